"""Scores of single answers from 0 to 1: whether they hold, equal or resemble what is right."""

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from experiments.tasks import ngrams
from kvjax.errors import ConfigError
from kvjax.typing import Json

Metric = Callable[[str, Sequence[str], Mapping[str, Json]], float]  # of a text, its references and what else is known
_BOX = r"\boxed{"


def contains_all(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """The share of references that a text holds, in whatever case: RULER's string_match_all."""
    return sum(each.lower() in text.lower() for each in references) / len(references)


def contains_any(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """Whether a text holds one of its references, in whatever case: RULER's string_match_part."""
    return float(any(each.lower() in text.lower() for each in references))


def exact(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """Whether a text is one of its references, but for spaces around it."""
    return float(text.strip() in [each.strip() for each in references])


def word_f1(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """The best F1 of a text's words, without case, punctuation and articles (SQuAD, arXiv:1606.05250)."""
    return max(_f1(_words(text), _words(each)) for each in references)


def rouge_l(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """The best ROUGE-L F measure, by rouge_score without stemming."""
    return max(ngrams.text_scores([text], [each])["ROUGE-L"] for each in references) / 100


def classification(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """One over the number of classes that a text names, if the right one is among them; LongBench's.

    A class whose name is part of the right one's does not count as named.
    """
    classes = about.get("all_classes") or references

    def score(right: str) -> float:
        named = [each for each in classes if each in text and (each == right or each not in right)]
        return 1 / len(named) if right in named else 0.0

    return max(map(score, references))


def count(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """The share of the numbers in a text that are the number in a reference; LongBench's."""
    found = re.findall(r"\d+", text)
    right = {number for each in references for number in re.findall(r"\d+", each)[:1]}
    return sum(each in right for each in found) / len(found) if found else 0.0


def similarity(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """The best similarity of a text's first line of code, without comments, to a reference: difflib's ratio."""
    code = [line for line in text.lstrip("\n").split("\n") if not any(mark in line for mark in ("`", "#", "//"))]
    line = code[0] if code else ""
    # Rounded to percent, as LongBench's.
    return max(round(100 * difflib.SequenceMatcher(None, line, each).ratio()) for each in references) / 100


def letters(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """Whether a text gives the letters of a reference, ``B``, ``(B) because ...`` or ``AC``, as in L-Eval's exams.

    The first capital letters from A to H that stand alone in the text count, in any order. A reference that does not
    begin with letters, such as ``True [fact: False]``, is what the text has to begin with, up to the bracket.
    """

    def right(reference: str) -> bool:
        if (own := re.match(r"\s*\(?([A-H]+)\)?(?!\w)", reference)) is None:
            return text.strip().lower().startswith(reference.split("[")[0].strip().lower())
        found = re.search(r"\b[A-H]+\b", text)
        return found is not None and sorted(found[0]) == sorted(own[1])

    return float(any(map(right, references)))


def boxed(text: str, references: Sequence[str], about: Mapping[str, Json]) -> float:
    """Whether the last ``\\boxed{...}`` of a text holds a reference, which may be in a box itself."""
    answer = in_box(text)
    if answer is None:
        return 0.0
    return float(any(_number(answer) == _number(in_box(each) or each) for each in references))


def in_box(text: str) -> str | None:
    r"""Returns the contents of the last ``\boxed{...}`` of a text; None if there is none, or it does not end."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 1
    for place in range(start + len(_BOX), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[start + len(_BOX) : place]
    return None


def _number(text: str) -> Fraction | str:
    """A number, if a text in LaTeX is one; otherwise the text without spaces and marks that change no meaning."""
    for mark in (r"\left", r"\right", r"\!", r"\,", r"\;", r"\ ", "$", " ", r"\%", "%"):
        text = text.replace(mark, "")
    text = re.sub(r"\\[dt]frac", r"\\frac", re.sub(r"\\(?:text|mathrm|mbox)\{([^{}]*)\}", r"\1", text)).rstrip(".")
    plain = re.sub(r"\\frac\{(-?\d+)\}\{(\d+)\}", r"\1/\2", re.sub(r"(?<=\d),(?=\d{3})", "", text))
    try:
        return Fraction(plain)
    except (ValueError, ZeroDivisionError):
        return text


def _words(text: str) -> list[str]:
    kept = "".join(each for each in text.lower() if each not in string.punctuation)
    return [word for word in kept.split() if word not in ("a", "an", "the")]


def _f1(words: Sequence[str], others: Sequence[str]) -> float:
    common = sum((Counter(words) & Counter(others)).values())
    return 2 * common / (len(words) + len(others)) if common else 0.0


METRICS: Mapping[str, Metric] = {
    "contains_all": contains_all, "contains_any": contains_any, "exact": exact, "word_f1": word_f1,
    "rouge_l": rouge_l, "classification": classification, "count": count, "similarity": similarity,
    "letters": letters, "boxed": boxed,
}  # fmt: skip
#: Metrics of whether a text holds, or begins with, a reference.
HELD = ("contains_all", "contains_any", "letters")


def by_name(name: str) -> Metric:
    """A metric.

    Raises:
      ConfigError: there is none of this name.
    """
    if name not in METRICS:
        raise ConfigError(f"metric={name!r} is unknown; known metrics: {', '.join(METRICS)}.")
    return METRICS[name]


def check(place: str, metric: str, references: Sequence[str], about: Mapping[str, Json]) -> None:
    """Refuses a question whose score would say nothing.

    Raises:
      ConfigError: no reference has text, or one that an empty answer holds has none; or classes that are not named.
    """
    blank = [not each.strip() for each in references]
    if all(blank) or (any(blank) and metric in HELD):
        raise ConfigError(f"{place}: an answer is empty, which every output would match; got {references}.")
    classes = about.get("all_classes")
    if metric == "classification" and not (
        classes and isinstance(classes, list) and all(isinstance(each, str) for each in classes)
    ):
        raise ConfigError(f"{place}: 'all_classes' should be the list of classes, but is {classes!r:.80}.")
