"""SCBench's files: the texts that are asked, the scores of each task, and what is said of records of another form."""

import json

import pytest

from experiments.tasks import registry, scbench
from experiments.tasks.base import Setting
from experiments.tasks.conversations import Turn
from experiments.tasks.scbench_scores import SCORES
from kvjax.errors import ConfigError
from tests.experiments.texts import Characters

OPTIONS = ["red", "green", "blue", "none"]
CODE = {
    name: f"def {name}(a, b):\n    total = a {sign} b\n    return total" for name, sign in (("add", "+"), ("sub", "-"))
}
NAMED = {"input": "It adds.", "answer": CODE["add"], "name": "add"}
RECORDS = {
    "scbench_kv": {
        "context": "{}", "multi_turns": [{"input": "Key a:", "answer": "x1"}, {"input": "b:\n", "answer": "y"}],
    },
    "scbench_prefix_suffix": {"context": "C", "multi_turns": [{"input": "I", "answer": "A"}]},
    "scbench_vt": {"input": "C", "multi_turns": [{"input": "I", "answer": ["A", "B"]}]},
    "scbench_repoqa": {"context": "C", "repo": "r", "lang": "python", "multi_turns": [NAMED]},
    "scbench_qa_eng": {"context": "C", "multi_turns": [{"input": "Who?", "answer": "Ann"}]},
    "scbench_qa_chn": {"context": "书", "multi_turns": [{"input": "谁", "answer": "安"}]},
    "scbench_choice_eng": {"context": "C", "multi_turns": [{"input": "Hue?", "answer": "blue", "options": OPTIONS}]},
    "scbench_many_shot": {"context": "C", "task": "t", "multi_turns": [{"input": "I", "answer": "(A)"}]},
    "scbench_summary": {"context": "C", "multi_turns": [{"input": "Sum up.", "answer": "S"}]},
    "scbench_mf": {"context": [1, 22], "multi_turns": [{"input": "The largest number is", "answer": 22}]},
    "scbench_summary_with_needles": {
        "context": "C",
        "multi_turns": [
            {"input": "Sum up.", "answer": "S", "task": "scbench_summary"},
            {"input": "The key?", "answer": "71", "task": "scbench_passkey"},
        ],
    },
    "scbench_repoqa_and_kv": {
        "context": "C", "repo": "r", "lang": "python",
        "multi_turns": [NAMED | {"task": "scbench_repoqa"}, {"input": "K:", "answer": "v", "task": "scbench_kv"}],
    },
}  # fmt: skip
BOOK = "Read the book and answer the question."
EXPECTED = {
    "scbench_kv": [
        "Extract the value corresponding to the specified key in the JSON object below.\n\n{}",
        ("\n\nKey a:", " x1", 150), ("\n\nb:\n", "y", 150),
    ],
    "scbench_vt": ["C", ("\n\nI", " A B", 30)],
    "scbench_qa_eng": [f"{BOOK} Be very concise in your answer.\n\nC", ("\n\nQuestion: Who?\nAnswer:", " Ann", 40)],
    "scbench_qa_chn": ["阅读以下书籍然后回答问题。\n\n书", ("\n\n问题：谁\n答案：", "安", 40)],
    "scbench_choice_eng": [
        f"{BOOK}\n\nC",
        ("\n\nQuestion: Hue?\nA. red\nB. green\nC. blue\nD. none\n\nThe letter of the correct answer is", " blue", 40),
    ],
    "scbench_mf": ["[1, 22]", ("\n\nWhat is the largest number?\n\nThe largest number is", " 22", 5)],
    "scbench_summary_with_needles": ["C", ("\n\nSum up.", " S", 800), ("\n\nThe key?", " 71", 15)],
    "scbench_repoqa_and_kv": ["C", ("\n\nIt adds.", f" {CODE['add']}", 1024), ("\n\nK:", " v", 80)],
}  # fmt: skip
pytest.importorskip("rouge_score", reason="rouge_score is not installed: pip install 'kvjax[tasks]'")


def setting(folder, max_length: int = 10_000) -> Setting:
    return Setting(folder, None, 0, Characters(), max_length)


