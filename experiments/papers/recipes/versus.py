"""Caches side by side with the full cache, query by query: rows of attention, and the tokens that each ranks highest.

One run of the full cache serves all caches of a part.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import Settings
from kvjax.analysis.rows import Rows, in_text_order
from kvjax.analysis.scan import over_steps
from kvjax.cache.state import Layer
from kvjax.numerics.top_k import largest
from kvjax.policies import Evict, Keep
from kvjax.typing import PyTree

Array = jax.Array
SUMS = ("mass", "count", "above")
#: What tokens are ranked by: RoCo's names of its Table 1.
KINDS = {"AAS": 0, "MAS": 1, "AQAS": 2, "LTAS": 3}


@dataclasses.dataclass(frozen=True)
class Counted(Keep):
    """Evicts nothing, and has attention report what each token receives."""

    needs = frozenset(SUMS)


FULL = Evict(importance=Counted(), budget=None, name="full")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versus(Part):
    """Compares caches with the full cache on rows of a text, at every query after the prompts.

    Attributes:
      caches: caches as text, each with its budget.
      text: a key of `TEXTS`.
      rows: of the text.
      prompt: tokens of each row's prompt.
      new: tokens after it.
    """

    caches: tuple[tuple[str, int | float], ...]
    text: str
    rows: int
    prompt: int
    new: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def compare(self, lab: Lab, step: Any, start: PyTree, *args: Any) -> np.ndarray:
        """The means over rows and heads of what a step has for each cache, [caches, L, new] float32."""
        tokens = lab.rows(self, self.text, self.rows, self.prompt + self.new)
        specs = [caches.build(cache, budget, lab.settings, self.prompt) for cache, budget in self.caches]
        run = over_steps(
            lab.model(self.model), tokens, (FULL, *specs), step, start, *args, prompt_length=self.prompt, lengths=None
        )
        return np.stack([each[..., self.prompt :].mean(axis=(1, 2)) for each in run.queries])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cosine(Versus):
    """The cosine similarity of rows of attention, a token that a cache does not hold having 0.

    The result has ``cosine`` [caches, L, new].
    """

    def measure(self, lab: Lab) -> Result:
        return {"cosine": self.compare(lab, _cosine, lambda *_: ())}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jaccard(Versus):
    """The Jaccard similarity of the top tokens of a cache, by its own scores, with those of the full cache.

    Scores are of what a token has received in its run; as many tokens count as the cache keeps. The result has
    ``jaccard`` [caches, L, new].

    Attributes:
      kinds: keys of `KINDS`, what each cache is judged by.
    """

    kinds: tuple[str, ...]

    def measure(self, lab: Lab) -> Result:
        slots = [budget if isinstance(budget, int) else int(budget * self.prompt + 1e-9) for _, budget in self.caches]
        kinds = [KINDS[kind] for kind in self.kinds]
        return {"jaccard": self.compare(lab, _jaccard, _after_prompt, jnp.array(slots), jnp.array(kinds))}


def cosine(
    settings: Settings, named: Sequence[tuple[str, int | float]], *, text: str, rows: int, prompt: int, new: int
) -> Cosine:
    """A part."""
    return Cosine(caches=tuple(named), text=text, rows=rows, prompt=prompt, new=new)


def jaccard(
    settings: Settings, ranked: Mapping[str, str], budget: float, *, text: str = "book", prompt: int, new: int
) -> Jaccard:
    """A part for one budget; `ranked` has the cache that is judged by each kind."""
    named = tuple((cache, budget) for cache in ranked.values())
    return Jaccard(caches=named, kinds=tuple(ranked), text=text, rows=settings.scale.look_rows, prompt=prompt, new=new)


def _cosine(carry: PyTree, attention: tuple[Rows, ...]) -> tuple[PyTree, tuple[Array, ...]]:
    # [B, K, G, 1, T]
    full, *others = (rows.probability for rows in attention)
    found = []
    for own in others:
        # [B, K, G, 1]
        squares = jnp.sum(jnp.square(full), axis=-1) * jnp.sum(jnp.square(own), axis=-1)
        found.append(jnp.sum(full * own, axis=-1) / jnp.sqrt(jnp.where(squares > 0, squares, 1)))
    return carry, tuple(found)


def _after_prompt(runs: tuple[Layer, ...], *shape: int) -> tuple[Mapping[str, Array], ...]:
    """The sums [B, K, 1, T] of every token of the prompt, the same for all runs: policies evict at its end."""
    full = runs[0]
    sums = {name: in_text_order(full.stats[name], full.position, shape[-1])[:, :, None] for name in SUMS}
    return (sums,) * len(runs)


def _jaccard(
    carry: tuple[Mapping[str, Array], ...], attention: tuple[Rows, ...], slots: Array, kinds: Array
) -> tuple[PyTree, tuple[Array, ...]]:
    sums, scores = [], []
    for before, rows in zip(carry, attention, strict=True):
        # [B, K, 1, T], of the single query
        seen, paid = rows.seen[..., 0, :], jnp.mean(rows.probability[..., 0, :], axis=2, keepdims=True)
        share = paid * jnp.sum(seen, axis=-1, keepdims=True, dtype=jnp.float32)
        added = {"mass": paid, "count": jnp.ones_like(paid), "above": (share >= 1).astype(jnp.float32)}
        # A token that is evicted loses what it had.
        after = {name: jnp.where(seen, before[name] + added[name], 0) for name in SUMS}
        sums.append(after)
        scores.append((after["mass"], after["mass"] / jnp.maximum(after["count"], 1), after["above"], paid))

    def top(number: int, which: int) -> Array:
        """[B, K, 1, T] bool: the top tokens of a run, as the cache `which` has them."""
        score = jnp.stack(scores[number])[kinds[which]]
        seen = attention[number].seen[..., 0, :]
        position = jnp.where(seen, jnp.arange(seen.shape[-1], dtype=jnp.int32), -1)
        return largest(score, position, slots[which])

    found = []
    for which in range(len(attention) - 1):
        full, own = top(0, which), top(which + 1, which)
        # [B, K, 1]
        both, either = (jnp.sum(marks, axis=-1, dtype=jnp.float32) for marks in (full & own, full | own))
        found.append((both / jnp.maximum(either, 1))[..., None])
    return tuple(sums), tuple(found)
