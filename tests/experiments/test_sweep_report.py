"""A sweep's table and files: the full cache's row, intervals, warnings, rates of one repetition, and pages."""

import builtins
import html
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

import experiments.sweep
from experiments import progress, stages
from experiments.programs import sweep
from experiments.reports import plots
from experiments.reports.bootstrap import interval
from experiments.runs import identity, session
from experiments.sweeps import doubts, intervals, report, table
from tests import browser

ROWS = 12


def row(policy, nats, *, recall=None, **more):
    nats = [float(x) for x in nats]
    hits = {"passkey": recall} if recall is not None else {}
    return {
        "policy": policy, "budget": 0.5, "perplexity": math.exp(np.mean(nats)), "nats_by_row": nats, "kv_bytes": 1,
        "full_kv_bytes": 4, "slots": 8, "least_slots": 8, "keeps_all": policy == "full", "agreement": 0.5,
        "agreement_by_row": [0.25, 0.75] * (len(nats) // 2), "same_until": 2.0, "new_tokens": 100,
        "prefill_tokens_per_second": 10.0, "decode_tokens_per_second": 20.0,
        "recall": {task: float(np.mean(each)) for task, each in hits.items()}, "recall_by_prompt": hits,
    } | more  # fmt: skip


def result(policy, rows, repeats=3, **swept):
    return {
        "status": "ok", "policy": policy, "rows": rows, "swept": {"policy.name": policy} | swept,
        "file": f"{policy}.json", "environment": {"code": identity.code()}, "model": "a model", "text": "a text",
        "config": {"repeats": repeats, "storage": "dense", "policy": {"name": policy}},
    }  # fmt: skip


@pytest.fixture
def full():
    """Rows that differ far more among themselves than caches do on the same row."""
    return row("full", np.linspace(1.0, 3.0, ROWS), budget=None)


@pytest.fixture
def found(full):
    worse = row("window", np.linspace(1.0, 3.0, ROWS) + 0.2 + 0.01 * np.arange(ROWS))
    alike = row("h2o", np.linspace(1.0, 3.0, ROWS) + 0.02 * (-1.0) ** np.arange(ROWS))
    return [result("window", [full, worse]), result("h2o", [full, alike])]


def test_the_full_cache_opens_the_table_once(found):
    lines = table.cells(found)
    assert [line["policy"] for line in lines] == ["full", "window", "h2o"]
    assert lines[0]["budget (slots)"] == "all (8)" and lines[0]["above full"] == "-"
    assert lines[0]["perplexity"].startswith("7.39 (")
    # One mean for each text, over both of its seeds.
    texts = [
        result(
            name, [row("full", np.arange(4) + shift), row(name, np.arange(4) + 1)], **{"data.text": text, "seed": seed}
        )
        for name in ("h2o", "window") for shift, text in ((0, "a"), (1, "b")) for seed in (0, 1)
    ]  # fmt: skip
    lines = table.cells(texts)
    assert [(line["policy"], line["text"], line["seed"]) for line in lines] == [
        (name, text, "2 seeds") for name in ("full", "h2o", "window") for text in ("a", "b")
    ]
    assert [len(each) for each in table.sources(texts)] == [0, 0, 2, 2, 2, 2]


def test_a_full_cache_that_was_swept_is_no_second_line(found, full):
    lines = table.cells([result("full", [full]), *found])
    assert [line["policy"] for line in lines] == ["full", "window", "h2o"]
    assert all(line["policy"] != "full" for line in table.cells([result("h2o", [row("h2o", [1, 2])])]))


def test_intervals_are_those_of_leaderboards(found, full):
    line = table.cells(found)[1]
    worse = found[0]["rows"][1]
    low, high = (math.exp(end) for end in interval(worse["nats_by_row"], "window 0.5 perplexity"))
    assert line["perplexity"] == f"{worse['perplexity']:.2f} ({low:.2f} to {high:.2f})"
    # Row by row the cache is worse by 20 to 31 hundredths of a nat.
    mean, low, high = map(float, re.fullmatch(r"\+(.*) % \(\+(.*) to \+(.*)\)", line["above full"]).groups())
    assert 22.1 < low < mean < high < 36.4 and mean == pytest.approx(100 * math.expm1(0.255), abs=0.06)
    assert re.fullmatch(r"50.0 % \((3\d|4\d)\.\d to (5\d|6\d)\.\d\)", line["agrees with full"])
    plain = table.cells(found, with_intervals=False)[1]
    assert plain["perplexity"] == f"{worse['perplexity']:.2f}" and plain["above full"] == f"+{mean:.1f} %"
    one = table.cells([result("h2o", [row("full", [1.0]), row("h2o", [1.5])])])[1]
    assert one["perplexity"] == "4.48" and one["above full"] == "-", "one row has no interval"


def test_scores_that_are_not_finite_have_no_interval():
    broken = row("h2o", [1.0, math.inf])
    assert "perplexity" not in intervals.values(broken) and "agrees with full" in intervals.values(broken)
    assert "(" not in table.cells([result("h2o", [broken])])[0]["perplexity"]


def test_rates_of_one_repetition_are_left_out(found, full):
    assert "decode tok/s" in table.cells(found)[1] and not [w for w in doubts.warnings(found) if "repetition" in w]
    once = [each | {"config": each["config"] | {"repeats": 1}} for each in found]
    assert not {"decode tok/s", "prefill tok/s"} & {*table.cells(once)[1]}
    assert [w for w in doubts.warnings(once) if w.startswith("Tokens per second are left out")]
    lines = table.cells([once[0], found[1]])
    assert (lines[1]["decode tok/s"], lines[2]["decode tok/s"]) == ("-", "20")


def test_warnings_name_what_is_not_told_apart(found):
    warned = doubts.warnings(found)
    assert warned == [
        "Perplexity: the difference of h2o to the full cache may be chance (its 95 % interval includes 0; 12 rows).",
        "Agreement with the full cache does not tell the two caches apart: window and h2o.",
    ]
    alike = [found[1], result("tova", [found[1]["rows"][0], found[1]["rows"][1] | {"policy": "tova"}])]
    warned = doubts.warnings(alike)
    assert warned[0].startswith("Perplexity: the difference of every cache to the full cache may be chance (")
    assert warned[1] == "Perplexity does not tell the two caches apart: h2o and tova."
    many = [result(name, [found[1]["rows"][0], found[1]["rows"][1] | {"policy": name}]) for name in "abcd"]
    assert "Perplexity tells none of the 6 pairs of caches with equal other settings apart." in doubts.warnings(many)
    many[0]["rows"][1] = found[0]["rows"][1] | {"policy": "a"}
    (line,) = [each for each in doubts.warnings(many) if each.startswith("Perplexity does not")]
    assert line.endswith("3 of 6 pairs of caches apart: b and c; b and d; c and d.")
    # Caches at other budgets are no pair.
    apart = [each | {"swept": each["swept"] | {"policy.budget": 0.1 * n}} for n, each in enumerate(alike, 1)]
    assert [w for w in doubts.warnings(apart) if "apart" in w] == []


def test_warnings_of_few_rows_tokens_and_prompts(full):
    def warned(rows, tokens, prompts):
        own = row("h2o", np.arange(rows), recall=[1] * prompts, new_tokens=tokens)
        whole = row("full", np.arange(rows) - 1.0, recall=[1] * prompts, new_tokens=tokens)
        return [line.partition(":")[0] for line in doubts.warnings([result("h2o", [whole, own])])]

    assert warned(8, 125, 8) == ["Passkey"]
    assert warned(7, 200, 8) == ["Few rows", "Passkey"]
    assert warned(8, 124, 8) == ["Few tokens", "Passkey"]
    assert warned(8, 125, 7) == ["Few prompts", "Passkey"]
    assert warned(1, 2000, 8)[0] == "One row of 2000 tokens"


def test_recall_is_compared_prompt_by_prompt(full):
    right, wrong = [1] * 16, [0] * 16
    whole, own = row("full", [1, 2], recall=right), row("h2o", [1, 2], recall=wrong)
    assert not [w for w in doubts.warnings([result("h2o", [whole, own])]) if w.startswith("Passkey")]
    nearly = row("h2o", [1, 2], recall=[*right[:13], 0, 0, 0])
    (line,) = [w for w in doubts.warnings([result("h2o", [whole, nearly])]) if w.startswith("Passkey")]
    assert "of h2o to the full cache may be chance (the sign test finds no difference; 16 prompts)" in line
    assert re.fullmatch(r"81 % \(\d+ to \d+\)", table.cells([result("h2o", [whole, nearly])])[1]["passkey"])


def test_bars_of_the_plot_are_intervals_of_the_difference(found):
    shown = table.points(found, "perplexity")
    worse, alike = shown
    assert worse["full"] < worse["interval"][0] < worse["y"] < worse["interval"][1]
    assert alike["interval"][0] < alike["full"] < alike["interval"][1], "it crosses the dashed line"
    below, above = plots.error_bar(worse)
    assert below[0] == pytest.approx(worse["y"] - worse["interval"][0]) and above[0] > 0
    assert plots.error_bar({"y": 1.0, "error": None, "interval": None}) is None
    assert plots.error_bar({"y": 1.0, "error": 0.5, "interval": None}) == [[0.5], [0.5]]
    assert plots.sweep_plot(shown, "perplexity").startswith(b"\x89PNG")


def test_the_command_of_a_run():
    argv = ["sweep", "--config=h2o_tiny", "--sweep=policy.name=h2o,window", "--sweep", "seed=0,1", "-rerun", "--nofull",
            "--config.output=x", "--config.repeats=0"]  # fmt: skip
    swept = {"policy.name": "roco(guard=4)", "policy.recent": None, "baselines": ("full", "h2o")}
    assert report.command_of(argv, swept) == (
        "python -m experiments.run --config=h2o_tiny --config.repeats=0 '--config.policy.name=roco(guard=4)' "
        "--config.policy.recent=none --config.baselines=full,h2o"
    )


@pytest.fixture
def command(small, monkeypatch, tmp_path):
    """Runs the command of sweeps on the small config; returns its output and its folder."""
    path = tmp_path / "mine.py"
    path.write_text("import builtins\ndef get_config():\n    return builtins.small\n")
    monkeypatch.setattr("builtins.small", small, raising=False)
    small.policy.sinks = None

    def run(*flags):
        assert experiments.sweep.main(["sweep", f"--config={path}", *flags]) == 0
        return Path(builtins.small.output, "small-sweep")

    return run


SWEPT = "--sweep=policy.name=h2o,window"


@pytest.mark.sampled(0)
def test_a_sweep_writes_its_page_and_one_of_each_run(command, small, monkeypatch, capsys):
    measured, measure = [], session.measure

    def noted(model, tokens, spec, **options):
        measured.append(spec.name)
        return measure(model, tokens, spec, **options)

    monkeypatch.setattr(session, "measure", noted)
    small.baselines = ()
    folder = command(SWEPT)
    assert measured == ["full", "h2o", "window"], "the full cache is added, and measured once"
    out = capsys.readouterr().out
    assert re.search(r"^full ", out, re.M)
    assert "Warning: Few rows: 2 of 6 tokens." in out and "tok/s" not in out
    text = (folder / "sweep.html").read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert "default-src 'none'" in text and not re.search(r"https?:|url\(|<script|@import", text)
    assert text.count("data:image/png;base64,") == 1 and "<li>Few rows: 2 of 6" in text
    links = re.findall(r'href="([^"]+)"', text)
    results = sorted(path.stem for path in folder.glob("*.json") if path.stem != "sweep")
    assert sorted(links) == [f"{name}.html" for name in results] and len(results) == 2
    for name in results:
        page = (folder / f"{name}.html").read_text(encoding="utf-8")
        assert 'href="sweep.html"' in page and "python -m experiments.run" in page and "greedy continuation" in page
        assert json.loads((folder / f"{name}.json").read_text()).keys() >= {"rows", "swept"}
    cells = [html.unescape(each) for each in re.findall(r"<td[^>]*>([^<]*)</td>", text)]
    written = (folder / "sweep.md").read_text()
    (first,) = [line for line in written.splitlines() if line.startswith("| full")]
    assert all(f"[{name}]({name}.html)" in written for name in results)
    expected = ["", *(each.strip() for each in first.split("|")[1:-2])]  # the last column is that of links
    assert cells[: len(expected)] == expected
    numbers = json.loads((folder / "sweep.json").read_text())
    assert len(numbers["full"]) == 1 and numbers["warnings"] and len(numbers["points"]) == 2
    low, high = numbers["points"][0]["intervals"]["perplexity"]
    assert low <= numbers["points"][0]["perplexity"] <= high
    if browser.PROGRAM is not None:
        assert not browser.opened(folder / "sweep.html").messages


@pytest.mark.sampled(0)
def test_the_full_cache_can_be_left_out(command, small, capsys):
    folder = command(SWEPT, "--nofull")
    (tables_lines,) = [(folder / "sweep.md").read_text()]
    assert "| full" not in tables_lines and "above full" not in tables_lines.split("*Numbers in")[0]
    stored = [json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem != "sweep"]
    assert all([each["policy"] for each in one["rows"]] == [one["rows"][-1]["policy"]] for one in stored)


@pytest.mark.sampled(0)
def test_results_without_a_page_are_linked_themselves(command, small):
    folder = command(SWEPT)
    pages = [path for path in folder.glob("*.html") if path.stem != "sweep"]
    pages[0].unlink()
    command(SWEPT)
    links = re.findall(r'href="([^"]+)"', (folder / "sweep.html").read_text(encoding="utf-8"))
    assert f"{pages[0].stem}.json" in links and pages[1].name in links


@pytest.mark.sampled(0)
def test_a_run_says_what_it_does(small, monkeypatch, capsys):
    entered, enter = [], stages.Stages.enter

    def noted(self, name, stage):
        entered.append((name, stage))
        enter(self, name, stage)

    monkeypatch.setattr(stages.Stages, "enter", noted)
    monkeypatch.setattr(progress, "STAGE_SECONDS", 0.001)
    sweep.sweep(small, [("policy.budget", [8])])
    assert list(dict.fromkeys(name for name, _ in entered)) == ["", "full", "window"]
    assert [stage for name, stage in entered if name == "window"] == [
        "compiling or loading programs, then reading prompts, 2 rows of 16 tokens",
        "compiling or loading programs, then scoring 6 tokens of 2 rows",
        "compiling or loading programs, then generating 6 tokens of 2 rows",
        "repetition 1 of 1, reading prompts, 2 rows of 16 tokens",
        "repetition 1 of 1, generating 6 tokens of 2 rows",
    ]
    said = capsys.readouterr().err
    assert re.search(r"^run 1 of 1: budget=8, \d+ s so far: (full|window): [^;]*$", said, re.M)
    assert "loading tiny; " not in said, "it has ended when caches are measured"


def test_a_line_names_the_caches_that_are_measured_at_once():
    shown = stages.Stages()
    assert shown.text() == ""
    with stages.shown_by(shown), stages.of("h2o"):
        stages.enter("compiling")
        assert shown.text() == "h2o: compiling" and shown.text("h2o") == "compiling"
        for number in range(3):
            shown.enter(f"cache {number}", "generating")
        assert shown.text() == "...; cache 0: generating; cache 1: generating; cache 2: generating"
    assert "h2o" not in shown.text()
    stages.enter("nothing shows this")
