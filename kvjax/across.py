"""Sums over slots and means over heads that are on several devices of a mesh.

Inside of `jax.shard_map` each device has some of the slots, or of the heads. Code that reduces over all of them calls
the functions here, which add what the other devices have; elsewhere they reduce what is given.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Across(NamedTuple):
    """Where the rest of an array is.

    Attributes:
      slots: the mesh axes that slots are divided over.
      heads: the mesh axes that KV heads are divided over.
      traced: whether a function is only traced, to see whether it reduces over slots otherwise; see
        `kvjax.cache.slotwise`.
    """

    slots: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    traced: bool = False


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


def mean_over_heads(x: Array) -> Array:
    """Returns the mean over all KV heads of a layer: [B, K, S] -> [B, 1, S]."""
    mean = jnp.mean(x, axis=1, keepdims=True)
    axes = current().heads
    return jax.lax.pmean(mean, axes) if axes else mean
