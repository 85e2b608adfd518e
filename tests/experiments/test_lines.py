"""A line feed ends a line of a file, and no other character does."""

import json

import pytest

from experiments import lines
from experiments.batch import requests
from experiments.batch.journal import Journal
from experiments.papers import texts
from experiments.tasks import files
from experiments.tasks.journal import Journal as Answers
from kvjax.errors import ConfigError

#: Characters at which `str.splitlines` divides, and text files in the mode of universal newlines.
OTHERS = ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r"]
RAW = OTHERS[:3]  # those that JSON leaves in strings as they are


def test_lines_are_divided_at_line_feeds():
    text = f"one{''.join(OTHERS)}\r\n \t\r\n\ntwo"
    for content in (text, text.encode()):
        kind = (lambda each: each) if isinstance(content, str) else str.encode
        first, second = kind(f"one{''.join(OTHERS)}\r"), kind("two")
        assert lines.divided(content) == [first, kind(" \t\r"), kind(""), second]
        assert lines.numbered(content) == [(1, first), (4, second)]
        assert lines.divided(content + kind("\n")) == lines.divided(content)
        assert lines.divided(kind("")) == [] and lines.divided(kind("\n")) == [kind("")]
    # No white space of JSON: such a line is not empty, and no JSON.
    assert lines.numbered("\u2028\n\x0b\n") == [(1, "\u2028"), (2, "\x0b")]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("character", OTHERS)
def test_every_reader_of_json_lines(tmp_path, character, end):
    """A value that holds the character, raw where JSON allows it, and white space between values."""
    space = "\r" if character == "\r" else " "
    given = [{"article": f"First{character}line.", "id": f"1{character}"}, {"article": "Second.", "id": "2"}]
    rows = [json.dumps(each, ensure_ascii=False).replace(", ", f",{space}") for each in given]
    assert character not in RAW or character in rows[0]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("".join(row + end for row in [*rows, ""]).encode())

    assert [dict(row.values) for row in files.json_lines(path)] == given
    assert [row.line for row in files.json_lines(path)] == [1, 2]
    assert list(texts._documents(path)) == [each["article"] for each in given]
    assert [json.loads(line) for _, line in requests.lines(path)] == given

    answers = tmp_path / "answers.jsonl"
    kept = [{"key": "k", "number": n, "answer": {"text": each["article"]}} for n, each in enumerate(given)]
    answers.write_bytes("".join(json.dumps(each, ensure_ascii=False) + end for each in kept).encode())
    assert Answers(answers).known("k") == {0: {"text": given[0]["article"]}, 1: {"text": "Second."}}

    output = tmp_path / "results.jsonl"
    about = {"requests": given[0]["id"]}
    for turn in range(2):
        with Journal(output, about) as journal:
            assert (turn in journal, journal.written) == (False, turn)
            journal.put(turn, {"id": turn, "text": given[turn]["article"]})
            journal.shorten()
    assert [json.loads(line)["text"] for line in output.read_bytes().split(b"\n")[:-1]] == [
        each["article"] for each in given
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_tables_of_tab_separated_values(tmp_path, end):
    path = tmp_path / "rows.tsv"
    values = [f"one{character}two" for character in OTHERS]
    path.write_bytes(f"a\tb{end}{''.join(f'{value}	x{end}' for value in values)}{end}".encode())
    assert [row.values for row in files.tab_separated(path)] == [{"a": value, "b": "x"} for value in values]


def test_lists_of_instructions_and_what_is_no_text(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(
        json.dumps([{"instruction": "Say\u2028it.", "output": "It."}], ensure_ascii=False), encoding="utf-8"
    )
    assert list(texts._documents(path)) == ["Say\u2028it.\nIt."]
    path.write_text(json.dumps([{"other": "x"}]))
    with pytest.raises(ConfigError, match="record 1: the record has none of the fields article, document"):
        list(texts._documents(path))
    lines_of = tmp_path / "rows.jsonl"
    lines_of.write_text('{"article": "a"}\u2028{"article": "b"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        list(texts._documents(lines_of))
