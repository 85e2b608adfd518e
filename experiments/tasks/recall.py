"""Recall tasks: facts hidden in a text, and a question at its end whose answer is among them.

Seeded and generated, so that every machine asks the same questions. Kinds, with what `difficulty` counts:

  passkey      one number in filler (Mohtashami and Jaggi, arXiv:2305.16300)        digits of the number
  multi_key    one number a name, one of them asked for (RULER, arXiv:2404.06654)   names
  associative  word pairs, one looked up (Arora et al., arXiv:2312.04927)           pairs
  copy         a span of words, to be continued from its first three                words to continue with
  variable     values handed from variable to variable (RULER's variable tracking)  hand-overs
"""

import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from experiments.tasks.words import Words
from kvjax.errors import ConfigError


class Question(NamedTuple):
    """Attributes:
    text: ends where the answer begins.
    answer: begins with a space and ends with the character that ends it in its fact.
    fact: index of the fact that it is in; of a chain, the last.
    """

    text: str
    answer: str
    fact: int


class Episode(NamedTuple):
    """Attributes:
    facts: what to hide in a text, in this order.
    questions: what may be asked after them.
    """

    facts: tuple[str, ...]
    questions: tuple[Question, ...]


def _number(rng: np.random.Generator, digits: int) -> str:
    return str(rng.integers(1, 10)) + "".join(str(digit) for digit in rng.integers(0, 10, digits - 1))


def _numbers(rng: np.random.Generator, count: int, digits: int) -> list[str]:
    """Different ones: an answer must tell which fact it is from."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[_number(rng, digits)] = None
    return list(found)


def _pick(rng: np.random.Generator, items: tuple, count: int) -> list:
    """`count` different items."""
    if count > len(items):
        raise ConfigError(f"a recall task needs {count} different words, but there are {len(items)}.")
    return [items[i] for i in rng.choice(len(items), count, replace=False)]


def _template(rng: np.random.Generator, words: Words, task: str) -> tuple[str, ...]:
    templates = words.templates[task]
    return templates[rng.integers(len(templates))]


def _answer(fact: str, value: str) -> str:
    """The value and what follows it in its fact: one character, so that an answer says where it ends."""
    end = fact.rindex(value) + len(value)
    return f" {value}{fact[end : end + 1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def passkey(rng: np.random.Generator, words: Words, difficulty: int) -> Episode:
    fact, question = _template(rng, words, "passkey")
    thing = words.things[rng.integers(len(words.things))]
    value = _number(rng, difficulty)
    text = fact.format(k=thing, v=value)
    return Episode((_capital(text),), (Question(_capital(question.format(k=thing)), _answer(text, value), 0),))


def multi_key(rng: np.random.Generator, words: Words, difficulty: int) -> Episode:
    fact, question = _template(rng, words, "multi_key")
    thing = words.things[rng.integers(len(words.things))]
    names = _pick(rng, words.names, difficulty)
    values = _numbers(rng, difficulty, int(rng.integers(3, 6)))
    facts = [_capital(fact.format(k=thing, n=name, v=value)) for name, value in zip(names, values, strict=True)]
    asked = [_capital(question.format(k=thing, n=name)) for name in names]
    return _each(facts, asked, values)


def associative(rng: np.random.Generator, words: Words, difficulty: int) -> Episode:
    fact, question = _template(rng, words, "associative")
    pairs = _pick(rng, words.nouns, 2 * difficulty)
    names, values = pairs[::2], pairs[1::2]
    facts = [fact.format(n=name, v=value) for name, value in zip(names, values, strict=True)]
    return _each(facts, [question.format(n=name) for name in names], values)


def copy(rng: np.random.Generator, words: Words, difficulty: int) -> Episode:
    before, again = _template(rng, words, "copy")
    span = [words.nouns[i] for i in rng.integers(len(words.nouns), size=difficulty + 3)]
    joint = "" if again.endswith('"') else " "
    asked = again + joint + " ".join(span[:3])
    return Episode((before.format(v=" ".join(span)),), (Question(asked, f" {' '.join(span[3:])}.", 0),))


def variable(rng: np.random.Generator, words: Words, difficulty: int) -> Episode:
    """One chain of hand-overs, asked at its end; another variable is there to be ignored."""
    first, hand_over, question = _template(rng, words, "variable")
    *names, stranger = _pick(rng, words.nouns, difficulty + 2)
    value, other = _numbers(rng, 2, 2)
    facts = [first.format(n=names[0], v=value)]
    facts += [hand_over.format(n=name, m=previous) for previous, name in itertools.pairwise(names)]
    at = int(rng.integers(len(facts) + 1))
    facts.insert(at, first.format(n=stranger, v=other))
    last = len(facts) - (2 if at == len(facts) - 1 else 1)
    return Episode(tuple(facts), (Question(question.format(n=names[-1]), f" {value}.", last),))


def _each(facts: list[str], questions: list[str], values: list[str]) -> Episode:
    """A question about every fact."""
    triples = enumerate(zip(questions, facts, values, strict=True))
    return Episode(tuple(facts), tuple(Question(q, _answer(fact, value), i) for i, (q, fact, value) in triples))


Task = Callable[[np.random.Generator, Words, int], Episode]
TASKS: Mapping[str, Task] = {
    "passkey": passkey,
    "multi_key": multi_key,
    "associative": associative,
    "copy": copy,
    "variable": variable,
}
#: The least difficulty of each task: one digit, name, pair or word; a variable may have its value at first hand.
EASIEST: Mapping[str, int] = {"passkey": 1, "multi_key": 1, "associative": 1, "copy": 1, "variable": 0}
#: What evaluations ask for unless told otherwise.
DIFFICULTY: Mapping[str, int] = {"passkey": 5, "multi_key": 4, "associative": 4, "copy": 6, "variable": 1}
