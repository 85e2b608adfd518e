"""The attention rows of a step, as its attention saw them.

A step of the decoder hands out what its attention saw (`kvjax.cache.step.Seen`): rotated queries and keys, and the
positions of the slots that were read. The rows are computed again from these, whatever the policy, the storage and the
selection.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.cache.layout import Group, Phase
from kvjax.cache.slots import write
from kvjax.cache.state import EMPTY, Block, KVState
from kvjax.cache.step import Seen
from kvjax.kernels import softmax
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder

Array = jax.Array


class Rows(NamedTuple):
    """The attention of n queries in one layer of one run; columns are in the order of the text.

    Attributes:
      probability: [B, K, G, n, T] float32 softmax weights of the G query heads of each KV head; 0 for unseen tokens.
      seen: [B, K, 1, n, T] bool, the tokens that a query sees: held by the cache, read, and within the layer's window.
      query: [B, n] int32 positions of the queries, -1 = padding.
    """

    probability: Array
    seen: Array
    query: Array


def look(
    params: Any, config: DecoderConfig, ids: Array, kv: KVState, block: Block, phase: Phase, width: int
) -> tuple[KVState, list[Rows]]:
    """One step of the decoder: the state afterwards, and the rows of each layer over `width` positions."""
    decoder = Decoder(config, params["embed"]["tokens"].dtype)
    (_, after), sown = decoder.apply(
        {"params": params}, ids, kv, block, phase, method="hidden", mutable="intermediates"
    )  # fmt: skip
    rows = []
    for index, groups in enumerate(phase):
        (seen,) = sown["intermediates"][f"attention_{index}"]
        whole = _whole_layer(seen, groups, width)
        rows.append(_rows(whole, block.position, config.windows[index]))
    return after, rows


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


def _whole_layer(seen: tuple[Seen, ...], groups: tuple[Group, ...], width: int) -> Seen:
    """What attention saw in all groups of a layer: heads in the model's order, slots in the order of the text."""
    parts = []
    for each in seen:
        weight = jnp.zeros(each.position.shape) if each.log_weight is None else each.log_weight
        batch, heads = each.position.shape[:2]
        assert each.key is not None, "a pool in host memory, which `kvjax.analysis.scan` puts on the device"
        part = Seen(
            # [B, K, G, n, D]
            query=each.query.reshape(batch, heads, -1, *each.query.shape[2:]),
            key=in_text_order(each.key, each.position, width),
            position=in_text_order(each.position, each.position, width, EMPTY),
            log_weight=in_text_order(weight, each.position, width),
            held=in_text_order(each.held, each.held, width, EMPTY),
        )
        parts.append(part)
    whole: Seen = jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis=1), *parts)
    order = [head for group in groups for head in group.heads or ()]
    if order:
        whole = jax.tree.map(lambda leaf: leaf[:, np.argsort(order)], whole)
    # [B, H, n, D]
    query = whole.query.reshape(whole.query.shape[0], -1, *whole.query.shape[3:])
    return whole._replace(query=query)


def _rows(seen: Seen, query_position: Array, window: int | None) -> Rows:
    """The rows of a layer whose slots are in the order of the text."""
    assert seen.key is not None
    problem = attention.problem(
        seen.query, seen.key, seen.key, query_position=query_position, key_position=seen.position, window=window,
        log_weight=seen.log_weight,
    )  # fmt: skip
    # [B, K, n, T]
    visible = softmax.visible(problem)
    # [B, K, G, n, T]
    probability, _ = softmax.probabilities(softmax.scores(problem), visible)
    return Rows(probability, visible[:, :, None], query_position)
