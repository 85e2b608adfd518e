"""RULER's questions about documents, from small files in the forms of SQuAD and HotpotQA."""

import json
import re
import string

import pytest

from experiments.tasks import matching, registry
from kvjax.errors import ConfigError
from tests.experiments.test_tasks import setting

DOCUMENTS = re.compile(r"Document (\d+):\n(.*?)(?=\n\nDocument |\Z)", re.DOTALL)


def paragraph(letter: str, number: int, **question) -> dict:
    asked = {"question": f"Who is {letter}{number}?", "answers": [{"text": f"{letter}{number}", "answer_start": 0}] * 2}
    return {
        "context": f"{letter}{number} is here. " + letter * 80,
        "qas": [{**asked, "is_impossible": False} | question],
    }


def squad(**question) -> dict:
    """Five articles of four paragraphs, with a question about each."""
    return {
        "version": "v2.0",
        "data": [
            {"title": letter, "paragraphs": [paragraph(letter, number, **question) for number in range(4)]}
            for letter in "abcde"
        ],
    }


def hotpot() -> list[dict]:
    return [
        {
            "question": f"Which {number}?",
            "answer": f"the {number}",
            "context": [
                [f"T{number}{letter}", ["One. ", f"Two of {number}."]] for letter in string.ascii_lowercase[:3]
            ],
        }
        for number in range(6)
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/squad.json").write_text(json.dumps(squad()))
    (tmp_path / "ruler/hotpotqa.json").write_text(json.dumps(hotpot()))
    return tmp_path


def documents(item) -> list[str]:
    found = DOCUMENTS.findall(item.context)
    assert [int(number) for number, _ in found] == list(range(1, len(found) + 1))
    return [text for _, text in found]


@pytest.mark.parametrize("length", [800, 1200])
def test_squad(folder, length):
    """The paragraph that holds the answer, then others of its article, then any, as many as fit."""
    made = registry.build(f"ruler_qa_1(length={length}, count=6)").make(setting(folder))
    every = [each["context"] for article in squad()["data"] for each in article["paragraphs"]]
    assert len(made) == 6
    for number, item in enumerate(made.items):
        letter, place = "abcde"[number // 4], number % 4
        listed = documents(item)
        assert len(set(listed)) == len(listed) and set(listed) <= set(every)
        assert set(every[number // 4 * 4 : number // 4 * 4 + 4]) <= set(listed)
        size = 1 + len(item.context) + len(item.question)
        # Another document would not fit.
        assert length - 130 < size <= length
        assert item.question.endswith(f"\n\nQuestion: Who is {letter}{place}? Answer:")
        assert item.references == (f"{letter}{place}",) and item.new_tokens == 32
        assert matching.contains_any(f"It is {letter.upper()}{place}.", item.references, {}) == 1
    # The place of the paragraph that holds the answer is drawn.
    assert len({documents(item).index(every[number]) for number, item in enumerate(made.items)}) > 1
    assert made.about == f"6 contexts of up to {length} tokens; the share of answers that hold a right one"


def test_few_documents(folder):
    """Where not all paragraphs of an article fit, no other document is added."""
    made = registry.build("ruler_qa_1(length=550, count=4)").make(setting(folder))
    for number, item in enumerate(made.items):
        listed = documents(item)
        assert len(listed) == 2 and all(text.startswith("a") for text in listed)
        assert any(text.startswith(f"a{number} ") for text in listed)


def test_all_documents_fit(folder):
    made = registry.build("ruler_qa_2(length=5000, count=2)").make(setting(folder))
    assert all(len(documents(item)) == 18 for item in made.items)


def test_hotpotqa(folder):
    made = registry.build("ruler_qa_2(length=600)").make(setting(folder, questions=5))
    assert len(made) == 5
    for number, item in enumerate(made.items):
        listed = documents(item)
        assert {f"T{number}{letter}\nOne. Two of {number}." for letter in "abc"} < set(listed)
        assert item.references == (f"the {number}",)


def test_questions_without_room_or_answer_are_skipped(folder):
    content = squad()
    content["data"][0]["paragraphs"][0]["context"] += "x" * 900
    content["data"][0]["paragraphs"][2]["qas"][0]["is_impossible"] = True
    (folder / "ruler/squad.json").write_text(json.dumps(content))
    made = registry.build("ruler_qa_1(length=700, count=2)").make(setting(folder))
    assert [item.references for item in made.items] == [("a1",), ("a3",)]
    assert made.about.endswith("; 1 before the last are skipped, because their own documents do not fit")


def test_the_same_seed_has_the_same_contexts(folder):
    spec = registry.build("ruler_qa_1(length=800, count=3)")
    one, same, other = (spec.make(setting(folder)._replace(seed=seed)) for seed in (0, 0, 1))
    assert one.content == same.content != other.content


@pytest.mark.parametrize(
    ("text", "content", "message"),
    [
        ("ruler_qa_1(length=0)", None, "length=0 should be at least 1"),
        ("ruler_qa_1(length=9990)", squad(), "exceed the model's 10000; lower length"),
        ("ruler_qa_1(length=300)", squad(), "no question of .*squad.json fits in 300 tokens"),
        ("ruler_qa_1", {"data": {}}, "'data' should be a list of articles"),
        ("ruler_qa_1", {"data": [{"title": "a"}]}, "squad.json, article 1: not an article of SQuAD"),
        ("ruler_qa_1", {"data": [3]}, "article 1: not an article of SQuAD"),
        ("ruler_qa_1", {"data": [{"paragraphs": [{"context": 3, "qas": []}]}]}, "'context' should be text, but is 3"),
        ("ruler_qa_1", squad(is_impossible=True), "squad.json contains no question"),
        ("ruler_qa_1", squad(answers=[]), "article 1: 'Who is a0\\?' has no answer"),
        (
            "ruler_qa_2",
            [*hotpot()[:1], {"question": "a", "answer": "b", "context": [["a"]]}],
            "record 2: not a question",
        ),
        ("ruler_qa_2", {"data": []}, "should be a list of records"),
        ("ruler_qa_2(haystack=a)", None, "it takes length, count, aware"),
    ],
)
def test_files_and_settings_that_cannot_work(text, content, message, folder):
    name = "squad" if "qa_1" in text else "hotpotqa"
    (folder / f"ruler/{name}.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=message):
        registry.build(text).make(setting(folder))


def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no file .*ruler/hotpotqa\.json"):
        registry.build("ruler_qa_2").files(tmp_path)
    with pytest.raises(ConfigError, match="give their folder"):
        registry.build("ruler_qa_2").files(None)
