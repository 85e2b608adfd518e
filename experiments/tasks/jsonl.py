"""Questions about contexts from JSON lines of any of the forms in which suites publish them.

| form | fields | by default scored by |
|---|---|---|
| kvpress | context, question, answer; answer_prefix, max_new_tokens, task | the metric of its task, or `contains_any` |
| LongBench | context, input, answers, dataset; all_classes | the metric of its dataset |
| RULER | input, outputs; answer_prefix | `contains_all` |
| L-Eval | input, instructions, outputs; evaluation | `letters` for exams, `word_f1` for f1, otherwise `rouge_l` |
| SCBench | context, multi_turns of input and answer, each asked as if it were the first | `contains_any` |
| InfiniteBench | context, input, answer | `contains_any` |
| EasyKV's passkeys | input, target | `contains_any` |
| AIME, MATH | problem, answer | `boxed` |

A context is processed once for all of its questions, unless `aware` puts each question into its context.
"""

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.tasks import files, matching, ngrams
from experiments.tasks.base import Answer, Asked, Setting
from experiments.tasks.files import Row, existing
from experiments.tasks.spec import TaskSpec, at_least_one, room, too_long
from experiments.tasks.written import Item, Written
from kvjax.errors import ConfigError

NEW_TOKENS = 64  # of an answer, unless its record or its suite says otherwise
#: LongBench's English datasets, and the metric of each.
LONGBENCH = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique"), "word_f1"),
    "triviaqa": "word_f1",
    **dict.fromkeys(("gov_report", "qmsum", "multi_news", "samsum"), "rouge_l"),
    "trec": "classification", "passage_retrieval_en": "count", "passage_count": "count",
    "lcc": "similarity", "repobench-p": "similarity",
}  # fmt: skip
FIRST_LINE = {"trec", "triviaqa", "samsum"}  # datasets of which the first line of an answer counts
#: New tokens of LongBench's datasets, where they are not `NEW_TOKENS`.
LONGBENCH_TOKENS = {
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), 512),
    **dict.fromkeys(("narrativeqa", "qasper", "samsum"), 128),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa", "passage_count", "passage_retrieval_en"), 32),
}  # fmt: skip
#: New tokens of RULER's tasks.
RULER_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
PASSKEY = "\nWhat is the pass key? The pass key is"
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}.\n"
THINKING = 2048  # new tokens of an answer that reasons


