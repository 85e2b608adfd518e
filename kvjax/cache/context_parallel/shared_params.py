"""The operands of attention on one device, of those that share the slots of a head: what all devices know."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.cache.context_parallel.position_ranks import Ranks
from kvjax.cache.context_parallel.select import Rows
from kvjax.cache.groups import Group
from kvjax.cache.step.operands import RotateByRank, rotate_to_ranks
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


def by_rank(
    positions: Sequence[Array], rows: Rows, group: Group, rope: Rope | None, ranks: Ranks | None
) -> RotateByRank | None:
    """Returns what rotates queries and keys to their ranks; None if they are not.

    Args:
      positions: [B, K, S_i] int32 of each store and of the step's own tokens.
      rows: the rows.
      group: the policy.
      rope: the layer's rotary embedding.
      ranks: of slots that hold theirs; None = ranks follow from positions.
    """
    if rope is None or group.policy.positions != "cache":
        return None
    found = _known_ranks(positions, rows, group) if ranks is None else ranks
    return functools.partial(
        rotate_to_ranks, query_rank=found.each[-1], key_ranks=found.each, longest=found.longest, rope=rope
    )


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
