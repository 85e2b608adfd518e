"""Policies that rank by positions alone: Sparse Transformers' strided and fixed patterns, and random eviction.

The patterns are H2O's baselines (arXiv:2306.14048, Table 1; Child et al., arXiv:1904.10509); random eviction is RoCo's
(arXiv:2402.06262, section 4.1).
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.errors import PolicyError
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Merge, Scope, Stats, View
from kvjax.policies.draws import LARGEST_SEED, slot_keys
from kvjax.policies.h2o import Newest

Array = jax.Array


def _two_classes(first: Array, view: View) -> Array:
    """Computes scores that evict one class of slots before the other, each oldest first.

    Args:
      first: [B, K, S] bool, the class that is evicted first.
      view: the slots.

    Returns:
      [B, K, S] float32, below zero for the first class; exact up to 2^24 tokens.
    """
    position = view.position
    return (position - jnp.where(first, (view.newest + 1)[:, None, None], 0)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class Strided(Importance):
    """Evicts positions that are not divisible by the stride first, then the others, each oldest first.

    Attributes:
      stride: at least 1.
    """

    stride: int
    needs = frozenset()
    amount = False
    by_position = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "stride", count_argument("stride", self.stride, minimum=1))

    def score(self, stats: Stats, view: View) -> Array:
        return _two_classes(view.position % self.stride != 0, view)


@dataclasses.dataclass(frozen=True)
class LastColumns(Importance):
    """Evicts positions before the last columns of their block first, then the others, each oldest first.

    Attributes:
      block: the number of positions of a block.
      columns: the number of last positions of each block that are evicted later; at most `block`.
    """

    block: int
    columns: int
    needs = frozenset()
    amount = False
    by_position = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", count_argument("block", self.block, minimum=1))
        object.__setattr__(self, "columns", count_argument("columns", self.columns))
        if self.columns > self.block:
            raise PolicyError(
                f"columns={self.columns} is more than a block of {self.block} positions; give at most {self.block}."
            )

    def score(self, stats: Stats, view: View) -> Array:
        return _two_classes(view.position % self.block < self.block - self.columns, view)


@dataclasses.dataclass(frozen=True)
class OwnBlock(Scope):
    """Protects the positions of the newest token's block, {p // block = newest // block}.

    Attributes:
      block: the number of positions of a block.
    """

    block: int
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", count_argument("block", self.block, minimum=1))

    def protected(self, stats: Stats, view: View) -> Array:
        return view.position // self.block == (view.newest // self.block)[:, None, None]

    def count(self, budget: int) -> int:
        return self.block


@dataclasses.dataclass(frozen=True)
class Uniform(Importance):
    """Ranks a slot by a number u ~ U[0, 1), drawn from a key into which layer, head and position are folded.

    Each step computes the same numbers again, so that none are stored.

    Attributes:
      seed: seed of the key, 0 to 2³² - 1.
    """

    seed: int = 0
    needs = frozenset()

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", count_argument("seed", self.seed, maximum=LARGEST_SEED))

    def score(self, stats: Stats, view: View) -> Array:
        return jax.vmap(jax.vmap(jax.vmap(jax.random.uniform)))(slot_keys(self.seed, view))


@factory
def strided(
    budget: BudgetLike,
    *,
    stride: int,
    local: int | None = None,
    positions: str = "original",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Keeps the newest positions and every `stride`-th of the rest, within the budget (H2O, Table 1; Child et al.).

    {p > newest - local} protected; of the rest, those with p mod stride ≠ 0 are evicted first, then the others, each
    oldest first.

    Args:
      budget: see `evict`.
      stride: positions divisible by it are evicted last.
      local: the number of newest positions that are protected; None = ⌊b/2⌋.
      positions: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    The papers' pattern moves with the query. In a cache it cannot, since an evicted token does not return.
    """
    return evict(
        importance=Strided(stride),
        scope=Newest(None if local is None else count_argument("local", local)),
        budget=budget,
        positions=positions,
        merge=merge,
        every=every,
        name="strided",
    )


@factory
def fixed(
    budget: BudgetLike,
    *,
    block: int,
    columns: int,
    positions: str = "original",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Keeps the newest token's block and the last `columns` of earlier blocks, within the budget (H2O, Table 1).

    {p // block = newest // block} protected; of the rest, those with p mod block < block - columns are evicted first,
    then the others, each oldest first.

    Args:
      budget: see `evict`; at least `block`.
      block: the number of positions of a block.
      columns: the number of last positions of each block that are evicted later; at most `block`.
      positions: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    The paper's pattern keeps the columns of every block, whatever their number; a budget limits it.
    """
    return evict(
        importance=LastColumns(block, columns),
        scope=OwnBlock(block),
        budget=budget,
        positions=positions,
        merge=merge,
        every=every,
        name="fixed",
    )


@factory
def random(
    budget: BudgetLike,
    *,
    seed: int = 0,
    recent: int = 0,
    positions: str = "original",
    merge: Merge | None = None,
    every: int = 1,
) -> Evict:
    """Evicts at random, by importances u ~ U[0, 1) drawn once per token (RoCo, section 4.1).

    Args:
      budget: see `evict`.
      seed: see `Uniform`.
      recent: the number of newest tokens that are protected. With half of the budget, this is the control for scores
        that protect as many, such as `h2o`.
      positions: see `evict`.
      merge: see `evict`.
      every: see `evict`.

    A token's importance depends on the seed, its layer, head and position, and not on its row's place in the batch.
    """
    return evict(
        importance=Uniform(seed), scope=Newest(recent) if recent else None, budget=budget, positions=positions,
        merge=merge, every=every, name="random",
    )  # fmt: skip
