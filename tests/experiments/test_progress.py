"""Lines about a long program whose output is a file."""

import time

from experiments import progress


def test_a_line_for_each_item_and_one_every_so_often(monkeypatch, capsys):
    """The items are those that are given, whatever is said."""
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    seen = []
    for item in progress.tracked(["a", "b"], unit="run", name=str, show=None):
        seen.append(item)
        if item == "b":
            time.sleep(0.5)
    said = capsys.readouterr().err.splitlines()
    assert seen == ["a", "b"]
    assert said[0].startswith("run 1 of 2: a, 0.") and said[-1].startswith("run 2 of 2: b, 0.")
    assert len(said) > 4 and all(line == "run 2 of 2: b, 0 s so far" for line in said[1:-1])


def test_questions_are_counted(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.05)
    with progress.counted(3, done=1, unit="question", name="copa", show=None) as answered:
        answered()
        time.sleep(0.3)
    assert "copa: question 2 of 3, 0 s so far" in capsys.readouterr().err.splitlines()


def test_nothing_is_said_where_none_is_wanted(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    assert list(progress.tracked([1, 2], unit="run", name=str, show=False)) == [1, 2]
    with progress.counted(3, done=0, unit="question", name="copa", show=False) as answered:
        answered()
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
