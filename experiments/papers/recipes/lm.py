"""LM: the log-probability of a text's tokens under a cache that evolves as in generation."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import kvjax
from experiments.papers.figures import Panel
from experiments.papers.parts import Cached, Lab, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import MAIN, Settings
from experiments.papers.statistics import Comparison, paired_bootstrap
from experiments.papers.verdict import Table
from kvjax.cache import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class LM(Cached):
    """Scores rows of a text.

    The result has ``logprobs`` [rows, new] float32, of the tokens after the prompts.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      prompt: tokens of each row's prompt.
      new: tokens after it.
      whole: whether the whole row is fed as one prompt, for caches that look at whole texts.
    """

    text: str
    rows: int
    prompt: int
    new: int
    whole: bool = False

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        total = self.prompt + self.new
        prompt = total if self.whole else self.prompt
        scored = kvjax.log_likelihood(
            lab.model(self.model), lab.rows(self, self.text, self.rows, total),
            caches.build(self.cache, self.budget, lab.settings, prompt), prompt_length=prompt,
            prefill_block=self.block, implementation="auto",
            limits=None if self.whole else Limits(self.prompt, self.new, shortest=self.prompt),
        )  # fmt: skip
        # Entry t scores token t + 1.
        return {"logprobs": np.asarray(scored.logprobs)[:, self.prompt - 1 :]}


def lm(
    settings: Settings,
    cache: str,
    budget: int | float,
    *,
    text: str = "book",
    block: int | None = None,
    prompt: int | None = None,
    new: int | None = None,
    rows: int | None = None,
    model: str = MAIN,
    whole: bool = False,
) -> LM:
    """A part of the scale's sizes, unless others are given."""
    scale = settings.scale
    full = cache.startswith("full")
    # The full cache has no budget, and blocks do not change what it holds: one part for all.
    return LM(
        model=model, cache=cache, budget=1.0 if full else budget, block=None if full else block, text=text,
        rows=rows or scale.rows, prompt=prompt or scale.prompt, new=new or scale.new, whole=whole,
    )  # fmt: skip


def nats(result: Result) -> np.ndarray:
    """The negative log-likelihood per token of each row, [rows] float64."""
    return np.asarray(-np.mean(result["logprobs"], axis=1, dtype=np.float64))


def perplexity(result: Result) -> float:
    """exp of the mean negative log-likelihood per token."""
    return math.exp(float(np.mean(nats(result))))


def shown(result: Result) -> str:
    """The perplexity as a cell."""
    value = perplexity(result)
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}"


def loss(result: Result, full: Result) -> float:
    """The perplexity above the full cache's, as a share of it."""
    return math.expm1(float(np.mean(nats(result) - nats(full))))


def cells(result: Result, full: Result) -> Mapping[str, str]:
    """Columns of a table: the perplexity, and what it is above the full cache's."""
    return {"perplexity": shown(result), "above full": f"{100 * loss(result, full):+.2f} %"}


def by_budget(
    text: str,
    results: Mapping[tuple[str, float], Result],
    *,
    budget: str,
    unit: float = 1.0,
    names: Mapping[str, str] | None = None,
    drawn: Sequence[str] | None = None,
) -> tuple[Table, Panel]:
    """Returns the perplexity of each cache at each budget, as a table and as curves.

    Args:
      text: what was scored.
      results: (cache, budget) -> its scores.
      budget: what the budget is, as the axis says it.
      unit: of the axis; 100 for a share in %.
      names: of caches in the table; None = as they are.
      drawn: the caches that have a curve, in this order; None = all.
    """
    every, budgets = dict.fromkeys(cache for cache, _ in results), sorted({size for _, size in results})

    def cell(cache: str, size: float) -> str:
        return shown(results[cache, size]) if (cache, size) in results else "-"

    rows = [
        {"policy": (names or {}).get(cache, cache)} | {f"{size:g}": cell(cache, size) for size in budgets}
        for cache in every
    ]
    curves = {}
    for cache in every if drawn is None else drawn:
        own = [size for size in budgets if (cache, size) in results]
        curves[cache] = [unit * size for size in own], [perplexity(results[cache, size]) for size in own]
    name = budget.split(",")[0]
    return Table(f"Perplexity of {text} by {name}", rows), Panel(text, budget, "perplexity", curves)


def as_good(one: Comparison) -> bool:
    """Whether the second cache of a comparison of nats is at least as good as the first, which is not better."""
    return not one.lower and one.difference >= 0


def compare(what: str, one: Result, other: Result, settings: Settings) -> Comparison:
    """Nats per token of one cache against another, row by row: lower is better."""
    return paired_bootstrap(f"{what}, nats a token", nats(one), nats(other), seed=settings.seed)
