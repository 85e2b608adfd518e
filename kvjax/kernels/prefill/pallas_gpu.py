"""Attention of a block of queries with column statistics, on a Hopper GPU (Pallas, Mosaic GPU), in linear memory.

Two passes, as on a TPU. The first is FlashAttention-2's forward (arXiv:2307.08691, algorithm 1): a tile of rows stays,
tiles of slots pass under a running softmax, and the log-sum-exps of the rows are kept. Rows are the queries of all
heads of a group in a line, so that a short block fills the products of tensor cores. In the second a tile of slots
stays and tiles of queries pass, head by head: probabilities are computed again from the log-sum-exps, which takes Q Kᵀ
alone, half of attention's FLOPs, and every statistic's Σ_i w_i f(m[i, j]) is reduced from them in the same pass. What
is visible is computed from positions inside the kernels: no array is queries × slots.

A program is a warpgroup that copies, and one or two that compute, each on a tile of its own; these share what is
copied, as in FlashAttention-3 (arXiv:2407.08608). float32 goes in three parts, which XLA cuts beforehand.

No GPU has run it. The bound should be tensor cores and exponentials about equally at head size 128, and exponentials
below. jax's own attention for Hopper refuses causal masks with CUDA 12.8.0 to 12.9.0, whose assembler miscompiles it;
whether that concerns this kernel too is not known.
"""

import itertools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from kvjax.kernels import hopper, registry, softmax
from kvjax.kernels.hopper import ROWS, TILE, tiled, untiled
from kvjax.kernels.prefill import positions
from kvjax.kernels.prefill.columns_gpu import reduce_columns
from kvjax.kernels.prefill.flash_gpu import attend_rows
from kvjax.kernels.prefill.grid_gpu import WORDS, Tiling, queries_of_slots, slots_of_rows
from kvjax.kernels.prefill.positions import pad
from kvjax.kernels.prefill.rings_gpu import LOG2E
from kvjax.kernels.problem import Attended, Problem

if TYPE_CHECKING:
    from kvjax.kernels.registry import Request

Array = jax.Array


def refuses(request: "Request") -> str | None:
    """See `kvjax.kernels.registry.Kernel`."""
    if reason := registry.refuses_problem(request):
        return reason
    statistics = [statistic for statistic in request.statistics if statistic.needs_attention]
    words = sum(max(statistic.words, default=1) for statistic in statistics)
    above = any(statistic.transform == "above" for statistic in statistics)
    try:
        hopper.check_dim(request.dim)
        # A window and weights take memory; whether there are any is not known yet.
        tiling = Tiling(
            request.group, _queries(request.tokens), _slots(request.slots), request.dim, jnp.dtype(request.dtype),
            windowed=True, weighted=True,
        )  # fmt: skip
        tiling.first()
        if statistics:
            tiling.second(1 + above + min(words, WORDS) + request.group)
    except ValueError as error:
        return str(error).rstrip(".")
    return None


