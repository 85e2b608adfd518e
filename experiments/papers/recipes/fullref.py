"""FULLREF: greedy text under a cache, scored against what the full cache says (RoCo's protocol)."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

import kvjax
from experiments.papers.parts import Cached, Lab, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import MAIN, Settings
from experiments.papers.statistics import Comparison, paired_bootstrap
from experiments.tasks import ngrams
from kvjax.cache import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(Cached):
    """Continues rows of a text greedily.

    The result has ``tokens`` [rows, new] int32.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      prompt: tokens of each row's prompt.
      new: tokens that are generated.
    """

    text: str
    rows: int
    prompt: int
    new: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        spec = caches.build(self.cache, self.budget, lab.settings, self.prompt)
        made = kvjax.generate(
            lab.model(self.model), lab.rows(self, self.text, self.rows, self.prompt), spec, max_new_tokens=self.new,
            prefill_block=self.block, limits=Limits(self.prompt, self.new, shortest=self.prompt),
        )  # fmt: skip
        return {"tokens": made.tokens}


def greedy(
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
) -> Greedy:
    """A part of the scale's sizes, unless others are given."""
    scale = settings.scale
    full = cache.startswith("full")
    # The full cache's text is the same in blocks.
    return Greedy(
        model=model, cache=cache, budget=1.0 if full else budget, block=None if full else block, text=text,
        rows=rows or scale.references, prompt=prompt or scale.prompt, new=new or scale.new,
    )  # fmt: skip


def agreement(result: Result, full: Result) -> float:
    """The share of the tokens that equal the full cache's at the same place."""
    return float(np.mean(result["tokens"] == full["tokens"]))


def same_until(result: Result, full: Result) -> float:
    """The mean number of tokens before the first that differs from the full cache's."""
    return float(np.mean(np.sum(np.cumprod(result["tokens"] == full["tokens"], axis=1), axis=1)))


def rouge_l(result: Result, full: Result) -> np.ndarray:
    """ROUGE-L of each row against the full cache's text, [rows] float64 from 0 to 100."""
    pairs = zip(result["tokens"], full["tokens"], strict=True)
    return np.array([ngrams.token_scores([one], [other])["ROUGE-L"] for one, other in pairs])


def cells(result: Result, full: Result) -> Mapping[str, str]:
    """Columns of a table: n-gram scores from 0 to 100, and agreement."""
    scores = ngrams.token_scores(list(result["tokens"]), list(full["tokens"]))
    return {
        "BLEU-4": f"{scores['BLEU-4']:.1f}", "R-1": f"{scores['ROUGE-1']:.1f}", "R-2": f"{scores['ROUGE-2']:.1f}",
        "R-L": f"{scores['ROUGE-L']:.1f}", "agrees with full": f"{100 * agreement(result, full):.1f} %",
        "first differs after": f"{same_until(result, full):.1f}",
    }  # fmt: skip


def unrelated(full: Result) -> Result:
    """The floor of all scores: each row's text replaced by that of the next row."""
    return {"tokens": np.roll(full["tokens"], 1, axis=0)}


def compare(what: str, one: Result, other: Result, full: Result, settings: Settings) -> Comparison:
    """ROUGE-L against the full cache's text, row by row: higher is better."""
    return paired_bootstrap(f"{what}, ROUGE-L", rouge_l(one, full), rouge_l(other, full), seed=settings.seed)


def distinct_2(result: Result) -> np.ndarray:
    """The share of a row's pairs of tokens that are distinct, [rows] float64 from 0 to 100."""
    return np.array([ngrams.diversity([row])["distinct-2"] for row in result["tokens"]])


def diversity_cells(result: Result) -> Mapping[str, str]:
    """Columns of a table: distinct n-grams in %, and the longest n-gram that occurs twice."""
    found = ngrams.diversity(list(result["tokens"]))
    return {
        "distinct-1": f"{found['distinct-1']:.1f} %", "distinct-2": f"{found['distinct-2']:.1f} %",
        "longest repeat": f"{found['longest repeat']:.1f}",
    }  # fmt: skip
