"""Wordings made up on the spot, for training: what a model must look up may be told in any words.

Trained on a handful of wordings, a model finds new words in those (90 % of pairs) and hardly anything in others (30 %).
"""

import dataclasses

import numpy as np

from experiments.tasks.words import HELD_OUT, TRAINING, Words

#: Between a name and its value; ">" is held out there, and opens sentences instead.
SYMBOLS = ("~", "@", "#", "%", "&", "*", "+", "|", "/", "<", "=", ":", "-", "--", "->", "=>", "::", "=", ",", "...")
OPENINGS = (">", "*", "#", "-", "+", "!", "(", "[", "<", "$")
ENDS = (".", ".", ".", ";", ",", "!", ")", "]", "|", "?")


def _of(words: Words) -> set[str]:
    return {
        word for templates in words.templates.values() for parts in templates for part in parts for word in part.split()
    }


#: Words of held-out wordings alone: a wording that is made up has none of them.
RESERVED = _of(HELD_OUT) - _of(TRAINING)


def invent(rng: np.random.Generator, words: Words, wordy_fraction: float = 0.5) -> Words:
    """The same words with one wording per task that was not used before, and names of any kind.

    Args:
      wordy_fraction: share of the joints between name and value that are one to four words; the others are symbols.
    """

    def some(least: int, most: int) -> str:
        picked = [words.nouns[i] for i in rng.integers(len(words.nouns), size=rng.integers(least, most + 1))]
        return " ".join(word for word in picked if word not in RESERVED)

    def one(choices: tuple[str, ...]) -> str:
        return choices[rng.integers(len(choices))]

    def joint() -> str:
        """Returns the text between a name and its value."""
        if rng.random() < wordy_fraction:
            return f" {some(1, 4)}".rstrip()
        return f" {one(SYMBOLS)}" if rng.random() < 0.7 else one(SYMBOLS)

    opening = f"{one(OPENINGS) if rng.random() < 0.5 else some(1, 2)} " if rng.random() < 0.4 else ""
    asked = f"{some(1, 4)}{one(('?', ':', '.'))} " if rng.random() < 0.4 else ""
    middle, other, end = joint(), joint(), one(ENDS)
    key = "{k}" + other + " {n}" if rng.random() < 0.5 else "{n}" + other + " {k}"
    key = key if rng.random() < 0.5 else "{n}"

    def templates_of(name: str) -> tuple[str, str]:
        return f"{opening}{name}{middle} {{v}}{end}", f"{asked}{opening}{name}{middle}"

    before = some(1, 3)
    nouns = rng.integers(len(words.nouns), size=16)
    return dataclasses.replace(
        words,
        names=words.names if rng.random() < 0.5 else tuple(dict.fromkeys(words.nouns[i].capitalize() for i in nouns)),
        templates={
            "passkey": (templates_of("{k}"),),
            "multi_key": (templates_of(key),),
            "associative": (templates_of("{n}"),),
            # These two end with a full stop.
            "variable": (
                (f"{opening}{{n}}{middle} {{v}}.", f"{opening}{{n}}{middle} {{m}}.", f"{asked}{opening}{{n}}{middle}"),
            ),
            "copy": ((f"{opening}{before}{middle} {{v}}.", f"{opening}{before}{middle}"),),
        },
    )
