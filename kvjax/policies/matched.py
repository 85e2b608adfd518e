"""Attention matching: keeps fewer slots, with weights and values fitted to the attention of the prompt's queries."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, named, number_argument
from kvjax.numerics.nnls import nnls
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel import sharding
from kvjax.policies.base import Evict, factory
from kvjax.policies.budget import BudgetLike, as_budget
from kvjax.policies.components import Folded, Importance, Merge, Stats, View
from kvjax.policies.prompt_replay import Replay
from kvjax.policies.row_memory import PromptQueries, ReplayQueries, RowMemory
from kvjax.typing import PyTree

Array = jax.Array
R = TypeVar("R")

QUERIES = ("prompt", "following", "replay")
FOLLOWING = 64  # positions after the prompt over which "following" spreads the prompt's queries
LOG_WEIGHT = "log_weight"  # the statistic: 0 in empty slots and for tokens that follow
SMALLEST_WEIGHT = 1e-6
TILE = 128  # positions whose logits over all slots of a head exist at the same time
MOST_NUMBERS = 1 << 26  # float32 numbers of the heads that are fitted at the same time
REFINEMENTS = 2
HIGHEST = jax.lax.Precision.HIGHEST


class Head(NamedTuple):
    """The queries and the slots of one KV head, or of several along leading axes.

    Attributes:
      query: [..., G, p, D] float32, rotated to their positions, or to positions after the prompt.
      real: [..., p] bool, False for padding.
      key: [..., S, D] float32, rotated to their positions.
      seen: [..., S] bool, whether tokens after the prompt can attend to the slot.
    """

    query: Array
    real: Array
    key: Array
    seen: Array


class Fit(NamedTuple):
    """The weights and values of the slots of one head, or of several along leading axes.

    Attributes:
      log_weight: [..., S] float32, 0 where nothing was fitted.
      value: [..., S, D] in the dtype of the values.
    """

    log_weight: Array
    value: Array


def memory_of(queries: str) -> PromptQueries:
    """Returns the memory that holds the queries of the prompt, or of its replay."""
    return ReplayQueries() if queries == "replay" else PromptQueries(rotated=queries == "prompt")


def heads_of(view: View, memory: PromptQueries) -> Head:
    """Returns the queries and slots of all heads, leaves [B, K, ...]."""
    queries = view.memory[memory.name]
    query = queries["query"]
    if not memory.rotated and view.frame is not None and view.frame.rope is not None:
        assert view.frame.frequencies is not None
        batch, kv_heads, group, count, dim = query.shape
        # [B, p]
        place = view.newest[:, None] + 1 + jnp.arange(count, dtype=jnp.int32) % FOLLOWING
        heads = query.reshape(batch, kv_heads * group, count, dim)
        query = view.frame.rope.rotate(heads, place, view.frame.frequencies).reshape(query.shape)
    seen = view.live if view.window is None else view.live & view.recent(view.window)
    return Head(query, queries["position"] >= 0, view.rotated().astype(jnp.float32), seen)


def tiles_of(head: Head) -> tuple[Array, Array]:
    """Divides the queries of a head into tiles, [tiles, G * t, D], and whether each is real, [tiles, G * t]."""
    group, count, dim = head.query.shape
    tile = min(TILE, count)
    pad = -count % tile
    query = jnp.pad(head.query, ((0, 0), (0, pad), (0, 0))).reshape(group, -1, tile, dim)
    real = jnp.broadcast_to(jnp.pad(head.real, (0, pad)).reshape(-1, 1, tile), (query.shape[1], group, tile))
    return jnp.moveaxis(query, 1, 0).reshape(-1, group * tile, dim), real.reshape(-1, group * tile)


def logits_of(query: Array, head: Head, scale: float, cap: float | None) -> Array:
    """Returns the logits of queries [t, D] on the slots of a head, [t, S] float32; -inf for slots that are not seen."""
    logits = soft_capped(scale * jnp.matmul(query, head.key.T, precision=HIGHEST), cap)
    return jnp.where(head.seen, logits, -jnp.inf)


def over_heads(function: Callable[..., R], arguments: tuple[PyTree, ...], numbers: int) -> R:
    """Calls a function for each row and KV head, in batches of at most `MOST_NUMBERS` numbers.

    Args:
      function: takes the trees, with arrays without the first two dimensions.
      arguments: trees of arrays [B, K, ...].
      numbers: the number of float32 numbers that one call holds.
    """

    def on_device(*own: PyTree) -> R:
        batch, kv_heads = jax.tree.leaves(own)[0].shape[:2]
        pairs = batch * kv_heads
        flat = jax.tree.map(lambda x: x.reshape(pairs, *x.shape[2:]), own)
        most = max(1, min(pairs, MOST_NUMBERS // max(numbers, 1)))
        size = next(each for each in range(most, 0, -1) if pairs % each == 0)
        made = jax.lax.map(lambda each: function(*each), flat, batch_size=size)
        unflat: R = jax.tree.map(lambda x: x.reshape(batch, kv_heads, *x.shape[1:]), made)
        return unflat

    axes = ("batch", "kv_heads")
    return sharding.on_each_device(on_device, arguments, (axes,) * len(arguments), axes)


@dataclasses.dataclass(frozen=True)
class LargestAttention(Importance):
    """Ranks a slot by its largest attention from a query of the prompt, where every query sees all slots.

    Of equal slots, the newer one stays.

    Attributes:
      queries: ``prompt``, ``following`` or ``replay``, see `matched`.
    """

    queries: str = "prompt"
    needs = frozenset()
    reads = frozenset({"key"})

    def __post_init__(self) -> None:
        choice_argument("queries", self.queries, QUERIES)

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (memory_of(self.queries),)

    @property
    def replay(self) -> Replay | None:
        return ReplayQueries().replay if self.queries == "replay" else None

    def score(self, stats: Stats, view: View) -> Array:
        def of_head(head: Head) -> Array:
            def add(largest: Array, tile: tuple[Array, Array]) -> tuple[Array, None]:
                query, real = tile
                logits = logits_of(query, head, view.scale, view.soft_cap)
                paid = jnp.where(real[:, None] & head.seen, jax.nn.softmax(logits, axis=1), 0.0)
                return jnp.maximum(largest, jnp.max(paid, axis=0)), None

            return jax.lax.scan(add, jnp.zeros(head.seen.shape, jnp.float32), tiles_of(head))[0]

        def score() -> Array:
            heads = heads_of(view, memory_of(self.queries))
            group, slots = heads.query.shape[2], heads.seen.shape[2]
            return over_heads(of_head, (heads,), 3 * TILE * group * slots)

        # Blocks of a prompt before its last one evict nothing.
        return jax.lax.cond(jnp.any(view.at_prompt_end), score, lambda: jnp.zeros(view.position.shape, jnp.float32))


@dataclasses.dataclass(frozen=True)
class Weights(Merge):
    """Adds the logarithms of the slots' weights to their logits; evicted slots are dropped."""

    remembers = (LOG_WEIGHT,)
    folds = False

    def log_weight(self, stats: Stats) -> Array:
        return stats[LOG_WEIGHT]


