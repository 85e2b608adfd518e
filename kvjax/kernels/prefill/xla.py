"""Attention of a block of queries with column statistics in linear memory: the reference, in plain XLA.

Queries are processed in tiles. A tile has whole rows of the score matrix, so that its softmax is exact, and its
probabilities are reduced to column sums before the next tile. Only one tile exists at a time, and its size in bytes is
bounded, so that the memory in addition to inputs and outputs is that of the column sums, linear in the prompt.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels.decode import xla as rows
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.typing import PyTree

Array = jax.Array
Sums = dict[str, Array]
Rows = tuple[Any, ...]  # arrays [B, K, G or 1, n, ...] with an entry for each query
Tile = Callable[..., tuple[Rows, Sums]]  # (problem of a tile, *its `Rows`) -> `Rows` and sums of the tile

TILE_BYTES = 16 << 20  # bytes of the scores of a tile, for all rows and heads; about the last-level cache of a CPU core
# A causal prompt is cut into segments, each of which uses only the keys before its end: two do 75 % of the work without
# segments, four 63 %, eight 56 %. Each one is compiled by itself, which takes longer than it saves in a short prompt.
MIN_SEGMENTS, SEGMENTS = 2, 8
SEGMENT_QUERIES = 512
QUERY_AXIS = 3  # the axis of queries in `Rows`


def attend(problem: Problem) -> Attended:
    """Like `decode.xla.attend`, for any number of queries."""

    def tile(part: Problem) -> tuple[Rows, Sums]:
        return rows.attend_whole(part), {}

    def in_tiles(problem: Problem) -> Rows:
        return _over_tiles(tile, problem.without_statistics())[0]

    if rows.in_one_pass(problem):
        return Attended(*jax.lax.platform_dependent(problem, cpu=rows.attend_used, default=in_tiles))
    return Attended(*in_tiles(problem))


def column_sums(problem: Problem, lse: Array, seen: Array | None = None) -> Sums:
    """Like `decode.xla.column_sums`, for any number of queries."""

    def tile(part: Problem, lse: Array, seen: Array | None = None) -> tuple[Rows, Sums]:
        return (), rows.column_sums(part, lse, None if seen is None else seen[:, :, 0])

    extra = (lse,) if seen is None else (lse, seen[:, :, None])
    return _over_tiles(tile, problem, *extra)[1]


def attend_and_reduce(problem: Problem) -> tuple[Attended, Sums]:
    """Like `decode.xla.attend_and_reduce`, for any number of queries."""
    check(problem, shorter_values=True)

    def tile(part: Problem) -> tuple[Rows, Sums]:
        attended, sums = rows.attend_and_reduce(part)
        return (attended.output, attended.lse), sums

    if rows.in_one_pass(problem):
        attended = attend(problem)
        return Attended(attended.output.astype(problem.value.dtype), attended.lse), {}
    (output, lse), sums = _over_tiles(tile, problem)
    return Attended(output, lse), sums


def count_seen(problem: Problem) -> Array:
    """Like `decode.xla.count_seen`, for any number of queries."""

    def tile(part: Problem) -> tuple[Rows, Sums]:
        return (rows.count_seen(part)[:, :, None],), {}

    (seen,), _ = _over_tiles(tile, problem.without_statistics())
    return seen[:, :, 0]


def tile_rows(row_scores: int, n: int) -> int:
    """Returns the number of queries of a tile: a power of two up to 512.

    Args:
      row_scores: the number of scores of one query, for all rows and heads. The float32 scores of a tile take at most
        `TILE_BYTES`, unless those of one query take more.
      n: the number of queries.
    """
    rows_that_fit = max(1, TILE_BYTES // (4 * row_scores))
    return min(512, 1 << (rows_that_fit.bit_length() - 1), 1 << (n - 1).bit_length())


def computed_scores(n: int, slots: int, heads: int, *, causal: bool) -> int:
    """Returns the number of scores that attention computes for each query head, those that are masked included.

    Args:
      n: the number of queries.
      slots: the number of slots.
      heads: the number of query heads of all rows.
      causal: see `Problem`.
    """
    tile = tile_rows(heads * slots, n)

    def in_tiles(n: int) -> int:
        return n if n <= tile else -(-n // tile) * tile

    if not causal:
        return in_tiles(n) * slots
    return sum(in_tiles(stop - start) * stop for start, stop in _segments(n, tile))


def _segments(n: int, tile: int) -> list[tuple[int, int]]:
    """Returns where the segments of a causal prompt of n queries begin and end."""
    segments = min(max(MIN_SEGMENTS, n // SEGMENT_QUERIES), SEGMENTS)
    step = max(tile, -(-n // (segments * tile)) * tile)
    return [(start, min(start + step, n)) for start in range(0, n, step)]


def _over_tiles(function: Tile, problem: Problem, *extra: Array) -> tuple[Rows, Sums]:
    """Calls a function on tiles of queries, joins its results for the queries and combines its columns.

    Codes are decoded before the first tile.

    Args:
      function: see `Tile`; its sums have the names of the problem's statistics.
      problem: a problem with any number of queries.
      extra: arrays [B, K, G or 1, n, ...], of which the function receives the part of its queries.
    """
    problem = problem.decoded()
    batch, kv_heads, group, n, _ = problem.query.shape
    tile = tile_rows(batch * kv_heads * group * problem.slots, n)
    if not problem.causal:
        return _tiles(function, problem, extra, tile)
    results = []
    sums = _zeros(problem)
    for start, stop in _segments(n, tile):
        own = tuple(x[:, :, :, start:stop] for x in extra)
        result, partial = _tiles(function, problem.only_queries(start, stop).only_slots(stop), own, tile)
        results.append(result)
        sums = {
            s.name: sums[s.name].at[:, :, :stop].set(s.join(sums[s.name][:, :, :stop], partial[s.name]))
            for s in problem.statistics
        }
    return tuple(jnp.concatenate(each, axis=QUERY_AXIS) for each in zip(*results, strict=True)), sums


def _tiles(function: Tile, problem: Problem, extra: tuple[Array, ...], tile: int) -> tuple[Rows, Sums]:
    """Like `_over_tiles`, with all slots for each tile."""
    n = problem.query.shape[QUERY_AXIS]
    count = -(-n // tile)
    if count == 1:
        return function(problem, *extra)
    more = count * tile - n
    # The tiles become the leading axis. Queries that fill the last tile see no slot (position -1) and have weight 0.
    inputs = (
        split_queries(problem.query, QUERY_AXIS, tile, more),
        split_queries(problem.query_position, 1, tile, more, fill=-1),
        tuple(split_queries(weight, 1, tile, more) for weight in problem.weights),
        None if problem.offset is None else split_queries(problem.offset, QUERY_AXIS, tile, more),
        tuple(split_queries(x, QUERY_AXIS, tile, more) for x in extra),
    )

    def body(sums: Sums, inputs: PyTree) -> tuple[Sums, tuple[Array, ...]]:
        query, position, weights, offset, own = inputs
        part = problem.replace(query=query, query_position=position, weights=weights, offset=offset)
        result, partial = function(part, *own)
        return {s.name: s.join(sums[s.name], partial[s.name]) for s in problem.statistics}, result

    sums, results = jax.lax.scan(body, _zeros(problem), inputs)
    return tuple(join_queries(x, n) for x in results), sums


def _zeros(problem: Problem) -> Sums:
    """Returns the columns of all statistics before any query: zeros, which are below every maximum too."""
    return {s.name: jnp.zeros((*problem.key_position.shape, *s.reported), jnp.float32) for s in problem.statistics}


def split_queries(x: Array, axis: int, tile: int, more: int, fill: int = 0) -> Array:
    """Cuts an axis into tiles: [..., n, ...] -> [tiles, ..., tile, ...], after appending `more` entries `fill`."""
    widths = [(0, more if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def join_queries(x: Array, n: int) -> Array:
    """Joins tiles of queries: [tiles, B, K, x, tile, ...] -> [B, K, x, n, ...]."""
    x = jnp.moveaxis(x, 0, QUERY_AXIS)
    x = x.reshape(*x.shape[:QUERY_AXIS], -1, *x.shape[QUERY_AXIS + 2 :])
    return x[:, :, :, :n]
