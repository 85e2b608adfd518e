"""Memory of a row's queries: what a policy remembers of them beyond statistics of slots.

Statistics belong to slots and are forgotten with them. A row memory belongs to a row and a KV head: it is updated in
each step from the queries of that row's real tokens, and evictions do not change it. A policy reads it in
`View.memory`.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.policies.prompt_replay import Replay

Array = jax.Array
Arrays = Mapping[str, Array]  # name -> [B, K, ...]


class Queries(NamedTuple):
    """The queries of a step's own tokens.

    Attributes:
      rotated: [B, K, G, n, D] float32, rotated to their positions in the text.
      unrotated: [B, K, G, n, D] float32.
      position: [B, n] int32, -1 = padding, which is at a row's end.
      first: [B] int32, the index of the step's first token in the prompt, or in its replay; None = not known.
      total: [B] int32, the number of tokens of the prompt, or of its replay.
    """

    rotated: Array
    unrotated: Array
    position: Array
    first: Array | None = None
    total: Array | None = None


class RowMemory:
    """Remembers something of a row's queries. Write a frozen dataclass that inherits from this class.

    Attributes:
      name: key of the memory in `View.memory`; two that are equal share one.
      per_slot: whether it is stored as a statistic of slots; see `kvjax.policies.round_memory`.
      of_replay: whether it is updated by the queries of the prompt's replay; see `kvjax.policies.Replay`.
    """

    per_slot: bool = False
    of_replay: bool = False

    @property
    def name(self) -> str:
        return repr(self)

    def bound(self, longest: int, queries: int) -> "RowMemory":
        """Returns this memory for prompts of up to `longest` tokens and `queries` query heads per KV head.

        The name is unchanged.
        """
        return self

    def empty(self, shape: tuple[int, int, int], dim: int) -> dict[str, Array]:
        """Returns the arrays [B, K, ...] before the first token.

        Args:
          shape: (B, K, G), G = query heads of a KV head.
          dim: D, features of a head.
        """
        raise NotImplementedError

    def update(self, memory: Arrays, queries: Queries) -> dict[str, Array]:
        """Returns the arrays after a step.

        Args:
          memory: the arrays [B, K, ...] before it.
          queries: of the step.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RecentQueries(RowMemory):
    """Remembers the newest queries, rotated to their positions, in the order of their positions.

    Arrays: ``query`` [B, K, G, w, D] float32, and ``position`` [B, K, w] int32, -1 = none yet.

    Attributes:
      number: w.
    """

    number: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", count_argument("window", self.number, minimum=1))

    def empty(self, shape: tuple[int, int, int], dim: int) -> dict[str, Array]:
        return {
            "query": jnp.zeros((*shape, self.number, dim), jnp.float32),
            "position": jnp.full((*shape[:2], self.number), -1, jnp.int32),
        }

    def update(self, memory: Arrays, queries: Queries) -> dict[str, Array]:
        # [B]: real tokens of the step
        count = jnp.sum(queries.position >= 0, axis=1, dtype=jnp.int32)
        # [B, w]: the newest of those before the step and of its own, whose padding is at the end
        taken = count[:, None] + jnp.arange(self.number, dtype=jnp.int32)
        kv_heads = memory["position"].shape[1]
        own = jnp.broadcast_to(queries.position[:, None], (len(count), kv_heads, queries.position.shape[1]))
        joined = jnp.concatenate([memory["query"], queries.rotated], axis=3)
        positions = jnp.concatenate([memory["position"], own], axis=2)
        return {
            "query": jnp.take_along_axis(joined, taken[:, None, None, :, None], axis=3),
            "position": jnp.take_along_axis(positions, taken[:, None], axis=2),
        }


@dataclasses.dataclass(frozen=True)
class QueryMoments(RowMemory):
    """Remembers the mean and the covariance of the queries of each head, before rotation.

    Arrays: ``count`` [B, K, 1] float32, ``mean`` [B, K, G, D], ``scatter`` [B, K, G, D, D] float32, the sum of the
    outer products of the deviations from the mean. Blocks are joined by the formulas for means and sums of squares,
    which do not cancel as E[qqᵀ] - μμᵀ does.

    Attributes:
      skip: the number of first positions that do not count.
      covariance: whether the scatter is kept.
    """

    skip: int = 0
    covariance: bool = True

    def empty(self, shape: tuple[int, int, int], dim: int) -> dict[str, Array]:
        made = {"count": jnp.zeros((*shape[:2], 1), jnp.float32), "mean": jnp.zeros((*shape, dim), jnp.float32)}
        return made | ({"scatter": jnp.zeros((*shape, dim, dim), jnp.float32)} if self.covariance else {})

    def update(self, memory: Arrays, queries: Queries) -> dict[str, Array]:
        # [B, n]
        counted = (queries.position >= self.skip).astype(jnp.float32)
        # [B, 1, 1]
        own = jnp.sum(counted, axis=1)[:, None, None]
        total = memory["count"] + own
        share = jnp.where(total > 0, own / jnp.maximum(total, 1.0), 0.0)
        # [B, 1, 1, n, 1]
        weight = counted[:, None, None, :, None]
        # [B, K, G, D]
        mean = jnp.sum(queries.unrotated * weight, axis=3) / jnp.maximum(own, 1.0)[..., None]
        change = jnp.where(own[..., None] > 0, mean - memory["mean"], 0.0)
        made = {"count": total, "mean": memory["mean"] + change * share[..., None]}
        if self.covariance:
            centred = (queries.unrotated - mean[:, :, :, None]) * weight
            exact = jax.lax.Precision.HIGHEST
            # [B, K, G, D, D]
            scatter = jnp.einsum("bkgnd,bkgne->bkgde", centred, centred, precision=exact)
            joint = change[..., :, None] * change[..., None, :] * (memory["count"] * share)[..., None, None]
            made["scatter"] = memory["scatter"] + scatter + joint
        return made


