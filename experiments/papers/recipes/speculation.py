"""InfiniGen: parts that read what a guess chooses, with a skewed model, and records of what was read."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes import caches, lm
from experiments.papers.settings import MAIN, Settings
from kvjax import analysis
from kvjax.cache import Limits
from kvjax.models.model import Model
from kvjax.models.skew import find_skew, skewed

SAMPLE, SAMPLE_ROWS = "hamlet", 2  # what the skew is found from: a text that no entry scores
#: The paper's settings for LLaMA-2, whose kind of decoder the small models are.
ALPHA, RATIO, CAP = 5.0, 0.3, 0.2
FIRST = 2  # the first layer that reads a choice
WITHOUT_THRESHOLD = 99.0  # the authors' alpha where a fixed share is read


class SkewedLab(Lab):
    """A lab whose models are skewed by a sample."""

    def __init__(self, lab: Lab, part: Part, length: int) -> None:
        self.__dict__.update(lab.__dict__)
        self._plain = lab
        self._sample = lab.rows(part, SAMPLE, SAMPLE_ROWS, length)
        self._skewed: dict[str, Model] = {}

    def model(self, name: str = MAIN) -> Model:
        if name not in self._skewed:
            model = self._plain.model(name)
            self._skewed[name] = skewed(model, find_skew(model, self._sample))
        return self._skewed[name]

    def rows(self, part: Part, text: str, rows: int, length: int) -> np.ndarray:
        return self._plain.rows(part, text, rows, length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Skewed(Part):
    """Measures another part with the skewed model; the result is of that part.

    Attributes:
      of: the part.
      kind: its class, which two parts of equal fields may differ in.
      sample: tokens of a row of the sample.
    """

    of: Part
    kind: str
    sample: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return [*self.of.files(settings), settings.file(SAMPLE)]

    def measure(self, lab: Lab) -> Result:
        return self.of.measure(SkewedLab(lab, self.of, self.sample))


def with_skew(settings: Settings, of: Part) -> Skewed:
    """A part."""
    return Skewed(model=of.model, of=of, kind=type(of).__name__, sample=settings.scale.length)


def infinigen(alpha: float = ALPHA, *, ratio: float = RATIO, cap: float | int = CAP, kept: str = "full") -> str:
    """A cache as text.

    Args:
      alpha: see `kvjax.selection.InfiniGen`.
      ratio: likewise.
      cap: likewise.
      kept: its policy.
    """
    return f"{kept} + infinigen({float(alpha)!r}, ratio={ratio!r}, cap={cap!r}, first_layer={FIRST})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded(lm.LM):
    """Scores rows of a text, and records what is read.

    The result has ``logprobs`` as `LM`'s, and for each of L layers the means over steps, rows and KV heads:
    ``share`` of the held slots that are read, ``number`` of chosen slots (NaN where everything is read), ``capped``,
    how
    often the cap was reached, and ``live`` slots.

    Attributes:
      cap: of the selection.
    """

    cap: float | int

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, self.rows, self.prompt + self.new)
        spec = caches.build(self.cache, self.budget, lab.settings, self.prompt)
        scored = kvjax.log_likelihood(
            lab.model(self.model), tokens, spec, prompt_length=self.prompt, prefill_block=self.block,
            implementation="auto", limits=Limits(self.prompt, self.new, shortest=self.prompt), record=True,
        )  # fmt: skip
        assert scored.record is not None
        # [steps, L, B, K]
        number, live = scored.record.number, scored.record.live
        most = np.floor(self.cap * (live - 1) + 1e-9) if isinstance(self.cap, float) else np.full(live.shape, self.cap)
        chosen = np.where(number >= 0, number, np.nan)
        capped = np.where(number >= 0, number >= np.maximum(most, 1), np.nan)
        with np.errstate(invalid="ignore"):
            means = {name: _by_layer(each) for name, each in (("number", chosen), ("capped", capped), ("live", live))}
        return {"logprobs": np.asarray(scored.logprobs)[:, self.prompt - 1 :], "share": scored.record.share} | means


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap(lm.LM):
    """Compares what a selection chooses with the best choice of the same size.

    The result has ``overlap`` and ``mass`` [L] of `kvjax.analysis.Selected`, means over rows, KV heads and queries; NaN
    where a layer reads everything.
    """

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, self.rows, self.prompt + self.new)
        spec = caches.build(self.cache, self.budget, lab.settings, self.prompt)
        found = analysis.selected(lab.model(self.model), tokens, spec, prompt_length=self.prompt)
        measured = {name: getattr(found, name)[..., self.prompt :] for name in ("overlap", "mass")}
        return {name: _by_layer(np.moveaxis(value, 0, 1)) for name, value in measured.items()}


def overlap(settings: Settings, cache: str, *, skew: bool) -> Part:
    """A part for the rows of attention."""
    of = lm.lm(settings, cache, 1.0, rows=settings.scale.look_rows)
    made = Overlap(**{field.name: getattr(of, field.name) for field in dataclasses.fields(of)})
    return with_skew(settings, made) if skew else made


def _by_layer(values: np.ndarray) -> np.ndarray:
    """[steps, L, ...] -> [L] float64 means; NaN where a layer has no numbers."""
    flat = np.moveaxis(values, 1, 0).reshape(values.shape[1], -1).astype(np.float64)
    return np.where(np.isnan(flat).any(axis=1), np.nan, flat.mean(axis=1))


def read(
    settings: Settings,
    *,
    alpha: float = ALPHA,
    ratio: float = RATIO,
    cap: float | int = CAP,
    skew: bool = True,
    **sizes: Any,
) -> Part:
    """A recorded part of InfiniGen over a cache that holds everything; `sizes` as of `lm.lm`."""
    of = lm.lm(settings, infinigen(alpha, ratio=ratio, cap=cap), 1.0, **sizes)
    made = Recorded(**{field.name: getattr(of, field.name) for field in dataclasses.fields(of)}, cap=cap)
    return with_skew(settings, made) if skew else made


def share(result: Result, layers: slice = slice(FIRST, None)) -> float:
    """The share of the held slots that the layers which choose read."""
    return float(np.mean(result["share"][layers]))


def mean(result: Result, name: str) -> float:
    """The mean of ``number`` or ``capped`` over the layers that choose."""
    return float(np.nanmean(result[name][FIRST:]))