def made(task: str, tmp_path, *records, settings: str = "", max_length: int = 10_000):
    (tmp_path / "scbench").mkdir(exist_ok=True)
    (tmp_path / f"scbench/{task}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    return registry.build(task + settings).make(setting(tmp_path, max_length))


def test_all_twelve_tasks_are_there():
    assert len(scbench.TASKS) == 12 and scbench.TASKS.keys() == RECORDS.keys() == {*registry.TASKS} & {*RECORDS}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", RECORDS)
def test_texts_and_right_answers(task, tmp_path):
    asked = made(task, tmp_path, RECORDS[task], settings="(mode=single)")
    (conversation,) = asked.conversations
    if task in EXPECTED:
        context, *turns = EXPECTED[task]
        decode = Characters().decode
        assert decode(conversation.context) == context
        assert [(decode(t.question), decode(t.answer), t.new_tokens) for t in conversation.turns] == turns
    values = [each["answer"] for each in RECORDS[task]["multi_turns"]]
    texts = [" ".join(each) if isinstance(each, list) else str(each) for each in values]
    answers = [{"bytes": 1, "turns": [{"text": text, "tokens": [], "slots": 1, "length": 1} for text in texts]}]
    scores = asked.scores(answers, None)
    assert scores["score"] == pytest.approx(100), "right answers are right"
    assert {"scbench_summary", "scbench_passkey"} <= scores.keys() or task != "scbench_summary_with_needles"
    wrong = [{"bytes": 1, "turns": [each | {"text": "~"} for each in answers[0]["turns"]]}]
    assert asked.by_question(wrong) == [0]


@pytest.mark.parametrize(
    ("task", "text", "references", "score"),
    [
        ("scbench_kv", "it is X1", ("x1",), 0),
        ("scbench_vt", "a, c", ("A", "B"), 0.5),
        ("scbench_qa_eng", "It was ANN.", ("Ann",), 1),
        # The released code finds a character of the answer here.
        ("scbench_many_shot", "A", ("(A)",), 0),
        ("scbench_many_shot", "so (a).", ("(A)",), 1),
        ("scbench_qa_chn", "安，好！", ("安好吗",), 0.8),
        ("scbench_qa_chn", "安", ("不安",), 2 / 3),
        ("scbench_choice_eng", " C. blue", ("blue", "C"), 1),
        ("scbench_choice_eng", "B", ("blue", "C"), 0),
        ("scbench_choice_eng", "blue", ("blue", "C"), 1),
        ("scbench_choice_eng", "the answer is: blue", ("blue", "C"), 1),
        ("scbench_choice_eng", "the answer is D, not C", ("blue", "C"), 0),
        ("scbench_choice_eng", "say (x) C or D", ("blue", "C"), 1),
        ("scbench_choice_eng", "", ("blue", "C"), 0),
        ("scbench_mf", "about 22.7", ("22",), 1),
        ("scbench_mf", "22", ("22.5",), 0),
        ("scbench_mf", "22.50", ("22.5",), 1),
        ("scbench_mf", "none", ("22",), 0),
        ("scbench_passkey", "It is 71, not 17", ("71",), 1),
        ("scbench_passkey", "17 or 71", ("71",), 0),
        # Lines are sentences: each of the reference is found in one of the text.
        ("scbench_summary", "two b\none a", ("one a\ntwo b",), 1),
        ("scbench_summary", "one", ("one two",), 2 / 3),
    ],
)  # fmt: skip
def test_scores(task, text, references, score):
    assert SCORES[task](text, Turn((), (), references, 1)) == pytest.approx(score)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (CODE["add"], 1),
        (f"Here:\n```python\n{CODE['add']}\n```\nand\n```\n{CODE['sub']}\n```", 1),
        (CODE["sub"], 0),
        ("def add(a, b):", 0),  # nearest, but not near
        ("", 0),
    ],
)
def test_a_function_is_found_among_those_of_its_repository(text, score):
    turn = Turn((), (), (CODE["add"],), 1, about={"name": "add", "functions": CODE})
    assert SCORES["scbench_repoqa"](text, turn) == score


def test_functions_of_all_records_of_a_repository_are_compared(tmp_path):
    other = {"input": "It subtracts.", "answer": CODE["sub"], "name": "sub"}
    first, second = ({"context": "C", "repo": "r", "lang": "python", "multi_turns": [each]} for each in (NAMED, other))
    third = first | {"repo": "s"}
    asked = made("scbench_repoqa", tmp_path, first, second, third)
    names = [sorted(each.turns[0].about["functions"]) for each in asked.conversations]
    assert names == [["add", "sub"], ["add", "sub"], ["add"]]


def test_long_contexts_lose_their_middle(tmp_path):
    record = {"context": "abcdefghij" * 10, "multi_turns": [{"input": "I", "answer": "A"}] * 3}
    asked = made("scbench_prefix_suffix", tmp_path, record, settings="(questions=2, new_tokens=4)", max_length=44)
    (conversation,) = asked.conversations
    assert len(conversation.context) == 44 - 2 * (3 + 4) and len(conversation.turns) == 2
    assert Characters().decode(conversation.context) == "abcdefghijabcd" + "fghijabcdefghij"
    assert "1 contexts do not fit" in asked.about
    with pytest.raises(ConfigError, match="3 questions and answers leave -115 of the model's 344 tokens"):
        made("scbench_prefix_suffix", tmp_path, record, max_length=344)


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("scbench_kv", {"multi_turns": []}, "'multi_turns' should be a list of questions"),
        ("scbench_kv", {"multi_turns": [{"input": "I"}]}, "line 1: there is no 'answer'"),
        ("scbench_kv", {"multi_turns": [{"input": "I", "answer": " "}]}, "an answer is empty"),
        ("scbench_kv", {"context": 3}, "'context' should be text"),
        ("scbench_mf", {"multi_turns": [{"input": "Largest?", "answer": 1}]}, "should read 'The ... is'"),
        ("scbench_mf", {"multi_turns": [{"input": "The sum is", "answer": "x"}]}, "not a record of scbench_mf"),
        ("scbench_choice_eng", {"multi_turns": [{"input": "I", "answer": "x", "options": OPTIONS}]}, "one of them the"),
        ("scbench_repoqa", {"repo": None}, "'repo' should be text"),
        ("scbench_repoqa_and_kv", {"multi_turns": [{"input": "I", "answer": "A", "task": "x"}]}, "'task' should be"),
    ],
)  # fmt: skip
def test_records_of_another_form(task, changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        made(task, tmp_path, RECORDS[task] | changes)


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"no file .*scbench_kv.jsonl"):
        registry.build("scbench_kv").files(tmp_path)
    with pytest.raises(ConfigError, match="contains no question"):
        made("scbench_kv", tmp_path)
    with pytest.raises(ConfigError, match="turns='x' is unknown"):
        registry.build("scbench_kv(turns=x)")
