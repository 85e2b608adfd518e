"""SCBench's released files (arXiv:2412.10319), a JSON-lines file for each of its twelve tasks, in its modes.

A record has ``context`` and ``multi_turns``, a list of questions: ``input``, ``answer``, and where the task needs it
``options``, ``name`` and ``task``. Texts around them are those of the released code (microsoft/MInference, scbench/),
except that all modes ask with the same words: `scbench_mf` names what is asked for after the numbers and not before
them, and `scbench_choice_eng` asks for the letter in the first question too. There is no chat template.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from experiments.tasks import files
from experiments.tasks.base import Asked, Setting
from experiments.tasks.conversations import APPEND, MULTI_TURN, Conversation, Conversations, Mode, Turn
from experiments.tasks.files import Row, existing
from experiments.tasks.scbench_scores import SCORES, check
from experiments.tasks.spec import TaskSpec, at_least_one, folder_of
from experiments.tasks.written import middle
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.errors import ConfigError

SUMMARY, PASSKEY, REPOQA, KV = "scbench_summary", "scbench_passkey", "scbench_repoqa", "scbench_kv"
CHOICE, FIND = "scbench_choice_eng", "scbench_mf"
LEAST_CONTEXT = 16  # tokens of a context that is cut


class Form(NamedTuple):
    """How a task is asked.

    Attributes:
      new_tokens: the most tokens of an answer, by kind of question.
      before: what stands before a context.
      question: what is asked; ``{input}`` stands for the question of the file.
    """

    new_tokens: Mapping[str, int]
    before: str = ""
    question: str = "\n\n{input}"


_BOOK = "Read the book and answer the question."
TASKS: Mapping[str, Form] = {
    "scbench_kv": Form({KV: 150}, "Extract the value corresponding to the specified key in the JSON object below.\n\n"),
    "scbench_prefix_suffix": Form({"scbench_prefix_suffix": 150}),
    "scbench_vt": Form({"scbench_vt": 30}),
    "scbench_repoqa": Form(
        {REPOQA: 1024}, "Based on the function description and code context, please retrieve and repeat the exact "
        "described function from the code context in a code block wrapped by ```:\n\n"
    ),
    "scbench_qa_eng": Form(
        {"scbench_qa_eng": 40}, f"{_BOOK} Be very concise in your answer.\n\n", "\n\nQuestion: {input}\nAnswer:"
    ),
    "scbench_qa_chn": Form({"scbench_qa_chn": 40}, "阅读以下书籍然后回答问题。\n\n", "\n\n问题：{input}\n答案："),
    "scbench_choice_eng": Form(
        {CHOICE: 40}, f"{_BOOK}\n\n", "\n\nQuestion: {input}\n{options}\n\nThe letter of the correct answer is"
    ),
    "scbench_many_shot": Form({"scbench_many_shot": 10}),
    "scbench_summary": Form({SUMMARY: 200}),
    "scbench_mf": Form({FIND: 5}, question="\n\nWhat is {target}?\n\n{input}"),
    "scbench_summary_with_needles": Form({SUMMARY: 800, PASSKEY: 15}),
    "scbench_repoqa_and_kv": Form({REPOQA: 1024, KV: 80}),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SCBench(TaskSpec):
    """One of `TASKS`, from a file of its name.

    Attributes:
      task: its name.
      mode: ``multi_turn``, ``multi_request`` or ``single``; see `experiments.tasks.conversations`.
      questions: about each context, the first ones; None = all.
      own_answers: see `Mode`.
      turns: see `Mode`.
      new_tokens: the most tokens of an answer; None = as SCBench has it.
    """

    task: str
    mode: str = MULTI_TURN
    questions: int | None = None
    own_answers: bool = False
    turns: str = APPEND
    new_tokens: int | None = None

    def __post_init__(self) -> None:
        at_least_one(self.task, questions=self.questions, new_tokens=self.new_tokens)
        self._asked_as()

    def _asked_as(self) -> Mode:
        return Mode(self.task, self.mode, self.own_answers, self.turns)

    def files(self, folder: Path | None) -> list[Path]:
        root, name = folder_of(self.task, folder), f"{self.task}.jsonl"
        return [existing(self.task, root / "scbench" / name, root / name)]

    def make(self, setting: Setting) -> Asked:
        file = self.files(setting.folder)[0]
        records = [Record.read(row, self.task) for row in files.json_lines(file)]
        if not records:
            raise ConfigError(f"{file} contains no question.")
        check()
        functions = _functions(records)
        made, cut = [], 0
        for record in records[: setting.questions]:
            turns = tuple(
                self._turn(each, functions.get(record.repo, {}), setting.tokenizer)
                for each in record.questions[: self.questions]
            )
            ids = tuple(setting.tokenizer.encode(TASKS[self.task].before + record.context))
            room = setting.max_length - Conversation((), turns).following
            if room < LEAST_CONTEXT:
                raise ConfigError(
                    f"task {self.task}: {len(turns)} questions and answers leave {room} of the model's "
                    f"{setting.max_length} tokens for a context; lower questions or new_tokens."
                )
            cut += len(ids) > room
            made.append(Conversation(tuple(middle(ids, room)), turns))
        about = f"{len(made)} contexts with {sum(len(each.turns) for each in made)} questions, {self.mode}"
        about += f"; {cut} contexts do not fit and are cut in their middle" if cut else ""
        kinds = tuple(TASKS[self.task].new_tokens)
        return Conversations(about, tuple(made), scored, self._asked_as(), kinds if len(kinds) > 1 else ())

    def _turn(self, question: "Question", functions: Mapping[str, str], tokenizer: Tokenizer) -> Turn:
        space = "" if question.text[-1:].isspace() or question.text.endswith("：") else " "
        return Turn(
            tuple(tokenizer.encode(question.text, bos=False)),
            tuple(tokenizer.encode(space + question.answer, bos=False)),
            question.references,
            self.new_tokens or TASKS[self.task].new_tokens[question.kind],
            about={"part": question.kind, "name": question.name, "functions": functions},
        )


class Question(NamedTuple):
    """Attributes:
    kind: the task whose score and length of answers it has.
    text: from what separates it from the text before to where the answer begins.
    answer: as later turns see it.
    references: right answers.
    name: of the function that is asked for; empty if none is.
    """

    kind: str
    text: str
    answer: str
    references: tuple[str, ...]
    name: str


class Record(NamedTuple):
    """Attributes:
    context: the text that questions are about.
    repo: the repository that the context is from; empty if it is from none.
    questions: in the order of the file.
    """

    context: str
    repo: str
    questions: tuple[Question, ...]

    @classmethod
    def read(cls, row: Row, task: str) -> "Record":
        """Reads a record of a task's file.

        Raises:
          ConfigError: it has another form.
        """
        field = "context" if "context" in row.values else "input"
        value = row.value(field)
        # Numbers of scbench_mf.
        context = str(value) if isinstance(value, list) else row.text(field)
        turns = row.value("multi_turns")
        if not isinstance(turns, list) or not turns or not all(isinstance(each, dict) for each in turns):
            raise ConfigError(f"{row.place}: 'multi_turns' should be a list of questions, but is {turns!r:.80}.")
        with row.checked(f"a record of {task}"):
            questions = tuple(_question(row._replace(values=each), task) for each in turns)
            repo = row.text("repo") if any(each.kind == REPOQA for each in questions) else ""
        return cls(context, repo, questions)


def _question(turn: Row, task: str) -> Question:
    kinds = TASKS[task].new_tokens
    kind = task if task in kinds else turn.text("task")
    if kind not in kinds:
        raise ConfigError(f"{turn.place}: 'task' should be one of {', '.join(kinds)}, but is {kind!r}.")
    references = turn.texts("answer")
    if not all(each.strip() for each in references):
        raise ConfigError(f"{turn.place}: an answer is empty, which every output would match.")
    asked, more = turn.text("input"), {}
    answer = " ".join(references)
    if task == CHOICE:
        options = turn.texts("options")
        if len(options) != 4 or answer not in options:
            raise ConfigError(f"{turn.place}: 'options' should be four texts, one of them the answer {answer!r:.80}.")
        more["options"] = "\n".join(f"{letter}. {option}" for letter, option in zip("ABCD", options, strict=True))
        references = (answer, "ABCD"[options.index(answer)])
    if task == FIND:
        found = re.search("The (.+) is", asked)
        if found is None:
            raise ConfigError(f"{turn.place}: 'input' should read 'The ... is', but is {asked!r:.80}.")
        more["target"] = f"the {found[1]}".lower()
    if kind in (FIND, PASSKEY):
        float(references[0])
    text = TASKS[task].question.format(input=asked, **more)
    return Question(kind, text, answer, references, turn.text("name") if kind == REPOQA else "")


def _functions(records: Iterable[Record]) -> dict[str, dict[str, str]]:
    """Returns the functions that are asked for in each repository, by name."""
    found: dict[str, dict[str, str]] = {}
    for record in records:
        for each in record.questions:
            if each.kind == REPOQA:
                found.setdefault(record.repo, {})[each.name] = each.references[0]
    return found


def scored(text: str, turn: Turn) -> float:
    """The score of one answer, by its kind."""
    return SCORES[turn.about["part"]](text, turn)
