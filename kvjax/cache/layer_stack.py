"""Caches of layers that are alike, in stacks: the form in which a loop over layers reads and writes them.

A state has its layers as a tuple of `Layer`, or as `Layers`, a sequence of the same whose arrays are slices of stacks.
`arranged` goes from any form to any other; `kvjax.models.layer_loop` decides which layers are worth it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import overload

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.cache.state import KVState, Layer
from kvjax.numerics.slices import AXIS, slice_of
from kvjax.summary import items, one_line
from kvjax.typing import PyTree

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class LayerRun:
    """Consecutive layers that are alike: those from `start` to before `stop`."""

    start: int
    stop: int

    @property
    def layers(self) -> range:
        """The numbers of the layers."""
        return range(self.start, self.stop)

    def __len__(self) -> int:
        return self.stop - self.start


LayerRuns = tuple[LayerRun, ...]


class LayerStack(flax.struct.PyTreeNode):
    """The caches of consecutive layers, as one.

    Attributes:
      layer: a `Layer` whose leaves have the layers after the batch, [B, L, ...].
      count: L.
    """

    layer: Layer
    count: int = flax.struct.field(pytree_node=False)

    def __repr__(self) -> str:
        return one_line(self)

    def layer_at(self, index: int) -> Layer:
        """Returns a layer, whose arrays are copied."""
        return jax.tree.map(lambda leaf: slice_of(leaf, index), self.layer)

    def map(self, function: Callable[[Layer, PyTree], Layer], others: PyTree) -> "LayerStack":
        """Applies a function to each layer, one after the other.

        Args:
          function: (layer, others) -> layer.
          others: a tree of arrays [L, ...].
        """
        # [L, B, ...] each
        layers = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, AXIS, 0), self.layer)
        made = jax.lax.map(lambda each: function(*each), (layers, others))
        return LayerStack(jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, AXIS), made), self.count)


@jax.tree_util.register_pytree_node_class
class Layers(Sequence[Layer]):
    """A sequence of `Layer`, of which some are in stacks; asking for one of these copies its arrays.

    Attributes:
      entries: single layers, and stacks of several.
    """

    def __init__(self, entries: Sequence[Layer | LayerStack]) -> None:
        self.entries = tuple(entries)

    def tree_flatten(self) -> tuple[tuple[Layer | LayerStack, ...], None]:
        return self.entries, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Sequence[Layer | LayerStack]) -> "Layers":
        return cls(children)

    def __repr__(self) -> str:
        return f"Layers({items(self.entries)})"

    def __len__(self) -> int:
        return sum(map(len_of, self.entries))

    def __iter__(self) -> Iterator[Layer]:
        for each in self.entries:
            if isinstance(each, LayerStack):
                yield from map(each.layer_at, range(each.count))
            else:
                yield each

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | slice) -> Layer | tuple[Layer, ...]:
        if isinstance(index, slice):
            return tuple(self[i] for i in range(*index.indices(len(self))))
        entry, inside = _find(self, index)
        return entry.layer_at(inside) if isinstance(entry, LayerStack) else entry


def len_of(entry: Layer | LayerStack) -> int:
    """Returns the number of layers."""
    return entry.count if isinstance(entry, LayerStack) else 1


def entries_of(layers: Sequence[Layer]) -> tuple[Layer | LayerStack, ...]:
    """Returns single layers, and stacks of several."""
    return layers.entries if isinstance(layers, Layers) else tuple(layers)


def sequence_of(entries: Sequence[Layer | LayerStack]) -> Sequence[Layer]:
    """Inverts `entries_of`."""
    single = tuple(each for each in entries if not isinstance(each, LayerStack))
    return single if len(single) == len(entries) else Layers(entries)


def positions_of(layers: Sequence[Layer], index: int) -> tuple[Array, ...]:
    """Returns the positions [B, K, S] of each group of heads of a layer, without copying its keys and values."""
    entry, inside = _find(layers, index)
    if isinstance(entry, LayerStack):
        return tuple(slice_of(group.position, inside) for group in entry.layer)
    return tuple(group.position for group in entry)


def _find(layers: Sequence[Layer], index: int) -> tuple[Layer | LayerStack, int]:
    """Returns the entry that has a layer, and the layer's place in it."""
    inside = range(len(layers))[index]
    for entry in entries_of(layers):
        if inside < len_of(entry):
            return entry, inside
        inside -= len_of(entry)
    raise AssertionError("entries are fewer than layers")


def stacked_runs(layers: Sequence[Layer]) -> LayerRuns:
    """Returns which layers are in stacks."""
    found, start = [], 0
    for each in entries_of(layers):
        if isinstance(each, LayerStack):
            found.append(LayerRun(start, start + each.count))
        start += len_of(each)
    return tuple(found)


def common_runs(each: Sequence[LayerRuns], layers: int) -> LayerRuns:
    """Returns the largest runs of layers that lie within one run of every state.

    Args:
      each: the runs of each state.
      layers: the number of layers.
    """
    # By layer, the run of each state that it is in.
    within = [tuple(next((run for run in runs if i in run.layers), None) for runs in each) for i in range(layers)]
    starts = [i for i in range(layers) if i == 0 or within[i] != within[i - 1]]
    bounds = zip(starts, [*starts[1:], layers], strict=True)
    return tuple(LayerRun(start, stop) for start, stop in bounds if stop - start > 1 and None not in within[start])


def arranged(layers: Sequence[Layer], runs: LayerRuns) -> Sequence[Layer]:
    """Returns layers with those of some runs, and no others, in stacks."""
    if stacked_runs(layers) == runs:
        return layers

    def stack(own: tuple[Layer, ...]) -> LayerStack:
        return LayerStack(jax.tree.map(lambda *leaves: jnp.stack(leaves, AXIS), *own), len(own))

    return _in_runs(tuple(layers), runs, stack)


def arranged_state(state: KVState, runs: LayerRuns) -> KVState:
    """Returns a state whose layers are as `arranged` returns them."""
    return state.replace(layers=arranged(state.layers, runs))


def repeated(layers: Sequence[Layer], runs: LayerRuns) -> Sequence[Layer]:
    """Returns layers as `arranged` does, where those of a run have equal values, as empty ones do."""

    def stack(own: tuple[Layer, ...]) -> LayerStack:
        return LayerStack(jax.tree.map(lambda leaf: jnp.repeat(leaf[:, None], len(own), AXIS), own[0]), len(own))

    return _in_runs(tuple(layers), runs, stack)


def _in_runs(
    layers: tuple[Layer, ...], runs: LayerRuns, stack: Callable[[tuple[Layer, ...]], LayerStack]
) -> Sequence[Layer]:
    starts = {run.start: run for run in runs}
    made: list[Layer | LayerStack] = []
    index = 0
    while index < len(layers):
        run = starts.get(index)
        made.append(layers[index] if run is None else stack(layers[run.start : run.stop]))
        index = index + 1 if run is None else run.stop
    return sequence_of(made)
