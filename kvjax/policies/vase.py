"""VaSE: keeps a random draw of the slots that recent queries attend to (arXiv:2606.03928)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument
from kvjax.numerics.group_reductions import mean_over_group
from kvjax.policies.base import Evict, evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.draws import LARGEST_SEED, slot_keys
from kvjax.policies.h2o import Newest
from kvjax.policies.query_window import check_odd, mean_over_queries, recent_logits, softmax_over
from kvjax.policies.row_memory import RecentQueries, RowMemory
from kvjax.policies.slot_order import over_neighbours
from kvjax.policies.union import protect_any
from kvjax.policies.value_aware import LargestValues
from kvjax.policies.window import First

Array = jax.Array


def pooled_attention(view: View, window: int, kernel: int) -> Array:
    """Returns the attention of the newest queries to the slots before them, [B, K, S] float32; 0 for other slots.

    This is the mean over the queries, the query heads that share a KV head, and `kernel` neighbours in the order of
    positions. Missing neighbours count as 0.

    Args:
      view: with a memory of `RecentQueries(window)`.
      window: the number of newest queries, and of newest positions whose attention is 0.
      kernel: the number of neighbours, odd.
    """
    logits, older, there = recent_logits(view, window)
    # [B, K, w, S]
    paid = mean_over_group(softmax_over(logits, jnp.broadcast_to(older[:, :, None, None], logits.shape)))
    mean = mean_over_queries(paid, there)
    return over_neighbours(mean, view.position, kernel, jax.lax.add, 0.0) / kernel


@dataclasses.dataclass(frozen=True)
class SampledAttention(Importance):
    """Ranks a slot by log a + g, with attention a and a Gumbel variable g (VaSE, arXiv:2606.03928, section 3).

    The slots of the highest scores are a draw without replacement in proportion to a, see `pooled_attention`. Each
    round draws again, with random keys that depend on layer, head, position and the number of tokens so far.

    Attributes:
      window: the number of newest queries.
      kernel: the number of neighbours whose attention is averaged, odd.
      seed: of the draw, 0 to 2³² - 1.
    """

    window: int
    kernel: int = 5
    seed: int = 0
    needs = frozenset()
    reads = frozenset({"key"})
    amount = False
    signed = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", count_argument("window", self.window, minimum=1))
        object.__setattr__(self, "kernel", count_argument("kernel", self.kernel, minimum=1))
        object.__setattr__(self, "seed", count_argument("seed", self.seed, maximum=LARGEST_SEED))
        check_odd(self.kernel)

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (RecentQueries(self.window),)

    def score(self, stats: Stats, view: View) -> Array:
        def draw(key: Array, seen: Array) -> Array:
            return jax.random.gumbel(jax.random.fold_in(key, seen), dtype=jnp.float32)

        # [B]: tokens so far
        seen = view.newest + 1
        noise = jax.vmap(jax.vmap(jax.vmap(draw, (0, None)), (0, None)))(slot_keys(self.seed, view), seen)
        return jnp.log(pooled_attention(view, self.window, self.kernel)) + noise


@dataclasses.dataclass(frozen=True)
class ProjectedShare(Importance):
    """Ranks a slot by the squared norms of its key and value in a few random directions (VaSE's variant DKV).

    Keys and values are multiplied by the same Gaussian matrix [D, rank] / √rank. It is drawn again in each round, with
    a random key that depends on the layer and the number of tokens so far. Each squared norm is divided by its sum over
    the live slots; the score is the product of the two shares.

    Attributes:
      rank: the number of directions.
      seed: of the draw, 0 to 2³² - 1.
    """

    rank: int = 20
    seed: int = 0
    needs = frozenset()
    reads = frozenset({"key", "value"})

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", count_argument("rank", self.rank, minimum=1))
        object.__setattr__(self, "seed", count_argument("seed", self.seed, maximum=LARGEST_SEED))

    def score(self, stats: Stats, view: View) -> Array:
        key, dim = jax.random.fold_in(jax.random.key(self.seed), view.layer), view.value.shape[3]

        def draw(seen: Array) -> Array:
            return jax.random.normal(jax.random.fold_in(key, seen), (dim, self.rank), jnp.float32) / self.rank**0.5

        # [B, D, rank]
        directions = jax.vmap(draw)(view.newest + 1)

        def share(x: Array) -> Array:
            exact = jax.lax.Precision.HIGHEST
            # [B, K, S, rank]
            projected = jnp.einsum("bksd,bdr->bksr", x.astype(jnp.float32), directions, precision=exact)
            squares = jnp.where(view.live, jnp.sum(jnp.square(projected), axis=3), 0.0)
            total = jnp.sum(squares, axis=2, keepdims=True)
            return squares / jnp.where(total > 0, total, 1.0)

        return share(view.rotated()) * share(view.value)


@factory
def vase(
    budget: BudgetLike,
    *,
    every: int = 64,
    large: int | None = None,
    sinks: int = 4,
    kernel: int = 5,
    seed: int = 0,
    positions: str = "original",
) -> Evict:
    """Keeps a random draw of slots in proportion to recent attention (VaSE, arXiv:2606.03928, AttnV).

    The `every` newest positions are protected, and `large` other slots: the first `sinks` slots, then those of the
    largest values by their range over features. The rest of the budget is drawn without replacement, in proportion to
    the attention of the `every` newest queries; see `SampledAttention`.

    Args:
      budget: see `evict`; at least ``every + large``.
      every: the number of slots that are evicted at once, see `evict`, and of newest queries and positions.
      large: the number of slots that are protected for their values; None = a quarter of the budget, ⌊b/4⌋.
      sinks: the number of first slots that count as the largest values.
      kernel: the number of neighbours, odd, whose attention is averaged.
      seed: the random seed of the draw, 0 to 2³² - 1. A draw also depends on the layer, the head, the position and the
        number of tokens so far, but not on the row's index in the batch.
      positions: see `evict`.

    After its first round, the authors' code averages over neighbours in the order of the draw, not of the text.
    """
    newest = Newest(count_argument("every", every, minimum=1))
    return evict(
        importance=SampledAttention(every, kernel, seed),
        scope=protect_any(newest, LargestValues(large, "range", newest, sinks)), budget=budget, positions=positions,
        every=every, name="vase",
    )  # fmt: skip


@factory
def vase_dkv(
    budget: BudgetLike, *, every: int = 64, rank: int = 20, sinks: int = 4, seed: int = 0, positions: str = "original"
) -> Evict:
    """Keeps slots whose keys and values have large norms in random directions (VaSE, arXiv:2606.03928, DKV).

    Importance is the product of the squared norms of key and value after a random projection, see `ProjectedShare`; the
    first `sinks` and the `every` newest positions are protected.

    Args:
      budget: see `evict`; at least ``every + sinks``.
      every: the number of slots that are evicted at once, see `evict`, and of newest positions that are protected.
      rank: the number of directions.
      sinks: the number of first positions that are protected.
      seed: the random seed of the directions, 0 to 2³² - 1; see `vase`.
      positions: see `evict`.
    """
    newest = Newest(count_argument("every", every, minimum=1))
    return evict(
        importance=ProjectedShare(rank, seed), scope=protect_any(First(sinks), newest), budget=budget,
        positions=positions, every=every, name="vase_dkv",
    )  # fmt: skip
