"""The base of tasks: how they are made, asked and scored; and questions with choices."""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks.multiple_choice import Question
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.lm_eval.runner import Pair, Runner

Answer = Mapping[str, Any]  # as JSON holds it
Done = Callable[[int, Answer], None]  # is called with the number of a question and its answer
SAME = "as full"  # the share of answers that are the full cache's own


class Setting(NamedTuple):
    """The sizes and the tokenizer that tasks are made for.

    Attributes:
      folder: of the published files; None if it was not given.
      questions: the most questions of a task; None = all.
      seed: of tasks that are generated.
      tokenizer: the model's.
      max_length: the most tokens of a question and its answer.
    """

    folder: Path | None
    questions: int | None
    seed: int
    tokenizer: Tokenizer
    max_length: int


class Asked(abc.ABC):
    """The questions of a task.

    Attributes:
      about: the task in words, for reports.
      headline: the scores that tables of all tasks show.
    """

    about: str
    headline: tuple[str, ...]

    @abc.abstractmethod
    def __len__(self) -> int:
        """The number of questions."""

    @property
    @abc.abstractmethod
    def content(self) -> str:
        """Returns the inputs of the answers as text: two tasks with equal content have the same answers."""

    @abc.abstractmethod
    def ask(self, runner: Runner, tokenizer: Tokenizer, wanted: Sequence[int], done: Done) -> None:
        """Answers the questions of these numbers, in any order."""

    @abc.abstractmethod
    def scores(self, answers: Sequence[Answer], full: Sequence[Answer] | None) -> dict[str, float]:
        """Scores the answers to all questions; shares are in percent.

        Args:
          answers: in the order of the questions.
          full: those under the full cache, if there are any.
        """

    @abc.abstractmethod
    def by_question(self, answers: Sequence[Answer]) -> list[float]:
        """Returns the first score of `headline` of each question by itself, from which intervals are computed."""

    def by_turn(self, answers: Sequence[Answer]) -> list[list[float]]:
        """Returns the score of each turn of each question, where a question is a conversation; otherwise nothing."""
        return []

    def grid(self, answers: Sequence[Answer]) -> "Grid | None":
        """The answers as a table of two quantities, for tasks that vary these."""
        return None


class Grid(NamedTuple):
    """Shares of right answers by two quantities.

    Attributes:
      lengths: of the columns, tokens.
      depths: of the rows, percent of the context before the fact.
      shares: [rows, columns], in percent.
    """

    lengths: tuple[int, ...]
    depths: tuple[float, ...]
    shares: np.ndarray


@dataclasses.dataclass(frozen=True)
class Choices(Asked):
    """Questions with choices, of which the most probable one is the answer.

    Scores: ``accuracy``; ``accuracy by length``, where log-probabilities are divided by the characters of a choice
    (lm_eval's acc_norm; only where the choices differ, and not their contexts); ``chance``; and `SAME`.
    """

    about: str
    questions: tuple[Question, ...]
    headline: tuple[str, ...] = ("accuracy", SAME)

    def __len__(self) -> int:
        return len(self.questions)

    @property
    def content(self) -> str:
        return repr(self.questions)

    def ask(self, runner: Runner, tokenizer: Tokenizer, wanted: Sequence[int], done: Done) -> None:
        pairs, owners = [], []
        for number in wanted:
            for place, (context, choice) in enumerate(self.questions[number].pairs):
                pairs.append(pair(tokenizer, context, f" {choice}"))
                owners.append((number, place))
        found: dict[int, list[float | None]] = {n: [None] * len(self.questions[n].pairs) for n in wanted}

        def scored(index: int, answer: tuple[float, bool]) -> None:
            number, place = owners[index]
            found[number][place] = answer[0]
            if None not in found[number]:
                done(number, {"logprobs": found[number]})

        runner.scores(pairs, scored)

    def scores(self, answers: Sequence[Answer], full: Sequence[Answer] | None) -> dict[str, float]:
        best = [int(np.argmax(answer["logprobs"])) for answer in answers]
        labels = [question.label for question in self.questions]
        found = {"accuracy": share(a == b for a, b in zip(best, labels, strict=True))}
        if all(len(question.contexts) == 1 for question in self.questions):
            sizes = [[len(choice) for _, choice in question.pairs] for question in self.questions]
            by_length = [
                int(np.argmax(np.asarray(answer["logprobs"]) / own)) for answer, own in zip(answers, sizes, strict=True)
            ]
            found["accuracy by length"] = share(a == b for a, b in zip(by_length, labels, strict=True))
        found["chance"] = 100 * float(np.mean([1 / len(question.pairs) for question in self.questions]))
        if full is not None:
            found[SAME] = share(a == int(np.argmax(b["logprobs"])) for a, b in zip(best, full, strict=True))
        return found

    def by_question(self, answers: Sequence[Answer]) -> list[float]:
        return [
            100.0 * (int(np.argmax(answer["logprobs"])) == question.label)
            for answer, question in zip(answers, self.questions, strict=True)
        ]


def pair(tokenizer: Tokenizer, context: str, continuation: str) -> Pair:
    """Returns the tokens that are read and those that are scored, as lm_eval splits them.

    Spaces at the end of the context belong to the continuation, and the tokens of the continuation are those that the
    whole text has beyond the context's own. An empty context is a BOS or an end-of-text token.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    begin = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    if not context and begin is not None:
        rest = tokenizer.encode(continuation, bos=False)
        return Pair([begin], rest)
    before, whole = tokenizer.encode(context), tokenizer.encode(context + continuation)
    return Pair(before, whole[len(before) :])


def share(values: Iterable[object]) -> float:
    """The share of values that are true, in percent."""
    return 100 * float(np.mean([bool(value) for value in values]))