@dataclasses.dataclass(frozen=True)
class PromptQueries(RowMemory):
    """Remembers the queries of evenly spaced positions of the prompt.

    With G query heads per KV head and a prompt of n tokens, p = min(n, max(1, ⌊number / G⌋)) positions are remembered,
    ⌊i·n / p⌋ - 1 for i = 1..p: all positions of a short prompt, and always the last one.

    Arrays: ``query`` [B, K, G, p, D] float32, and ``position`` [B, K, p] int32, -1 = not filled yet.

    Attributes:
      number: the largest number of queries of a KV head.
      longest: the largest number of tokens of a prompt, which limits the arrays; None = not known.
      rotated: whether they are rotated to their positions.
    """

    number: int = 4096
    longest: int | None = None
    rotated: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", count_argument("number", self.number, minimum=1))

    @property
    def name(self) -> str:
        return f"PromptQueries({self.number}{'' if self.rotated else ', rotated=False'})"

    def bound(self, longest: int, queries: int) -> RowMemory:
        return dataclasses.replace(self, longest=longest)

    def _room(self, group: int) -> int:
        """Returns the largest number of positions that are remembered."""
        room = max(1, self.number // group)
        return room if self.longest is None else min(room, self.longest)

    def empty(self, shape: tuple[int, int, int], dim: int) -> dict[str, Array]:
        room = self._room(shape[2])
        return {
            "query": jnp.zeros((*shape, room, dim), jnp.float32),
            "position": jnp.full((*shape[:2], room), -1, jnp.int32),
        }

    def update(self, memory: Arrays, queries: Queries) -> dict[str, Array]:
        assert queries.first is not None and queries.total is not None
        room, n = memory["position"].shape[2], queries.position.shape[1]
        # [B, p]: the indices in the prompt of the tokens to remember
        number = jnp.arange(1, room + 1, dtype=jnp.int32)
        length = queries.total[:, None]
        count = jnp.clip(length, 1, room)
        # ⌊i·n / p⌋ without the product, which may exceed int32
        wanted = number * (length // count) + number * (length % count) // count - 1
        wanted = jnp.where(number <= jnp.minimum(length, room), wanted, -1)
        # [B, p]: their indices among the step's tokens, which are consecutive
        place = wanted - queries.first[:, None]
        last = jnp.sum(queries.position >= 0, axis=1, keepdims=True, dtype=jnp.int32)
        here = (wanted >= 0) & (place >= 0) & (place < last)
        index = jnp.clip(place, 0, n - 1)
        # [B, K, G, p, D]
        given = queries.rotated if self.rotated else queries.unrotated
        own = jnp.take_along_axis(given, index[:, None, None, :, None], axis=3)
        return {
            "query": jnp.where(here[:, None, None, :, None], own, memory["query"]),
            "position": jnp.where(here[:, None], wanted[:, None], memory["position"]),
        }


@dataclasses.dataclass(frozen=True)
class ReplayQueries(PromptQueries):
    """Remembers evenly spaced queries of the prompt's replay, as `PromptQueries` does those of the prompt.

    The tokens of all blocks of the replay are numbered in order; ``position`` is this number.

    Attributes:
      number: see `PromptQueries`.
      longest: the largest number of tokens of a replay.
      rotated: see `PromptQueries`.
      replay: how the prompt is replayed.
    """

    replay: Replay = dataclasses.field(default_factory=Replay)
    of_replay = True

    @property
    def name(self) -> str:
        return f"ReplayQueries({self.number}, {self.replay!r})"

    def bound(self, longest: int, queries: int) -> RowMemory:
        blocks = -(-longest // self.replay.chunk)
        return dataclasses.replace(self, longest=longest + int(self.replay.added(blocks)))
