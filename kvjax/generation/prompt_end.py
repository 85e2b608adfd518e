"""The end of prompts that were run in blocks or replayed: their caches move to the arrays of the decoding phase."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import LayerStack, entries_of, len_of, sequence_of
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.slots import constrain_slots
from kvjax.cache.state import KVState, Layer
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.layer_shares import shared_by_layers
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.cache.step.prompt_replay import evict_prompt
from kvjax.generation.program import program
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder_layer import POLICY, SIDES, SKEW
from kvjax.parallel.sharding import Params
from kvjax.storage.side import rows_of
from kvjax.typing import PyTree

Array = jax.Array
# Optional parameters of the attention of a layer; its budgets, by group of heads; and its number.
LayerParts = tuple[tuple[PyTree, ...], PyTree, Array | np.int32]


def converted(kv: KVState, layout: CacheLayout, config: DecoderConfig, params: Params) -> Sequence[Layer]:
    """Moves the slots of every group of heads from the arrays of the prompt phase to those of the decoding phase.

    If the prompts have been replayed, slots are evicted first.

    Args:
      kv: the cache after the last block, or the replay.
      layout: of the cache.
      config: the decoder.
      params: of the decoder.
    """
    if layout.shares_layers:
        kv = shared_by_layers(kv, layout.prompt)

    def one(index: int, layer: Layer, parts: LayerParts) -> Layer:
        """Converts a layer of the same structure as layer `index`, given its parts."""
        return _convert(
            layer, parts, kv.length, kv.total, config=config, kind=config.kind(index), before=layout.prompt[index],
            after=layout.decode[index],
        )  # fmt: skip

    def parts_of(index: int) -> LayerParts:
        own = params[f"layer_{index}"]["attention"]
        return (own.get(SKEW), own.get(SIDES), own.get(POLICY)), kv.budget[index], np.int32(index)

    def entry(index: int, layer: Layer | LayerStack) -> Layer | LayerStack:
        if isinstance(layer, Layer):
            return one(index, layer, parts_of(index))
        parts = jax.tree.map(lambda *each: jnp.stack(each), *(parts_of(index + i) for i in range(layer.count)))
        return layer.map(functools.partial(one, index), parts)

    entries = entries_of(kv.layers)
    starts = itertools.accumulate((len_of(each) for each in entries[:-1]), initial=0)
    return sequence_of([entry(*each) for each in zip(starts, entries, strict=True)])


@program(static_argnames=("config", "kind", "before", "after"))
def _convert(
    layer: Layer,
    parts: LayerParts,
    length: Array,
    total: Array,
    *,
    config: DecoderConfig,
    kind: LayerKind,
    before: tuple[Group, ...],
    after: tuple[Group, ...],
) -> Layer:
    """Converts a layer; within a program, layers that are alike are traced once.

    Args:
      layer: at the end of the prompt.
      parts: see `LayerParts`.
      length: [B] int32, see `KVState`.
      total: [B] int32, likewise.
      config: the decoder.
      kind: the settings in which the layer may differ from others.
      before: the groups of heads of the prompt phase.
      after: those of the decoding phase.
    """
    shared, budgets, number = parts
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    frequencies = None if kind.rope is None else kind.rope.frequencies(total)
    made = []
    for own, old, new, budget in zip(layer, before, after, budgets, strict=True):
        # [K, D, D] and [K or 1, ...], of the group's heads
        skew, sides, policy = rows_of(shared, new.heads)
        prompt = Prompt(length, kind.rope, frequencies, skew, sides)
        if old.replay is not None:
            args = LayerArgs(scale=scale, soft_cap=config.attention_soft_cap, window=kind.window, params=policy)
            own = evict_prompt(own, old, budget, prompt, total, jnp.asarray(number), args)
        group = convert(own, old, new, prompt)
        made.append(constrain_slots(group, new.per_head) if new.slot_axes else group)
    return Layer(made)
