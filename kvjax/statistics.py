"""Column statistics: what attention reports to a policy about every slot (POLICIES.md, "Column statistics").

Every statistic is a weighted sum over the queries i of a block, ``Σ_i w_i f(m[i, j])``, of an elementwise function of
the group-reduced probability ``m``; one attention routine therefore serves every policy and can reduce tile by tile
without ever holding the queries × slots matrix. This module is a leaf: attention and policies both import it.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp

Array = jax.Array
Transform = Literal["identity", "square", "above", "one"]
Accumulate = Literal["sum", "replace", "decay", "recall"]
WORD = 16  # queries of one word of `recall`: as many bits as a float32 sum holds exactly, and an uint16


@dataclasses.dataclass(frozen=True)
class Statistic:
    """One column statistic; hashable, so that it can be part of what a jitted step closes over.

    Attributes:
      name: key of the statistic in an `Observation` and in a policy's stats.
      transform: f, applied to m[i, j] for every query i that sees slot j: ``identity`` m, ``square`` m²,
        ``above`` [m ≥ 1 / (number of slots i sees)], ``one`` 1 (needs no attention).
      accumulate: how a block joins what is already there: ``sum`` adds it, ``replace`` keeps the block's last
        query alone, ``decay`` is the exponential average E ← γE + (1 − γ)m, applied query by query; ``recall``
        remembers f, 0 or 1, of each of the last `history` queries, one bit each.
      gamma: γ of ``decay``; history: queries of ``recall``; unused otherwise.
      tail: None = every query counts; w = only the last w of each row's prompt, and none thereafter.
    """

    name: str
    transform: Transform = "identity"
    accumulate: Accumulate = "sum"
    gamma: float = 1.0
    history: int = 0
    tail: int | None = None

    @property
    def needs_attention(self) -> bool:
        return self.transform != "one"

    @property
    def words(self) -> tuple[int, ...]:
        """What a slot has beyond one number: () or, of ``recall``, (words,)."""
        return (-(-self.history // WORD),) if self.accumulate == "recall" else ()

    def empty(self, shape: tuple[int, int, int]) -> Array:
        """The statistic of empty slots, [B, K, S] float32 or [B, K, S, words] uint16."""
        return jnp.zeros((*shape, *self.words), jnp.uint16 if self.words else jnp.float32)

    def query_weights(self, age: Array, left: Array) -> Array:
        """Weight of each query.

        Args:
          age: [B, n] int32, 0 for the block's last real query, 1 for the one before; negative for padding.
          left: [B, n] int32 tokens of the prompt after each query; negative for padding and after the prompt.

        Returns:
          [B, n] or [B, n, words] float32, 0 for padding.
        """
        if self.tail is not None:
            return ((left >= 0) & (left < self.tail)).astype(jnp.float32)
        match self.accumulate:
            case "sum":
                weight = jnp.ones(age.shape, jnp.float32)
            case "replace":
                weight = (age == 0).astype(jnp.float32)
            case "decay":
                gamma = jnp.float32(self.gamma)
                weight = (1 - gamma) * gamma ** jnp.maximum(age, 0).astype(jnp.float32)
            case "recall":
                word = jnp.arange(self.words[0], dtype=jnp.int32)
                # [B, n, words]
                here = (age[..., None] // WORD == word) & (age[..., None] < self.history)
                bit = jnp.left_shift(jnp.int32(1), age % WORD).astype(jnp.float32)
                return jnp.where((age >= 0)[..., None] & here, bit[..., None], 0.0)
        return jnp.where(age >= 0, weight, 0.0)

    def merge(self, old: Array, block: Array, queries: Array) -> Array:
        """Joins a block's column sums to the accumulated ones.

        Args:
          old: accumulated so far, shaped as `empty`.
          block: [B, K, S] or [B, K, S, words] float32, ``Σ_i w_i f(m[i, j])`` of this block.
          queries: [B] int32 number of real queries of each row in this block; a row with none is unchanged.
        """
        n = queries[:, None, None]
        match self.accumulate:
            case "sum":
                return old + block
            case "replace":
                return jnp.where(n > 0, block, old)
            case "decay":
                return jnp.float32(self.gamma) ** n.astype(jnp.float32) * old + block
            case "recall":
                return self._shifted(old, n[..., None]) | block.astype(jnp.uint16)

    def _shifted(self, old: Array, n: Array) -> Array:
        """Bits of `recall` n queries later: [B, K, S, words], [B, 1, 1, 1] -> [B, K, S, words]; the oldest fall out."""
        word = jnp.arange(self.words[0], dtype=jnp.int32)
        source, shift = word - n // WORD, (n % WORD).astype(jnp.uint32)

        def take(index: Array) -> Array:
            index = jnp.broadcast_to(index, (*old.shape[:3], self.words[0]))
            taken = jnp.take_along_axis(old, jnp.maximum(index, 0), axis=3)
            return jnp.where(index >= 0, taken, jnp.uint16(0)).astype(jnp.uint32)

        moved = (take(source) << shift) | (take(source - 1) >> (WORD - shift))
        # The last word may be remembered in part only.
        remembered = jnp.minimum(self.history - word * WORD, WORD).astype(jnp.uint32)
        return (moved & ((jnp.uint32(1) << remembered) - 1)).astype(jnp.uint16)


MASS = Statistic("mass")
MASS_SQ = Statistic("mass_sq", transform="square")
COUNT = Statistic("count", transform="one")
ABOVE = Statistic("above", transform="above")
LAST = Statistic("last", accumulate="replace")

NAMED: Mapping[str, Statistic] = {s.name: s for s in (MASS, MASS_SQ, COUNT, ABOVE, LAST)}


def decayed(gamma: float) -> Statistic:
    """E(γ): every query first decays all slots, then adds (1 − γ)m; independent of the block size."""
    return Statistic(f"decayed({gamma:g})", accumulate="decay", gamma=float(gamma))


def recent_above(history: int) -> Statistic:
    """Which of the last `history` queries gave a slot at least the uniform share; `popcount` counts them."""
    return Statistic(f"above[{history}]", transform="above", accumulate="recall", history=history)


def prompt_tail(window: int) -> Statistic:
    """Σ over the last `window` queries of the prompt of m: SnapKV's observation window."""
    return Statistic(f"tail[{window}]", tail=window)


def popcount(words: Array) -> Array:
    """[..., words] uint16 -> [...] float32: bits that are set."""
    return jnp.sum(jax.lax.population_count(words), axis=-1, dtype=jnp.uint16).astype(jnp.float32)


def resolve(needs: Iterable[str | Statistic]) -> frozenset[Statistic]:
    """Turns names into statistics, so that a policy may declare ``needs={"mass", "mass_sq"}``.

    Raises:
      KeyError: for a name that is not in `NAMED`.
    """
    return frozenset(NAMED[need] if isinstance(need, str) else need for need in needs)


class Observation(flax.struct.PyTreeNode):
    """What attention saw of a block, for the statistics that were asked for and no others.

    Attributes:
      columns: statistic name -> [B, K, S] float32 ([B, K, S, words] of one that remembers single queries), this
        block's ``Σ_i w_i f(m[i, j])``; 0 for empty slots.
      queries: [B] int32 number of real (not padding) queries of each row.
    """

    columns: Mapping[str, Array]
    queries: Array

    def __getitem__(self, name: str) -> Array:
        return self.columns[name]
