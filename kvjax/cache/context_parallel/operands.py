"""The operands of attention on one device, of those that share the slots of a head."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache.context_parallel.position_ranks import Ranks
from kvjax.cache.context_parallel.select import Rows
from kvjax.cache.groups import Group
from kvjax.cache.step import attend
from kvjax.cache.step.operands import KeyRotation, Pool, decoded, pieces, placed
from kvjax.kernels.coded import as_array
from kvjax.numerics.rope import Rope
from kvjax.storage.side import Sides

Array = jax.Array


class SharedParams(NamedTuple):
    """Parameters that the vectors of all slots share, on whichever device they are.

    Attributes:
      sides: of a calibration, leaves [K, ...] or [1, ...]; {} if the storage has none.
      frequencies: [B or 1, D / 2] by which keys that are held as they are before rotation are rotated to their
        positions in each step; None = keys are held as attention takes them.
    """

    sides: Sides
    frequencies: Array | None


class Operands(NamedTuple):
    """Queries, keys and values of a step, of each store of this device and of the step's own tokens.

    Attributes:
      query: [B, H, n, D], rotated.
      keys: [B, K, S_i, D] each, arrays or `Coded`, rotated; possibly shorter vectors, see `Dims`.
      values: [B, K, S_i, D] each, as `keys`.
      stored: keys and values [B, K, S_i, D] each, as policies and selections look at them.
    """

    query: Array
    keys: tuple[Any, ...]
    values: tuple[Any, ...]
    stored: tuple[list[Array], list[Array]]


def operands(
    pool: Pool,
    query: Array,
    positions: Sequence[Array],
    rows: Rows,
    group: Group,
    rope: Rope | None,
    common: SharedParams,
    ranks: Ranks | None = None,
) -> Operands:
    """Decodes what must be decoded, and rotates what is held as it is before rotation.

    Args:
      pool: of this device's slots.
      query: [B, H, n, D], rotated, unless ``positions="cache"``.
      positions: [B, K, S_i] int32 of each store and of the step's own tokens.
      rows: the rows.
      group: the storage and the policy.
      rope: the layer's rotary embedding.
      common: what vectors share.
      ranks: of slots that hold theirs; None = ranks follow from positions, or keys are not rotated by rank.
    """
    keys, values = pieces(pool, group)
    turn = None if rope is None or common.frequencies is None else KeyRotation(rope, common.frequencies)
    keys = placed(pool, keys, turn)
    # What is held shorter has all its features for policies and selections; XLA removes this if none looks.
    whole = decoded(pool, group, whole=True) if group.storage.shortened else (keys, values)
    stored = [as_array(each) for each in whole[0]], [as_array(each) for each in whole[1]]
    if rope is not None and group.policy.positions == "cache":
        ranks = _known_ranks(positions, rows, group) if ranks is None else ranks
        frequencies = rope.frequencies(ranks.longest)
        keys = tuple(rope.rotate(key, at, frequencies) for key, at in zip(stored[0], ranks.each, strict=True))
        # [B, H, n]: the query heads of a group share their KV head's slots.
        own = jnp.repeat(ranks.each[-1], query.shape[1] // ranks.each[-1].shape[1], axis=1)
        query = rope.rotate(query, own, frequencies)
    return Operands(query, keys, values, stored)


def problems(
    own: Operands,
    positions: Sequence[Array],
    log_weights: Sequence[Array | None],
    pool: Pool,
    group: Group,
    **options: Any,
) -> tuple[list[attention.Problem], list[attention.Mapped]]:
    """Returns the problem of each store and of the step's own tokens, and how its values are mapped.

    Args:
      own: the operands.
      positions: [B, K, S_i] int32 of each store and of the step's own tokens; -1 = empty or not read.
      log_weights: [B, K, S_i] float32 of each, which a merge adds to logits, or None.
      pool: of this device's slots.
      group: the storage and the statistics.
      options: further arguments of `kvjax.attention.problem`.
    """
    queries, maps = [own.query] * len(own.keys), [attention.Mapped()] * len(own.keys)
    offsets: list[Array | None] = [None] * len(own.keys)
    if group.storage.shortened:
        queries[0], offsets[0], maps[0] = attend.mapped(own.query, pool, group, options["scale"])
    made = [
        attention.problem(
            query, key, value, key_position=position, offset=offset, log_weight=weight, needs=group.reports,
            group_reduce=group.policy.group_reduce, **options,
        )
        for query, key, value, position, offset, weight in zip(
            queries, own.keys, own.values, positions, offsets, log_weights, strict=True
        )
    ]  # fmt: skip
    return made, maps


def _known_ranks(positions: Sequence[Array], rows: Rows, group: Group) -> Ranks:
    """Returns the ranks of slots among the live ones of their head, on all devices; see `Group.known_ranks`.

    What is held are the first positions, which the scope protects, and the newest.

    Args:
      positions: [B, K, S_i] int32 of each of this device's stores and of the step's own tokens.
      rows: the rows.
      group: the policy.
    """
    sinks = group.policy.scope.count(0)
    # [B]: the tokens before the step, and those that are held of them
    before = jnp.maximum(rows.position[:, 0], 0)
    kept = jnp.minimum(before, rows.budget)
    dropped = (before - kept)[:, None, None]
    ranks = [jnp.where(position < sinks, position, position - dropped) for position in positions]
    return Ranks(ranks, kept + jnp.sum(rows.position >= 0, axis=1, dtype=jnp.int32))
