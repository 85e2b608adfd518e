"""Layers that hold some of their slots together, such as pairs of layers; see `Arrangement.borrow`."""

from collections.abc import Sequence
from typing import cast

from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import LayerStack
from kvjax.cache.slots import constrain
from kvjax.cache.state import Layer

#: Single layers, and stacks of those that hold nothing together.
Entries = Sequence[Layer | LayerStack]


def borrow(layers: Entries, index: int, groups: tuple[Group, ...]) -> Layer:
    """Returns a layer with what the layer before it holds for both, as a step of it needs it.

    Args:
      layers: of the cache.
      index: of the layer, among these.
      groups: its groups of heads.
    """
    layer = cast(Layer, layers[index])
    if not any(group.arrangement.borrows(group) for group in groups):
        return layer
    return Layer(
        group.arrangement.borrow(lower, own) if group.arrangement.borrows(group) else own
        for group, lower, own in zip(groups, cast(Layer, layers[index - 1]), layer, strict=True)
    )


def release(after: Layer, before: Layer, groups: tuple[Group, ...]) -> Layer:
    """Returns a layer after a step without what it borrowed.

    Args:
      after: the layer after the step.
      before: the layer before it borrowed.
      groups: its groups of heads.
    """
    return Layer(group.arrangement.release(*both) for group, *both in zip(groups, after, before, strict=True))


def join_prompts(layers: Sequence[Layer], phase: Phase) -> Sequence[Layer]:
    """Joins the prompts of layers that hold them together, when all have ended.

    Args:
      layers: after prompts in one shot, in the arrays of `Arrangement.prompt_end`.
      phase: the groups of the decoding phase.
    """
    if not any(group.arrangement.borrows(group) for groups in phase for group in groups):
        return layers
    made = list(layers)
    for index in range(len(phase) - 1):
        pairs = [
            group.arrangement.join_prompts(own, following, group)
            for group, own, following in zip(phase[index], layers[index], layers[index + 1], strict=False)
        ]
        if joined := [pair for pair in pairs if pair is not None]:
            for place, both in zip((index, index + 1), zip(*joined, strict=True), strict=True):
                made[place] = Layer(map(constrain, both))
    return tuple(made)
