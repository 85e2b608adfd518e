"""Row swap: a row of a running batch moves to host memory, and later into any row of the batch.

Rows are copied as they are, whatever a cache holds (codes, indices of selections, statistics, memories of policies,
layers in stacks), so that a row that was swapped out and in goes on as if it had stayed, equal to the bit.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.generation.program import program
from kvjax.parallel import host_memory
from kvjax.typing import PyTree

Array = jax.Array
T = TypeVar("T")


def committed(batch: T) -> T:
    """Commits arrays to the devices and memories where they are, as those are that `swap_in` returns.

    A program of uncommitted arrays is another one, so that the first row that comes back would wait for a compiler.

    Args:
      batch: any arrays.
    """
    moved: T = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding), batch)
    return moved


def swap_out(batch: T, row: int) -> T:
    """Copies a row of a batch to host memory; the copy may go on while the device runs other programs.

    Args:
      batch: arrays whose first dimension is the row, [R, ...] each, such as a `KVState`.
      row: from 0 to R - 1.

    Returns:
      The row, [1, ...] each, in host memory; random keys as their numbers.
    """
    held: T = jax.device_put(take_row(batch, row), host_memory.Space.Host)
    return held


def take_row(batch: T, row: int) -> T:
    """Copies a row of a batch within its memory, [1, ...] each; random keys as their numbers.

    Args:
      batch: as in `swap_out`.
      row: from 0 to R - 1.
    """
    taken: T = _taken(batch, np.int32(row))
    return taken


def swap_in(batch: T, row: int, held: T) -> T:
    """Replaces a row of a batch by one that was swapped out.

    Args:
      batch: as in `swap_out`; donated.
      row: from 0 to R - 1.
      held: from `swap_out`, of this batch or of another one of the same shapes.
    """
    replaced: T = _replaced(batch, np.int32(row), held)
    return replaced


def row_bytes(batch: PyTree) -> int:
    """Returns the number of bytes that a row of a batch takes in host memory."""
    return sum(leaf.nbytes // leaf.shape[0] for leaf in jax.tree.leaves(batch))


def put_row(batch: T, row: Array, new: T) -> T:
    """Replaces a row of a batch, within a program.

    Args:
      batch: arrays [R, ...].
      row: int32, from 0 to R - 1.
      new: arrays [1, ...].
    """

    def put(whole: Array, new: Array) -> Array:
        if _are_keys(whole):
            return whole.at[row].set(new[0])
        return host_memory.put_row(whole, row, new)

    replaced: T = jax.tree.map(put, batch, new)
    return replaced


@program()
def _taken(batch: PyTree, row: Array) -> PyTree:
    """Copies a row of a batch within its memory."""

    def take(whole: Array) -> Array:
        # [1, ...]
        return jax.random.key_data(whole[row][None]) if _are_keys(whole) else host_memory.take_row(whole, row)

    return jax.tree.map(take, batch)


@program(donate_argnames=("batch",))
def _replaced(batch: PyTree, row: Array, held: PyTree) -> PyTree:
    """Puts a row in host memory into a batch."""

    def moved(whole: Array, own: Array) -> Array:
        if _are_keys(whole):
            return jax.random.wrap_key_data(host_memory.to_device(own), impl=jax.random.key_impl(whole))
        return own if host_memory.on_host(whole) else host_memory.to_device(own)

    return put_row(batch, row, jax.tree.map(moved, batch, held))


def _are_keys(leaf: Array) -> bool:
    """Returns whether an array is one of random keys."""
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))
