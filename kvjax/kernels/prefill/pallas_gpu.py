"""Attention of a block of queries with column statistics, on a Hopper GPU (Pallas, Mosaic GPU), in linear memory.

There are two passes, as on a TPU. The first is FlashAttention-2's forward pass (arXiv:2307.08691, algorithm 1): for
each tile of rows, a loop over tiles of slots computes a running softmax, and the log-sum-exps of the rows are stored.
Rows are the queries of all heads of a group, one head after the other, so that a short block fills the products of
tensor cores. The second pass loops over tiles of queries, head by head, for each tile of slots: it recomputes
probabilities from the log-sum-exps, which needs only Q Kᵀ, half of attention's FLOPs, and reduces them to
Σ_i w_i f(m[i, j]) for every statistic. Visibility is computed from positions inside the kernels, so no array has
queries × slots elements.

A program consists of one warpgroup that copies, and one or two that compute, each for a tile of its own. They share the
copied tiles, as in FlashAttention-3 (arXiv:2407.08608). float32 is split into three parts, by XLA, before the kernels.

On an H200, prompts of OPT-1.3B's shape reach 65 % of the FLOPs of a large product without statistics, and 46 % with
those of h2o (experiments/measured). At head size 128, tensor cores and exponentials should limit the speed about
equally; at smaller head sizes, exponentials. jax's own attention for Hopper rejects causal masks with CUDA 12.8.0 to
12.9.0, whose assembler miscompiles it; it is not known whether this affects these kernels.
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
from kvjax.kernels.problem import Attended, Problem, check

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
        # A window and `log_weight` take memory. A request does not tell whether the problem has them.
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
    """Like `kvjax.kernels.prefill.xla.attend_and_reduce`, without log-sum-exps and gradients; see `refuses`.

    In addition to inputs and outputs, the memory is 4 bytes per query and head (the log-sum-exps), a few lines of
    positions, one float32 per KV head, query and word of the weights, and the sums. There are copies of float32 arrays
    (their parts), of queries if they do not fill whole tiles, and of keys and values if the number of slots is not a
    multiple of 8 or is below 64. There is one second pass for every 32 words of statistics.
    """
    check(problem)
    registry.require("prefill", "pallas_gpu", problem)
    query, statistics = problem.query, problem.statistics
    key, value = problem.arrays()
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
    # Sorted by transform, so that words with the same transform are consecutive.
    order = sorted(range(len(statistics)), key=lambda i: statistics[i].transform)
    statistics, weights = tuple(statistics[i] for i in order), [problem.weights[i] for i in order]
    # [B, words, n] for each statistic
    weights = [w[:, None] if w.ndim == 2 else jnp.swapaxes(w, 1, 2) for w in weights]
    transforms = [s.transform for s, w in zip(statistics, weights, strict=True) for _ in range(w.shape[1])]
    # [B, words, n padded]
    weight = pad(jnp.concatenate(weights, axis=1), tiling.n, 0.0)
    # [pairs, tiles, lines, TILE]
    of_tiles = _tiled(slot_lines, TILE, tiling.places)
    # [pairs, tiles, 2]
    visits = queries_of_slots(tiling, jnp.any(weight != 0, axis=1), of_tiles, window)
    # [pairs, G, n padded] each
    lse, *counts = (x[:, : group * tiling.n].reshape(pairs, group, tiling.n) for x in kept)
    length = tiling.query_tiles * tiling.queries
    # [pairs, 1, length]; padding queries see no slot
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
                tiling, tuple(transforms[of]), rows, key, pad(lines, tiling.largest_tile, 0.0), of_tiles, visits, above
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
    """Returns the number of queries of a head, padded to a multiple of 8."""
    return -(-n // 8) * 8


def _slots(size: int) -> int:
    """Returns the number of slots, padded to whole tiles if copies require it."""
    return size if size % 8 == 0 and size >= TILE else -(-size // TILE) * TILE


def _padded(x: Array, length: int) -> Array:
    """Appends zeros: [..., rows, D] -> [..., length, D]. An array of that length is not copied."""
    more = length - x.shape[-2]
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 2), (0, more), (0, 0))) if more else x


def _tiled(lines: Array, tile: int, places: int = 1) -> Array:
    """Cuts lines into at least `places` tiles: [pairs, lines, S] -> [pairs, tiles, lines, tile]."""
    return jnp.swapaxes(tiled(lines, tile, jnp.inf, places), 1, 2)
