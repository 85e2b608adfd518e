"""Six multiple-choice tasks, read from the files that their authors or users published, worded as lm_eval words them.

| task | file | wording |
|---|---|---|
| copa | the original XML | the premise, "because" or "therefore", and an alternative |
| openbookqa | the original TSV | the stem, and a choice |
| piqa | the original JSON lines, and labels beside them | "Question: ...\\nAnswer:", and a solution |
| winogrande | instructions of LLM-Adapters | each option in the blank; what follows it is scored |
| rte | SuperGLUE's JSON lines | the premise, the hypothesis "True or False?", and one of these |
| mathqa | instructions of LLM-Adapters | "Question: ...\\nAnswer:", and an option |
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from kvjax.errors import ConfigError


class Question(NamedTuple):
    """A question.

    Attributes:
      contexts: one, or one for each choice.
      choices: what follows a context, which a space separates; one if contexts differ.
      label: the index of the right one.
    """

    contexts: tuple[str, ...]
    choices: tuple[str, ...]
    label: int


def read(task: str, folder: Path) -> list[Question]:
    """Reads the questions of a task.

    Args:
      task: one of `TASKS`.
      folder: holds a folder for each task.

    Raises:
      ConfigError: an unknown task, or a file that is not there.
    """
    if task not in TASKS:
        raise ConfigError(f"unknown task {task!r}; known tasks: {', '.join(TASKS)}.")
    file, reader = TASKS[task]
    if not (folder / file).is_file():
        raise ConfigError(f"task {task}: there is no file {folder / file}.")
    return list(reader(folder / file))


def _copa(file: Path) -> Iterator[Question]:
    for item in ElementTree.parse(file).getroot().iter("item"):
        word = {"cause": "because", "effect": "therefore"}[item.attrib["asks-for"]]
        premise, *both = (str(item.findtext(name)).strip() for name in ("p", "a1", "a2"))
        choices = tuple(each[:1].lower() + each[1:] for each in both)
        yield Question((f"{premise[:-1]} {word}",), choices, int(item.attrib["most-plausible-alternative"]) - 1)


def _openbookqa(file: Path) -> Iterator[Question]:
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        _, stem, choices, _, answer = line.split("\t")
        texts = re.split(r"\s*\([A-D]\)\s*", choices)[1:]
        yield Question((stem,), tuple(texts), "ABCD".index(answer.strip()))


def _piqa(file: Path) -> Iterator[Question]:
    labels = (file.parent / "dev-labels.lst").read_text().split()
    for line, label in zip(file.read_text(encoding="utf-8").splitlines(), labels, strict=True):
        row = json.loads(line)
        yield Question((f"Question: {row['goal']}\nAnswer:",), (row["sol1"], row["sol2"]), int(label))


def _winogrande(file: Path) -> Iterator[Question]:
    for row in json.loads(file.read_text(encoding="utf-8")):
        found = re.search(r"sentence: (.*?)\s*Option1: (.*?) Option2: (.*?) Answer", row["instruction"], re.DOTALL)
        if found is None or "_" not in found[1]:
            raise ConfigError(f"{file}: a row is not of the form that is known: {row['instruction'][:80]!r}.")
        before, after = found[1].split("_", 1)
        yield Question((before + found[2], before + found[3]), (after.strip(),), int(row["answer"][-1]) - 1)


def _rte(file: Path) -> Iterator[Question]:
    for line in file.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = f"{row['premise']}\nQuestion: {row['hypothesis']} True or False?\nAnswer:"
        yield Question((text,), ("True", "False"), ["entailment", "not_entailment"].index(row["label"]))


def _mathqa(file: Path) -> Iterator[Question]:
    for row in json.loads(file.read_text(encoding="utf-8")):
        question, options = row["instruction"].split(" The options:", 1)
        # In some rows a list of strings, as Python prints it.
        texts = [each.strip(" ,'[]") for each in re.split(r"(?:^|,)[\s'\[]*[A-E] \)", options)[1:]]
        yield Question((f"Question: {question}\nAnswer:",), tuple(texts), "ABCDE".index(row["answer"]))


TASKS: dict[str, tuple[str, Callable[[Path], Iterator[Question]]]] = {
    "copa": ("copa/copa-test.xml", _copa),
    "openbookqa": ("openbookqa/test.tsv", _openbookqa),
    "piqa": ("piqa/dev.jsonl", _piqa),
    "winogrande": ("winogrande/dev_llm_adapters.json", _winogrande),
    "rte": ("rte/val.jsonl", _rte),
    "mathqa": ("mathqa/test_llm_adapters.json", _mathqa),
}
