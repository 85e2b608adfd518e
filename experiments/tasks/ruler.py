"""RULER's synthetic tasks (arXiv:2404.06654), worded as there, over free text: stories of ours, or a file of yours.

| tasks | what is hidden | what is asked for |
|---|---|---|
| niah_single_1, 2, 3 | a number in sentences over and over; a number, a UUID in text | it |
| niah_multikey_1, 2, 3 | four numbers in text; numbers, UUIDs and nothing else | one of them, by its key |
| niah_multivalue, niah_multiquery | four numbers of one key; of four keys | all four |
| vt | a variable that is handed on four times | the five variables of its value |
| cwe, fwe | words, of which some occur more often | the ten, the three most frequent |

Unlike RULER's own, keys are two nouns of ours, there is no worked example before vt and cwe, and a length is that of
context and question, without the answer. RULER's two other tasks are in `experiments.tasks.ruler_questions`.
"""

import dataclasses
import itertools
import math
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.tasks import files
from experiments.tasks.base import Asked, Setting
from experiments.tasks.files import existing
from experiments.tasks.jsonl import RULER_TOKENS, scored
from experiments.tasks.needles import NOISE
from experiments.tasks.spec import TaskSpec, at_least_one, check_length
from experiments.tasks.story import story
from experiments.tasks.words import HELD_OUT, TRAINING
from experiments.tasks.written import Item, Written
from kvjax.errors import ConfigError

HOPS, CHAIN = 4, 5  # hand-overs of a variable, and letters of its name
COMMON, OFTEN, SELDOM = 10, (30, 6), (3, 1)  # cwe: common words, and how often words occur in long and short contexts
LONG = 4096  # tokens of a context that is not short
FREQUENT, LETTERS, ALPHA = 3, 6, 2.0  # fwe: words that are asked for, letters of a word, and the decay of frequencies


class Needle(NamedTuple):
    """How a task hides values.

    Attributes:
      hay: ``noise``, ``text`` or ``needles``.
      keys: how many there are; values: of each key; queries: keys that are asked for.
      kind: of the values, ``number`` or ``uuid``; that of the keys, if these are UUIDs too.
    """

    hay: str
    keys: int = 1
    values: int = 1
    queries: int = 1
    kind: str = "number"
    key_kind: str = "word"


NEEDLES = {
    "niah_single_1": Needle("noise"),
    "niah_single_2": Needle("text"),
    "niah_single_3": Needle("text", kind="uuid"),
    "niah_multikey_1": Needle("text", keys=4),
    "niah_multikey_2": Needle("needles"),
    "niah_multikey_3": Needle("needles", kind="uuid", key_kind="uuid"),
    "niah_multivalue": Needle("text", values=4),
    "niah_multiquery": Needle("text", keys=4, queries=4),
}
TASKS = (*NEEDLES, "vt", "cwe", "fwe")


