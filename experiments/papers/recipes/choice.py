"""CHOICE: multiple-choice questions after solved ones, each answer scored behind its prompt."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvjax
from experiments.papers.parts import Cached, Lab, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import MAIN, Settings
from experiments.papers.statistics import Comparison, sign_test
from experiments.runs import data
from experiments.tasks import multiple_choice
from experiments.tasks.multiple_choice import Question
from kvjax.cache import Limits
from kvjax.models.model import Model

ROWS = 16  # contexts that are scored at once
STEP = 320  # tokens, of which the width of prompts is a multiple: few programs for tasks of many lengths
ROOM = 64  # tokens of the longest answer; questions with longer ones are left out
TASKS = tuple(multiple_choice.TASKS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Cached):
    """Answers multiple-choice questions: of the answers, the one of the largest mean log-probability per token.

    The solved questions before each are the first ones of `multiple_choice.with_examples`, as many as fit.

    The result has ``score`` [questions, answers] float64, the mean log-probabilities, NaN where there are fewer
    answers; ``label`` [questions] int32, the right ones; and ``shots`` [questions] int32, the solved questions.

    Attributes:
      task: of `experiments.tasks.multiple_choice`.
      questions: the number of questions, from the beginning of the file.
      shots: the most solved questions before each.
      width: the most tokens of a prompt.
    """

    task: str
    questions: int
    shots: int
    width: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return multiple_choice.files_of(self.task, settings.data / "tasks", self.shots)

    def measure(self, lab: Lab) -> Result:
        model = lab.model(self.model)
        examples, every = multiple_choice.with_examples(self.task, lab.settings.data / "tasks", self.shots)
        solved = [each.example for each in examples]
        asked: list[Question] = []
        contexts: list[list[int]] = []
        answers: list[list[list[int]]] = []
        shots: list[int] = []
        for question in every:
            choices = [_ids(model, f" {choice}") for choice in question.choices]
            shown = [_fitting(model, solved, context, self.width) for context in question.contexts]
            if len(asked) == self.questions:
                break
            if max(map(len, choices)) > ROOM or None in shown:
                continue
            asked.append(question)
            for ids, number in filter(None, shown):
                contexts.append(ids)
                answers.append(choices)
                shots.append(number)
        means = self._scores(lab, contexts, answers)
        # A question of several contexts has one answer for each of them.
        several = len(asked[0].contexts)
        rows = [[mean for each in means[i : i + several] for mean in each] for i in range(0, len(means), several)]
        score = np.full((len(asked), max(map(len, rows))), np.nan)
        for row, own in zip(score, rows, strict=True):
            row[: len(own)] = own
        labels = np.array([each.label for each in asked], np.int32)
        return {"score": score, "label": labels, "shots": np.array(shots[::several], np.int32)}

    def _scores(self, lab: Lab, contexts: list[list[int]], answers: list[list[list[int]]]) -> list[list[float]]:
        """The mean log-probability of each answer of each context."""
        rows, means = min(ROWS, self.questions), []
        # Padding changes no result.
        width = min(self.width, STEP * math.ceil(max(map(len, contexts)) / STEP))
        spec = caches.build(self.cache, self.budget, lab.settings, width)
        limits = Limits(width, ROOM + 1)
        for start in range(0, len(contexts), rows):
            part = contexts[start : start + rows]
            # The last batch is filled up, so that it has the program of the others.
            filled = [*part, *[part[-1]] * (rows - len(part))]
            lengths = np.array([len(each) for each in filled], np.int32)
            tokens = np.zeros((rows, width), np.int32)
            for row, ids in zip(tokens, filled, strict=True):
                row[: len(ids)] = ids
            choices = [*answers[start : start + rows], *[[]] * (rows - len(part))]
            found = kvjax.score_choices(
                lab.model(self.model), tokens, choices, spec, lengths=lengths, prefill_block=self.block, limits=limits
            )
            means += [[float(np.mean(each.logprobs, dtype=np.float64)) for each in own] for own in found[: len(part)]]
        return means


def choice(
    settings: Settings, cache: str, budget: int | float, *, task: str, shots: int = 5, model: str = MAIN
) -> Choice:
    """A part of the scale's sizes."""
    width = settings.scale.prompt if settings.scale.trial else settings.scale.length - ROOM
    return Choice(
        model=model, cache=cache, budget=1.0 if cache.startswith("full") else budget, task=task,
        questions=settings.scale.questions, shots=shots, width=width,
    )  # fmt: skip


def chosen(result: Result) -> np.ndarray:
    """The answer of each question, [questions] int."""
    found: np.ndarray = np.nanargmax(result["score"], axis=1)
    return found


def accuracy(result: Result) -> float:
    """The share of the questions that are answered rightly."""
    return float(np.mean(chosen(result) == result["label"]))


def chance(result: Result) -> float:
    """The expected share of answers drawn at random."""
    return float(np.mean(1 / np.sum(~np.isnan(result["score"]), axis=1)))


def same(result: Result, full: Result) -> np.ndarray:
    """Whether each question is decided as under the full cache, [questions] bool."""
    return np.asarray(chosen(result) == chosen(full))


def agreement(result: Result, full: Result) -> float:
    """The share of the questions that are decided as under the full cache."""
    return float(np.mean(same(result, full)))


def compare(what: str, one: Result, other: Result, full: Result) -> Comparison:
    """Decisions as under the full cache, question by question: higher is better."""
    return sign_test(f"{what}, decided as under full", same(one, full), same(other, full))


def _ids(model: Model, text: str) -> list[int]:
    return [int(each) for each in data.encode(model, text)]


def _fitting(model: Model, solved: Sequence[str], context: str, width: int) -> tuple[list[int], int] | None:
    """The tokens of a context behind as many solved questions as fit, and their number; None if it does not fit."""
    for number in range(len(solved), -1, -1):
        text = multiple_choice.GAP.join([*solved[:number], context])
        ids = [*data.opening(model), *_ids(model, text)]
        if len(ids) <= width:
            return ids, number
    return None
