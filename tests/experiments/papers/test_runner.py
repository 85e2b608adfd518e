"""The spine: parts are kept and shared, a run that is killed ends with the same table, errors are one entry's own."""

import dataclasses
import errno
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

import kvjax
from experiments import results
from experiments.config import ModelConfig
from experiments.papers import generated, page, runner, texts
from experiments.papers.entry import Entry
from experiments.papers.parts import Lab, Part, by_inputs, read
from experiments.papers.recipes import lm, recall
from experiments.papers.settings import FAST, FULL, TEXTS, Settings, find_data
from experiments.papers.statistics import paired_bootstrap
from experiments.papers.verdict import Claim, Judgement, Table
from experiments.tasks import multiple_choice
from kvjax.errors import ConfigError

MEASURED: list[str] = []  # names of parts, in the order in which they were measured
KILLED: set[str] = set()  # parts that end the process


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(Part):
    name_of: str
    rows: int = 40

    def measure(self, lab):
        if self.name_of in KILLED:
            raise KeyboardInterrupt
        MEASURED.append(self.name_of)
        seed = [lab.settings.seed, *self.name_of.encode()]
        return {"value": np.random.default_rng(seed).normal(len(self.name_of), 0.1, self.rows)}


def entry(name, *parts):
    def judge(settings, found):
        means = {each: found[Noise(name_of=each)]["value"] for each in parts}
        first, last = means[parts[0]], means[parts[-1]]
        made = paired_bootstrap(f"{parts[0]} against {parts[-1]}", first, last, seed=settings.seed)
        return Judgement(
            [Table("Means", [{"part": each, "mean": f"{value.mean():.6f}"} for each, value in means.items()])],
            [Claim("the first is lower", made.lower, made.result)],
            comparisons=[made],
            draw=lambda: b"PNG",
        )

    return Entry(
        name=name, question="Which?", here="Noise.", judge=judge,
        parts=lambda settings: [Noise(name_of=each) for each in parts],
    )  # fmt: skip


@pytest.fixture
def entries(monkeypatch):
    known = {"h2o_fig1": entry("h2o_fig1", "a", "bb", "ccc"), "roco_fig1": entry("roco_fig1", "a", "dddd")}
    monkeypatch.setattr(runner, "registry", lambda: known)
    MEASURED.clear()
    KILLED.clear()
    return known


def settings(seed=0, scale=FULL):
    return Settings(ModelConfig(), find_data.__globals__["ROOT"], seed, scale)