@dataclasses.dataclass(frozen=True)
class MatchedAttention(Merge):
    """Fits weights and values of the kept slots to the attention over all slots, for the queries of the prompt.

    Let l_ij be the logit of query i on slot j, over all slots that tokens after the prompt can attend to, o_i the
    output of this attention, m_i = max_j l_ij and e_ij = exp(l_ij - m_i).

    - The weights w ≥ 0 of the kept slots c minimise Σ_i (Σ_c e_ic w_c - Σ_j e_ij)². Each is then at least 1e-6.
    - With P the softmax of l_ic + log w_c over the kept slots, their new values V' minimise
      ‖P V' - O‖² + λ‖V' - V‖², λ = ridge·trace(PᵀP) / b.

    A head that evicts nothing is unchanged. A head whose error would grow keeps w = 1 and V' = V.

    Attributes:
      ridge: the weight of ‖V' - V‖², relative to the mean square of a column of P.
      queries: see `LargestAttention`.
    """

    ridge: float = 1e-3
    queries: str = "prompt"
    remembers = (LOG_WEIGHT,)

    def __post_init__(self) -> None:
        choice_argument("queries", self.queries, QUERIES)
        object.__setattr__(self, "ridge", number_argument("ridge", self.ridge, minimum=1e-6, maximum=1e6))

    def log_weight(self, stats: Stats) -> Array:
        return stats[LOG_WEIGHT]

    def afterwards(self) -> Merge:
        return Weights()

    def fold(self, key: Array, value: Array, victim: Array, stats: Stats, view: View, tokens: int) -> Folded:
        def fit() -> Fit:
            # Gradients treat the fit as a constant.
            heads, constant = jax.lax.stop_gradient((heads_of(view._replace(key=key), memory_of(self.queries)), value))
            group, count, dim = heads.query.shape[2:]
            slots = heads.seen.shape[2]
            most = min(slots, view.most_left or slots)
            # [B, K, S] bool
            kept = heads.seen & ~victim
            # [B, K, b]: the slots that stay, followed by others
            order = jnp.argsort(~kept, axis=2, stable=True)[:, :, :most]
            # [B, K]
            due = jnp.any(victim, axis=2)
            numbers = 3 * TILE * group * slots + group * count * (3 * most + 2 * dim) + 4 * most**2

            def of_head(head: Head, value: Array, kept: Array, order: Array, due: Array) -> Fit:
                return self._fit(head, value, kept, order, due, view.scale, view.soft_cap)

            return over_heads(of_head, (heads, constant, kept, order, due), numbers)

        def unchanged() -> Fit:
            return Fit(stats[LOG_WEIGHT], value)

        made = jax.lax.cond(jnp.any(victim), fit, unchanged)
        due = jnp.any(victim, axis=2, keepdims=True)
        log_weight = jnp.where(due, made.log_weight, stats[LOG_WEIGHT])
        return Folded(key, jnp.where(due[..., None], made.value, value), {**stats, LOG_WEIGHT: log_weight})

    def _fit(
        self, head: Head, value: Array, kept: Array, order: Array, due: Array, scale: float, cap: float | None
    ) -> Fit:
        """Fits one head.

        Args:
          head: its queries and slots.
          value: [S, D].
          kept: [S] bool, which slots stay.
          order: [b] int32, the indices of slots, kept ones first.
          due: whether any slot is evicted.
          scale: factor of the logits.
          cap: soft cap of the logits, or None.
        """
        exact = value.astype(jnp.float32)

        def attend(tile: tuple[Array, Array]) -> tuple[Array, Array, Array]:
            query, real = tile
            # [t, S]
            logits = logits_of(query, head, scale, cap)
            largest = jnp.max(logits, axis=1, keepdims=True)
            largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
            terms = jnp.where(real[:, None], jnp.exp(logits - largest), 0.0)
            # [t]
            total = jnp.sum(terms, axis=1)
            output = jnp.matmul(terms, exact, precision=HIGHEST) / jnp.where(total > 0, total, 1.0)[:, None]
            # Sums the same numbers as the fit does: another product would round differently.
            return (logits - largest)[:, order], total, output

        # [tiles, t, b], [tiles, t] and [tiles, t, D], then without tiles
        found = jax.lax.map(attend, tiles_of(head))
        logits, total, output = (x.reshape(-1, *x.shape[2:]) for x in found)
        # [b] and [N, b]
        stays = kept[order]
        both = (total > 0)[:, None] & stays
        logits = jnp.where(both, logits, -jnp.inf)
        weight = jnp.maximum(nnls(jnp.exp(logits), total, stays), SMALLEST_WEIGHT)
        log_weight = jnp.where(stays, jnp.log(weight), 0.0)
        # [b, D]
        old = exact[order]
        fitted = self._values(_shares(logits + log_weight, both), output, old, stays).astype(value.dtype)

        def error(log_weight: Array, values: Array) -> Array:
            shares = _shares(logits + log_weight, both)
            missed = jnp.matmul(shares, values.astype(jnp.float32), precision=HIGHEST) - output
            return jnp.sum(jnp.square(missed))

        better = due & (error(log_weight, fitted) <= error(jnp.zeros_like(log_weight), value[order]))
        changed = better & stays
        values = value.at[order].set(jnp.where(changed[:, None], fitted, value[order]))
        return Fit(jnp.zeros(kept.shape, jnp.float32).at[order].set(jnp.where(changed, log_weight, 0.0)), values)

    def _values(self, shares: Array, output: Array, old: Array, stays: Array) -> Array:
        """Returns the values [b, D] by ridge regression.

        Args:
          shares: P, [N, b].
          output: O, [N, D].
          old: [b, D], the values of the slots.
          stays: [b] bool.
        """
        # [b, b]
        gram = jnp.matmul(shares.T, shares, precision=HIGHEST)
        number = jnp.maximum(jnp.sum(stays, dtype=jnp.float32), 1.0)
        ridge = self.ridge * jnp.trace(gram) / number
        ridge = jnp.where(ridge > 0, ridge, 1.0)
        factor = jnp.linalg.cholesky(gram + ridge * jnp.eye(len(stays), dtype=jnp.float32))

        def refined(_: int, change: Array) -> Array:
            residual = output - jnp.matmul(shares, old + change, precision=HIGHEST)
            descent = jnp.matmul(shares.T, residual, precision=HIGHEST) - ridge * change
            return change + jax.scipy.linalg.cho_solve((factor, True), descent)

        return old + jax.lax.fori_loop(0, 1 + REFINEMENTS, refined, jnp.zeros_like(old))