def attend_and_reduce(problem: Problem) -> tuple[Attended, dict[str, Array]]:
    """As `kvjax.kernels.prefill.xla.attend_and_reduce`, without log-sum-exps and gradients; see `refuses`.

    Beyond inputs and outputs it takes 4 bytes per query and head (the log-sum-exps), a few lines of positions, one
    float32 per KV head, query and word of the weights, and the sums themselves. float32 arrays are copied into parts;
    queries are copied that do not fill whole tiles, and slots that are no multiple of 8 or fewer than 64. Statistics of
    more than 32 words in all take one second pass for every 32.
    """
    registry.require("prefill", "pallas_gpu", problem)
    query, key, value, statistics = problem.query, problem.key, problem.value, problem.statistics
    batch, kv_heads, group, n, dim = query.shape
    pairs, size = batch * kv_heads, problem.slots
    whole, above = _slots(size), problem.needs_seen
    tiling = Tiling(
        group, _queries(n), whole, dim, key.dtype, problem.window is not None, problem.log_weight is not None,
        problem.causal, problem.scale, problem.group_reduce,
    )  # fmt: skip
    # [B, 1, n] and [pairs, lines, S]
    query_line, slot_lines = positions.lines(problem, LOG2E)
    query_line, slot_lines = pad(query_line[:, 0], tiling.n, -jnp.inf), pad(slot_lines, whole, jnp.inf)
    window = None if problem.exempt is not None else problem.window
    # [pairs, parts, rows, D] and [pairs, parts, S, D]
    rows = _padded(_padded(query.astype(key.dtype), tiling.n).reshape(pairs, -1, dim), tiling.rows)
    slots = (_padded(x.reshape(pairs, size, dim), whole) for x in (key, value))
    rows, key, value = (jnp.concatenate([part[:, None] for part in hopper.parts(x)], axis=1) for x in (rows, *slots))

    # [B, rows]
    row_line = pad(jnp.tile(query_line, (1, group)), tiling.rows, -jnp.inf)
    output, *kept = attend_rows(
        tiling, rows, key, value, row_line.reshape(batch, -1, ROWS), _tiled(slot_lines, tiling.slots),
        slots_of_rows(tiling, row_line, slot_lines, window), bool(statistics), above,
    )  # fmt: skip
    # [B, K, G, n, D]
    output = output[:, : group * tiling.n].reshape(*query.shape[:3], tiling.n, dim)[:, :, :, :n]
    attended = Attended(output, None)
    if not statistics:
        return attended, {}
    # In the order of transforms: what some of them share is computed once.
    order = sorted(range(len(statistics)), key=lambda i: statistics[i].transform)
    statistics, weights = tuple(statistics[i] for i in order), [problem.weights[i] for i in order]
    # [B, words, n] of each
    weights = [w[:, None] if w.ndim == 2 else jnp.swapaxes(w, 1, 2) for w in weights]
    transforms = [s.transform for s, w in zip(statistics, weights, strict=True) for _ in range(w.shape[1])]
    # [B, words, n padded]
    weight = pad(jnp.concatenate(weights, axis=1), tiling.n, 0.0)
    of_tiles = _tiled(slot_lines, TILE, tiling.places)
    visits = queries_of_slots(tiling, jnp.any(weight != 0, axis=1), of_tiles, window)
    # [pairs, G, n padded] of each
    lse, *counts = (x[:, : group * tiling.n].reshape(pairs, group, tiling.n) for x in kept)
    # Padding queries see no slot.
    length = tiling.query_tiles * tiling.queries
    position = pad(jnp.repeat(query_line[:, None], kv_heads, axis=0), length, -jnp.inf)
    shares, lse = [pad(softmax.uniform_share(x[:, :1]), length, 0.0) for x in counts], pad(lse, length, 0.0)
    weight = pad(jnp.repeat(weight, kv_heads, axis=0), length, 0.0)
    sums = []
    for start in range(0, len(transforms), WORDS):
        of = slice(start, start + WORDS)
        # [pairs, tiles, lines, queries]
        lines = jnp.concatenate([position, *shares, weight[:, of], lse], axis=1)
        lines = jnp.swapaxes(lines.reshape(*lines.shape[:2], -1, tiling.queries), 1, 2)
        sums.append(
            reduce_columns(
                tiling, tuple(transforms[of]), rows, key, pad(lines, tiling.most, 0.0), of_tiles, visits, above
            )
        )
    # [B, K, words, S]
    columns = untiled(jnp.concatenate(sums, axis=1), whole)[..., :size].reshape(batch, kv_heads, -1, size)
    stops = itertools.accumulate(w.shape[1] for w in weights)
    return attended, {
        s.name: jnp.moveaxis(columns[:, :, stop - w.shape[1] : stop], 2, 3) if s.words else columns[:, :, stop - 1]
        for s, w, stop in zip(statistics, weights, stops, strict=True)
    }


def _queries(n: int) -> int:
    """The number of queries of a head, padded to a multiple of 8."""
    return -(-n // 8) * 8


def _slots(size: int) -> int:
    """The number of slots, padded to whole tiles unless copies can take them as they are."""
    return size if size % 8 == 0 and size >= TILE else -(-size // TILE) * TILE


def _padded(x: Array, length: int) -> Array:
    """[..., rows, D] with zeros appended; an array that is long enough is not copied."""
    more = length - x.shape[-2]
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, more), (0, 0))) if more else x


def _tiled(lines: Array, tile: int, places: int = 1) -> Array:
    """[pairs, lines, S] -> [pairs, tiles, lines, tile], at least `places` tiles."""
    return jnp.swapaxes(tiled(lines, tile, jnp.inf, places), 1, 2)