def files(folder):
    """Returns the files that a run wrote, without the page's line about the commit."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_killed_run_ends_with_the_same_table(entries, tmp_path, capsys):
    assert not runner.run(["all"], settings(), tmp_path / "whole", progress=False)
    assert MEASURED == ["a", "bb", "ccc", "dddd"], "parts are shared"
    whole = capsys.readouterr().out
    for killed in ("a", "bb", "ccc", "dddd"):
        KILLED.add(killed)
        with pytest.raises(KeyboardInterrupt):
            runner.run(["all"], settings(), tmp_path / "killed", progress=False)
        KILLED.clear()
    capsys.readouterr()
    assert not runner.run(["all"], settings(), tmp_path / "killed", progress=False)
    assert MEASURED == ["a", "bb", "ccc", "dddd"] * 2, "what was finished was not measured again"
    assert capsys.readouterr().out == whole.replace("/whole/", "/killed/")
    assert files(tmp_path / "killed") == files(tmp_path / "whole")


def test_parts_of_equal_prompts_are_measured_one_after_the_other(tmp_path):
    """So that the prompts of one text need not stay in memory while other texts are read."""
    of = settings()
    books, caches = ("book", "alice"), ("full", "h2o", "window")
    parts = [lm.lm(of, cache, 0.2, text=text) for cache in caches for text in books]
    other = [Noise(name_of="a"), recall.recall(of, "h2o", 0.2), lm.lm(of, "h2o", 0.2, block=64), *parts]
    ordered = by_inputs(other)
    assert ordered[:3] == other[:3], "blocks are other prompts"
    assert [(part.text, part.cache) for part in ordered[3:]] == [(text, cache) for text in books for cache in caches]


def test_report_page_and_json(entries, tmp_path, capsys):
    runner.run(["h2o", "roco_fig1"], settings(), tmp_path, progress=False)
    printed = capsys.readouterr().out
    assert "Verdict: CONFIRM (the first is lower)." in printed and "One comparison was made" in printed
    page = (tmp_path / "README.md").read_text()
    for name in entries:
        about = json.loads((tmp_path / f"{name}.json").read_text())
        assert about["verdict"] == "CONFIRM" and about["comparisons"][0]["result"] == "lower"
        assert about["tables"][0]["rows"][0]["part"] == "a"
        assert f"[{name}](#{name})" in page and f"![{name}]({name}.png)" in page and f"### {name}\n" in page
        assert (tmp_path / f"{name}.png").read_bytes() == b"PNG"
    assert runner.write_page(tmp_path, settings().described()) == list(entries), "from results alone"
    assert (tmp_path / "README.md").read_text() == page and page.count("\nOn cpu (") == 1
    assert page.index("H2O (arXiv") < page.index("### h2o_fig1") < page.index("RoCo (arXiv") < page.index("### roco")


def test_seed_and_sizes_name_the_results(entries, tmp_path):
    runner.run(["h2o"], settings(), tmp_path, progress=False)
    first = json.loads((tmp_path / "h2o_fig1.json").read_text())
    runner.run(["h2o"], settings(seed=1), tmp_path, progress=False)
    assert MEASURED == ["a", "bb", "ccc"] * 2
    again = json.loads((tmp_path / "h2o_fig1.json").read_text())
    assert again["tables"] != first["tables"] and again["comparisons"] != first["comparisons"]
    runner.run(["roco"], settings(seed=1, scale=FAST), tmp_path, progress=False)
    page = (tmp_path / "README.md").read_text()
    assert "### roco_fig1" in page and "### h2o_fig1" not in page, "results of other settings are not of this page"
    assert "would say CONFIRM" in page and "1 INCONCLUSIVE" in page


def test_the_page_has_the_verdicts_of_another_model(entries, tmp_path):
    runner.run(["h2o"], settings(), tmp_path / "small", progress=False)
    path = tmp_path / "small" / "h2o_fig1.json"
    other = json.loads(path.read_text()) | {"verdict": "CONTRADICT"}
    other["settings"]["model"]["path"] = "models/another"
    path.write_text(json.dumps(other))
    runner.run(["all"], settings(), tmp_path / "own", progress=False, compared=[tmp_path / "small"])
    rows = [line for line in (tmp_path / "own" / "README.md").read_text().splitlines() if line.startswith("| ")]
    cells = {
        row.split("](#")[0][3:]: [cell.strip() for cell in row.split("|")[3:5]] for row in rows[1:] if "](#" in row
    }
    assert cells == {"h2o_fig1": ["CONFIRM", "CONTRADICT"], "roco_fig1": ["CONFIRM", "-"]}
    assert "| another" in rows[0]
    with pytest.raises(ConfigError, match="nowhere has no results"):
        runner.run(["all"], settings(), tmp_path / "own", progress=False, compared=[tmp_path / "nowhere"])


def test_damaged_parts_and_rerun(entries, tmp_path):
    lab = Lab(settings(), tmp_path)
    part = Noise(name_of="a")
    value = lab.get(part)["value"]
    (file,) = tmp_path.glob("*.npz")
    file.write_bytes(file.read_bytes()[:-30])
    assert read(file) is None
    np.testing.assert_array_equal(Lab(settings(), tmp_path).get(part)["value"], value)
    assert MEASURED == ["a", "a"]
    again = Lab(settings(), tmp_path, rerun=True)
    assert not again.has(part)
    again.get(part)
    again.get(part)
    assert MEASURED == ["a", "a", "a"] and again.code_of(part) == Lab(settings(), tmp_path).code_of(part)


def test_an_entry_that_fails_is_alone(entries, tmp_path, capsys):
    broken = dataclasses.replace(entries["h2o_fig1"], parts=lambda settings: ["no part"])
    entries["h2o_fig1"] = broken
    assert runner.run(["all"], settings(), tmp_path, progress=False) == ["h2o_fig1"]
    assert "h2o_fig1 FAILED: an entry needs 'no part'" in capsys.readouterr().err
    assert (tmp_path / "roco_fig1.md").is_file()


@pytest.mark.filterwarnings("ignore:a measurement is not saved:UserWarning")
def test_a_full_disk_loses_no_entry(entries, tmp_path, monkeypatch, capsys):
    """Reports go elsewhere; measurements are those of this process."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = results.write

    def full(path, content):
        if path.is_relative_to(tmp_path / "out"):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(results, "write", full)
    assert not runner.run(["all"], settings(), tmp_path / "out", progress=False)
    shown = capsys.readouterr()
    (page,) = (tmp_path / "cache" / "kvjax" / "results").glob("*/README.md")
    assert f"They go to {page.parent}/ instead" in shown.err and f"Wrote {page}" in shown.out
    assert (page.parent / "roco_fig1.md").is_file() and (page.parent / "h2o_fig1.md").is_file()