def _shares(logits: Array, visible: Array) -> Array:
    """Returns the softmax over slots of logits [N, b]; 0 for slots that are not visible."""
    largest = jnp.max(logits, axis=1, keepdims=True)
    terms = jnp.where(visible, jnp.exp(logits - jnp.where(jnp.isfinite(largest), largest, 0.0)), 0.0)
    total = jnp.sum(terms, axis=1, keepdims=True)
    return terms / jnp.where(total > 0, total, 1.0)


@factory
def matched(budget: BudgetLike, *, queries: str = "prompt", ridge: float = 1e-3, positions: str = "original") -> Evict:
    """Keeps the slots of the largest attention, with weights and values that replace the evicted ones (ours).

    When the prompt ends, each KV head keeps the slots of the largest attention from any query of the prompt (see
    `LargestAttention`). Each kept slot gets a weight, whose logarithm is added to its logits, and a new value. Both are
    fitted to the attention of these queries over the whole prompt (see `MatchedAttention`). Decoding appends tokens of
    weight 1.

    Args:
      budget: slots per KV head that remain of a prompt; see `evict`. A shorter prompt is kept as it is.
      queries: ``prompt`` = the queries of the prompt, at most 4,096 per KV head, evenly spaced in a longer prompt (see
        `PromptQueries`); if the prompt is read in blocks, they are held until it ends. ``following`` = the same
        queries, but the i-th is rotated to position n + i mod 64 of a prompt of n tokens, from where queries after the
        prompt attend: heads that look at near tokens then fit the prompt's end. ``replay`` = the queries of a replay of
        the prompt, as for `kvzip` (see `Replay`), which takes one more prefill.
      ridge: see `MatchedAttention`.
      positions: see `evict`. The fit uses queries at their positions in the text, even if ``cache`` later rotates keys
        by rank.

    Kernels of whole steps are not used, and selections that choose slots are refused: they do not take weights.
    """
    with named("matched"):
        slots = as_budget(budget)
        importance, merge = LargestAttention(queries), MatchedAttention(ridge, queries)
    return Evict(
        importance=importance, budget=slots, when="prompt_end", merge=merge, positions=positions, name="matched"
    )


largest_attention, matched_attention = LargestAttention, factory(MatchedAttention)
