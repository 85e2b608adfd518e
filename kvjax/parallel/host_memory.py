"""Arrays in host memory: an accelerator's program holds them as arguments, and the host reads and writes their slots.

Arrays of both memories have the same type; their memory space is part of it (`jax.typeof`), so that functions here take
arrays of either memory. A program never moves a whole array unless `to_device` is called for it: rows are gathered and
written by the host (`compute_on`), and only indices and rows cross the link between host and device.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import compute_on as _compute_on
from jax.typing import DTypeLike

Array = jax.Array
T = TypeVar("T")
Function = Callable[..., Array]
Space = jax.memory.Space
MemorySpace = Any  # a `jax.memory.Space`, which is no type in every version of jax

DEVICE, HOST = "device", "host"
MEMORIES = (DEVICE, HOST)
PINNED = "pinned_host"  # JAX's name of the host memory that a device reads directly

# Named compute_on2 before jax 0.12.
_run_on: Any = getattr(_compute_on, "compute_on2", _compute_on.compute_on)


def on_host(x: object) -> bool:
    """Returns whether an array is in host memory."""
    return jax.typeof(x).memory_space == Space.Host


def to_device(tree: T) -> T:
    """Moves the arrays of a tree to the device, those that are on the host as a whole."""
    return jax.tree.map(lambda x: jax.device_put(x, Space.Device) if on_host(x) else x, tree)


def to_host(tree: T) -> T:
    """Moves the arrays of a tree to host memory."""
    return jax.tree.map(lambda x: x if on_host(x) else jax.device_put(x, Space.Host), tree)


def after(tree: T, x: Array) -> T:
    """Returns a tree whose arrays in host memory are moved after `x` has been computed, not before.

    Moves depend on nothing else, and a compiler that starts all of them at once needs the device's memory for all.
    """
    if not any(map(on_host, jax.tree.leaves(tree))):
        return tree
    tied: T = lax.optimization_barrier((tree, x))[0]
    return tied


def zeros(shape: tuple[int, ...], dtype: DTypeLike, memory: str) -> Array:
    """Allocates zeros in one of `MEMORIES`."""
    if memory == DEVICE:
        return jnp.zeros(shape, dtype)
    # The host fills them: a copy of zeros of the device would take the device's memory.
    return _on_host(Space.Host)(lambda zero: jnp.broadcast_to(zero, shape))(jnp.zeros((), dtype))


def gather(x: Array, slots: Array) -> Array:
    """Reads slots; of an array in host memory, the host gathers them and only they move to the device.

    Args:
      x: [B, K, S, ...].
      slots: [B, K, W] int32, from 0 to S - 1.

    Returns:
      [B, K, W, ...] on the device.
    """
    return _run_where(x, Space.Device)(_gather)(x, slots[..., None])


def take(x: Array, slots: Array) -> Array:
    """Reads slots as `gather` does; the result is in the memory of `x`."""
    return _run_where(x, Space.Host)(_gather)(x, slots[..., None])


def pad(x: Array, slots: int, fill: int = 0) -> Array:
    """Adds slots to the end of an array; the result is in the memory of `x`.

    Args:
      x: [B, K, S, ...].
      slots: the number of slots of the result, at least S.
      fill: the value of what is added.

    Returns:
      [B, K, slots, ...].
    """
    if slots == x.shape[2]:
        return x
    more = ((0, 0, 0), (0, 0, 0), (0, slots - x.shape[2], 0), *((0, 0, 0),) * (x.ndim - 3))
    return _run_where(x, Space.Host)(lambda x, fill: lax.pad(x, fill, more))(x, jnp.array(fill, x.dtype))


FEW_FEATURES = 32  # of a slot, such as the scales of its groups


def write(x: Array, slots: Array, new: Array) -> Array:
    """Writes slots; those outside of the array are dropped. The result is in the memory of `x`.

    B and K are batching dimensions of the scatter, so that a sharded cache is written where it lies.

    Args:
      x: [B, K, S, ...].
      slots: [B, K, n] int32, distinct.
      new: [B, K, n, ...].
    """
    few = slots.shape[2] == 1 and x.ndim == 4 and x.shape[3] <= FEW_FEATURES and not on_host(x)

    def put(x: Array, slots: Array, new: Array) -> Array:
        if few:
            return lax.platform_dependent(x, slots, new, tpu=_put_by_comparison, default=_scatter)
        return _scatter(x, slots, new)

    return _run_where(x, Space.Host)(put)(x, slots[..., None], new.astype(x.dtype))


def put_row(whole: Array, row: Array | int, new: Array) -> Array:
    """Replaces one row of an array, such as a `KVState`'s for another request; the result is in the memory of `whole`.

    Args:
      whole: [B, ...].
      row: int32, from 0 to B - 1.
      new: [1, ...].
    """

    def put(whole: Array, new: Array, *at: Array) -> Array:
        return lax.dynamic_update_slice(whole, new, at)

    start = (jnp.asarray(row, jnp.int32), *(jnp.zeros((), jnp.int32) for _ in whole.shape[1:]))
    return _run_where(whole, Space.Host)(put)(whole, new, *start)


def take_row(whole: Array, row: Array | int) -> Array:
    """Copies one row of an array; the result is in the memory of `whole`.

    Args:
      whole: [B, ...].
      row: int32, from 0 to B - 1.

    Returns:
      [1, ...].
    """

    def copy(whole: Array, *at: Array) -> Array:
        return lax.dynamic_slice(whole, at, (1, *whole.shape[1:]))

    start = (jnp.asarray(row, jnp.int32), *(jnp.zeros((), jnp.int32) for _ in whole.shape[1:]))
    return _run_where(whole, Space.Host)(copy)(whole, *start)


def take_rows(whole: Array, rows: Array) -> Array:
    """Copies rows of an array, such as a `KVState`'s for several continuations; the result is in the memory of `whole`.

    Args:
      whole: [B, ...].
      rows: [R] int32, from 0 to B - 1; a row may occur several times.

    Returns:
      [R, ...].
    """

    def copy(whole: Array, rows: Array) -> Array:
        inside = tuple(range(1, whole.ndim))
        numbers = lax.GatherDimensionNumbers(offset_dims=inside, collapsed_slice_dims=(0,), start_index_map=(0,))
        sizes, mode = (1, *whole.shape[1:]), lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(whole, rows, numbers, sizes, mode=mode)

    return _run_where(whole, Space.Host)(copy)(whole, rows[:, None])


def _scatter(x: Array, slots: Array, new: Array) -> Array:
    """Writes the slots [B, K, n, 1] of x [B, K, S, ...]."""
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(3, x.ndim)), inserted_window_dims=(2,), scatter_dims_to_operand_dims=(2,),
        operand_batching_dims=(0, 1), scatter_indices_batching_dims=(0, 1),
    )  # fmt: skip
    mode = lax.GatherScatterMode.FILL_OR_DROP
    return lax.scatter(x, slots, new, numbers, unique_indices=True, mode=mode)


def _put_by_comparison(x: Array, slots: Array, new: Array) -> Array:
    """Writes the slot [B, K, 1, 1] of x [B, K, S, m].

    A scatter has features as the lanes of a TPU, so that the array takes 128 / m times its size for a whole loop.
    """
    here = lax.broadcasted_iota(jnp.int32, (*x.shape[:3], 1), 2) == slots
    return jnp.where(here, new, x)


def _gather(x: Array, slots: Array) -> Array:
    """Reads the slots [B, K, W, 1] of x [B, K, S, ...]."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(3, x.ndim)), collapsed_slice_dims=(2,), start_index_map=(2,),
        operand_batching_dims=(0, 1), start_indices_batching_dims=(0, 1),
    )  # fmt: skip
    # On the host an index is not checked, which would take constants that are in the device's memory.
    return lax.gather(x, slots, numbers, (1, 1, 1, *x.shape[3:]), mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def _run_where(x: Array, result: MemorySpace) -> Callable[[Function], Function]:
    """Returns what runs a function where `x` is: on the device as it is, or on the host with a result in `result`."""
    return _on_host(result) if on_host(x) else lambda function: function


def _on_host(result: MemorySpace) -> Callable[[Function], Function]:
    """Returns what moves the arguments of a function to the host and runs it there."""

    def decorate(function: Function) -> Function:
        run = _run_on(function, compute_type="device_host", out_memory_spaces=result)
        return lambda *arguments: run(*to_host(arguments))

    return decorate
