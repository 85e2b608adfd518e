"""Six multiple-choice tasks, read from the files that their authors or users published, worded as lm_eval words them.

| task | file | wording |
|---|---|---|
| copa | the original XML | the premise, "because" or "therefore", and an alternative |
| openbookqa | the original TSV | the stem, and a choice |
| piqa | the original JSON lines, and labels beside them | "Question: ...\\nAnswer:", and a solution |
| winogrande | instructions of LLM-Adapters | each option in the blank; what follows it is scored |
| rte | SuperGLUE's JSON lines | the premise, the hypothesis "True or False?", and one of these |
| mathqa | instructions of LLM-Adapters | "Question: ...\\nAnswer:", and an option |

Examples of few-shot prompts are of copa's development set and of the training sets of openbookqa and rte (GLUE's TSV).
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from experiments.tasks import files
from experiments.tasks.files import Row, existing
from kvjax.errors import ConfigError

GAP = "\n\n"  # between the examples of a few-shot prompt, as in lm_eval


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

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """For each choice what is read, and what is scored after it."""
        several = len(self.contexts) > 1
        return [(each, self.choices[0]) for each in self.contexts] if several else [
            (self.contexts[0], each) for each in self.choices
        ]  # fmt: skip

    @property
    def example(self) -> str:
        """The question with its right answer."""
        return " ".join(self.pairs[self.label])

    def after(self, examples: str) -> "Question":
        """The question after examples."""
        return self._replace(contexts=tuple(examples + each for each in self.contexts))


def path_of(task: str, folder: Path, name: str | None = None) -> Path:
    """The file of a task, or another file beside it: in `folder`, or in its folder ``tasks``.

    Raises:
      ConfigError: an unknown task, or a file that is not there.
    """
    if task not in TASKS:
        raise ConfigError(f"unknown task {task!r}; known tasks: {', '.join(TASKS)}.")
    name = TASKS[task][0] if name is None else name
    return existing(task, folder / name, folder / "tasks" / name)


def files_of(task: str, folder: Path, shots: int = 0) -> list[Path]:
    """The files that `with_examples` reads.

    Raises:
      ConfigError: as `path_of`.
    """
    found = [path_of(task, folder)]
    if task in LABELS:
        found.append(existing(task, found[0].parent / LABELS[task]))
    if shots and task in TRAINING:
        found.append(path_of(task, folder, TRAINING[task][0]))
    return found


def read(task: str, folder: Path) -> list[Question]:
    """Reads the questions of a task.

    Args:
      task: one of `TASKS`.
      folder: holds a folder for each task.

    Raises:
      ConfigError: an unknown task, or a file that is not there or damaged.
    """
    path = path_of(task, folder)
    return list(TASKS[task][1](path))


def with_examples(task: str, folder: Path, shots: int) -> tuple[list[Question], list[Question]]:
    """Reads examples for few-shot prompts and the questions that are asked.

    Examples are the first ones of the task's training file; for tasks without one (see `TRAINING`), the first ones of
    the file itself, which are not asked then.

    Raises:
      ConfigError: as `read`, or fewer than `shots` examples.
    """
    questions = read(task, folder)
    if not questions:
        raise ConfigError(f"{path_of(task, folder)} contains no question.")
    if shots and task in TRAINING:
        name, reader = TRAINING[task]
        examples = list(reader(path_of(task, folder, name)))
    else:
        examples, questions = questions[:shots], questions[shots:]
    if len(examples) < shots or not questions:
        raise ConfigError(f"task {task}: its files have fewer than {shots} examples; lower shots.")
    return examples[:shots], questions


def _copa(file: Path) -> Iterator[Question]:
    text = files.read_text(file)
    try:
        items = ElementTree.fromstring(text.encode()).iter("item")
    except ElementTree.ParseError as error:
        raise ConfigError(f"{file}, line {error.position[0]}: not XML ({error}).") from None
    lines = [text[: each.start()].count("\n") + 1 for each in re.finditer(r"<item\b", text)]
    for item, line in zip(items, lines, strict=False):
        row = Row(dict(item.attrib) | {each.tag: (each.text or "").strip() for each in item}, file, line)
        with row.checked("a question of COPA"):
            word = {"cause": "because", "effect": "therefore"}[row.text("asks-for")]
            choices = tuple(each[:1].lower() + each[1:] for each in (row.text("a1"), row.text("a2")))
            label = "12".index(row.text("most-plausible-alternative"))
            yield Question((f"{row.text('p')[:-1]} {word}",), choices, label)


def _openbookqa(file: Path) -> Iterator[Question]:
    for row in files.tab_separated(file):
        with row.checked("a question of OpenBookQA"):
            texts = re.split(r"\s*\([A-D]\)\s*", row.text("Choices"))[1:]
            label = "ABCD"[: len(texts)].index(row.text("Answer Key").strip())
            yield Question((row.text("Question Stem"),), tuple(texts), label)


def _piqa(file: Path) -> Iterator[Question]:
    where = existing("piqa", file.parent / LABELS["piqa"])
    labels, rows = files.read_text(where).split(), list(files.json_lines(file))
    if len(labels) != len(rows):
        raise ConfigError(f"{file} has {len(rows)} questions, but {where} {len(labels)} labels.")
    for row, label in zip(rows, labels, strict=True):
        with row.checked("a question of PIQA, with a label of 0 or 1"):
            solutions = row.text("sol1"), row.text("sol2")
            yield Question((f"Question: {row.text('goal')}\nAnswer:",), solutions, "01".index(label))


def _winogrande(file: Path) -> Iterator[Question]:
    for row in files.json_list(file):
        with row.checked("a question of WinoGrande in LLM-Adapters' form"):
            form = r"sentence: (.*?)\s*Option1: (.*?) Option2: (.*?) Answer"
            sentence, *options = re.findall(form, row.text("instruction"), re.DOTALL)[0]
            before, after = sentence.split("_", 1)
            label = ["option1", "option2"].index(row.text("answer"))
            yield Question((before + options[0], before + options[1]), (after.strip(),), label)


def _rte(file: Path) -> Iterator[Question]:
    for row in files.json_lines(file):
        with row.checked("a question of RTE"):
            label = ["entailment", "not_entailment"].index(row.text("label"))
            yield _entailed(row.text("premise"), row.text("hypothesis"), label)


def _rte_glue(file: Path) -> Iterator[Question]:
    for row in files.tab_separated(file):
        with row.checked("a row of GLUE's RTE, with a label of 0 or 1"):
            yield _entailed(row.text("sentence1"), row.text("sentence2"), "01".index(row.text("label")))


def _entailed(premise: str, hypothesis: str, label: int) -> Question:
    return Question((f"{premise}\nQuestion: {hypothesis} True or False?\nAnswer:",), ("True", "False"), label)


def _mathqa(file: Path) -> Iterator[Question]:
    for row in files.json_list(file):
        with row.checked("a question of MathQA in LLM-Adapters' form"):
            question, options = row.text("instruction").split(" The options:", 1)
            # In some rows a list of strings, as Python prints it.
            texts = [each.strip(" ,'[]") for each in re.split(r"(?:^|,)[\s'\[]*[A-E] \)", options)[1:]]
            label = "ABCDE"[: len(texts)].index(row.text("answer"))
            yield Question((f"Question: {question}\nAnswer:",), tuple(texts), label)


Reader = Callable[[Path], Iterator[Question]]
TASKS: dict[str, tuple[str, Reader]] = {
    "copa": ("copa/copa-test.xml", _copa),
    "openbookqa": ("openbookqa/test.tsv", _openbookqa),
    "piqa": ("piqa/dev.jsonl", _piqa),
    "winogrande": ("winogrande/dev_llm_adapters.json", _winogrande),
    "rte": ("rte/val.jsonl", _rte),
    "mathqa": ("mathqa/test_llm_adapters.json", _mathqa),
}
#: Files of right answers, beside those of the questions.
LABELS = {"piqa": "dev-labels.lst"}
#: Where examples for few-shot prompts come from, if a training or development file was published.
TRAINING: dict[str, tuple[str, Reader]] = {
    "copa": ("copa/copa-dev.xml", _copa),
    "openbookqa": ("openbookqa/train.tsv", _openbookqa),
    "rte": ("rte/glue_train.tsv", _rte_glue),
}
