"""Attention of a block of queries with column statistics in linear memory: the reference, in plain XLA.

Queries go tile by tile; a tile sees whole rows of the score matrix, so its softmax is exact and its probabilities are
reduced to column sums before the next tile overwrites them. What exists at once is one tile, whose size is bounded in
bytes: the memory beyond inputs and outputs is the column sums, linear in the prompt.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.kernels.decode import xla as rows
from kvjax.statistics import Statistic

Array = jax.Array

TILE_BYTES = 16 << 20  # scores of one tile, over batch and heads; about the last-level cache of a CPU core
SEGMENTS = 8  # a causal prompt is cut so; each part sees only the keys before its end: 56 % of the square's work


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_position: Array,
    key_position: Array,
    statistics: Sequence[Statistic],
    weights: Sequence[Array],
    scale: float,
    window: int | Array | None,
    exempt: Array | None,
    log_weight: Array | None,
    group_reduce: str,
    causal: bool,
) -> tuple[Array, dict[str, Array]]:
    """A block of queries per head over all slots.

    Args:
      query: [B, K, G, n, D]; key, value: [B, K, S, D].
      query_position: [B, n] int32; key_position: [B, K, S] int32; window, exempt: see `softmax.visible`.
      log_weight: [B, K, S] float32, added to the logits, or None.
      statistics: what to report; weights: of each, [B, n] or [B, n, words] float32, see `Statistic.query_weights`.
      causal: the slots are this very block in order (S = n), so a query never sees a slot behind its own.

    Returns:
      output [B, K, G, n, D] in value's dtype, and statistic name -> [B, K, S] or [B, K, S, words] float32.
    """
    batch, kv_heads, group, n, _ = query.shape
    size = key.shape[2]
    tile = tile_rows(batch * kv_heads * group * size, n)
    part = functools.partial(
        _tiles, scale=scale, window=window, statistics=statistics, group_reduce=group_reduce, tile=tile
    )
    if not causal:
        return part(query, key, value, query_position, key_position, weights, exempt=exempt, log_weight=log_weight)
    step = max(tile, -(-n // (SEGMENTS * tile)) * tile)
    outputs = []
    sums = _zeros(statistics, key_position)
    for start in range(0, n, step):
        stop = min(start + step, n)
        output, partial_sums = part(
            query[:, :, :, start:stop],
            key[:, :, :stop],
            value[:, :, :stop],
            query_position[:, start:stop],
            key_position[:, :, :stop],
            tuple(weight[:, start:stop] for weight in weights),
            exempt=None if exempt is None else exempt[:, :, :stop],
            log_weight=None if log_weight is None else log_weight[:, :, :stop],
        )
        outputs.append(output)
        sums = {name: total.at[:, :, :stop].add(partial_sums[name]) for name, total in sums.items()}
    return jnp.concatenate(outputs, axis=3), sums


def tile_rows(row_scores: int, n: int) -> int:
    """Queries of a tile: a power of two up to 512 whose float32 scores stay near `TILE_BYTES`."""
    rows_that_fit = max(1, TILE_BYTES // (4 * row_scores))
    return min(512, 1 << (rows_that_fit.bit_length() - 1), 1 << (n - 1).bit_length())


def _tiles(query, key, value, query_position, key_position, weights, *, tile, statistics, **options):
    """`rows.attend` over tiles of queries, sums added up; shapes as in `attend`."""
    n = query.shape[3]
    count = -(-n // tile)
    if count == 1:
        return rows.attend(
            query, key, value, query_position=query_position, key_position=key_position, weights=weights,
            statistics=statistics, **options,
        )  # fmt: skip
    pad = count * tile - n
    # Padding queries see nothing (position -1) and weigh nothing.
    query = _split(jnp.pad(query, ((0, 0),) * 3 + ((0, pad), (0, 0))), 3, tile)
    query_position = _split(jnp.pad(query_position, ((0, 0), (0, pad)), constant_values=-1), 1, tile)
    weights = tuple(_split(jnp.pad(w, ((0, 0), (0, pad), *((0, 0),) * (w.ndim - 2))), 1, tile) for w in weights)

    def body(sums, inputs):
        q, position, tile_weights = inputs
        output, tile_sums = rows.attend(
            q, key, value, query_position=position, key_position=key_position, weights=tile_weights,
            statistics=statistics, **options,
        )  # fmt: skip
        return {name: total + tile_sums[name] for name, total in sums.items()}, output

    sums, outputs = jax.lax.scan(body, _zeros(statistics, key_position), (query, query_position, weights))
    # [tiles, B, K, G, tile, D] -> [B, K, G, n, D]
    outputs = jnp.moveaxis(outputs, 0, 3)
    return outputs.reshape(*outputs.shape[:3], count * tile, outputs.shape[-1])[:, :, :, :n], sums


def _zeros(statistics: Sequence[Statistic], key_position: Array) -> dict[str, Array]:
    return {s.name: jnp.zeros((*key_position.shape, *s.words), jnp.float32) for s in statistics}


def _split(x: Array, axis: int, tile: int) -> Array:
    """[..., tiles * tile, ...] -> [tiles, ..., tile, ...]."""
    x = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)
