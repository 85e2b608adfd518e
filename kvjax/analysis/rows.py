"""The attention rows of a step, as its attention saw them.

A step of the decoder collects the operands of its attention (`kvjax.cache.step.interface.AttentionOperands`): rotated
queries and keys, and the positions of the slots that were read. The rows are computed again from these, whatever the
policy, the storage and the selection.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.cache.layer_stack import LayerRuns
from kvjax.cache.planning.layout import Group, Phase
from kvjax.cache.slots import write
from kvjax.cache.state import EMPTY, Block, KVState
from kvjax.cache.step.interface import AttentionOperands
from kvjax.kernels import softmax
from kvjax.models.bound import BoundDecoder
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import Streams
from kvjax.typing import PyTree

Array = jax.Array


class Rows(NamedTuple):
    """The attention of n queries in one layer of one run; columns are in the order of the text.

    Attributes:
      probability: [B, K, G, n, T] float32 softmax weights of the G query heads of each KV head; 0 for unseen tokens.
      seen: [B, K, 1, n, T] bool, the tokens that a query sees: held by the cache, read, and within the layer's window.
      query: [B, n] int32 positions of the queries, -1 = padding.
      logits: [B, K, G, n, T] float32 of all tokens that are held, read or not.
      held: [B, K, 1, n, T] bool, the tokens that a query would see if it read everything: held by the cache, and within
        the layer's window.
      choice: [B, K, 1, 1, T] bool, the tokens that a selection chose.
      selects: [K] bool, whether a selection chooses what the KV head reads; otherwise it reads everything.
      streams: what entered the layer, and what its attention and its MLP returned.
      before: the same of the layer before; None in the first.
    """

    probability: Array
    seen: Array
    query: Array
    logits: Any = None
    held: Any = None
    choice: Any = None
    selects: Any = None
    streams: Any = None
    before: Streams | None = None


class Span(NamedTuple):
    """Consecutive layers that are alike, in a step of one run.

    Attributes:
      start: the first layer.
      groups: the groups of heads of each layer.
      seen: of each group, the operands of attention, leaves [L, ...].
      streams: inputs and outputs of the layers, leaves [L, ...].
      before: those of the layer before each, or None for the first layer of the model.
    """

    start: int
    groups: tuple[Group, ...]
    seen: tuple[AttentionOperands, ...]
    streams: Streams
    before: Streams | None

    @property
    def arrays(self) -> PyTree:
        """The arrays of all layers, leaves [L, ...]."""
        return self.seen, self.streams, self.before

    def rows(self, arrays: PyTree, position: Array, config: DecoderConfig, width: int) -> Rows:
        """Returns the rows of one layer.

        Args:
          arrays: of the layer, as in `arrays`, leaves [...].
          position: [B, n] int32 of the queries, -1 = padding.
          config: the decoder.
          width: the number of positions of the text.
        """
        seen, streams, before = arrays
        made = _rows(_whole_layer(seen, self.groups, width), position, config, self.start)
        return made._replace(selects=_selects(seen, self.groups), streams=streams, before=before)


def bounds(layers: int, runs: LayerRuns) -> list[tuple[int, int]]:
    """Returns (start, stop) of each `Span`. The first layer is always alone: there is none before it."""
    inside = {index for run in runs for index in run.layers[1:]} - {1}
    starts = [index for index in range(layers) if index not in inside]
    return list(zip(starts, [*starts[1:], layers], strict=True))


def look(decoder: BoundDecoder, ids: Array, kv: KVState, block: Block, phase: Phase) -> tuple[KVState, list[Span]]:
    """Does one step of the decoder.

    Args:
      decoder: whose state is `kv`.
      ids: [B, n] int32.
      kv: the cache.
      block: positions and budgets.
      phase: the groups of each layer.

    Returns:
      The state afterwards, and what each layer saw.
    """
    after, found = decoder.seen(ids, kv, block, phase)
    looped = {run.start for run in decoder.runs}
    # [L, ...], of all layers that come with an index
    stacks = {i: own if i in looped else jax.tree.map(lambda leaf: leaf[None], own) for i, own in found.items()}
    spans: list[Span] = []
    for start, stop in bounds(len(phase), decoder.runs):
        first = max(i for i in stacks if i <= start)
        seen, streams = (_part(own, start - first, stop - first) for own in stacks[first])
        before = None
        if start > 0:
            last = jax.tree.map(lambda leaf: leaf[-1:], spans[-1].streams)
            before = jax.tree.map(lambda one, own: jnp.concatenate([one, own[:-1]]), last, streams)
        spans.append(Span(start, phase[start], seen, streams, before))
    return after, spans


def _part(tree: PyTree, start: int, stop: int) -> Any:
    return jax.tree.map(lambda leaf: leaf[start:stop], tree)


def in_text_order(leaf: Array, position: Array, width: int, fill: int = 0) -> Array:
    """Puts the slot that holds position t at index t.

    Args:
      leaf: [B, K, S, ...], something for each slot.
      position: [B, K, S] int32, -1 = a slot that is left out.
      width: the number of positions.
      fill: the value at positions that no slot holds.

    Returns:
      [B, K, width, ...].
    """
    # [B, K, S]; `width` is out of bounds, where writes are dropped
    target = jnp.where(position >= 0, position, width)
    return write(jnp.full((*leaf.shape[:2], width, *leaf.shape[3:]), fill, leaf.dtype), target, leaf)


def _whole_layer(seen: tuple[AttentionOperands, ...], groups: tuple[Group, ...], width: int) -> AttentionOperands:
    """Joins the operands of attention of a layer's groups: heads in the model's order, slots in that of the text."""
    parts = []
    for each in seen:
        weight = jnp.zeros(each.position.shape) if each.log_weight is None else each.log_weight
        batch, heads = each.position.shape[:2]
        assert each.key is not None, "a pool in host memory, which `kvjax.analysis.scan` puts on the device"
        part = AttentionOperands(
            # [B, K, G, n, D]
            query=each.query.reshape(batch, heads, -1, *each.query.shape[2:]),
            key=in_text_order(each.key, each.held, width),
            position=in_text_order(each.position, each.position, width, EMPTY),
            log_weight=in_text_order(weight, each.held, width),
            held=in_text_order(each.held, each.held, width, EMPTY),
            choice=in_text_order(
                jnp.zeros(each.held.shape, bool) if each.choice is None else each.choice, each.held, width
            ),
        )
        parts.append(part)
    whole: AttentionOperands = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
    order = _order(groups)
    if len(order):
        whole = jax.tree.map(lambda leaf: leaf[:, order], whole)
    # [B, H, n, D]
    query = whole.query.reshape(whole.query.shape[0], -1, *whole.query.shape[3:])
    return whole._replace(query=query)


def _order(groups: tuple[Group, ...]) -> np.ndarray:
    """The index of each KV head of the model in the groups' heads one after the other; empty for one group of all."""
    return np.argsort([head for group in groups for head in group.heads or ()])