def test_errors_of_names_and_texts(entries, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"unknown entry 'fig1'; did you mean h2o_fig1, roco_fig1\?"):
        runner.entries_of(["fig1"])
    with pytest.raises(ConfigError, match="give the names of entries"):
        runner.entries_of([])
    assert [each.name for each in runner.entries_of(["roco_fig1", "h2o"])] == ["h2o_fig1", "roco_fig1"]
    monkeypatch.setenv("KVJAX_SHARED", str(tmp_path))
    assert find_data(None) is None
    with pytest.raises(ConfigError, match=r"the texts were not found: .*--data=FOLDER"):
        find_data(str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no file .*great_expectations"):
        Settings(ModelConfig(), tmp_path).file("book")


@pytest.mark.sampled(0)
def test_generated_stories_stand_in_for_every_text(tmp_path):
    """Each file is one that the readers of the real ones take, with as many rows and questions as an entry asks for."""
    folder = generated.make(tmp_path / "texts")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    given = Settings(ModelConfig(path="kvjax-tiny"), folder, 0, FULL, True)
    model = kvjax.load("kvjax-tiny")
    for name in TEXTS:
        rows = texts.rows_of(model, given.file(name), FULL.rows, FULL.length)
        assert rows.shape == (FULL.rows, FULL.length) and len(np.unique(rows, axis=0)) == FULL.rows
    for task in multiple_choice.TASKS:
        examples, questions = multiple_choice.with_examples(task, folder / "tasks", 5)
        assert len(examples) == 5 and len(questions) >= FULL.questions
        assert len({question.label for question in questions}) > 1 or task == "mathqa"
    assert "texts" not in Settings(ModelConfig(), folder).described() and given.described()["texts"] == "generated"
    assert {path: path.stat().st_mtime_ns for path in generated.make(folder).rglob("*")} == before


@pytest.mark.sampled(0)
def test_an_entry_without_texts(tmp_path):
    command = [sys.executable, "-m", "experiments.paper", "h2o_fig3", "--fast", f"--output={tmp_path / 'out'}"]
    environment = os.environ | {"KVJAX_SHARED": str(tmp_path / "absent")}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert "the papers' texts were found neither in" in shown and "gutenberg.org" in shown
    assert "Note: of generated stories" in shown
    assert "Of generated stories" in (tmp_path / "out" / "README.md").read_text()


def test_the_measured_page_is_of_its_results():
    folder = find_data.__globals__["ROOT"] / "experiments" / "measured" / "papers"
    made = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert made and all(result["settings"] == next(iter(made.values()))["settings"] for result in made.values())
    described = next(iter(made.values()))["settings"]
    sections = runner.entries_in(folder, described)
    assert set(sections) == set(made)
    expected = page.page(sections, runner.about(described, sections))
    assert (folder / "README.md").read_text() == expected, "python -m experiments.paper --page --output=..."
    for name in made:
        assert not re.search(rf"!\[{name}\]", expected) or (folder / f"{name}.png").is_file()
