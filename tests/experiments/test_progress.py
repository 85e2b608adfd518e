"""Lines about a long program whose output is a file."""

import re
import time

from experiments import progress


def test_a_line_for_each_item_and_one_every_so_often(monkeypatch, capsys):
    """The items are those that are given, whatever is said. A busy machine may sleep longer than it is asked to."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    seen = []
    for item in progress.tracked(["a", "b"], unit="run", name=str, show=None):
        seen.append(item)
        if item == "b":
            time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert seen == ["a", "b"]
    done = [n for n, line in enumerate(lines) if re.fullmatch(r"run \d of 2: [ab], \d+\.\d s", line)]
    assert [lines[n][:14] for n in done] == ["run 1 of 2: a,", "run 2 of 2: b,"] and done[-1] == len(lines) - 1
    between = lines[done[0] + 1 : done[1]]
    assert between and all(re.fullmatch(r"run 2 of 2: b, \d+ s so far", line) for line in between)


def test_questions_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    with progress.counted(3, done=1, unit="question", name="copa", show=None) as answered:
        answered()
        time.sleep(0.3)
    lines = capsys.readouterr().err.splitlines()
    assert lines and all(re.fullmatch(r"copa: question 2 of 3, \d+ s so far", line) for line in lines)


def test_nothing_is_said_where_none_is_wanted(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    assert list(progress.tracked([1, 2], unit="run", name=str, show=False)) == [1, 2]
    with progress.counted(3, done=0, unit="question", name="copa", show=False) as answered:
        answered()
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
