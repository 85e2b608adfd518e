"""Learned retention: slots by the score of a trained gate."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import number_argument
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, compress_or_evict, factory
from kvjax.policies.budget import Budget, BudgetLike, Derived, as_budget
from kvjax.policies.components import Importance, Scope, Stats, View
from kvjax.policies.gates import Gate, GateScore, LinearGate
from kvjax.policies.h2o import Newest
from kvjax.policies.union import protect_any
from kvjax.policies.window import First
from kvjax.policies.written import Written

Array = jax.Array
LARGEST = 1e30  # the largest threshold


@dataclasses.dataclass(frozen=True)
class GateImportance(Importance):
    """Ranks a slot by the score that a gate gave its token, optionally times the age of the token.

    Attributes:
      gate: scores each token once.
      threshold: scores below it become -inf, so that a budget of `AtMost` evicts the slots early; None = no threshold.
      age: whether the score is multiplied by the number of positions since the token. The gate then returns log β,
        where β is the part of its importance that a token keeps in each step (TRIM-KV, arXiv:2512.03324, eq. 4).
    """

    gate: Gate
    threshold: float | None = None
    age: bool = False
    needs = frozenset()
    signed = True

    def __post_init__(self) -> None:
        if not isinstance(self.gate, Gate):
            raise PolicyError(f"gate={self.gate!r} is not a gate; give one such as kvjax.policies.LinearGate().")
        if self.threshold is not None:
            found = number_argument("threshold", self.threshold, minimum=-LARGEST, maximum=LARGEST)
            object.__setattr__(self, "threshold", found)
        if not isinstance(self.age, bool):
            raise PolicyError(f"age={self.age!r} is not valid; give True or False.")

    @property
    def writes(self) -> tuple[Written, ...]:
        return (GateScore(self.gate),)

    def score(self, stats: Stats, view: View) -> Array:
        own = stats[GateScore(self.gate).name]
        score = own
        if self.age:
            score = own * (view.newest[:, None, None] + 1 - view.position).astype(jnp.float32)
        return score if self.threshold is None else jnp.where(own < self.threshold, -jnp.inf, score)


@dataclasses.dataclass(frozen=True)
class AtMost(Derived):
    """An upper bound: slots of priority -inf are evicted even if the head is within it.

    Attributes:
      most: the largest number of slots, for which arrays are allocated.

    Raises:
      PolicyError: a budget that heads share.
    """

    most: Budget

    def __post_init__(self) -> None:
        budget = self.most if isinstance(self.most, Budget) else as_budget(self.most)
        if budget is None or budget.shared or budget.evicts_early:
            raise PolicyError(f"most={self.most!r} is not a number of slots for each head; give slots or a fraction.")
        object.__setattr__(self, "most", budget)

    @property
    def base(self) -> Budget:
        return self.most

    @property
    def evicts_early(self) -> bool:
        return True

    def limit(self, policy: Evict, stats: Stats, view: View) -> Array:
        worthy = view.live & (policy.rank(stats, view) > -jnp.inf)
        number = jnp.sum(worthy, axis=2, keepdims=True, dtype=jnp.int32)
        return jnp.minimum(self.most.limit(policy, stats, view), number)

    def traced(self) -> Budget:
        return dataclasses.replace(self, most=self.most.traced())


@factory
def learned(
    budget: BudgetLike,
    *,
    gate: Gate = LinearGate(),
    every: int | None = 1,
    recent: int = 0,
    threshold: float | None = None,
    age: bool = False,
    sinks: int = 0,
    positions: str = "original",
) -> Evict:
    """Keeps the slots whose tokens a trained gate scores highest.

    A gate scores each token once, when it enters the cache; see `kvjax.policies.Gate`. Pass its trained parameters as
    ``calibration=``.

    Args:
      budget: slots per KV head; see `evict`.
      gate: the gate, such as ``LinearGate()`` (KVzap), ``MlpGate(512, output="log_sigmoid")`` (TRIM-KV, with `age`),
        ``QkvGate()`` (Locret), ``SinkGate()`` (Fast KVzip), ``ChannelGate()`` (DMS) or ``AttentionGate()``
        (Attention-Gate, with ``every=None``).
      every: see `evict`; None evicts once, when the prompt ends.
      recent: the number of newest positions that are protected.
      threshold: slots of a lower score that are not protected are evicted, even if the head is within its budget;
        None = no threshold.
      age: whether the score is multiplied by the age of the token, for gates that return log β.
      sinks: the number of first positions that are protected.
      positions: see `evict`.

    Raises:
      PolicyError: an argument that is not valid.
    """
    if isinstance(gate, Gate) and gate.whole_prompt and every is not None:
        raise PolicyError(
            f"every={every} is not valid: gate={gate!r} scores the tokens of a whole prompt, when it ends; give "
            "every=None."
        )
    scopes: list[Scope] = [*([Newest(recent)] if recent else []), *([First(sinks)] if sinks else [])]
    made = compress_or_evict(
        every, importance=GateImportance(gate, threshold, age), scope=protect_any(*scopes) if scopes else None,
        budget=budget, positions=positions, name="learned",
    )  # fmt: skip
    if threshold is None:
        return made
    if made.budget is None:
        raise PolicyError("a threshold needs a budget, for which arrays are allocated; give slots or a fraction.")
    return dataclasses.replace(made, budget=AtMost(made.budget))