class Made(NamedTuple):
    """A context, a question and what an answer must hold."""

    context: str
    question: str
    answers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Ruler(TaskSpec):
    """One of `TASKS`.

    Attributes:
      task: its name.
      length: the most tokens of context and question.
      count: contexts.
      haystack: a text file; None = stories of ours.
      aware: whether the question is known when the context is compressed.
    """

    task: str
    length: int = 896
    count: int = 16
    haystack: str | None = None
    aware: bool = False

    def __post_init__(self) -> None:
        at_least_one(self.task, length=self.length, count=self.count)

    def files(self, folder: Path | None) -> list[Path]:
        return [existing(self.task, Path(self.haystack))] if self.haystack else []

    def make(self, setting: Setting) -> Asked:
        kind = self.task.split("_")[0]
        new_tokens, encode = RULER_TOKENS[kind], setting.tokenizer.encode
        check_length(self.task, self.length, new_tokens, setting)
        items = []
        for number in range(min(self.count, setting.questions or self.count)):

            def made(size: int, number: int = number) -> Made:
                return self._made(np.random.default_rng([setting.seed, number]), size)

            def fits(size: int, made: Callable[[int], Made] = made) -> bool:
                each = made(size)
                return len(encode(each.context)) + len(encode(each.question, bos=False)) <= self.length

            size = largest(fits)
            if not size:
                raise ConfigError(
                    f"task {self.task}: its facts and its question do not fit in {self.length} tokens; raise length."
                )
            each = made(size)
            items.append(Item(each.context, each.question, each.answers, new_tokens, {"metric": "contains_all"}))
        about = f"{len(items)} contexts of up to {self.length} tokens; the share of what is asked for that answers hold"
        return Written(about, tuple(items), scored, ("score",), aware=self.aware)

    def _made(self, rng: np.random.Generator, size: int) -> Made:
        """A context of `size` units: sentences of noise, needles, words of text, or words."""
        if self.task in NEEDLES:
            return self._niah(rng, size, NEEDLES[self.task])
        return {"vt": _variables, "cwe": self._common, "fwe": self._frequent}[self.task](rng, size)

    def _niah(self, rng: np.random.Generator, size: int, form: Needle) -> Made:
        kinds = form.kind + "s"
        keys = [_drawn(rng, form.key_kind) for _ in range(form.keys)]
        values = [[_drawn(rng, form.kind) for _ in range(form.values)] for _ in keys]
        facts = [_needle(kinds, key, value) for key, own in zip(keys, values, strict=True) for value in own]
        facts = [facts[place] for place in rng.permutation(len(facts))]
        if form.hay == "text":
            sentences, joint = self._text(rng, size), " "
        elif form.hay == "noise":
            sentences, joint = [NOISE] * size, "\n"
        else:
            others = ((_drawn(rng, form.key_kind), _drawn(rng, form.kind)) for _ in range(size))
            sentences, joint = [_needle(kinds, *each) for each in others], "\n"
        context = joint.join(_among(rng, sentences, facts))
        picked = rng.choice(len(keys), form.queries, replace=False)
        queries = [keys[place] for place in picked]
        query = ", ".join(queries[:-1]) + f", and {queries[-1]}" if len(queries) > 1 else queries[0]
        one = form.queries * form.values == 1
        thing, some, are = (form.kind, "A", "is") if one else (kinds, "Some", "are")
        what = "What is the" if one else "What are all the"
        intro = f"{some} special magic {thing} {are} hidden within the following text. Make sure to memorize it. "
        intro += f"I will quiz you about the {thing} afterwards.\n"
        about = f"special magic {thing} for {query} mentioned in the provided text"
        question = f"\n{what} {about}? The {about} {are}"
        return Made(intro + context, question, tuple(value for place in picked for value in values[place]))

    def _text(self, rng: np.random.Generator, size: int) -> list[str]:
        """Sentences of `size` words of free text."""
        if self.haystack is None:
            words = story(rng, HELD_OUT, 12 * size).split()
        else:
            words = files.words(Path(self.haystack))
            start = int(rng.integers(len(words)))
            words = (words * (1 + (start + size) // len(words)))[start : start + size]
        return re.split(r"(?<=[.!?])\s+", " ".join(words[:size]))

    def _common(self, rng: np.random.Generator, size: int) -> Made:
        short = self.length < LONG
        words = rng.permutation(sorted({*TRAINING.nouns, *HELD_OUT.nouns}))[: COMMON + size]
        common = [str(each) for each in words[:COMMON]]
        # More words than there are nouns are numbered nouns.
        rest = [str(each) for each in words[COMMON:]]
        rest += [f"{rest[place % len(rest)]}{place}" for place in range(size - len(rest))]
        listed = common * OFTEN[short] + rest * SELDOM[short]
        order = rng.permutation(len(listed))
        text = " ".join(f"{number}. {listed[place]}" for number, place in enumerate(order, 1))
        intro = (
            "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones "
            "that appear most often.\n"
        )
        question = (
            f"\nQuestion: What are the {COMMON} most common words in the above list? Answer: The top {COMMON} words "
            "that appear most often in the list are:"
        )
        return Made(intro + text, question, tuple(common))

    def _frequent(self, rng: np.random.Generator, size: int) -> Made:
        vocabulary = [_letters(rng, LETTERS) for _ in range(max(self.length // 50, FREQUENT + 2))]
        # The most frequent one is noise, which is not asked for.
        vocabulary = ["...", *dict.fromkeys(vocabulary)]
        # The sum of all n^-2 is pi^2 / 6.
        shares = np.arange(1, len(vocabulary) + 1) ** -ALPHA * 6 / math.pi**2
        words = [word for word, share in zip(vocabulary, shares, strict=True) for _ in range(int(size * share))]
        text = " ".join(words[place] for place in rng.permutation(len(words)))
        intro = (
            "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
            "appeared coded words. "
        )
        question = (
            "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most "
            "frequently appeared words in the above coded text? Answer: According to the coded text above, the three "
            "most frequently appeared words are:"
        )
        return Made(intro + text, question, tuple(vocabulary[1 : 1 + FREQUENT]))


def _variables(rng: np.random.Generator, size: int) -> Made:
    names = [_letters(rng, CHAIN).upper() for _ in range(HOPS + 1)]
    value = str(rng.integers(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before}" for before, name in itertools.pairwise(names)]
    intro = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    question = (
        f"\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to "
        f"the chain(s) of variable assignment in the text above, {len(names)} variables are assigned the value "
        f"{value}, they are: "
    )
    return Made(intro + "\n".join(_among(rng, [NOISE] * size, chain)), question, tuple(names))


def largest(fits: Callable[[int], bool]) -> int:
    """The largest size that fits, by doubling and bisection; 0 if not even 1 does."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _among(rng: np.random.Generator, sentences: list[str], facts: list[str]) -> list[str]:
    """Sentences with others among them, in their order, at places that are drawn."""
    places = sorted(rng.integers(0, len(sentences) + 1, len(facts)))
    found = list(sentences)
    for number, (place, each) in enumerate(zip(places, facts, strict=True)):
        found.insert(int(place) + number, each)
    return found


def _needle(kinds: str, key: str, value: str) -> str:
    return f"One of the special magic {kinds} for {key} is: {value}."


def _drawn(rng: np.random.Generator, kind: str) -> str:
    """A number of seven digits, a UUID, or two nouns."""
    if kind == "number":
        return str(rng.integers(10**6, 10**7))
    if kind == "uuid":
        return str(uuid.UUID(bytes=rng.bytes(16), version=4))
    return "-".join(str(each) for each in rng.choice(TRAINING.nouns, 2, replace=False))


def _letters(rng: np.random.Generator, count: int) -> str:
    return "".join(chr(97 + int(each)) for each in rng.integers(0, 26, count))
