"""Needles in a haystack: a fact at every depth of contexts of several lengths, and a question about it."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from experiments.tasks import files, matching
from experiments.tasks.base import Answer, Asked, Grid, Setting
from experiments.tasks.files import existing
from experiments.tasks.spec import TaskSpec, at_least_one
from experiments.tasks.story import story
from experiments.tasks.words import HELD_OUT
from experiments.tasks.written import Item, Written
from kvjax.errors import ConfigError

#: The fact, the question and how the answer begins; {v}: what is to be found.
FORMS = {
    "needle": (
        "The secret ingredient of the soup in {n}'s kitchen is {v}.",
        "\nQuestion: What is the secret ingredient of the soup in {n}'s kitchen?\nAnswer: The secret ingredient of the "
        "soup in {n}'s kitchen is",
    ),
    "passkey": ("The pass key is {v}. Remember it. {v} is the pass key.", "\nWhat is the pass key? The pass key is"),
}
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DIGITS = 5  # of a pass key


@dataclasses.dataclass(frozen=True)
class Needles(TaskSpec):
    """One fact in free text, at every depth of every length.

    Attributes:
      task: ``needle`` (a word in a story) or ``passkey`` (a number in sentences over and over, arXiv:2305.16300).
      lengths: tokens of context and question.
      depths: percent of the context that lies before the fact; a number n stands for n of them from 0 to 100.
      repeats: questions of each length and depth.
      haystack: a text file to hide facts in; None = as the task says.
      aware: whether the question is known when the context is compressed.
      new_tokens: of an answer.
    """

    task: str
    lengths: tuple[int, ...] | int = (256, 512, 960)
    depths: tuple[float, ...] | int = 5
    repeats: int = 2
    haystack: str | None = None
    aware: bool = False
    new_tokens: int = 12

    def __post_init__(self) -> None:
        at_least_one(self.task, new_tokens=self.new_tokens)
        depths, lengths = self.grid
        if (
            not lengths
            or min(lengths) < 1
            or not depths
            or not 0 <= min(depths) <= max(depths) <= 100
            or self.repeats < 1
        ):
            raise ConfigError(
                f"task {self.task}: lengths should be at least 1, depths from 0 to 100, and repeats at least 1; got "
                f"lengths={self.lengths}, depths={self.depths}, repeats={self.repeats}."
            )

    @property
    def grid(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """The depths and the lengths."""
        lengths = (self.lengths,) if isinstance(self.lengths, int) else tuple(self.lengths)
        if isinstance(self.depths, int):
            return tuple(float(each) for each in np.linspace(0, 100, max(self.depths, 1)).round(1)), lengths
        return tuple(float(each) for each in self.depths), lengths

    def files(self, folder: Path | None) -> list[Path]:
        return [existing(self.task, Path(self.haystack))] if self.haystack else []

    def make(self, setting: Setting) -> Asked:
        depths, lengths = self.grid
        if max(lengths) + self.new_tokens > setting.max_length:
            raise ConfigError(
                f"task {self.task}: a length of {max(lengths)} and {self.new_tokens} new tokens exceed the model's "
                f"{setting.max_length}; lower lengths."
            )
        rng = np.random.default_rng(setting.seed)
        items = []
        for length in lengths:
            for depth in depths:
                for _ in range(self.repeats):
                    items.append(self._item(rng, length, depth, setting))
        about = (
            f"{len(items)} contexts of {', '.join(map(str, lengths))} tokens, a fact at {len(depths)} depths of each"
        )
        return Haystacks(about, tuple(items), found_shares, ("score",), aware=self.aware)

    def _item(self, rng: np.random.Generator, length: int, depth: float, setting: Setting) -> Item:
        fact, question = FORMS[self.task]
        name = str(rng.choice(HELD_OUT.names))
        number = self.task == "passkey"
        value = str(rng.integers(10 ** (DIGITS - 1), 10**DIGITS) if number else rng.choice(HELD_OUT.nouns))
        fact, question = (each.format(n=name, v=value) for each in (fact, question))
        encode = setting.tokenizer.encode
        room = length - len(encode(f" {fact}")) - len(encode(question, bos=False))
        if room < 1:
            raise ConfigError(f"task {self.task}: a fact and a question do not fit in {length} tokens; raise lengths.")
        sentences = self._sentences(rng, room, setting, value)
        # The longest run of sentences that fits.
        sizes = np.cumsum([len(encode(f" {each}", bos=False)) for each in sentences])
        kept = sentences[: max(1, int(np.searchsorted(sizes, room, side="right")))]
        place = round(len(kept) * depth / 100)
        context = " ".join([*kept[:place], fact, *kept[place:]])
        about = {"length": length, "depth": depth, "metric": "contains_any"}
        return Item(context, question, (value,), self.new_tokens, about)

    def _sentences(self, rng: np.random.Generator, room: int, setting: Setting, value: str) -> list[str]:
        """Sentences of more than `room` tokens without the value."""
        characters = 16 * room
        if self.haystack is not None:
            text = " ".join(files.words(Path(self.haystack)))
            if len(text) < characters:
                text = " ".join([text] * -(-characters // len(text)))
            start = int(rng.integers(max(len(text) - characters, 0) + 1))
            text = text[start : start + characters]
        elif self.task == "passkey":
            return [NOISE] * (room // max(len(setting.tokenizer.encode(f" {NOISE}", bos=False)), 1) + 1)
        else:
            text = story(rng, HELD_OUT, characters)
        found = re.split(r"(?<=[.!?])\s+", text)[1 if self.haystack else 0 :]
        return [each for each in found if value.lower() not in each.lower()] or [NOISE]


def found_shares(items: Sequence[Item], answers: Sequence[Answer]) -> dict[str, float]:
    """The share of answers that hold what was to be found, in percent."""
    return {"score": 100 * float(np.mean(_found(items, answers)))}


def _found(items: Sequence[Item], answers: Sequence[Answer]) -> list[float]:
    return [
        matching.METRICS[item.about["metric"]](each["text"], item.references, item.about)
        for item, each in zip(items, answers, strict=True)
    ]


@dataclasses.dataclass(frozen=True)
class Haystacks(Written):
    """Answers whose length and depth are known."""

    def grid(self, answers: Sequence[Answer]) -> Grid | None:
        lengths = tuple(sorted({item.about["length"] for item in self.items}))
        depths = tuple(sorted({item.about["depth"] for item in self.items}))
        shares, counts = np.zeros((2, len(depths), len(lengths)))
        for item, value in zip(self.items, _found(self.items, answers), strict=True):
            place = depths.index(item.about["depth"]), lengths.index(item.about["length"])
            shares[place] += 100 * value
            counts[place] += 1
        return Grid(lengths, depths, shares / np.maximum(counts, 1))
