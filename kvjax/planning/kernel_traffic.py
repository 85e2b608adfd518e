"""Counts the numbers that kvjax's TPU kernels of attention move, from their traced grids and block specs.

Nothing runs, and no TPU is needed: a kernel is traced, and the index maps of its blocks are computed for each step of
its grid. Pallas copies a block of an input when its index is another one than in the step before, and a block of an
output when its index is about to change. So the counts are what the compiled kernel moves on one core, between its
memory and the device's, besides the few indices that it holds from the start.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from kvjax import attention
from kvjax.errors import KvjaxError
from kvjax.inputs import check_count
from kvjax.kernels.decode import pallas_tpu as decode_tpu
from kvjax.kernels.prefill import pallas_tpu as prefill_tpu
from kvjax.kernels.problem import Problem
from kvjax.numerics.statistics import MASS

Array = jax.Array


class KernelTraffic(NamedTuple):
    """The numbers that one kernel moves.

    Attributes:
      kernel: its name.
      query_tile: queries of a head in a block; in a decode step, those of the group.
      slot_tile: slots of a block.
      features: numbers of blocks of queries, keys, values and outputs.
      lines: numbers of other blocks: positions, weights, log-sum-exps and statistics.
      steps: of its grid.
    """

    kernel: str
    query_tile: int
    slot_tile: int
    features: int
    lines: int
    steps: int


def prefill_kernels(
    tokens: int, dim: int, *, group: int = 1, window: int | None = None, statistics: bool = False
) -> list[KernelTraffic]:
    """Returns what a prompt's kernels move for one KV head: attention, and the pass of statistics.

    Args:
      tokens: of the prompt, n.
      dim: features of a head, D.
      group: query heads of a KV head.
      window: the number of newest positions that a query sees; None = all.
      statistics: whether attention mass is summed over queries, as H2O needs.

    Raises:
      InputError: a number that is not at least 1.
      KvjaxError: as `kvjax.kernels.registry.require`.
    """
    for name, value in (("tokens", tokens), ("dim", dim), ("group", group)):
        check_count(name, value)
    return _counted(prefill_tpu.attend_and_reduce, tokens, tokens, dim, group, window, statistics)


def decode_kernels(slots: int, dim: int, *, group: int = 1, statistics: bool = False) -> list[KernelTraffic]:
    """Returns what the kernel of a decode step moves for one KV head.

    Args:
      slots: of the cache, S.
      dim: features of a head, D.
      group: query heads of a KV head.
      statistics: whether attention mass is reported.

    Raises:
      InputError: a number that is not at least 1.
      KvjaxError: as `kvjax.kernels.registry.require`.
    """
    for name, value in (("slots", slots), ("dim", dim), ("group", group)):
        check_count(name, value)
    return _counted(decode_tpu.attend_and_reduce, 1, slots, dim, group, None, statistics)


def _counted(
    kernel: Callable[[Problem], Any], n: int, slots: int, dim: int, group: int, window: int | None, statistics: bool
) -> list[KernelTraffic]:
    """Traces a kernel for n new tokens after slots − n others, in bfloat16, and counts."""
    query = jax.ShapeDtypeStruct((1, group, n, dim), jnp.bfloat16)
    side = jax.ShapeDtypeStruct((1, 1, slots, dim), jnp.bfloat16)
    position = np.arange(slots, dtype=np.int32)

    def run(position: Array, query: Array, key: Array, value: Array) -> Any:
        return kernel(attention.problem(
            query, key, value, query_position=position[None, slots - n :], key_position=position[None, None],
            window=window, needs=frozenset({MASS} if statistics else ()), causal=n == slots and n > 1,
        ))  # fmt: skip

    closed = jax.make_jaxpr(run)(position, query, side, side)
    return [
        _of_call(equation, _held(closed, equation, position))
        for equation in closed.jaxpr.eqns if equation.primitive.name == "pallas_call"
    ]  # fmt: skip


def _held(closed: core.ClosedJaxpr, call: core.JaxprEqn, position: np.ndarray) -> list[Array]:
    """Returns the indices that a call of a kernel holds from the start, which its index maps read.

    Keys, values and queries have no numbers here: what makes the indices out of the first argument is cut out of the
    program, and runs.

    Args:
      closed: the program.
      call: one of its equations.
      position: [S] int32, its first argument.

    Raises:
      KvjaxError: the indices depend on other arguments.
    """
    program = closed.jaxpr
    held = call.invars[: call.params["grid_mapping"].num_index_operands]
    wanted, equations = set(held), []
    for equation in reversed(program.eqns):
        if wanted & set(equation.outvars):
            equations.append(equation)
            wanted |= {var for var in equation.invars if not isinstance(var, core.Literal)}
    if wanted & set(program.invars[1:]):
        raise KvjaxError(f"the blocks of {call.params['name']} depend on queries, keys or values, and are not counted.")
    cut = program.replace(invars=program.invars[:1], outvars=held, eqns=equations[::-1])
    return list(core.jaxpr_as_fun(core.ClosedJaxpr(cut, closed.consts))(jnp.asarray(position)))


def _of_call(equation: core.JaxprEqn, held: list[Array]) -> KernelTraffic:
    """Counts the numbers of one call of a kernel; see `_held`."""
    mapping = equation.params["grid_mapping"]
    grid = tuple(int(size) for size in mapping.grid)
    # [steps, axes], the last axis fastest
    steps = jnp.asarray(np.indices(grid).reshape(len(grid), -1).T, jnp.int32)
    blocks = mapping.block_mappings

    @jax.jit
    def starts(steps: Array, held: list[Array]) -> list[Array]:
        """Returns the first element of each block in each step, [steps, axes of the array]."""

        def of_step(step: Array) -> list[Array]:
            return [jnp.stack(block.compute_start_indices_interpret(tuple(step), *held)) for block in blocks]

        return jax.vmap(of_step)(steps)

    features = lines = 0
    for block, start in zip(blocks, map(np.asarray, starts(steps, held)), strict=True):
        moved = np.concatenate([[True], (start[1:] != start[:-1]).any(axis=1)])
        # Beyond the end of an array, there is nothing to copy.
        sizes = np.minimum(_shape(block), np.asarray(block.array_aval.shape) - start[moved])
        numbers = int(np.sum(np.prod(sizes, axis=1)))
        if block.array_aval.dtype == jnp.bfloat16:
            features += numbers
        else:
            lines += numbers
    query, key = (_shape(block)[-2] for block in blocks[:2])
    return KernelTraffic(equation.params["name"], query, key, features, lines, math.prod(grid))


def _shape(block: Any) -> list[int]:
    """Returns the shape of a block; an axis of which one element is taken is 1 long."""
    return [1 if axis is None else int(getattr(axis, "block_size", 1)) for axis in block.block_shape]
