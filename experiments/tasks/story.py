"""A story without end: filler for tasks, and a text for machines that have none."""

from collections.abc import Callable

import numpy as np

from experiments.tasks.words import Words

Encode = Callable[[str], list[int]]
#: A random generator and a number of tokens -> that many tokens of filler, which end where a sentence does.
Filler = Callable[[np.random.Generator, int], np.ndarray]

_PLACES = ("the harbour", "the old mill", "the orchard", "the market", "the tower", "the river", "the station")
_VERBS = ("carried", "lost", "found", "hid", "mended", "borrowed", "painted", "counted")
_WHENS = ("In the morning", "At noon", "Before the rain", "Later that day", "By evening", "On the way home")
_FRAMES = (
    "{when} {a} {verb} the {thing} near {place}.",
    "{a} asked {b} about the {thing}, but {b} had left it at {place}.",
    '"Where is the {thing}?" said {a}. "It is at {place}," said {b}.',
    "Nobody at {place} knew that {a} still had the {thing} which {b} {verb}.",
    "{when} {b} walked to {place}, and {a} followed with the {thing}.",
)


def story(rng: np.random.Generator, words: Words, characters: int) -> str:
    """At least `characters` characters about a few people and things that keep coming back."""
    names = rng.choice(words.names, 8, replace=False)
    things = rng.choice(words.nouns, 10, replace=False)
    sentences: list[str] = []
    size = 0
    while size < characters:
        a, b = rng.choice(names, 2, replace=False)
        sentence = str(rng.choice(_FRAMES)).format(
            a=a,
            b=b,
            thing=rng.choice(things),
            place=rng.choice(_PLACES),
            verb=rng.choice(_VERBS),
            when=rng.choice(_WHENS),
        )
        sentences.append(sentence)
        size += len(sentence) + 1
    return " ".join(sentences)


def filler(encode: Encode, words: Words) -> Filler:
    """Stories as filler for prompts: the last tokens of one, so that it ends where a sentence does."""

    def draw(rng: np.random.Generator, tokens: int) -> np.ndarray:
        ids: list[int] = []
        characters = 4 * tokens
        while len(ids) < tokens:
            characters *= 2
            ids = encode(" " + story(rng, words, characters))
        return np.asarray(ids[len(ids) - tokens :], np.int32)

    return draw
