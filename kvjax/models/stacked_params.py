"""Parameters of layers in stacks: the form in which a loop over layers reads them on TPUs.

There, XLA reads one layer's matrix within its stack, in a loop as in unrolled layers, and no slice is copied; a loop
over matrices that are apart would need a copy. See `kvjax.models.layer_loop`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Sharding
from jax.tree_util import DictKey, KeyPath

from kvjax.models.decoder_layer import POLICY
from kvjax.numerics.slices import slice_of, stacked_shape
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
        """The number of layers L."""
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
        return jax.tree.map(lambda leaf: slice_of(leaf, index, 0), self.layers)

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
    """Returns parameters as a dict, with each layer's arrays apart.

    Those that were in stacks are copied, unless they are traced: Flax takes no other mapping than a dict.
    """
    return dict(params) if isinstance(params, StackedParams) else params


def layer_part(params: Params, index: int, name: str) -> PyTree:
    """Returns a module's parameters of a layer, such as its ``attention``; {} if it has none."""
    if isinstance(params, StackedParams):
        return jax.tree.map(lambda leaf: slice_of(leaf, index, 0), params.layers.get(name, {}))
    return params[f"{LAYER}{index}"].get(name, {})


def map_with_path(function: Callable[[KeyPath, Any], PyTree], params: Params) -> Params:
    """Does what `jax.tree_util.tree_map_with_path` does, for one layer after the other, whose arrays are then apart."""
    found: dict[str, PyTree] = {}
    for name in params:
        found |= jax.tree_util.tree_map_with_path(function, {name: params[name]})
    return found


def stacked(params: Params) -> StackedParams:
    """Returns parameters, or their shapes, with the layers in stacks.

    Args:
      params: a nested dict, all of whose layers are alike; see `are_alike`.

    Raises:
      AssertionError: layers differ.
    """
    names = sorted((name for name in params if name.startswith(LAYER)), key=lambda name: int(name[len(LAYER) :]))
    others = {name: params[name] for name in params if name not in names}

    assert are_alike([params[name] for name in names]), "layers differ, and cannot be in stacks"

    def stack(*leaves: PyTree) -> PyTree:
        first = leaves[0]
        return stacked_shape(first, len(leaves), 0) if isinstance(first, jax.ShapeDtypeStruct) else jnp.stack(leaves)

    return StackedParams(others, jax.tree.map(stack, *(params[name] for name in names)))


def are_alike(layers: Sequence[Params]) -> bool:
    """Whether parameters of layers have the same tree, shapes and dtypes."""
    kinds = {(jax.tree.structure(own), *((x.shape, x.dtype) for x in jax.tree.leaves(own))) for own in layers}
    return len(kinds) == 1


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

    if isinstance(params, StackedParams) and are_alike(layers):
        added = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        return StackedParams(params.rest, with_own(params.layers, added))
    own_layers = unstacked(params)
    return {**own_layers, **{f"{LAYER}{i}": with_own(own_layers[f"{LAYER}{i}"], own) for i, own in enumerate(layers)}}


class StackBuilder:
    """Writes the parameters of layers into stacks, one array after the other.

    The peak of memory is the stacks and one array.

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
