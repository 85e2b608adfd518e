"""The forms in which the same text is laid out in lines.

Books are wrapped at some 70 columns. A model that has seen no other form spends capacity on where lines end, and needs
half as many bits again for a text whose paragraphs are one line each, which is how most data sets hold theirs.
"""

import re
import textwrap
from collections.abc import Callable
from pathlib import PurePath

import numpy as np

from experiments.fields import Names
from kvjax.errors import ConfigError

_PARAGRAPHS = re.compile(r"\n[ \t]*\n\s*")
SHORT = (24, 48)  # columns of a short line, from and below


def _paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a text, each in one line."""
    return [" ".join(part.split()) for part in _PARAGRAPHS.split(text) if part.strip()]


def wrapped(text: str, rng: np.random.Generator) -> str:
    """The text as its file has it."""
    return text


def joined(text: str, rng: np.random.Generator) -> str:
    """One line per paragraph, with an empty line between two of them."""
    return "\n\n".join(_paragraphs(text))


def flat(text: str, rng: np.random.Generator) -> str:
    """One line: every run of white space is a space."""
    return " ".join(text.split())


def short(text: str, rng: np.random.Generator) -> str:
    """Short lines, of another width in each paragraph."""
    return "\n\n".join(textwrap.fill(part, int(rng.integers(*SHORT))) for part in _paragraphs(text))


LAYOUTS: dict[str, Callable[[str, np.random.Generator], str]] = {
    layout.__name__: layout for layout in (wrapped, joined, flat, short)
}


def check(names: Names) -> None:
    """Checks the names of layouts.

    Raises:
      ConfigError: there is none, one is unknown, or one occurs twice.
    """
    if not names or len({*names}) != len(names) or not {*names} <= LAYOUTS.keys():
        raise ConfigError(f"layouts={tuple(names)} must be one or more of {', '.join(LAYOUTS)}, each at most once.")


def named(file: str, layout: str) -> str:
    """Returns the name of a file's text in a layout: ``alice.txt``, ``alice.joined.txt``."""
    path = PurePath(file)
    return file if layout == "wrapped" else f"{path.stem}.{layout}{path.suffix}"
