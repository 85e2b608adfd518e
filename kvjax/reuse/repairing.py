"""Recomputes a part of the tokens after an edit, as `kvjax.reuse.blend` does with a chunk."""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.groups import Group, Phase
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.cache.state import FAR, KVState
from kvjax.generation.context import Context
from kvjax.generation.program import program
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.reuse.blending import largest
from kvjax.reuse.cache import Collected
from kvjax.reuse.last_block import feed_question
from kvjax.reuse.layerwise import LayerResult, run_tokens
from kvjax.storage.base import UNROTATED

Array = jax.Array


def holds_rotated(group: Group) -> bool:
    """Returns whether keys are held rotated to their positions."""
    return group.policy.positions == "original" and group.storage.frame != UNROTATED


def repaired(model: Model, context: Context, start: int, ratio: float) -> Context:
    """Recomputes tokens from a position on, and the last one.

    Args:
      model: of the context.
      context: of one row, full, after an edit.
      start: the position of the first token that has not seen the edit.
      ratio: the share of these tokens, the last one of the text left out, that go on after layer 1.
    """
    assert context.text is not None and context.made is not None and context.boundaries is not None
    (tokens,) = context.text
    last = len(tokens) - 1
    size = prompt_bucket(len(tokens))
    keys, values = by_position(context.state, config=model.config, phase=context.layout.decode, size=size)
    position = np.arange(min(start, last), last, dtype=np.int32)
    count = int(np.floor(ratio * len(position) + 1e-9))

    def choose(layer: int, result: LayerResult, position: np.ndarray) -> np.ndarray:
        if layer != 1:
            return np.arange(len(position))
        deviation = np.asarray(result.value_deviation[0])[: len(position)]
        return largest(deviation, position, count, np.zeros(len(position), bool))

    held = Collected()
    total = int(np.asarray(context.state.total)[0])
    run_tokens(
        model, tokens[position], position, keys, values, np.arange(size) < last, total=total, choose=choose,
        record=held.add,
    )  # fmt: skip
    reached = len(held.key)
    made = feed_question(
        model, context.made.spec, tokens[:last], held.key + keys[reached:], held.value + values[reached:],
        tokens[last:], room=total, options=context.made.options,
    )  # fmt: skip
    return made._replace(boundaries=context.boundaries)


@program(static_argnames=("config", "phase", "size"))
def by_position(state: KVState, *, config: DecoderConfig, phase: Phase, size: int) -> tuple[list[Array], list[Array]]:
    """Returns the keys, not rotated, and the values of a full cache, [1, K, size, D] by position for each layer."""
    keys, values = [], []
    for index, (layer, groups) in enumerate(zip(arranged_state(state, ()).layers, phase, strict=True)):
        rope = config.kind(index).rope if holds_rotated(groups[0]) else None
        own = []
        for group in layer:
            # [1, K, S]
            order = jnp.argsort(jnp.where(group.position >= 0, group.position, FAR), axis=2)
            order = jnp.pad(order, ((0, 0), (0, 0), (0, max(0, size - order.shape[2]))))[:, :, :size, None]
            key, value = (jnp.take_along_axis(each, order, axis=2) for each in (group.key, group.value))
            own.append((key, value))
        key, value = (jnp.concatenate(side, axis=1) for side in zip(*own, strict=True))
        if rope is not None:
            at = jnp.arange(size, dtype=jnp.int32)[None]
            key = rope.unrotate(key, at, rope.frequencies(state.total)).astype(key.dtype)
        keys.append(key)
        values.append(value)
    return keys, values
