"""Attention of a block of queries with column statistics in linear memory: the reference, in plain XLA.

Queries are taken tile by tile. A tile sees whole rows of the score matrix, so its softmax is exact, and its
probabilities are reduced to column sums before the next tile overwrites them. One tile exists at a time, whose size is
bounded in bytes: beyond inputs and outputs, the memory is that of the column sums, linear in the prompt.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.kernels.decode import xla as rows
from kvjax.kernels.problem import Attended, Problem

Array = jax.Array
Sums = dict[str, Array]
Rows = tuple[Any, ...]  # of arrays [B, K, x, n, ...], something for each query
Tile = Callable[..., tuple[Rows, Sums]]  # (problem of a tile, *arrays as of `Rows`) -> what each query gets, and sums

TILE_BYTES = 16 << 20  # scores of one tile, over batch and heads; about the last-level cache of a CPU core
SEGMENTS = 8  # of a causal prompt; each sees only the keys before its end, which takes 56 % of the square's work
QUERY_AXIS = 3  # of an array that has something for each query: [B, K, G or 1, n, ...]


def attend(problem: Problem) -> Attended:
    """As `decode.xla.attend`, for any number of queries."""

    def tile(part: Problem) -> tuple[Rows, Sums]:
        attended = rows.attend(part)
        return (attended.output, attended.lse), {}

    (output, lse), _ = _over_tiles(tile, problem.without_statistics())
    return Attended(output, lse)


def column_sums(problem: Problem, lse: Array, seen: Array | None = None) -> Sums:
    """As `decode.xla.column_sums`, for any number of queries."""

    def tile(part: Problem, lse: Array, seen: Array | None = None) -> tuple[Rows, Sums]:
        return (), rows.column_sums(part, lse, None if seen is None else seen[:, :, 0])

    extra = (lse,) if seen is None else (lse, seen[:, :, None])
    return _over_tiles(tile, problem, *extra)[1]


def attend_and_reduce(problem: Problem) -> tuple[Attended, Sums]:
    """As `decode.xla.attend_and_reduce`, for any number of queries."""

    def tile(part: Problem) -> tuple[Rows, Sums]:
        attended, sums = rows.attend_and_reduce(part)
        return (attended.output, attended.lse), sums

    (output, lse), sums = _over_tiles(tile, problem)
    return Attended(output, lse), sums


def count_seen(problem: Problem) -> Array:
    """As `decode.xla.count_seen`, for any number of queries."""

    def tile(part: Problem) -> tuple[Rows, Sums]:
        return (rows.count_seen(part)[:, :, None],), {}

    (seen,), _ = _over_tiles(tile, problem.without_statistics())
    return seen[:, :, 0]


def tile_rows(row_scores: int, n: int) -> int:
    """The number of queries of a tile: a power of two up to 512 whose float32 scores stay near `TILE_BYTES`."""
    rows_that_fit = max(1, TILE_BYTES // (4 * row_scores))
    return min(512, 1 << (rows_that_fit.bit_length() - 1), 1 << (n - 1).bit_length())


def _over_tiles(function: Tile, problem: Problem, *extra: Array) -> tuple[Rows, Sums]:
    """Calls a function on tiles of queries, joins what it returns for each query and adds up its sums.

    Args:
      function: see `Tile`; its sums have the names of the problem's statistics.
      problem: any number of queries.
      extra: arrays [B, K, x, n, ...] that the function gets the queries' part of.
    """
    batch, kv_heads, group, n, _ = problem.query.shape
    tile = tile_rows(batch * kv_heads * group * problem.slots, n)
    if not problem.causal:
        return _tiles(function, problem, extra, tile)
    step = max(tile, -(-n // (SEGMENTS * tile)) * tile)
    results = []
    sums = _zeros(problem)
    for start in range(0, n, step):
        stop = min(start + step, n)
        own = tuple(x[:, :, :, start:stop] for x in extra)
        result, partial = _tiles(function, problem.only_queries(start, stop).only_slots(stop), own, tile)
        results.append(result)
        sums = {name: total.at[:, :, :stop].add(partial[name]) for name, total in sums.items()}
    return tuple(jnp.concatenate(each, axis=QUERY_AXIS) for each in zip(*results, strict=True)), sums


def _tiles(function: Tile, problem: Problem, extra: tuple[Array, ...], tile: int) -> tuple[Rows, Sums]:
    """As `_over_tiles`, over all slots for each tile."""
    n = problem.query.shape[QUERY_AXIS]
    count = -(-n // tile)
    if count == 1:
        return function(problem, *extra)
    more = count * tile - n
    # Padding queries see nothing (position -1) and weigh nothing.
    inputs = (
        _split(problem.query, QUERY_AXIS, tile, more),
        _split(problem.query_position, 1, tile, more, fill=-1),
        tuple(_split(weight, 1, tile, more) for weight in problem.weights),
        tuple(_split(x, QUERY_AXIS, tile, more) for x in extra),
    )

    def body(sums: Sums, inputs: Any) -> tuple[Sums, tuple[Array, ...]]:
        query, position, weights, own = inputs
        result, partial = function(problem.replace(query=query, query_position=position, weights=weights), *own)
        return {name: total + partial[name] for name, total in sums.items()}, result

    sums, results = jax.lax.scan(body, _zeros(problem), inputs)
    return tuple(_join(x, n) for x in results), sums


def _zeros(problem: Problem) -> Sums:
    return {s.name: jnp.zeros((*problem.key_position.shape, *s.words), jnp.float32) for s in problem.statistics}


def _split(x: Array, axis: int, tile: int, more: int, fill: int = 0) -> Array:
    """[..., n, ...], `more` entries that are `fill` appended -> [tiles, ..., tile, ...]."""
    widths = [(0, more if i == axis else 0) for i in range(x.ndim)]
    x = jnp.pad(x, widths, constant_values=fill)
    x = x.reshape(*x.shape[:axis], -1, tile, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, 0)


def _join(x: Array, n: int) -> Array:
    """[tiles, B, K, x, tile, ...] -> [B, K, x, n, ...]."""
    x = jnp.moveaxis(x, 0, QUERY_AXIS)
    x = x.reshape(*x.shape[:QUERY_AXIS], -1, *x.shape[QUERY_AXIS + 2 :])
    return x[:, :, :, :n]
