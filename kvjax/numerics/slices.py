"""Slices of stacked arrays: an operand in place of an array, for operations that read and write within the stack."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from kvjax.typing import PyTree

Array = jax.Array

AXIS = 1  # of a stack's slices; rows of a batch come first in all arrays of a cache


@jax.tree_util.register_pytree_node_class
class Slice:
    """One slice of a stack.

    It is a tree of the stack and the index; `is_slice` serves as `is_leaf` where it is to be one leaf.

    Attributes:
      stack: [B, L, ...].
      index: int32, of the slice.
      name: of the stack, as it was and after writes; no two stacks of a call have the same.
    """

    def __init__(self, stack: Array, index: Array, name: str) -> None:
        self.stack = stack
        self.index = index
        self.name = name

    def tree_flatten(self) -> tuple[tuple[Array, Array], str]:
        return (self.stack, self.index), self.name

    @classmethod
    def tree_unflatten(cls, name: str, children: tuple[Array, Array]) -> "Slice":
        return cls(*children, name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the slice, [B, ...]."""
        return (*self.stack.shape[:AXIS], *self.stack.shape[AXIS + 1 :])

    @property
    def ndim(self) -> int:
        """The number of axes of the slice."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements of the slice."""
        return self.stack.size // self.stack.shape[AXIS]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the slice."""
        return self.stack.dtype

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the slice."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @functools.cached_property
    def array(self) -> Array:
        """The slice as an array, [B, ...]."""
        # All that reads it reads one copy: XLA would copy the whole stack if something read it after the next write.
        return lax.optimization_barrier(lax.dynamic_index_in_dim(self.stack, self.index, AXIS, keepdims=False))

    def astype(self, dtype: DTypeLike) -> "Array | Slice":
        """Returns the slice in a dtype: itself if it has that one."""
        return self if self.dtype == jnp.dtype(dtype) else self.array.astype(dtype)

    def written(self, stack: Array) -> "Slice":
        """Returns the slice of the stack after a write."""
        return Slice(stack, self.index, self.name)

    def replaced(self, new: "Array | Slice") -> Array:
        """Returns the stack with another slice; with one of the same stack after writes, that one's stack."""
        if isinstance(new, Slice):
            if new.name == self.name and new.stack.shape == self.stack.shape:
                return new.stack
            new = new.array
        return lax.dynamic_update_index_in_dim(self.stack, new, self.index, AXIS)

    def with_specs(self, spec: PartitionSpec) -> "Slice":
        """Returns the partitions of the stack and the index, as a tree of this kind, for that of the slice."""
        of_stack = PartitionSpec(*spec[:AXIS], None, *spec[AXIS:])
        return jax.tree.unflatten(jax.tree.structure(self), [of_stack, PartitionSpec()])


def is_slice(x: object) -> bool:
    """Whether a leaf is a `Slice`; serves as `is_leaf` of `jax.tree` functions."""
    return isinstance(x, Slice)


def to_stacks(given: Sequence[Array | Slice]) -> tuple[list[Array], Array]:
    """Returns the stacks of slices, for code that reads and writes one slice of each.

    Args:
      given: slices of one index; or arrays, which become stacks of one slice each, and so do slices among arrays.

    Returns:
      The stacks, [B, L, ...] each, and the index of the slices, [1] int32.
    """
    slices = [x for x in given if isinstance(x, Slice)]
    if len(slices) == len(given):
        return [x.stack for x in slices], slices[0].index.reshape(1)
    return [jnp.expand_dims(array_of(x), AXIS) for x in given], jnp.zeros(1, jnp.int32)


def from_stacks(stacks: Sequence[Array], given: Sequence[Array | Slice]) -> list[Array | Slice]:
    """Inverts `to_stacks` for stacks that were written; `given` as there."""
    slices = [x for x in given if isinstance(x, Slice)]
    if len(slices) == len(given):
        return [x.written(stack) for x, stack in zip(slices, stacks, strict=True)]
    return [jnp.squeeze(stack, AXIS) for stack in stacks]


def array_of(x: Array | Slice) -> Array:
    """Returns a slice as an array, and an array as it is."""
    return x.array if isinstance(x, Slice) else x


def stacked_shape(leaf: jax.ShapeDtypeStruct, count: int, axis: int = AXIS) -> jax.ShapeDtypeStruct:
    """Returns the shape of a stack of arrays.

    Args:
      leaf: the shape of an array, with its sharding if it has one.
      count: of arrays.
      axis: of the stack, along which no mesh divides it.
    """
    place = leaf.sharding
    if isinstance(place, NamedSharding):
        spec = (*place.spec, *(None,) * (axis - len(place.spec)))
        place = _with_spec(place, PartitionSpec(*spec[:axis], None, *spec[axis:]))
    return jax.ShapeDtypeStruct((*leaf.shape[:axis], count, *leaf.shape[axis:]), leaf.dtype, sharding=place)


def slice_shape(leaf: jax.ShapeDtypeStruct, axis: int = AXIS) -> jax.ShapeDtypeStruct:
    """Inverts `stacked_shape`."""
    place = leaf.sharding
    if isinstance(place, NamedSharding):
        place = _with_spec(place, PartitionSpec(*place.spec[:axis], *place.spec[axis + 1 :]))
    return jax.ShapeDtypeStruct((*leaf.shape[:axis], *leaf.shape[axis + 1 :]), leaf.dtype, sharding=place)


def _with_spec(place: NamedSharding, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(place.mesh, spec, memory_kind=place.memory_kind)


def slice_of(leaf: PyTree, index: int, axis: int = AXIS) -> PyTree:
    """Returns a slice of a stack, or of its shape.

    Args:
      leaf: an array, or `jax.ShapeDtypeStruct`; anything else is returned as it is.
      index: of the slice.
      axis: of the stack.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return slice_shape(leaf, axis)
    if isinstance(leaf, np.ndarray | jax.core.Tracer):
        return leaf[(slice(None),) * axis + (index,)]
    # An index that is an operand: a constant would compile another program for each layer.
    return jax.lax.dynamic_index_in_dim(leaf, index, axis, keepdims=False) if isinstance(leaf, jax.Array) else leaf
