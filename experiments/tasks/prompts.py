"""Recall tasks as rows of tokens: filler, the facts at a distance from the end, the question last."""

import itertools
from typing import NamedTuple

import numpy as np

from experiments.tasks import recall
from experiments.tasks.story import Encode, Filler, filler
from experiments.tasks.words import HELD_OUT, Words
from kvjax.errors import ConfigError


class NoRoom(ConfigError):
    """Facts and question do not fit into the prompt at that distance."""


class Prompt(NamedTuple):
    """Attributes:
    tokens: [length] int32, BOS first, up to where the answer begins.
    answer: [m] int32; text: the same as text, from its space to the character that ends it.
    """

    tokens: np.ndarray
    answer: np.ndarray
    text: str


def make(
    rng: np.random.Generator,
    *,
    task: str,
    difficulty: int,
    length: int,
    distance: int,
    words: Words,
    encode: Encode,
    filler: Filler,
    bos: list[int],
) -> Prompt:
    """One prompt.

    Args:
      task, difficulty: see `recall`.
      length: tokens of the prompt; distance: from the end of the fact that is asked for to the end of the prompt.
      encode: text -> tokens without special ones; bos: what opens a row, one token or none.

    Raises:
      NoRoom: facts and question do not fit.
    """
    episode = recall.TASKS[task](rng, words, difficulty)
    question = episode.questions[rng.integers(len(episode.questions))]
    facts = [encode(f" {fact}") for fact in episode.facts]
    before = list(itertools.chain(*facts[: question.fact + 1]))
    after, asked = list(itertools.chain(*facts[question.fact + 1 :])), encode(f" {question.text}")
    gap = distance - len(after) - len(asked)
    lead = length - distance - len(before) - len(bos)
    if gap < 0 or lead < 0:
        raise NoRoom(
            f"{task} of difficulty {difficulty} needs {len(before)} tokens up to the fact that is asked for and "
            f"{len(after) + len(asked)} after it, which does not fit in a prompt of {length} tokens with this fact "
            f"{distance} tokens before its end."
        )
    parts = [bos, filler(rng, lead), before, after, filler(rng, gap), asked]
    tokens = np.concatenate([np.asarray(part, np.int32) for part in parts])
    return Prompt(tokens, np.asarray(encode(question.answer), np.int32), question.answer)


def make_many(
    task: str,
    *,
    count: int,
    difficulty: int,
    length: int,
    nearest: int,
    farthest: int,
    encode: Encode,
    bos: list[int],
    seed: int,
    words: Words = HELD_OUT,
) -> list[Prompt]:
    """Prompts for evaluation: held-out words and wordings, generated stories between, distances drawn evenly.

    Raises:
      NoRoom: as `make`.
    """
    rng = np.random.default_rng(seed)
    return [
        make(
            rng, task=task, difficulty=difficulty, length=length, distance=int(rng.integers(nearest, farthest + 1)),
            words=words, encode=encode, filler=filler(encode, words), bos=bos,
        )
        for _ in range(count)
    ]  # fmt: skip
