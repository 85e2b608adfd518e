"""RULER's two tasks of questions about documents (arXiv:2404.06654), from the files of SQuAD and HotpotQA.

| task | file under `tasks.folder` | documents that hold the answer | documents that do not |
|---|---|---|---|
| qa_1 | ruler/squad.json: SQuAD 2.0, dev-v2.0.json | one paragraph | the same article's first, then any |
| qa_2 | ruler/hotpotqa.json: HotpotQA, hotpot_dev_distractor_v1.json | the question's ten | any |

As in RULER, questions come in the order of the file, and those that SQuAD calls impossible are left out. Unlike there,
each context has as many documents as fit. Questions whose own documents do not fit are skipped.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.tasks import files
from experiments.tasks.base import Asked, Setting
from experiments.tasks.files import Row
from experiments.tasks.jsonl import RULER_TOKENS, scored
from experiments.tasks.ruler import largest
from experiments.tasks.spec import TaskSpec, at_least_one, check_length, folder_of
from experiments.tasks.written import Item, Written
from kvjax.errors import ConfigError

REQUEST = "Answer the question based on the given documents. Only give me the answer and do not output any other words."


class Question(NamedTuple):
    """A question of a file.

    Attributes:
      text: what is asked.
      answers: any of which is right.
      own: the documents that a context cannot do without.
      near: documents that are added before any other.
    """

    text: str
    answers: tuple[str, ...]
    own: tuple[str, ...]
    near: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RulerQuestions(TaskSpec):
    """One of `SOURCES`.

    Attributes:
      task: its name.
      length: the most tokens of context and question.
      count: contexts.
      aware: whether the question is known when the context is compressed.
    """

    task: str
    length: int = 2048
    count: int = 16
    aware: bool = False

    def __post_init__(self) -> None:
        at_least_one(self.task, length=self.length, count=self.count)

    def files(self, folder: Path | None) -> list[Path]:
        path = folder_of(self.task, folder) / SOURCES[self.task][0]
        return [files.existing(self.task, path)]

    def make(self, setting: Setting) -> Asked:
        new_tokens = RULER_TOKENS["qa"]
        check_length(self.task, self.length, new_tokens, setting)
        file = self.files(setting.folder)[0]
        questions = list(SOURCES[self.task][1](file))
        if not questions:
            raise ConfigError(f"{file} contains no question.")
        documents = sorted({document for each in questions for document in (*each.own, *each.near)})
        wanted = min(self.count, setting.questions or self.count)
        items: list[Item] = []
        skipped = 0
        for number, each in enumerate(questions):
            if len(items) == wanted:
                break
            context = self._context(each, documents, np.random.default_rng([setting.seed, number]), setting)
            if context is None:
                skipped += 1
                continue
            items.append(Item(context, _asked(each), each.answers, new_tokens, {"metric": "contains_any"}))
        if not items:
            raise ConfigError(
                f"task {self.task}: no question of {file} fits in {self.length} tokens with its own documents; raise "
                "length."
            )
        about = f"{len(items)} contexts of up to {self.length} tokens; the share of answers that hold a right one"
        about += f"; {skipped} before the last are skipped, because their own documents do not fit" if skipped else ""
        return Written(about, tuple(items), scored, ("score",), aware=self.aware)

    def _context(
        self, question: Question, documents: list[str], rng: np.random.Generator, setting: Setting
    ) -> str | None:
        """A context with as many documents as fit, in a random order; None if its own do not fit."""
        encode = setting.tokenizer.encode
        left = self.length - len(encode(_asked(question), bos=False))
        taken = {*question.own, *question.near}
        near = [question.near[place] for place in rng.permutation(len(question.near))]
        # A document takes a token or more, so that no more than `left` of them are looked at.
        order = rng.permutation(len(documents))[: max(0, left) + len(taken)]
        added = [*near, *(documents[place] for place in order if documents[place] not in taken)]

        def fits(size: int) -> bool:
            return size <= 1 + len(added) and len(encode(_listed([*question.own, *added[: size - 1]]))) <= left

        size = largest(fits)
        if not size:
            return None
        chosen = [*question.own, *added[: size - 1]]
        return _listed([chosen[place] for place in rng.permutation(len(chosen))])


def _listed(documents: list[str]) -> str:
    numbered = "\n\n".join(f"Document {number}:\n{text}" for number, text in enumerate(documents, 1))
    return f"{REQUEST}\n\nThe following are given documents.\n\n{numbered}"


def _asked(question: Question) -> str:
    return f"\n\n{REQUEST}\n\nQuestion: {question.text} Answer:"


def _squad(file: Path) -> Iterator[Question]:
    """The questions of a file in SQuAD's form, without the impossible ones."""
    articles = files.json_object(file).get("data")
    if not isinstance(articles, list):
        raise ConfigError(f"{file}: 'data' should be a list of articles, as in SQuAD.")
    for number, article in enumerate(articles, 1):
        row = Row({"article": article}, file, number, "article")
        with row.checked("an article of SQuAD, {'title': ..., 'paragraphs': [{'context': ..., 'qas': [...]}, ...]}"):
            paragraphs = [row._replace(values=each) for each in article["paragraphs"]]
            every = dict.fromkeys(each.text("context") for each in paragraphs)
            for paragraph in paragraphs:
                own = paragraph.text("context")
                near = tuple(text for text in every if text != own)
                for values in paragraph.values["qas"]:
                    if values.get("is_impossible"):
                        continue
                    asked = row._replace(values=values)
                    answers = dict.fromkeys(str(each["text"]) for each in values["answers"])
                    if not answers:
                        raise ConfigError(f"{row.place}: {asked.text('question')!r} has no answer.")
                    yield Question(asked.text("question"), tuple(answers), (own,), near)


def _hotpot(file: Path) -> Iterator[Question]:
    """The questions of a file in HotpotQA's form."""
    for row in files.json_list(file):
        with row.checked("a question of HotpotQA, whose context is a list of titles and sentences"):
            own = dict.fromkeys(f"{title}\n{''.join(sentences)}" for title, sentences in row.values["context"])
            yield Question(row.text("question"), row.texts("answer"), tuple(own), ())


#: Name -> its file, and what reads it.
SOURCES = {"qa_1": ("ruler/squad.json", _squad), "qa_2": ("ruler/hotpotqa.json", _hotpot)}
