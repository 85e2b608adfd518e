"""Attention of a block of queries with column statistics, on a Hopper GPU (Pallas, Mosaic GPU), in linear memory.

Two passes, as on a TPU. The first is FlashAttention-2's forward (arXiv:2307.08691, algorithm 1): a tile of rows stays,
tiles of slots go by under a running softmax, and the rows' log-sum-exp are kept. Rows are the queries of all heads of a
group in a line, so that a short block fills the products of tensor cores. The second turns it round: a tile of slots
stays, tiles of queries go by head by head, probabilities are recomputed from the log-sum-exp, which takes Q Kᵀ alone,
half of attention's FLOPs, and every statistic's Σ_i w_i f(m[i, j]) is reduced from them at once. What is visible is
computed from positions inside the kernels: no array is queries × slots.

A program is a warpgroup that copies, and one or two that compute, each on a tile of its own, and share what is copied,
as in FlashAttention-3 (arXiv:2407.08608). float32 goes in three parts, which XLA cuts beforehand.

No GPU has run it. What should bind: tensor cores and exponentials about equally at head size 128, exponentials below.
jax's own attention for Hopper refuses causal masks with CUDA 12.8.0 to 12.9.0, whose assembler miscompiles it; whether
that concerns this kernel too is not known.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kvjax.kernels import hopper
from kvjax.kernels.hopper import ROWS, TILE, tiled, untiled
from kvjax.kernels.prefill import positions
from kvjax.kernels.prefill.columns_gpu import reduce_columns
from kvjax.kernels.prefill.flash_gpu import attend_rows
from kvjax.kernels.prefill.grid_gpu import WORDS, Plan, queries_of_slots, slots_of_rows
from kvjax.kernels.prefill.positions import TIE, pad
from kvjax.kernels.prefill.rings_gpu import LOG2E
from kvjax.statistics import Statistic

Array = jax.Array


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
    """As `kernels.prefill.xla.attend`, without gradients, for head sizes of 64 to 256, a multiple of 16.

    Beyond inputs and outputs it takes 4 bytes a query and head (the log-sum-exp), a few lines of positions, one float32
    per KV head, query and word of the weights, and the sums themselves. Copied are float32 arrays, into parts; queries
    that do not fill whole tiles; and slots that are no multiple of 8, or fewer than 64. Statistics of more than 32
    words together take one second pass for every 32.

    Returns:
      output [B, K, G, n, D] in value's dtype, and statistic name -> [B, K, S] or [B, K, S, words] float32.

    Raises:
      ValueError: for other head sizes, and where the shared memory of a GPU is too small.
    """
    batch, kv_heads, group, n, dim = query.shape
    if dim % 16 or not 64 <= dim <= 256:
        raise ValueError(f"the GPU's prefill kernel takes head sizes of 64 to 256, a multiple of 16; got {dim}.")
    pairs, size = batch * kv_heads, key.shape[2]
    whole = size if size % 8 == 0 and size >= TILE else -(-size // TILE) * TILE
    plan = Plan(
        group, -(-n // 8) * 8, whole, dim, key.dtype, window is not None, log_weight is not None, causal, scale,
        group_reduce,
    )  # fmt: skip
    query_line, slot_lines = positions.lines(
        query_position, key_position, window, exempt, None if log_weight is None else log_weight * LOG2E
    )
    query_line, slot_lines = pad(query_line[:, 0], plan.n, -jnp.inf), pad(slot_lines, whole, jnp.inf)
    near = None if exempt is not None else window
    above = any(statistic.transform == "above" for statistic in statistics)
    # [pairs, parts, rows, D] and [pairs, parts, S, D]
    rows = _filled(_filled(query.astype(key.dtype), plan.n).reshape(pairs, -1, dim), plan.rows)
    slots = (_filled(x.reshape(pairs, size, dim), whole) for x in (key, value))
    rows, key, value = (jnp.concatenate([part[:, None] for part in hopper.parts(x)], axis=1) for x in (rows, *slots))

    row_line = pad(jnp.tile(query_line, (1, group)), plan.rows, -jnp.inf)
    output, *kept = attend_rows(
        plan, rows, key, value, row_line.reshape(batch, -1, ROWS), _tiled(slot_lines, plan.slots),
        slots_of_rows(plan, row_line, slot_lines, near), bool(statistics), above,
    )  # fmt: skip
    output = output[:, : group * plan.n].reshape(*query.shape[:3], plan.n, dim)[:, :, :, :n]
    if not statistics:
        return output, {}
    # In the order of transforms: what is common to some is computed once.
    order = sorted(range(len(statistics)), key=lambda i: statistics[i].transform)
    statistics, weights = [statistics[i] for i in order], [weights[i] for i in order]
    # [B, words, n] of each
    weights = [w[:, None] if w.ndim == 2 else jnp.swapaxes(w, 1, 2) for w in weights]
    transforms = [s.transform for s, w in zip(statistics, weights, strict=True) for _ in range(w.shape[1])]
    weight = pad(jnp.concatenate(weights, axis=1), plan.n, 0.0)
    of_tiles = _tiled(slot_lines, TILE, plan.places)
    visits = queries_of_slots(plan, jnp.any(weight != 0, axis=1), of_tiles, near)
    lse, *counts = (x[:, : group * plan.n].reshape(pairs, group, plan.n) for x in kept)
    # Nobody sees through queries that are filled up.
    length = plan.query_tiles * plan.queries
    position = pad(jnp.repeat(query_line[:, None], kv_heads, axis=0), length, -jnp.inf)
    shares, lse = [pad(_uniform_share(x[:, :1]), length, 0.0) for x in counts], pad(lse, length, 0.0)
    weight = pad(jnp.repeat(weight, kv_heads, axis=0), length, 0.0)
    sums = []
    for start in range(0, len(transforms), WORDS):
        of = slice(start, start + WORDS)
        lines = jnp.concatenate([position, *shares, weight[:, of], lse], axis=1)
        lines = jnp.swapaxes(lines.reshape(*lines.shape[:2], -1, plan.queries), 1, 2)
        sums.append(
            reduce_columns(plan, tuple(transforms[of]), rows, key, pad(lines, plan.most, 0.0), of_tiles, visits, above)
        )
    columns = untiled(jnp.concatenate(sums, axis=1), whole)[..., :size].reshape(batch, kv_heads, -1, size)
    stops = itertools.accumulate(w.shape[1] for w in weights)
    return output, {
        s.name: jnp.moveaxis(columns[:, :, stop - w.shape[1] : stop], 2, 3) if s.words else columns[:, :, stop - 1]
        for s, w, stop in zip(statistics, weights, stops, strict=True)
    }


def _uniform_share(count: Array) -> Array:
    """What counts as the uniform share of a query that sees so many slots; of one slot, all there is, near enough."""
    return jnp.where(count > 1, TIE / jnp.maximum(count, 1.0), 0.5)


def _filled(x: Array, length: int) -> Array:
    """[..., rows, D] with zeros behind; what is long enough is not copied."""
    more = length - x.shape[-2]
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, more), (0, 0))) if more else x


def _tiled(lines: Array, tile: int, places: int = 1) -> Array:
    """[pairs, lines, S] -> [pairs, tiles, lines, tile], as many tiles as there are places at least."""
    return jnp.swapaxes(tiled(lines, tile, jnp.inf, places), 1, 2)
