"""Tasks as a part of runs and sweeps: columns, tables, a heat map, and a run that is ended goes on."""

import dataclasses
import json
from pathlib import Path

import pytest

from experiments.config import PolicyConfig, TasksConfig
from experiments.programs import run, sweep
from experiments.runs import session
from experiments.tasks import answering, journal
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from tests.experiments.texts import Characters

pytestmark = pytest.mark.thorough

COPA = """<copa-corpus><item asks-for="cause" most-plausible-alternative="2">
<p>The cup fell.</p><a1>It rained.</a1><a2>The cat jumped.</a2></item>
<item asks-for="effect" most-plausible-alternative="1">
<p>It was night.</p><a1>We slept.</a1><a2>We ate.</a2></item></copa-corpus>"""
NEEDLE = "passkey(lengths=(220, 240), depths=(0, 100), repeats=1, new_tokens=4)"
LINES = [{"context": "The sky is blue. " * 9, "question": q, "answer": "blue"} for q in ("Sky?", "Is it red?")]


@pytest.fixture
def config(small, tmp_path, monkeypatch):
    load = session._load
    monkeypatch.setattr(
        session, "_load", lambda config: dataclasses.replace(load(config), tokenizer=Characters())
    )  # fmt: skip
    (tmp_path / "copa").mkdir()
    (tmp_path / "copa/copa-test.xml").write_text(COPA)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LINES))
    small.policy.budget, small.data.chunk = 0.2, 4
    small.tasks = TasksConfig(
        names=("copa", NEEDLE, "rows.jsonl(new_tokens=4)"), folder=str(tmp_path), rows=2, least_slots=12
    )  # fmt: skip
    return small


def rows(folder: Path) -> dict[str, dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["policy"]: line for line in lines if line["kind"] == "summary"}


def kept(config) -> list[Path]:
    return list(Path(config.output, journal.FOLDER).glob("*"))


@pytest.mark.sampled(0)
def test_a_run_that_is_ended_goes_on_from_its_answers(config, monkeypatch, capsys):
    whole = run.run(config)
    assert not kept(config)
    found = rows(whole)
    assert list(found["full"]["tasks"]) == list(config.tasks.names)
    assert found["full"]["tasks"]["copa"]["scores"]["as full"] == 100
    scores = found["window"]["tasks"]["copa"]["scores"]
    assert scores.keys() == {"accuracy", "accuracy by length", "chance", "as full"} and scores["chance"] == 50
    text = (whole / "report.md").read_text()
    for part in (
        "copa: accuracy",
        "## rows.jsonl(new_tokens=4)",
        "(task-2.png)",
        "1 to 4 ",
        "passkey: score",
        "## Perplexity by new",
    ):
        assert part in text
    assert (whole / "task-2.png").read_bytes().startswith(b"\x89PNG") and not (whole / "task-1.png").exists()
    written = [json.loads(line) for line in (whole / "answers.jsonl").read_text().splitlines()]
    assert len(written) == 2 * (2 + 4 + 2) and written[-1]["task"] == "rows.jsonl(new_tokens=4)"
    assert found["window"]["perplexity_by_chunk"][0] != found["full"]["perplexity_by_chunk"][0]
    # Each policy has asked two questions of four when the run ends: under the second policy.
    add, count = journal.Journal.add, []

    def ended(self, *args):
        count.append(args)
        if len(count) > 11:
            raise KeyboardInterrupt
        add(self, *args)

    monkeypatch.setattr(journal.Journal, "add", ended)
    with pytest.raises(KeyboardInterrupt):
        run.run(config)
    (file,) = kept(config)
    assert len(file.read_text().splitlines()) == 11
    count.clear()
    monkeypatch.setattr(journal.Journal, "add", lambda self, *args: (count.append(args), add(self, *args)))
    again = rows(run.run(config))
    assert len(count) == 16 - 11 and not kept(config)
    for policy in found:
        assert again[policy]["tasks"] == found[policy]["tasks"]


@pytest.mark.sampled(0)
def test_a_sweep_shows_tasks_and_takes_the_full_cache_once(config, monkeypatch):
    config.tasks.names = ("copa",)
    asked = []
    answers = answering.answers

    def noted(model, spec, *args, **options):
        asked.append(spec.name)
        return answers(model, spec, *args, **options)

    monkeypatch.setattr(answering, "answers", noted)
    folder, found = sweep.sweep(config, [("policy.budget", [16, 20])])
    assert [result["status"] for result in found] == ["ok", "ok"] and asked == ["full", "window", "window"]
    (_, first, _) = sweep.cells(found)
    assert first["copa: accuracy"] in ("0.00", "50.00", "100.00")
    sweep.write(folder, config, found, "the command")
    assert "copa: as full" in (folder / "sweep.md").read_text()
    assert not kept(config)


CLOSURES = """
from kvjax.policies import Importance, evict, protect_newest

def made(sign):
    importance = Importance(needs=frozenset({"mass"}), score=lambda stats, view: sign * stats["mass"])
    return lambda *, budget: evict(importance=importance, scope=protect_newest(2), budget=budget, name="mine")

most, least = made(1), made(-1)
"""


@pytest.mark.sampled(0)
def test_policies_that_differ_in_a_closure_have_answers_of_their_own(config, tmp_path, monkeypatch):
    """They have one name, and functions of one name."""
    (tmp_path / "mine.py").write_text(CLOSURES)
    config.tasks.names, config.baselines, config.policy = ("copa",), (), PolicyConfig(budget=12)
    count, add = [], journal.Journal.add
    monkeypatch.setattr(journal.Journal, "add", lambda self, *args: (count.append(args[0]), add(self, *args)))
    axes = [("policy.name", [f"{tmp_path}/mine.py:most", f"{tmp_path}/mine.py:least"])]
    _, found = sweep.sweep(config, axes, full=False)
    assert [result["status"] for result in found] == ["ok", "ok"], found
    assert len(count) == 4 and len(set(count)) == 2


def test_tasks_are_checked_before_a_model_is_loaded(config, monkeypatch):
    monkeypatch.setattr(session, "_load", lambda config: pytest.fail("was loaded"))
    for name, message in (
        ("cope", "did you mean 'copa'"),
        ("piqa", "there is no file"),
        ("copa(shot=1)", "takes shots"),
    ):
        config.tasks.names = (name,)
        with pytest.raises(ConfigError, match=message):
            run.run(config)
    config.tasks.names, config.tasks.questions = ("copa",), 0
    with pytest.raises(ConfigError, match="must be at least 1, or none for all questions"):
        run.run(config)


def test_a_model_without_a_tokenizer(config):
    with pytest.raises(ConfigError, match="the model has no tokenizer"):
        answering.make(config.tasks, Model(config=None, params=None), 0)
