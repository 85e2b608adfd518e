"""Sums over slots and means over heads that are on several devices of a mesh.

Inside of `jax.shard_map` each device has some of the slots, or of the heads. Code that reduces over all of them calls
the functions here, which add what the other devices have; elsewhere they reduce what is given.
"""

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.numerics.assumed_top_k import Assumed

Array = jax.Array
T = TypeVar("T")


class Across(NamedTuple):
    """Where the rest of an array is.

    Attributes:
      slots: the mesh axes that slots are divided over.
      heads: the mesh axes that KV heads are divided over.
      traced: whether a function is only traced, to see whether it reduces over slots otherwise; see
        `kvjax.cache.context_parallel.slotwise`.
      assumed: answers `kvjax.numerics.top_k.largest` without a search; None = it searches.
    """

    slots: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    traced: bool = False
    assumed: Assumed | None = None


_HERE = Across()
_current: contextvars.ContextVar[Across] = contextvars.ContextVar("across", default=_HERE)


@contextlib.contextmanager
def devices(across: Across) -> Iterator[None]:
    """A context in which arrays are parts of those of all devices."""
    token = _current.set(across)
    try:
        yield
    finally:
        _current.reset(token)


def current() -> Across:
    """Returns where the rest of arrays is."""
    return _current.get()


def sum_over_slots(total: Array) -> Array:
    """Adds the sums of the slots of all devices to the sums [..., n] of this device's slots."""
    axes = current().slots
    return jax.lax.psum(total, axes) if axes else total


def anywhere(flag: Array) -> Array:
    """Returns whether a flag [] is set on any device of the mesh, so that all of them take the same branch.

    The devices that have the slots of a head must have the same flag.
    """
    if not current().slots:
        return flag
    mesh = jax.sharding.get_abstract_mesh()
    others = tuple(name for name, size in mesh.shape.items() if size > 1 and name not in current().slots)
    return jax.lax.pmax(flag.astype(jnp.int32), others) > 0 if others else flag


def size_of_all(size: int) -> int:
    """Returns the number of slots of a head on all devices, of which each has `size`."""
    axes = current().slots
    return size * jax.lax.axis_size(axes) if axes else size


def sum_over_heads(x: Array) -> Array:
    """Returns the sum over all KV heads of a layer: [B, K, ...] -> [B, 1, ...]."""
    total = jnp.sum(x, axis=1, keepdims=True)
    axes = current().heads
    return jax.lax.psum(total, axes) if axes else total


def number_of_heads(heads: int) -> int:
    """Returns the number of KV heads on all devices, of which each has `heads`."""
    axes = current().heads
    return heads * jax.lax.axis_size(axes) if axes else heads


def max_over_slots(x: Array) -> Array:
    """Returns the maximum over the slots of all devices, of the maxima [..., n] of this device's slots."""
    axes = current().slots
    return jax.lax.pmax(x, axes) if axes else x


def softmax_of_all(weight: Array, top: Array, total: Array) -> Array:
    """Returns a softmax over the slots of all devices.

    Args:
      weight: [..., S] float32, the softmax over this device's slots.
      top: [..., n] float32, which is subtracted from the logits of this device's slots.
      total: [..., n] float32, the sum of the exponentials of the differences.
    """
    axes = current().slots
    if not axes:
        return weight
    # [C, 2, ..., n], in one collective
    tops, totals = jnp.moveaxis(jax.lax.all_gather(jnp.stack([top, total]), axes), 1, 0)
    highest = jnp.max(jnp.where(totals > 0, tops, -jnp.inf), axis=0)
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    whole = jnp.sum(jnp.where(totals > 0, totals * jnp.exp(tops - highest), 0.0), axis=0)
    own = jnp.where(total > 0, total * jnp.exp(top - highest), 0.0)
    return weight * (own / jnp.where(whole > 0, whole, 1.0))


def gather(x: Array) -> Array:
    """Gathers the arrays [...] of all devices that have the slots of a head: [C, ...]."""
    return jax.lax.all_gather(x, current().slots)


def gather_tree(tree: T) -> T:
    """Gathers a tree of arrays [B, K, ...] int32 or float32 in one collective: [C, B, K, ...] each."""
    leaves, structure = jax.tree.flatten(tree)
    sizes = [math.prod(leaf.shape[2:]) for leaf in leaves]
    bits = [jax.lax.bitcast_convert_type(leaf, jnp.int32) for leaf in leaves]
    flat = [leaf.reshape(*leaf.shape[:2], size) for leaf, size in zip(bits, sizes, strict=True)]
    every = jnp.split(gather(jnp.concatenate(flat, axis=2)), np.cumsum(sizes)[:-1].tolist(), axis=3)
    whole = [
        jax.lax.bitcast_convert_type(part.reshape(len(part), *leaf.shape), leaf.dtype)
        for part, leaf in zip(every, leaves, strict=True)
    ]
    found: T = jax.tree.unflatten(structure, whole)
    return found


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A context in which arrays are taken for whole ones: each device looks at its own slots."""
    with devices(_HERE):
        yield


def mean_over_heads(x: Array) -> Array:
    """Returns the mean over all KV heads of a layer: [B, K, S] -> [B, 1, S]."""
    mean = jnp.mean(x, axis=1, keepdims=True)
    axes = current().heads
    return jax.lax.pmean(mean, axes) if axes else mean
