"""How the attention that a token receives varies, by the token's age; and which tokens a policy keeps."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.papers.parts import Cached, Lab, Part, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import Settings
from kvjax import analysis

AROUND = 16  # queries before and after the one at which a deviation rises or not


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deviation(Part):
    """Follows tokens of the first half of each row for half a row.

    The result has, for L layers and ages (queries since the token's own) from 0 to `late`: ``curve`` [L, late + 1], the
    mean deviation; ``peak`` [L, n] uint16, the age at which each token's was largest; ``halved`` [L], the share of
    those that were under half of their maximum at the end; and ``rising`` [L], of those that still rose at age `still`.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      length: tokens of each.
      followed: the number of tokens of a row that are followed.
      late: the last age.
      still: see above.
      around: queries before and after `still` between which a deviation rises or not.
    """

    text: str
    rows: int
    length: int
    followed: int
    late: int
    still: int
    around: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, self.rows, self.length)
        positions = np.linspace(0, self.length - 1 - self.late, self.followed).astype(np.int32)
        # [L, B, H, P, T]
        every = analysis.attention_std(lab.model(self.model), tokens, positions=positions).trajectory
        by_age = [every[..., i, p : p + self.late + 1] for i, p in enumerate(positions)]
        # [L, n, ages]
        std = np.stack(by_age, axis=3).reshape(len(every), -1, self.late + 1)
        rises = std[..., self.still + self.around] > std[..., self.still - self.around]
        return {
            "curve": std.mean(axis=1), "peak": std.argmax(axis=2).astype(np.uint16),
            "halved": np.mean(std[..., -1] < 0.5 * std.max(axis=2), axis=1), "rising": rises.mean(axis=1),
        }  # fmt: skip


def deviation(settings: Settings, *, text: str = "book", followed: int = 16) -> Deviation:
    """A part of the scale's sizes."""
    scale = settings.scale
    return Deviation(
        text=text, rows=scale.look_rows, length=scale.length, followed=followed, late=scale.tokens(512),
        still=scale.tokens(256), around=scale.tokens(AROUND),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kept(Cached):
    """Which queries see each token of one row under a policy.

    The result has ``last_seen`` [L, K, T] int32; see `kvjax.analysis.Retained`.

    Attributes:
      text: a key of `TEXTS`.
      prompt: tokens of the prompt.
      new: tokens after it.
    """

    text: str
    prompt: int
    new: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, 1, self.prompt + self.new)
        spec = caches.build(self.cache, self.budget, lab.settings, self.prompt)
        found = analysis.retained(lab.model(self.model), tokens, spec, prompt_length=self.prompt)
        return {"last_seen": found.last_seen[:, 0]}


def kept(settings: Settings, cache: str, budget: int | float, *, text: str = "book") -> Kept:
    """A part of half of the scale's longest text, half of it the prompt."""
    half = settings.scale.length // 4
    return Kept(cache=cache, budget=budget, text=text, prompt=half, new=half)


def drawn(part: Kept, result: Result, *, layer: int, head: int) -> Any:
    """The map of `kvjax.analysis.plots.plot_retained`."""
    seen = result["last_seen"][:, None]
    lengths, prompt = np.array([part.prompt + part.new]), np.array([part.prompt])
    return analysis.plots.plot_retained(analysis.Retained(seen, lengths, prompt), layer=layer, head=head)
