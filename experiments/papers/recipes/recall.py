"""RECALL: the prompts of a recall task that greedy generation answers exactly."""

import dataclasses

import numpy as np

from experiments.config import RecallConfig
from experiments.papers.parts import Cached, Lab, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import MAIN, Settings
from experiments.papers.statistics import Comparison, sign_test
from experiments.tasks.score import answers, exact_matches, make_prompts
from kvjax.generation.generate import Generation

#: Distances from the fact to the end of a prompt of 984 tokens, at the least and at the most.
DISTANCES = {"close": (50, 200), "near": (250, 450), "far": (700, 900)}
FULL_LENGTH = 984
ROOM = 90  # tokens that a shorter prompt leaves before and behind a fact, for other facts and the question


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Cached):
    """Asks a recall task's prompts.

    The result has ``right`` [prompts] bool, ``tokens`` [prompts, n] int32, the generated ones, and ``answers`` of that
    shape, the true ones; both end with -1s.

    Attributes:
      task: of `experiments.tasks.recall`.
      prompts: the number of prompts.
      length: tokens of each.
      nearest: the fewest tokens from the fact to the end of its prompt.
      farthest: the most.
      difficulty: as the task counts it; None = its default.
    """

    task: str
    prompts: int
    length: int
    nearest: int
    farthest: int
    difficulty: int | None = None

    def measure(self, lab: Lab) -> Result:
        model = lab.model(self.model)
        config = RecallConfig(
            tasks=(self.task,), prompts=self.prompts, length=self.length, nearest=self.nearest,
            farthest=self.farthest, difficulty=self.difficulty,
        )  # fmt: skip
        asked = make_prompts(config, model, lab.settings.seed)[self.task]
        spec = caches.build(self.cache, self.budget, lab.settings, self.length)
        parts: list[np.ndarray] = []

        def keep(generation: Generation) -> None:
            parts.append(generation.tokens)

        exact_matches(model, {self.task: asked}, spec, watch=keep, prefill_block=self.block)
        # [prompts, n]
        tokens = np.concatenate(parts)
        right = np.array([answers(model, row, prompt) for row, prompt in zip(tokens, asked, strict=True)])
        true = np.full_like(tokens, -1)
        for row, prompt in zip(true, asked, strict=True):
            row[: prompt.answer.size] = prompt.answer
        return {"right": right, "tokens": tokens, "answers": true}


def recall(
    settings: Settings,
    cache: str,
    budget: int | float,
    *,
    task: str = "passkey",
    distance: str = "near",
    block: int | None = None,
    length: int | None = None,
    difficulty: int | None = None,
    model: str = MAIN,
) -> Recall:
    """A part of the scale's sizes, or of prompts of another length; distances are shares of the length."""
    length = settings.scale.recall if length is None else length
    nearest, farthest = (round(each * length / FULL_LENGTH) for each in DISTANCES[distance])
    if length < FULL_LENGTH:
        nearest, farthest = (min(max(each, ROOM), length - ROOM) for each in (nearest, farthest))
    full = cache.startswith("full")
    return Recall(
        model=model, cache=cache, budget=1.0 if full else budget, block=None if full else block, task=task,
        prompts=settings.scale.prompts, length=length, nearest=nearest, farthest=farthest, difficulty=difficulty,
    )  # fmt: skip


def short(settings: Settings) -> int:
    """Half the tokens of a prompt, where an entry asks many; all of them in a trial, whose prompts are short."""
    return settings.scale.recall // (1 if settings.scale.trial else 2)


def share(result: Result) -> float:
    """The share of the prompts that are answered exactly."""
    return float(np.mean(result["right"]))


def shown(result: Result) -> str:
    """The share as a cell."""
    return f"{100 * share(result):.0f} %"


def compare(what: str, one: Result, other: Result) -> Comparison:
    """Exact answers of one cache against another, prompt by prompt: higher is better."""
    return sign_test(f"{what}, exact answers", one["right"], other["right"])


def inside(part: Recall, newest: int) -> float:
    """The share of the facts that lie among the `newest` tokens of their prompts, which many policies protect."""
    distances = np.arange(part.nearest, part.farthest + 1)
    return float(np.mean(distances <= newest))
