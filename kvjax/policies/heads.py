"""Policies by head: some heads keep every token, the others a short window (DuoAttention, RazorAttention).

Which heads need every token is a property of a model: `kvjax.analysis.retrieval_heads` measures it, and
`kvjax.analysis.head_gates` learns it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError
from kvjax.numerics.statistics import Statistic
from kvjax.policies.base import Evict, Policy, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Folded, Merge, Stats, View
from kvjax.policies.window import First, full, recency

Array = jax.Array
Table = tuple[tuple[bool, ...], ...]


@dataclasses.dataclass(frozen=True)
class Split(Policy):
    """Some KV heads under one policy, all others under another, each with a cache of its own capacity.

    Attributes:
      heads: [L][K] bool, which KV heads of each layer are under `chosen`.
      chosen: the policy of the marked heads; it evicts at every step, or keeps every token.
      others: the policy of all other heads; it evicts at every step, or keeps every token.
      name: see `Policy`.

    Raises:
      PolicyError: heads that are not such a table, a policy that does not evict at every step, or two policies of
        different `positions`.
    """

    heads: Table
    chosen: Evict
    others: Evict
    name: str = dataclasses.field(default="split_heads", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", _table(self.name, self.heads))
        for policy in (self.chosen, self.others):
            if not isinstance(policy, Policy):
                raise PolicyError(
                    f"{self.name}: {policy!r} is not a policy; make one with kvjax.policies, such as h2o(budget=256)."
                )
            if not isinstance(policy, Evict) or policy.when != "step":
                raise PolicyError(
                    f"{self.name}: {policy.name} does not evict step by step; give policies such as h2o or window."
                )
        one, two = self.chosen, self.others
        if one.positions != two.positions:
            raise PolicyError(
                f"{self.name}({one.name}, {two.name}): positions {one.positions!r} and {two.positions!r} differ; give "
                "both policies the same."
            )

    @property
    def positions(self) -> str:
        return self.chosen.positions

    @property
    def group_reduce(self) -> str:
        """The `group_reduce` of `chosen`; the other heads use that of `others`."""
        return self.chosen.group_reduce

    @property
    def budget(self) -> None:
        """None: each of the two policies has its own."""
        return None

    @property
    def needs(self) -> frozenset[Statistic]:
        return self.chosen.needs | self.others.needs

    def members(self, chosen: bool) -> tuple[tuple[int, ...], ...]:
        """Returns the indices of each layer's heads that are under `chosen` (True) or `others` (False)."""
        return tuple(tuple(head for head, each in enumerate(row) if each is chosen) for row in self.heads)


def _table(name: str, heads: object) -> Table:
    heads = _tuples(heads)
    rows = heads if isinstance(heads, tuple) else ()
    if not rows or not all(isinstance(row, tuple) and row and len(row) == len(rows[0]) for row in rows):
        raise PolicyError(
            f"{name}: heads={heads!r} is not a table; give one row per layer, with true or false for each KV head."
        )
    if any(each not in (0, 1) for row in rows for each in row):
        raise PolicyError(f"{name}: heads={heads!r} must be true or false (1 or 0) for each KV head.")
    return tuple(tuple(bool(each) for each in row) for row in rows)