@dataclasses.dataclass(frozen=True)
class JsonLines(TaskSpec):
    """A file of questions.

    Attributes:
      file: JSON lines.
      aware: whether a question is known when its context is compressed; problems without a context always are.
      metric: of `matching.METRICS`; None = as the form says.
      new_tokens: the most tokens of an answer; None = as the record or its suite says.
      prompts: of LongBench, its own dataset2prompt.json; None = the one beside `file` or in ``config`` beside it, or a
        plain form of ours.
    """

    file: str
    aware: bool = False
    metric: str | None = None
    new_tokens: int | None = None
    prompts: str | None = None

    def __post_init__(self) -> None:
        if self.metric is not None:
            matching.by_name(self.metric)
        at_least_one(self.file, new_tokens=self.new_tokens)

    def files(self, folder: Path | None) -> list[Path]:
        inside = [] if folder is None else [folder / self.file]
        found = [existing(self.file, Path(self.file), *inside)]
        path = self._prompts(found[0])
        return found if path is None else [*found, path]

    def make(self, setting: Setting) -> Asked:
        file = self.files(setting.folder)[0]
        templates = self._templates(file)
        items = [item for row in files.json_lines(file) for item in self._items(row, templates)]
        if not items:
            raise ConfigError(f"{file} contains no question.")
        items = items[: setting.questions]
        contexts = len({item.context for item in items if item.question})
        kinds = Counter(item.about["metric"] for item in items)
        if "rouge_l" in kinds:
            ngrams.check()
        left = room(self.file, max(item.new_tokens for item in items), setting)
        cut = sum(too_long(item.context + item.question, left, setting) for item in items)
        about = f"{len(items)} questions" + (f" about {contexts} contexts" if contexts and not self.aware else "")
        about += f"; scored by {', '.join(kinds)}"
        about += f"; {cut} contexts do not fit and are cut in their middle" if cut else ""
        if later := sum("turn" in item.about for item in items):
            turns = f"{later} are later turns of a conversation, and are asked as if each were the first"
            advice = "the tasks scbench_kv(mode=multi_turn) and so on ask SCBench's files as conversations"
            warnings.warn(f"{self.file}: {turns}: no turn sees the ones before it; {advice}.", stacklevel=2)
            about += f"; {turns}"
        thinks = "boxed" in kinds
        return Written(
            about, tuple(items), scored, ("score", "tokens", "ended") if thinks else ("score",), aware=self.aware
        )  # fmt: skip

    def _items(self, row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
        form = next((each for fields, each in FORMS.items() if row.values.keys() >= set(fields)), None)
        if form is None:
            known = "; ".join(", ".join(fields) for fields in FORMS)
            raise ConfigError(f"{row.place}: unknown fields {', '.join(row.values)}; known formats: {known}.")
        with row.checked("a record of its form"):
            for item in form(row, templates):
                about = dict(item.about) | ({"metric": self.metric} if self.metric else {})
                new_tokens = self.new_tokens or item.new_tokens
                matching.check(row.place, about["metric"], item.references, about)
                yield item._replace(about=about, new_tokens=new_tokens)

    def _prompts(self, file: Path) -> Path | None:
        """The file of LongBench's prompts, if there is one."""
        if self.prompts:
            return existing(self.file, Path(self.prompts))
        name = "dataset2prompt.json"
        places = (file.parent / name, file.parent / "config" / name, file.parent.parent / "config" / name)
        return next((each for each in places if each.is_file()), None)

    def _templates(self, file: Path) -> Mapping[str, str]:
        path = self._prompts(file)
        found = {} if path is None else files.json_object(path)
        for dataset, template in found.items():
            if not isinstance(template, str) or "{context}" not in template:
                raise ConfigError(f"{path}: the prompt of {dataset!r} has no {{context}}.")
        return found


def scored(items: Sequence[Item], answers: Sequence[Answer]) -> dict[str, float]:
    """The mean score, in percent; of problems with boxed answers also the share of answers with a box."""
    metrics = [matching.METRICS[item.about["metric"]] for item in items]
    texts = [
        each["text"].lstrip("\n").split("\n")[0] if item.about.get("dataset") in FIRST_LINE else each["text"]
        for each, item in zip(answers, items, strict=True)
    ]
    values = [
        metric(text, item.references, item.about) for metric, text, item in zip(metrics, texts, items, strict=True)
    ]
    found = {"score": 100 * float(np.mean(values))}
    if matching.boxed in metrics:
        found["answered"] = 100 * float(np.mean([matching.in_box(text) is not None for text in texts]))
    return found


def _kvpress(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    task = str(row.values.get("task") or "")
    metric = LONGBENCH.get(task.removesuffix("-e")) or ("contains_all" if _ruler(task) else "contains_any")
    question = row.text("question") + str(row.values.get("answer_prefix") or "")
    new_tokens = row.whole("max_new_tokens", NEW_TOKENS)
    about = {"metric": metric, "dataset": task, "all_classes": row.values.get("all_classes")}
    answers = row.texts("answers" if "answers" in row.values else "answer")
    yield Item(row.text("context"), question, answers, new_tokens, about)


def _longbench(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    dataset = row.text("dataset").removesuffix("_e")
    if dataset not in LONGBENCH:
        raise ConfigError(
            f"{row.place}: dataset {dataset!r} is not one of LongBench's English ones, {', '.join(LONGBENCH)}; others "
            "need a word segmenter, which kvjax does not include."
        )
    metric, asked = LONGBENCH[dataset], row.text("input")
    if dataset in templates:
        before, after = templates[dataset].split("{context}", 1)
        after = after.replace("{input}", asked)
    elif metric == "rouge_l" and dataset != "samsum":
        before, after = "", f"\n\n{asked}\nSummary:".replace("\n\n\n", "\n\n")
    elif metric == "similarity":
        before, after = "", asked
    else:
        before, after = "", f"\n\nQuestion: {asked}\nAnswer:" if metric == "word_f1" else f"\n{asked}\nAnswer:"
    about = {"metric": metric, "dataset": dataset, "all_classes": row.values.get("all_classes")}
    new_tokens = LONGBENCH_TOKENS.get(dataset, NEW_TOKENS)
    yield Item(before + row.text("context"), after, row.texts("answers"), new_tokens, about)


def _ruler_row(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    # The last line asks, and may hold the beginning of the answer.
    context, line, question = row.text("input").rpartition("\n")
    task = _ruler(row.file.stem) or _ruler(row.file.parent.name) or "niah"
    prefix = str(row.values.get("answer_prefix") or "")
    metric = "contains_any" if task == "qa" else "contains_all"
    yield Item(context, f"{line}{question}{prefix}", row.texts("outputs"), RULER_TOKENS[task], {"metric": metric})


def _ruler(name: str) -> str | None:
    """Which of RULER's tasks a name begins with."""
    return next((each for each in RULER_TOKENS if name.split("_")[0] == each), None)


def _leval(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    kind = str(row.values.get("evaluation") or "")
    metric = {"exam": "letters", "f1": "word_f1"}.get(kind, "rouge_l")
    new_tokens = {"letters": 8, "word_f1": NEW_TOKENS}.get(metric, 256)
    for asked, output in zip(row.texts("instructions"), row.texts("outputs"), strict=True):
        yield Item(row.text("input"), f"\n\nQuestion: {asked}\nAnswer:", (output,), new_tokens, {"metric": metric})


def _scbench(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    turns = row.value("multi_turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(each, dict) for each in turns):
        raise ConfigError(f"{row.place}: 'multi_turns' should be a list of questions, but is {turns!r:.80}.")
    for number, values in enumerate(turns):
        turn = row._replace(values=values)
        about = {"metric": "contains_any"} | ({"turn": number} if number else {})
        yield Item(row.text("context"), turn.text("input"), turn.texts("answer"), NEW_TOKENS, about)


def _infinite(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    question = f"\n\nQuestion: {row.text('input')}\nAnswer:"
    yield Item(row.text("context"), question, row.texts("answer"), NEW_TOKENS, {"metric": "contains_any"})


def _passkey(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    yield Item(row.text("input"), PASSKEY, row.texts("target"), 8, {"metric": "contains_any"})


def _problem(row: Row, templates: Mapping[str, str]) -> Iterator[Item]:
    yield Item(row.text("problem") + BOXED, "", row.texts("answer"), THINKING, {"metric": "boxed"})


Form = Callable[[Row, Mapping[str, str]], Iterator[Item]]
#: The fields that a form is known by, the more particular forms first.
FORMS: dict[tuple[str, ...], Form] = {
    ("context", "multi_turns"): _scbench,
    ("context", "input", "answers", "dataset"): _longbench,
    ("context", "question", "answer"): _kvpress,
    ("context", "question", "answers"): _kvpress,
    ("context", "input", "answer"): _infinite,
    ("input", "instructions", "outputs"): _leval,
    ("input", "outputs"): _ruler_row,
    ("input", "target"): _passkey,
    ("problem", "answer"): _problem,
}
