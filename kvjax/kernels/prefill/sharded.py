"""Attention of a block of queries on several devices of a mesh, each of which has all slots and some of the queries."""

import functools
from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from kvjax.kernels.problem import Attended, Problem
from kvjax.numerics.statistics import Statistic
from kvjax.parallel import sharding
from kvjax.typing import PyTree

Array = jax.Array
Run = Callable[[Problem], tuple[Attended, dict[str, Array]]]


def attend_and_reduce(problem: Problem, run: Run) -> tuple[Attended, dict[str, Array]]:
    """Computes attention and its statistics by `run`, on each device for its part of the queries.

    The projections have gathered the prompt's keys and values, so that none moves here. The columns of the
    queries of all devices are combined.

    Args:
      problem: with any number of queries. If the mesh has no axes for its queries, or these do not divide them, each
        device computes all.
      run: computes attention on one device.
    """
    _, kv_heads, _, n, _ = problem.query.shape
    axes, parts = sharding.left_over("tokens", kv_heads)
    if not axes or n % parts:
        return run(problem)
    mesh = jax.sharding.get_abstract_mesh()
    heads = ("batch", "kv_heads")
    names = {
        "query": (*heads, None, "tokens"), "offset": (*heads, None, "tokens"), "query_position": ("batch", "tokens"),
        "weights": ("batch", "tokens"), "band": ("batch",),
    }  # fmt: skip
    arrays = problem.by_head() | problem.by_row()

    def specs(tree: PyTree, names: tuple[str | None, ...]) -> PyTree:
        known = [None if name == "tokens" else name for name in names]

        def of_leaf(leaf: Array) -> PartitionSpec:
            # An array without heads has its queries on the same axes as one with heads.
            found = sharding.spec(known, leaf.shape[: len(names)], mesh)
            return PartitionSpec(*(axes if name == "tokens" else own for name, own in zip(names, found, strict=True)))

        return jax.tree.map(of_leaf, tree)

    def part(arrays: dict[str, PyTree]) -> tuple[Attended, dict[str, Array]]:
        # Positions say which slots a query sees.
        attended, sums = run(problem.replace(**arrays, causal=False))
        return attended, {s.name: _over_devices(s, sums[s.name], axes) for s in problem.statistics}

    placed = {name: specs(each, names.get(name, heads)) for name, each in arrays.items()}
    by_query, by_head = placed["query"], specs(problem.key_position, heads)
    return jax.shard_map(
        part, mesh=mesh, in_specs=(placed,), check_vma=False,
        out_specs=(Attended(by_query, by_query), {s.name: by_head for s in problem.statistics}),
    )(arrays)  # fmt: skip


def _over_devices(statistic: Statistic, columns: Array, axes: tuple[str, ...]) -> Array:
    """Combines the columns [B, K, S, ...] of all devices, whose queries are in the order of `axes`."""
    if not statistic.recurs:
        return (jax.lax.pmax if statistic.largest else jax.lax.psum)(columns, axes)
    # [devices, B, K, S, 3]
    gathered = jax.lax.all_gather(columns, axes)
    return functools.reduce(statistic.join, gathered)
