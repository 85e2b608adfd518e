"""Column statistics: the sums over queries that attention reports to a policy for every slot.

Every statistic is a weighted sum ``Σ_i w_i f(m[i, j])`` over the queries i of a block, or the maximum of
``w_i f(m[i, j])``, where ``m[i, j]`` is the attention probability of query i on slot j, reduced over the query heads
that share a KV head. One attention routine therefore serves every policy, and it reduces tile by tile without
materialising the queries × slots matrix. A statistic does not depend on how queries are divided into blocks, except for
rounding.

Statistics are float32, in which whole numbers are exact up to `EXACT` = 2²⁴ = 16,777,216. A count to which queries are
added one at a time stops there. A sum of attention probabilities ignores a term below 2⁻²⁵ of the sum, and as each term
is at most 1, it stops at 2²⁴ too. This matters only in rows of more than 16.7 million tokens: from there on ``mass`` /
``count`` of a slot that has been held since the beginning stays as it is. `decayed`, `LAST`, `recent_above` and maxima
of probabilities are bounded and do not have this limit. `LAST_FETCHED` is a position, and later ones are rounded to a
multiple of 2 (beyond 2²⁵ of 4, and so on); of slots that are then equal, the older one is evicted first. So are the
ages and gaps of `recurrence`.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from kvjax.arguments import choice_argument, count_argument, number_argument
from kvjax.errors import PolicyError
from kvjax.numerics import query_bits
from kvjax.numerics import recurrence as hits
from kvjax.numerics.query_bits import WORD_BITS

Array = jax.Array
Transform = Literal["identity", "square", "above", "one", "chosen", "chosen_at"]
Accumulate = Literal["sum", "max", "replace", "decay", "recall", "latest", "recurrence"]

EXACT = 1 << 24  # float32 holds every whole number up to this one; counts stop here


@dataclasses.dataclass(frozen=True)
class Statistic:
    """One column statistic; hashable, so that it can be a static argument of a jitted function.

    Attributes:
      name: key of the statistic in a policy's statistics.
      transform: the elementwise function f, applied to m[i, j] for every query i that sees slot j. ``identity`` is m,
        ``square`` is m², ``above`` is 1 where m ≥ 1 / (number of slots that query i sees) and 0 elsewhere, and ``one``
        is 1, which needs no attention probabilities. Two do not come from attention: ``chosen`` is 1 where a selection
        chose the slot for the query and 0 elsewhere, and ``chosen_at`` is the query's position plus 1 there.
      accumulate: how the values of f are combined, query by query. ``sum`` adds them up. ``max`` keeps the largest one.
        ``replace`` keeps that of the last query. ``decay`` is the exponential average E ← γE + (1 − γ)f. ``recall``
        stores f, which must be 0 or 1, for each of the last `history` queries, one bit per query. ``latest`` stores
        f for each of the last `history` queries, the newest first. ``recurrence`` stores
        two numbers: the age of the last query with m ≥ `threshold`, and the widest gap between two such queries; see
        `kvjax.numerics.recurrence`.
      gamma: the decay rate γ in [0, 1]; read only by ``decay``.
      history: the number of queries that ``recall`` and ``latest`` store; read only by these.
      threshold: the smallest m that counts, greater than 0; read only by ``recurrence``.
      saturate: if given, the values of all slots of a head are halved and rounded down when one of them reaches this
        number; only of ``chosen``, whose queries come one at a time, and with ``sum``.
      tail: if given, only the last `tail` queries of each row's prompt count, and no query after the prompt does; only
        with ``sum`` and ``max``, and with attention. If None, every query counts.

    Raises:
      PolicyError: a field that is not valid, or fields that do not go with each other.
    """

    name: str
    transform: Transform = "identity"
    accumulate: Accumulate = "sum"
    gamma: float = 1.0
    history: int = 0
    saturate: int | None = None
    tail: int | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        about = f"statistic {self.name!r}"
        if not isinstance(self.name, str) or not self.name:
            raise PolicyError(f"{about}: its name must be a non-empty string.")
        choice_argument(f"{about}: transform", self.transform, get_args(Transform))
        choice_argument(f"{about}: accumulate", self.accumulate, get_args(Accumulate))
        number_argument(f"{about}: gamma", self.gamma, minimum=0, maximum=1)
        recalls = self.accumulate == "recall"
        count_argument(f"{about}: history", self.history, minimum=1 if recalls or self.accumulate == "latest" else 0)
        for field in ("saturate", "tail"):
            if getattr(self, field) is not None:
                count_argument(f"{about}: {field}", getattr(self, field), minimum=1)
        if recalls and self.transform != "above":
            raise PolicyError(f"{about}: recall stores bits, which transform='above' gives, not {self.transform!r}.")
        number_argument(f"{about}: threshold", self.threshold, minimum=0, maximum=1)
        if self.recurs and (self.transform != "identity" or not self.threshold):
            raise PolicyError(
                f"{about}: recurrence compares m with a threshold greater than 0, with transform='identity'; got "
                f"threshold={self.threshold!r} and transform={self.transform!r}."
            )
        if (self.of_selection or self.transform == "one") and self.accumulate == "latest":
            raise PolicyError(f"{about}: latest needs a transform of attention, not {self.transform!r}.")
        if self.of_selection and self.accumulate == "decay":
            raise PolicyError(f"{about}: transform={self.transform!r} takes accumulate='sum', 'max' or 'replace'.")
        if self.saturate is not None and (self.transform, self.accumulate) != ("chosen", "sum"):
            raise PolicyError(f"{about}: saturate={self.saturate} needs transform='chosen' and accumulate='sum'.")
        if self.tail is not None and (not self.needs_attention or self.accumulate not in ("sum", "max")):
            raise PolicyError(
                f"{about}: tail={self.tail} needs a transform of attention and accumulate='sum' or 'max'; got "
                f"transform={self.transform!r} and accumulate={self.accumulate!r}."
            )

    @property
    def largest(self) -> bool:
        """Whether columns are maxima over queries; otherwise they are sums."""
        return self.accumulate == "max"

    @property
    def recurs(self) -> bool:
        """Whether columns are those of `kvjax.numerics.recurrence`, which depend on the order of queries."""
        return self.accumulate == "recurrence"

    @property
    def needs_attention(self) -> bool:
        """Whether the statistic depends on attention probabilities, and not only on positions."""
        return self.transform != "one" and not self.of_selection

    @property
    def of_selection(self) -> bool:
        """Whether the statistic depends on what a selection chose; such statistics are 0 where everything is read."""
        return self.transform in ("chosen", "chosen_at")

    @property
    def words(self) -> tuple[int, ...]:
        """Trailing shape of the weight of a query: ``(words,)``, ``(history,)`` for ``latest``, otherwise ``()``."""
        if self.accumulate == "latest":
            return (self.history,)
        return (-(-self.history // WORD_BITS),) if self.accumulate == "recall" else ()

    @property
    def kept(self) -> tuple[int, ...]:
        """Trailing shape of the statistic of one slot: ``words``, or ``(2,)`` for ``recurrence``."""
        return (hits.NUMBERS,) if self.recurs else self.words

    @property
    def reported(self) -> tuple[int, ...]:
        """Trailing shape of a block's columns of one slot: ``words``, or ``(3,)`` for ``recurrence``."""
        return (hits.COLUMNS,) if self.recurs else self.words

    def empty(self, shape: tuple[int, int, int]) -> Array:
        """Returns the initial value of the statistic.

        Args:
          shape: (B, K, S).

        Returns:
          Zeros, [B, K, S, ...] float32, see `kept`; of ``recall`` [B, K, S, words] uint16.
        """
        return jnp.zeros((*shape, *self.kept), jnp.uint16 if self.accumulate == "recall" else jnp.float32)

    def query_weights(self, age: Array, left: Array) -> Array:
        """Returns the weight w_i of each query.

        Args:
          age: [B, n] int32, the number of real queries of the block after each query: 0 for the last one. Negative for
            padding.
          left: [B, n] int32, the number of prompt tokens after each query. Negative for padding and after the prompt.

        Returns:
          [B, n] or [B, n, words] float32, 0 for padding.
        """
        if self.tail is not None:
            # [B, n]
            return ((left >= 0) & (left < self.tail)).astype(jnp.float32)
        match self.accumulate:
            case "sum" | "max" | "recurrence":
                # [B, n]
                weight = jnp.ones(age.shape, jnp.float32)
            case "replace":
                # [B, n]
                weight = (age == 0).astype(jnp.float32)
            case "decay":
                gamma = jnp.float32(self.gamma)
                # [B, n]
                weight = (1 - gamma) * gamma ** jnp.maximum(age, 0).astype(jnp.float32)
            case "latest":
                # [B, n, history]; no query of padding has an age of the history
                return (age[..., None] == jnp.arange(self.history, dtype=jnp.int32)).astype(jnp.float32)
            case "recall":
                # [words]
                word = jnp.arange(self.words[0], dtype=jnp.int32)
                # [B, n, words]: whether the query's bit is in the word
                in_word = (age[..., None] // WORD_BITS == word) & (age[..., None] < self.history)
                # [B, n]
                bit = jnp.left_shift(jnp.int32(1), age % WORD_BITS).astype(jnp.float32)
                # [B, n, words]
                return jnp.where((age >= 0)[..., None] & in_word, bit[..., None], 0.0)
        # [B, n]
        return jnp.where(age >= 0, weight, 0.0)

    def reduce(self, terms: Array, weight: Array) -> Array:
        """Reduces the terms of some queries to columns.

        Args:
          terms: f(m), [B, K, n, S] float32, at least 0.
          weight: of each query, [B, n] or [B, n, words] float32; of a maximum 0 or 1.

        Returns:
          [B, K, S] or [B, K, S, words] float32.
        """
        if self.largest:
            return jnp.max(terms * weight[:, None, :, None], axis=2)
        if terms.shape[2] == 1:
            # [B, 1, 1] or [B, 1, 1, words]
            weight = weight[:, 0][:, None, None]
            term = terms[:, :, 0]
            return term * weight if weight.ndim == 3 else term[..., None] * weight
        words = weight if weight.ndim == 3 else weight[..., None]
        shape = (*terms.shape[:2], words.shape[2], terms.shape[2])
        # [B, K, words, n]: a copy for each head, without which XLA's CPU compiler would transpose the terms.
        factors = jnp.broadcast_to(jnp.swapaxes(words, 1, 2)[:, None], shape)
        # [B, K, S, words], in full float32: by default, GPUs and TPUs would multiply fewer bits.
        columns = jnp.swapaxes(jnp.matmul(factors, terms, precision=jax.lax.Precision.HIGHEST), 2, 3)
        return columns if weight.ndim == 3 else columns[..., 0]

    def join(self, one: Array, other: Array) -> Array:
        """Combines the columns [...] of some queries of a block with those of later ones, in the same shape."""
        if self.recurs:
            return hits.join(one, other)
        return jnp.maximum(one, other) if self.largest else one + other

    def counted(self, first: Array, last: Array, newest: Array) -> Array:
        """Computes the columns of ``one`` from the positions of the queries that see a slot.

        Args:
          first: [...] int32, the first query that sees the slot.
          last: [...] int32, the last one; below `first` if none does.
          newest: [...] int32, the block's newest query.

        Returns:
          [...] float32, of the shape that the arguments broadcast to.
        """
        count = jnp.maximum(last - first + 1, 0)
        match self.accumulate:
            case "max":
                return (count > 0).astype(jnp.float32)
            case "replace":
                return ((count > 0) & (last == newest)).astype(jnp.float32)
            case "decay":
                # Σ_i (1 − γ)γ^i over the ages i of these queries
                gamma, age = jnp.float32(self.gamma), jnp.maximum(newest - last, 0).astype(jnp.float32)
                decayed = gamma**age - gamma ** (age + count.astype(jnp.float32))
                return jnp.where(count > 0, decayed, 0.0)
        return count.astype(jnp.float32)

    def merge(self, old: Array, block: Array, queries: Array, most: int | None = None) -> Array:
        """Combines the columns of a block with the accumulated statistic.

        Args:
          old: the accumulated statistic, [B, K, S], [B, K, S, words] or [B, K, S, 2], as from `empty`.
          block: [B, K, S], [B, K, S, words] or [B, K, S, 3] float32, ``Σ_i w_i f(m[i, j])`` over the queries of the
            block, the maximum, or hits and gaps.
          queries: [B] int32, the number of real queries of each row in the block. A row without any is unchanged.
          most: the largest number of queries of a row; None = not known.

        Returns:
          The updated statistic, in the shape and dtype of `old`.
        """
        # [B, 1, 1]
        n = queries[:, None, None]
        match self.accumulate:
            case "sum":
                total = old + block
                if self.saturate is None:
                    return total
                # [B, K, 1]
                full = jnp.max(total, axis=2, keepdims=True) >= self.saturate
                return jnp.where(full, jnp.floor(total / 2), total)
            case "max":
                return jnp.maximum(old, block)
            case "replace":
                return jnp.where(n > 0, block, old)
            case "decay":
                return jnp.float32(self.gamma) ** n.astype(jnp.float32) * old + block
            case "recall":
                return query_bits.shifted(old, n[..., None], self.history) | block.astype(jnp.uint16)
            case "latest" if most == 1:
                # A gather of every number would take longer than the rest of a step on CPUs.
                shifted = jnp.concatenate([block[..., :1], old[..., :-1]], axis=3)
                return jnp.where(n[..., None] > 0, shifted, old)
            case "latest":
                # [history] and [B, 1, 1, history]
                place = jnp.arange(self.history, dtype=jnp.int32)
                before = jnp.broadcast_to(place - n[..., None], old.shape)
                moved = jnp.take_along_axis(old, jnp.maximum(before, 0), axis=3)
                return jnp.where(before >= 0, moved, block)
            case "recurrence":
                return hits.after_block(old, block)


#: Accumulated attention (H2O, arXiv:2306.14048).
MASS = Statistic("mass")
#: Sum of squared attention probabilities, for its standard deviation (RoCo, arXiv:2402.06262).
MASS_SQ = Statistic("mass_sq", transform="square")
#: The number of queries that saw a slot.
COUNT = Statistic("count", transform="one")
#: The number of queries that gave a slot at least the uniform share (Scissorhands, arXiv:2305.17118).
ABOVE = Statistic("above", transform="above")
#: The attention probability of the newest query (TOVA, arXiv:2401.06104).
LAST = Statistic("last", accumulate="replace")
#: The number of times that a selection chose a slot (InfiniGen, arXiv:2406.19707, section 4.4).
FETCHED = Statistic("fetched", transform="chosen")
#: 1 plus the position of the last query for which a selection chose a slot; 0 = never (InfiniGen, section 4.4).
LAST_FETCHED = Statistic("last_fetched", transform="chosen_at", accumulate="max")

#: The statistics that a policy may request by name.
NAMED: Mapping[str, Statistic] = {s.name: s for s in (MASS, MASS_SQ, COUNT, ABOVE, LAST, FETCHED, LAST_FETCHED)}


def saturating_fetched(saturate: int) -> Statistic:
    """Returns `FETCHED` with counters that are all halved when one counter of a head reaches a number.

    Args:
      saturate: that number; 255 is the largest of one byte.
    """
    return dataclasses.replace(FETCHED, name=f"fetched[{saturate}]", saturate=saturate)


def decayed(gamma: float) -> Statistic:
    """Returns the exponential average E ← γE + (1 − γ)m, which does not depend on how queries are split into blocks.

    Args:
      gamma: the decay rate γ.
    """
    return Statistic(f"decayed({gamma:g})", accumulate="decay", gamma=float(gamma))


def recent_above(history: int) -> Statistic:
    """Returns the statistic of which of the last queries gave a slot at least the uniform share.

    Args:
      history: the number of queries. `popcount` counts the bits that are set.
    """
    return Statistic(f"above[{history}]", transform="above", accumulate="recall", history=history)


def latest(history: int) -> Statistic:
    """Returns the statistic that stores m of each of the last queries, the newest first, one float32 per query.

    Args:
      history: the number of queries.
    """
    return Statistic(f"latest[{history}]", accumulate="latest", history=history)


def recurrence(threshold: float) -> Statistic:
    """Returns the statistic of the queries that paid a slot at least a threshold (LazyEviction, arXiv:2506.15969).

    It has two numbers per slot: the age of the last such query, and the widest gap between two of them; see
    `kvjax.numerics.recurrence`.

    Args:
      threshold: the smallest m that counts, greater than 0.
    """
    threshold = float(threshold)
    return Statistic(f"recurrence({threshold:g})", accumulate="recurrence", threshold=threshold)


def prompt_tail(window: int) -> Statistic:
    """Returns the sum of m over the last queries of the prompt (SnapKV's observation window, arXiv:2404.14469).

    Args:
      window: the number of queries.
    """
    return Statistic(f"tail[{window}]", tail=window)


def popcount(words: Array) -> Array:
    """Counts the bits that are set.

    Args:
      words: [..., words] uint16.

    Returns:
      [...] float32.
    """
    # [...]
    return jnp.sum(jax.lax.population_count(words), axis=-1, dtype=jnp.uint16).astype(jnp.float32)


def by_name(statistics: Iterable[Statistic]) -> list[Statistic]:
    """Returns statistics in the order of their names.

    That of a set differs from one process to the next, and so would programs, which could not be kept.
    """
    return sorted(statistics, key=lambda statistic: statistic.name)


def resolve(needs: Iterable[str | Statistic]) -> frozenset[Statistic]:
    """Replaces names by statistics, so that a policy may declare ``needs={"mass", "mass_sq"}``.

    Args:
      needs: names from `NAMED`, or statistics.

    Raises:
      KeyError: if a name is not in `NAMED`.
    """
    return frozenset(NAMED[need] if isinstance(need, str) else need for need in needs)
