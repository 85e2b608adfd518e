"""Stand-ins for the texts and questions of the papers, for a clone that has none: generated stories, in the same files.

They show that an entry runs, and what its caches do with a text that keeps coming back to a few people and things. They
say nothing about books.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import numpy as np

from experiments import results
from experiments.papers.settings import TEXTS
from experiments.tasks.multiple_choice import LABELS, TASKS, TRAINING
from experiments.tasks.story import story
from experiments.tasks.words import HELD_OUT
from kvjax.errors import ConfigError

CHARACTERS = 250_000  # of a text: more rows than any entry reads
ARTICLES, ARTICLE = 80, 8000  # of files of articles: their number, and characters of each
QUESTIONS = 240
ENDED = "ended"  # the file that says that all others are whole
#: Where the texts can be had.
SOURCES = (
    "the books are Project Gutenberg's (gutenberg.org: Great Expectations is ebook 1400, War and Peace 2600, Alice 11, "
    "Hamlet 1524), and docs/papers.md lists the files"
)


def make(folder: Path) -> Path:
    """Writes the stand-ins, unless they are there.

    Args:
      folder: that is written; each file has the name that the real one has in the folder of the texts.

    Raises:
      ConfigError: it cannot be written.
    """
    if (folder / ENDED).is_file():
        return folder
    try:
        for path, content in _files():
            results.make_folder((folder / path).parent)
            results.write(folder / path, content)
        results.write(folder / ENDED, "")
    except OSError as error:
        raise ConfigError(f"generated texts cannot be written to {folder}: {error.strerror or error}.") from None
    return folder


def _files() -> Iterator[tuple[str, str]]:
    """Yields the name and the content of each file."""
    for name, path in TEXTS.items():
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        if path.endswith(".json"):
            articles = [story(rng, HELD_OUT, ARTICLE).split(". ", 1) for _ in range(ARTICLES)]
            yield path, json.dumps([{"instruction": first, "output": rest} for first, rest in articles])
        elif path.endswith(".jsonl"):
            lines = (json.dumps({"article": story(rng, HELD_OUT, ARTICLE)}) for _ in range(ARTICLES))
            yield path, "\n".join(lines) + "\n"
        else:
            yield path, story(rng, HELD_OUT, CHARACTERS)
    for task, write in _TASKS.items():
        names = [TASKS[task][0], *([TRAINING[task][0]] if task in TRAINING else [])]
        for name in names:
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            asked = [_question(rng) for _ in range(QUESTIONS)]
            for file, content in write(name, asked).items():
                yield f"tasks/{Path(name).with_name(file)}", content


#: A beginning, what follows it, what does not, and whether the first choice is the one that follows.
_Question = tuple[str, str, str, bool]


def _question(rng: np.random.Generator) -> _Question:
    sentences = [each.strip().rstrip('.?!"') for each in story(rng, HELD_OUT, 600).split(". ")]
    other = story(rng, HELD_OUT, 200).split(". ")[0].rstrip('.?!"')
    return " and then ".join(sentences[:2]), sentences[2], other, bool(rng.integers(2))


def _choices(asked: _Question) -> tuple[str, str]:
    _, right, wrong, first = asked
    return (right, wrong) if first else (wrong, right)


def _copa(name: str, asked: list[_Question]) -> dict[str, str]:
    items = []
    for number, each in enumerate(asked, 1):
        one, other = map(escape, _choices(each))
        items.append(
            f'<item id="{number}" asks-for="effect" most-plausible-alternative="{1 if each[3] else 2}">'
            f"<p>{escape(each[0])}.</p><a1>{one}.</a1><a2>{other}.</a2></item>"
        )
    return {Path(name).name: "<copa-corpus>\n" + "\n".join(items) + "\n</copa-corpus>\n"}


def _openbookqa(name: str, asked: list[_Question]) -> dict[str, str]:
    lines = ["ID\tQuestion Stem\tChoices\tComplete Question\tAnswer Key"]
    for number, each in enumerate(asked):
        one, other = _choices(each)
        choices = f"(A) {one} (B) {other} (C) {each[0][::-1]} (D) {each[2][::-1]}"
        lines.append(f"{number}\t{each[0]}\t{choices}\t{each[0]} {choices}\t{'A' if each[3] else 'B'}")
    return {Path(name).name: "\n".join(lines) + "\n"}


def _piqa(name: str, asked: list[_Question]) -> dict[str, str]:
    rows = [{"goal": each[0], "sol1": _choices(each)[0], "sol2": _choices(each)[1]} for each in asked]
    labels = "".join(f"{int(not each[3])}\n" for each in asked)
    return {Path(name).name: "".join(json.dumps(row) + "\n" for row in rows), Path(LABELS["piqa"]).name: labels}


def _winogrande(name: str, asked: list[_Question]) -> dict[str, str]:
    rows = []
    for each in asked:
        one, other = _choices(each)
        text = f"sentence: {each[0]}, _ , so it was. Option1: {one} Option2: {other} Answer format: option1/option2"
        rows.append({"instruction": text, "answer": "option1" if each[3] else "option2"})
    return {Path(name).name: json.dumps(rows)}


def _rte(name: str, asked: list[_Question]) -> dict[str, str]:
    if name.endswith(".tsv"):
        lines = [f"{number}\t{each[0]}\t{_choices(each)[0]}\t{int(not each[3])}" for number, each in enumerate(asked)]
        return {Path(name).name: "index\tsentence1\tsentence2\tlabel\n" + "\n".join(lines) + "\n"}
    rows = [
        {"premise": each[0], "hypothesis": _choices(each)[0], "label": "entailment" if each[3] else "not_entailment"}
        for each in asked
    ]
    return {Path(name).name: "".join(json.dumps(row) + "\n" for row in rows)}


def _mathqa(name: str, asked: list[_Question]) -> dict[str, str]:
    rows = []
    for number, each in enumerate(asked):
        values = [number + 3, number + 7, 2 * number + 1, number + 5, number + 11]
        options = " , ".join(f"{letter} ) {value}" for letter, value in zip("abcde".upper(), values, strict=True))
        rows.append({"instruction": f"{each[0]}: {number} and 3 are? The options: {options}", "answer": "A"})
    return {Path(name).name: json.dumps(rows)}


_TASKS: dict[str, Callable[[str, list[_Question]], dict[str, str]]] = {
    "copa": _copa, "openbookqa": _openbookqa, "piqa": _piqa, "winogrande": _winogrande, "rte": _rte, "mathqa": _mathqa,
}  # fmt: skip