def _selects(seen: tuple[AttentionOperands, ...], groups: tuple[Group, ...]) -> np.ndarray:
    """Whether a selection chooses what each KV head of a layer reads, [K] bool."""
    marks = np.concatenate([np.full(each.position.shape[1], each.choice is not None) for each in seen])
    order = _order(groups)
    return marks[order] if len(order) else marks


def _rows(seen: AttentionOperands, query_position: Array, config: DecoderConfig, layer: int) -> Rows:
    """The rows of a layer whose slots are in the order of the text."""
    assert seen.key is not None
    problem = attention.problem(
        seen.query, seen.key, seen.key, query_position=query_position, key_position=seen.position,
        log_weight=seen.log_weight, scale=config.attention_scale, soft_cap=config.attention_soft_cap,
        window=config.kind(layer).window,
    )  # fmt: skip
    # [B, K, n, T]
    visible = softmax.visible(problem)
    # [B, K, n, T]
    of_held = problem.replace(key_position=seen.held)
    held = softmax.visible(of_held)
    # [B, K, G, n, T]
    logits = softmax.scores(of_held)
    # [B, K, G, n, T]
    probability, _ = softmax.probabilities(logits, visible)
    assert seen.choice is not None
    return Rows(
        probability, visible[:, :, None], query_position, logits, held[:, :, None], seen.choice[:, :, None, None]
    )
