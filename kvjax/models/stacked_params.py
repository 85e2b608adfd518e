"""Parameters of layers in stacks: the form in which a loop over layers reads them on TPUs.

There, XLA reads one layer's matrix within its stack, in a loop as in unrolled layers, and no slice is copied; a loop
over matrices that are apart would need a copy. See `kvjax.models.layer_loop`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.tree_util import DictKey

from kvjax.models.decoder_layer import POLICY
from kvjax.numerics.slices import slice_shape, stacked_shape
from kvjax.parallel.sharding import LAYERS, Params, PyTree

Array = jax.Array

LAYER = "layer_"  # of the names of layers


@jax.tree_util.register_pytree_with_keys_class
class StackedParams(Mapping[str, Any]):
    """The parameters of a decoder whose layers are in stacks.

    As a mapping it is the nested dict of any other decoder, see `kvjax.models.model.Model`. A layer that is asked for
    consists of slices: copies outside of a jitted function.

    Attributes:
      rest: the parameters that belong to no layer.
      layers: the parameters of a layer, leaves [L, ...].
    """

    def __init__(self, rest: Params, layers: Params) -> None:
        self.rest = rest
        self.layers = layers

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[DictKey, PyTree], ...], tuple[str, ...]]:
        names = tuple(sorted(self.rest))
        return ((DictKey(LAYERS), self.layers), *((DictKey(name), self.rest[name]) for name in names)), names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], children: tuple[PyTree, ...]) -> "StackedParams":
        layers, *others = children
        return cls(dict(zip(names, others, strict=True)), layers)

    @property
    def num_layers(self) -> int:
        """L."""
        return cast(int, jax.tree.leaves(self.layers)[0].shape[0])

    @property
    def layer_shapes(self) -> Params:
        """Shapes and dtypes of the parameters of a layer."""
        return cast(Params, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.layers))

    def __getitem__(self, name: str) -> PyTree:
        if name not in self:
            raise KeyError(name)
        if name in self.rest:
            return self.rest[name]
        index = int(name.removeprefix(LAYER))
        return jax.tree.map(lambda leaf: _slice(leaf, index), self.layers)

    def __contains__(self, name: object) -> bool:
        number = name.removeprefix(LAYER) if isinstance(name, str) and name.startswith(LAYER) else ""
        return name in self.rest or (number.isdecimal() and int(number) < self.num_layers)

    def __iter__(self) -> Iterator[str]:
        yield from self.rest
        yield from (f"{LAYER}{index}" for index in range(self.num_layers))

    def __len__(self) -> int:
        return len(self.rest) + self.num_layers


def with_rest(params: Params, own: Params) -> Params:
    """Returns parameters with more, or other ones, that belong to no layer."""
    if isinstance(params, StackedParams):
        return StackedParams({**params.rest, **own}, params.layers)
    return {**params, **own}


def unstacked(params: Params) -> Params:
    """Returns parameters with each layer's arrays apart; those that were in stacks are copied."""
    return dict(params) if isinstance(params, StackedParams) else params


def _slice(leaf: PyTree, index: int) -> PyTree:
    """Returns the part of a layer of a stack [L, ...], or of its shape."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return slice_shape(leaf, 0)
    if isinstance(leaf, np.ndarray | jax.core.Tracer):
        return leaf[index]
    # An index that is an operand: `leaf[index]` would compile another program for each layer.
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False) if isinstance(leaf, jax.Array) else leaf


def stacked(params: Params) -> StackedParams:
    """Returns parameters, or their shapes, with the layers in stacks.

    Args:
      params: a nested dict, all of whose layers have the same tree, shapes and dtypes.
    """
    names = sorted((name for name in params if name.startswith(LAYER)), key=lambda name: int(name[len(LAYER) :]))
    others = {name: params[name] for name in params if name not in names}

    def stack(*leaves: PyTree) -> PyTree:
        first = leaves[0]
        return stacked_shape(first, len(leaves), 0) if isinstance(first, jax.ShapeDtypeStruct) else jnp.stack(leaves)

    return StackedParams(others, jax.tree.map(stack, *(params[name] for name in names)))


def with_attention(params: Params, layers: Sequence[Params]) -> Params:
    """Returns parameters with other, or more, arrays of the attention of each layer. All others are the same arrays.

    Layers in stacks remain there if what they are given is alike.

    Args:
      params: of a decoder.
      layers: of each layer, what to replace or add in its ``attention``; parameters of policies are added to others.
    """

    def with_own(layer: Params, own: Params) -> Params:
        attention = layer["attention"]
        if POLICY in own:
            own = {**own, POLICY: {**attention.get(POLICY, {}), **own[POLICY]}}
        return {**layer, "attention": {**attention, **own}}

    if isinstance(params, StackedParams):
        kinds = {(jax.tree.structure(own), *((x.shape, x.dtype) for x in jax.tree.leaves(own))) for own in layers}
        if len(kinds) == 1:
            added = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
            return StackedParams(params.rest, with_own(params.layers, added))
    return {**params, **{f"{LAYER}{i}": with_own(params[f"{LAYER}{i}"], own) for i, own in enumerate(layers)}}


class StackBuilder:
    """Writes the parameters of layers into stacks, one array after the other, so that no more than one is held twice.

    Args:
      num_layers: L.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._layers: dict[str, Any] = {}

    def add(self, path: Sequence[str], array: Array) -> None:
        """Writes a parameter of a layer.

        Args:
          path: of the parameter, such as ``("layer_3", "attention", "query", "kernel")``.
          array: on its devices.
        """
        first, *nodes, name = path
        node = self._layers
        for key in nodes:
            node = node.setdefault(key, {})
        shape = stacked_shape(
            jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding), self._num_layers, 0
        )
        if name not in node:
            node[name] = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
        node[name] = _write(shape.sharding)(node[name], array, int(first.removeprefix(LAYER)))

    def build(self, rest: Params) -> StackedParams:
        """Returns all parameters, with those that belong to no layer."""
        return StackedParams(rest, self._layers)


@functools.lru_cache
def _write(place: Sharding) -> Callable[[Array, Array, int], Array]:
    """Returns a program that writes an array into a stack of a sharding, which is donated."""
    return jax.jit(
        lambda stack, array, index: jax.lax.dynamic_update_index_in_dim(stack, array, index, 0), donate_argnums=0,
        out_shardings=place,
    )  # fmt: skip