def _tuples(value: object) -> Any:
    """Converts sequences and arrays to tuples."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(_tuples(each) for each in value) if isinstance(value, list | tuple) else value


@factory
def split_heads(heads: object, chosen: Policy, others: Policy, *, name: str = "split_heads") -> Split:
    """Puts the marked KV heads under one policy and all others under another, each with a cache of its own capacity.

    Args:
      heads: [L, K] bool, which KV heads of each layer are under `chosen`; nested sequences or an array.
      chosen: a policy that evicts at every step, or keeps every token.
      others: a policy that evicts at every step, or keeps every token.
      name: shown in reports.

    Raises:
      PolicyError: see `Split`.
    """
    return Split(heads, chosen, others, name)  # type: ignore[arg-type]  # checked there


@factory
def duo_attention(heads: object, *, sinks: int = 64, recent: int = 256, positions: str = "original") -> Split:
    """Keeps every token in retrieval heads, the first and the newest in the others (DuoAttention, arXiv:2410.10819).

    These others, the streaming heads, have importance p and {p < sinks} protected.

    Args:
      heads: [L, K] bool, the retrieval heads; see `split_heads`.
      sinks: the number of first positions that a streaming head keeps.
      recent: the number of newest positions that a streaming head keeps.
      positions: see `evict`.

    DuoAttention learns the table by training gates on passkeys, as `kvjax.analysis.head_gates` does. Other tables can
    be used, such as that of `kvjax.analysis.retrieval_heads`, which measures attention.
    """
    sinks, recent = count_argument("sinks", sinks), count_argument("recent", recent, minimum=1)
    streaming = evict(
        importance=recency, scope=First(sinks), budget=sinks + recent, positions=positions, name="duo_attention"
    )
    return split_heads(heads, full(positions=positions), streaming, name="duo_attention")


@factory
def razor_attention(heads: object, budget: BudgetLike = 0.2, *, sinks: int = 4, positions: str = "original") -> Split:
    """Splits heads as `duo_attention`, with one slot for the mean of a head's dropped tokens (arXiv:2407.15891).

    See `Compensation` for that slot.

    Args:
      heads: [L, K] bool, the retrieval heads; see `split_heads`.
      budget: slots of each other head: the sinks, the compensation token and the newest tokens; see `evict`.
      sinks: the number of first positions that the other heads keep.
      positions: see `evict`.

    The paper's Algorithm 1 keeps the max(S_0, n / C) newest tokens in addition to the sinks; here the budget is a
    number of slots or a fraction.
    """
    sinks = count_argument("sinks", sinks)
    streaming = evict(
        importance=recency, scope=First(sinks + 1), budget=budget, positions=positions, merge=Compensation(sinks),
        name="razor_attention",
    )  # fmt: skip
    return split_heads(heads, full(positions=positions), streaming, name="razor_attention")


@dataclasses.dataclass(frozen=True)
class Compensation(Merge):
    """Holds the mean of all dropped tokens in one slot, weighted by their number (RazorAttention, eq. 4 and 5).

    With N_d dropped tokens of mean key k and value v, the softmax's sums have the terms N_d·exp(q·k) v and N_d·exp(q·k)
    in addition to those of the live tokens. The token at `position` counts as the first dropped token: a policy must
    protect it, as `razor_attention` does, so that its slot stays. Keys are averaged as stored. In bfloat16 the mean is
    rounded at every step; a one-shot prompt is averaged at once.

    Attributes:
      position: the position of that token.
    """

    position: int
    remembers = ("folded",)
    over_devices = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "position", count_argument("position", self.position))

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        # [B, K, S]
        here = view.live & (view.position == self.position)
        # [B, K, 1]; a text that ends before that position has no such slot, and no token was dropped
        count = jnp.sum(victim & jnp.any(here, axis=2, keepdims=True), axis=2, keepdims=True, dtype=jnp.float32)
        # [B, K, S]: the number of tokens that a slot stands for
        before = 1.0 + stats["folded"]

        def mean(x: Array) -> Array:
            # [B, K, 1, D]
            dropped = jnp.einsum("bks,bksd->bkd", victim.astype(jnp.float32), x.astype(jnp.float32))[:, :, None]
            averaged = (before[..., None] * x.astype(jnp.float32) + dropped) / (before + count)[..., None]
            return jnp.where((here & (count > 0))[..., None], averaged, x.astype(jnp.float32)).astype(x.dtype)

        folded = jnp.where(here, stats["folded"] + count, 0.0)
        return Folded(mean(key), mean(value), {**stats, "folded": folded})

    def log_weight(self, stats: Stats) -> Array:
        return jnp.log1p(stats["folded"])


compensation = factory(Compensation)
