"""The speed of reading prompts in blocks, measured."""

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvjax
from experiments.papers.parts import Cached, Lab, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import MAIN, Settings
from kvjax.cache import Limits
from kvjax.generation import prompt_store

REPEATS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(Cached):
    """Times the prompts of rows of a text, with one token after them.

    The result has ``speed``, prompt tokens per second of all rows, by the fastest repetition.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      prompt: tokens of each.
      repeats: repetitions, after one that compiles.
    """

    text: str
    rows: int
    prompt: int
    repeats: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        tokens = lab.rows(self, self.text, self.rows, self.prompt)
        spec = caches.build(self.cache, self.budget, lab.settings, self.prompt)
        seconds = []
        with prompt_store.suspended():
            for _ in range(self.repeats + 1):
                start = time.perf_counter()
                # Its tokens are on the host, so that it has ended.
                kvjax.generate(
                    lab.model(self.model), tokens, spec, max_new_tokens=1, prefill_block=self.block,
                    limits=Limits(self.prompt, 1, shortest=self.prompt),
                )  # fmt: skip
                seconds.append(time.perf_counter() - start)
        return {"speed": np.asarray(self.rows * self.prompt / min(seconds[1:]))}


def prefill(
    settings: Settings, cache: str, budget: float, *, block: int | None, prompt: int, model: str = MAIN
) -> Prefill:
    """A part."""
    return Prefill(
        model=model, cache=cache, budget=budget, block=block, text="book", rows=settings.scale.rows, prompt=prompt,
        repeats=1 if settings.scale.trial else REPEATS,
    )  # fmt: skip
