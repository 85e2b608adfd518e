"""Sweeps: the product of the values, only what is missing, and failures that stop nothing."""

import dataclasses
import errno
import json
import re
from pathlib import Path

import pytest

import experiments.sweep
from experiments import fields, results
from experiments.config import PolicyConfig
from experiments.programs import sweep
from experiments.reports import trades
from experiments.runs import identity, session
from experiments.sweeps import table
from kvjax.errors import ConfigError
from kvjax.generation.decoding import decode_steps
from kvjax.generation.prefill import prefill_steps
from kvjax.specs import parse

AXES = [("policy.budget", [4, 8]), ("policy.name", ["h2o", "window"])]


@pytest.fixture
def calls(monkeypatch):
    """The policies that were really measured."""
    made, measure = [], session.measure

    def counted(model, tokens, spec, **settings):
        made.append((spec.name, spec.policy.budget and spec.policy.budget.value))
        return measure(model, tokens, spec, **settings)

    monkeypatch.setattr(session, "measure", counted)
    return made


def test_axes():
    assert sweep.parse_axis("policy.budget=0.1,2,1.0") == ("policy.budget", [0.1, 2, 1.0])
    assert sweep.parse_axis("policy.name=h2o, window,h2o") == ("policy.name", ["h2o", "window"])
    assert sweep.parse_axis("mesh=data:2;data:1,model:2") == ("mesh", ["data:2", "data:1,model:2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy.budget", "not of the form"),
        ("policy.budget=", "not of the form"),
        ("policy.budget=1,,2", "not of the form"),
        ("policy.size=1", "policy has name, budget"),
        ("policy.budget=small", "'small' is not valid here"),
        ("output=a,b", "cannot be swept"),
    ],
)
def test_a_wrong_axis_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        sweep.parse_axis(text)


def test_product(small):
    found = sweep.product(small, AXES)
    assert [(c.policy.budget, c.policy.name) for _, c in found] == [
        (4, "h2o"),
        (4, "window"),
        (8, "h2o"),
        (8, "window"),
    ]
    assert found[0][0] == {"policy.budget": 4, "policy.name": "h2o"}
    assert small.policy.budget == 8
    with pytest.raises(ConfigError, match="each field once"):
        sweep.product(small, [AXES[0], AXES[0]])
    with pytest.raises(ConfigError, match="at least one --sweep"):
        sweep.product(small, [])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("storage", ["dense", "int8"])
def test_budgets_of_a_sweep_share_programs_and_report_their_own_bytes(small, storage, tmp_path):
    small.repeats, small.storage, small.baselines = 0, storage, ("full", "h2o")
    alone, programs = [], []
    for budget in (5, 8, 10):
        one = fields.override(small, "policy.budget", budget)
        alone.append([row for row in session.Session().run(one).rows() if row["policy"] != "full"])
    for axes in ([("policy.budget", [5, 8, 10])], [("policy.budget", [4, 6, 9])]):
        before = decode_steps._cache_size(), prefill_steps._cache_size()
        _, found = sweep.sweep(small, axes)
        after = decode_steps._cache_size(), prefill_steps._cache_size()
        programs.append([b - a for a, b in zip(before, after, strict=True)])
        rows = [[row for row in result["rows"] if row["policy"] != "full"] for result in found]
        if axes[0][1] == [5, 8, 10]:
            for own, other in zip(rows, alone, strict=True):
                for row, expected in zip(own, other, strict=True):
                    assert row.keys() == expected.keys()
                    assert row["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
                    assert row["nats_by_row"] == pytest.approx(expected["nats_by_row"], rel=1e-5)
                    scores = {"perplexity": None, "nats_by_row": None}
                    assert row | scores == expected | scores
    # The largest budget has run before; of the second three, both policies have programs for 9 slots alone.
    assert programs[0] == [0, 0]
    assert all(1 <= number <= 2 for number in programs[1])


def test_budgets_that_differ_much_or_in_kind_share_nothing():
    assert sweep.capacity_of([0.1, 0.5, 0.2, 0.5]) == 0.5
    assert sweep.capacity_of([0, 4, 8]) == 8 and sweep.capacity_of([0.5, 1.5, 0.2]) == 0.5, "invalid ones fail alone"
    for budgets in ([0.2], [0.2, 0.2], [0.1, 8], [0.05, 0.9], [0, 4]):
        assert sweep.capacity_of(budgets) is None


def test_a_sweep_resumes_and_survives_failures(small, calls, monkeypatch, capsys):
    small.policy.sinks = None
    axes = [("policy.budget", [0, 4]), ("policy.name", ["h2o", "window"])]
    folder, found = sweep.sweep(small, axes)
    assert [result["status"] for result in found] == ["failed", "failed", "ok", "ok"]
    assert "budget 0 is out of range" in found[0]["error"]
    assert "traceback" not in found[0]
    # The full cache is measured once for all.
    assert calls == [("full", None), ("h2o", 4), ("window", 4)]
    stored = {path.name: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert stored.keys() == {result["file"] for result in found}
    assert len(stored) == 4

    whole, *lines = sweep.write(folder, small, found, "the command")
    assert whole["policy"] == "full"
    assert [line["perplexity"] for line in lines[:2]] == ["-", "-"]
    assert lines[0]["of full"] == "FAILED"
    assert lines[2]["policy"] == "h2o"
    assert lines[2]["budget (slots)"] == "4"
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "Failed, policy.budget=0, policy.name=h2o: policy h2o: budget 0" in (folder / "sweep.md").read_text()

    numbers = json.loads((folder / "sweep.json").read_text())
    assert [point["policy.name"] for point in numbers["points"]] == ["h2o", "window"]
    assert numbers["points"][0]["perplexity"] == found[2]["rows"][-1]["perplexity"]

    # Again: what is done stays, what failed is tried, what is new or lost is run.
    calls.clear()
    (folder / found[2]["file"]).write_text('{"status": "ok", "ro')
    (folder / found[3]["file"]).write_text(json.dumps(stored[found[3]["file"]] | {"mark": 1}))
    retried = []
    run = session.Session.run

    def seen(self, config, **settings):
        retried.append((config.policy.name, config.policy.budget))
        return run(self, config, **settings)

    monkeypatch.setattr(session.Session, "run", seen)
    _, again = sweep.sweep(small, axes)
    assert retried == [("h2o", 0), ("window", 0), ("h2o", 4)]
    assert again[3]["mark"] == 1
    assert [row["perplexity"] for row in again[2]["rows"]] == [row["perplexity"] for row in found[2]["rows"]]


def test_bytes_against_quality_where_storages_are_swept(tmp_path, small):
    def result(name, storage, held, perplexity, budget=0.5, **seed):
        row = {"policy": name, "budget": budget, "kv_bytes": held, "perplexity": perplexity, "keeps_all": False,
               "slots": 8, "least_slots": 8}  # fmt: skip
        config = {"storage": storage, "policy": {"name": name}}
        swept = {"storage": storage, "policy.name": name, "policy.budget": budget} | seed
        return {"status": "ok", "policy": name, "swept": swept, "config": config, "rows": [row]}

    found = [result("h2o", "dense", 800, 3.0), result("h2o", "int8", 400, 3.1), result("full", "int8", 800, 2.5, None)]
    shown = trades.points(found, "perplexity")
    assert [tuple(point.values()) for point in shown] == [
        ("dense", "h2o", 800, 3.0, None, None), ("int8", "h2o", 400, 3.1, None, None),
        ("int8", "full", 800, 2.5, None, None),
    ]  # fmt: skip
    seeds = [result("h2o", "int8", 400, 3.0 + 0.1 * seed, seed=seed) for seed in range(3)]
    (point,) = trades.points(seeds, "perplexity")
    assert (point["y"], point["error"]) == (pytest.approx(3.1), pytest.approx(0.1))
    assert trades.plot([*shown, point], "perplexity").startswith(b"\x89PNG")
    assert len(set(trades.STORAGE_COLORS)) == len(trades.STORAGE_COLORS) > 25, "a storage has a colour of its own"
    assert trades.points([*found, result("h2o", "int8", 200, 3.5, 0.2)], "perplexity")[-1]["policy"] == "h2o, 20 % (8)"
    # The full cache opens the table of its combination.
    full = result("full", "dense", 900, 2.4, None)
    full["rows"] += result("window", "dense", 400, 4.0)["rows"]
    assert trades.points([full], "perplexity")[0]["y"] == 2.4
    exact = [result("h2o", "dense", 800, 2.9 + 0.2 * seed, seed=seed) for seed in range(2)]
    for each, share in zip([*seeds[:2], *exact], (0.5, 0.75, 0.5, 1.0), strict=True):
        each["rows"][0]["recall"] = {"passkey": share, "copy": 0.5}
    (cost,) = trades.costs([*seeds, *exact])
    # Text by text: ln(3.0 / 2.9) and ln(3.1 / 3.1), and 0 and -25 points; the third has no exact slots.
    assert trades.cost_cells(cost) == {
        "storage": "int8", "policy": "h2o", "budget": "0.5", "texts": "2", "bytes, of exact": "50.0 %",
        "perplexity": "+1.71 ± 1.70 %", "passkey": "-12.5 ± 12.5 %", "copy": "+0.0 ± 0.0 %", "all": "-6.2 ± 6.2 %",
    }  # fmt: skip
    assert trades.cost_cells(trades.costs(found)[0])["perplexity"] == "+3.33 %"
    assert trades.costs(seeds) == []
    points = [(point["bytes"], point["y"]) for point in shown]
    assert trades.frontier(points, smaller=True) == [(400, 3.1), (800, 2.5)]
    assert trades.frontier([(1, 5), (1, 6), (2, 6), (3, 7)], smaller=False) == [(1, 6), (3, 7)]
    assert trades.plot(shown, "perplexity").startswith(b"\x89PNG")


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_storages_and_selections_are_swept(small, calls):
    small.policy = PolicyConfig(name="full")
    axes = [("storage", ["dense", "int4(group=4)"]), ("selection", ["everything", "optimal(4)", "quest(budget=0)"])]
    folder, found = sweep.sweep(small, axes)
    names = [
        "full", "full + optimal(4)", "full + quest(budget=0)", "full + int4(group=4)",
        "full + int4(group=4) + optimal(4)", "full + int4(group=4) + quest(budget=0)",
    ]  # fmt: skip
    assert [result["policy"] for result in found] == names
    assert [result["status"] for result in found] == ["ok", "ok", "failed"] * 2
    assert "budget must be a whole number of at least 1" in found[2]["error"]
    assert [name for name, _ in calls] == [name for name in names if "quest" not in name]
    assert list(found[4]["environment"]["explain"]) == ["full", names[4]]
    lines = sweep.write(folder, small, found, "the command")
    assert [line["policy"] for line in lines] == names
    assert [line["budget (slots)"] for line in lines] == ["all (21)", "all (21)", "-"] * 2
    shown = table.points(found, "perplexity")
    assert [(point["label"], point["x_name"]) for point in shown] == [
        (name, "KV cache held, % of the full cache") for name in names[1:] if "quest" not in name
    ]  # fmt: skip


def test_an_unforeseen_error_is_recorded_too_and_an_interruption_is_not(small, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(session, "measure", broken)
    folder, (result,) = sweep.sweep(small, [("policy.budget", [4])])
    assert result["error"] == "RuntimeError: out of luck"
    assert "broken" in result["traceback"]
    assert json.loads((folder / result["file"]).read_text())["status"] == "failed"

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sweep.sweep(small, [("policy.budget", [5])])
    assert [path.name for path in folder.iterdir()] == [result["file"]]


@pytest.mark.sampled(0)
def test_contents_of_files_and_other_code(small, calls, tmp_path, monkeypatch, capsys):
    """An edited policy is another result; what other code computed is marked; all is computed again if asked for."""
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from kvjax.policies import window\n\ndef recent(*, budget):\n    return window(budget=budget, sinks=0)\n"
    )
    small.policy = PolicyConfig(name=f"{mine}:recent", budget=8)
    axes = [("policy.budget", [8])]
    _, (first,) = sweep.sweep(small, axes)
    assert sweep.sweep(small, axes)[1][0]["file"] == first["file"] and len(calls) == 2
    mine.write_text(mine.read_text().replace("sinks=0", "sinks=2"))
    _, (second,) = sweep.sweep(small, axes)
    assert second["file"] != first["file"] and list(second["contents"]) == [str(mine)]
    assert len(calls) == 4
    sweep.sweep(small, axes, rerun=True)
    assert len(calls) == 6
    # Beside these lines, a run of more than a second says where it is.
    assert len(re.findall(r"^run 1 of 1: budget=8, [\d.]+ s$", capsys.readouterr().err, re.MULTILINE)) == 4

    assert not sweep.other_code([second]) and OTHER not in sweep.cells([second])[0]["budget (slots)"]
    monkeypatch.setattr(identity, "code", lambda: "another")
    assert sweep.other_code([second]) == [
        f"* 1 of 1 results are of other code (commit {commit_of(second)}); --rerun computes them anew."
    ]
    assert sweep.cells([second])[0]["budget (slots)"].endswith("*")


HELPER = "from kvjax.policies import window\n\ndef kept(budget):\n    return window(budget=budget, sinks=0)\n"


@pytest.mark.sampled(0)
def test_what_an_own_file_imports_is_a_part_of_it(small, calls, tmp_path):
    """An edit of the file, or of one beside it that it imports, is another result, computed by the new code."""
    mine, helper = tmp_path / "mine.py", tmp_path / "pack" / "helper.py"
    helper.parent.mkdir()
    (helper.parent / "__init__.py").write_text("from .helper import kept\n")
    helper.write_text(HELPER)
    mine.write_text(
        f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport pack\n\n"
        "def recent(*, budget):\n    return pack.kept(budget)\n"
    )
    small.policy, small.baselines = PolicyConfig(name=f"{mine}:recent", budget=8), ()
    axes = [("policy.budget", [8])]
    _, (first,) = sweep.sweep(small, axes, full=False)
    assert set(first["contents"]) == {str(mine), str(helper), str(helper.parent / "__init__.py")}
    assert sweep.sweep(small, axes, full=False)[1][0]["file"] == first["file"] and len(calls) == 1
    # Of another length: Python tells sources of one second apart by it.
    helper.write_text(HELPER.replace("sinks=0", "sinks=2 + 0"))
    _, (second,) = sweep.sweep(small, axes, full=False)
    assert second["file"] != first["file"] and len(calls) == 2
    assert second["rows"][-1]["perplexity"] != first["rows"][-1]["perplexity"]
    mine.write_text("def recent(:")
    _, (broken,) = sweep.sweep(small, axes, full=False)
    assert broken["status"] == "failed" and "mine.py cannot be loaded: SyntaxError: " in broken["error"]
    assert "(mine.py, line 1)." in broken["error"] and len(calls) == 2
    mine.write_text("import pack\nfrom kvjax.policies import windw\n")
    with pytest.raises(ConfigError, match=r"cannot import name 'windw' .*mine.py, line 2\)\."):
        parse.build("policy", f"{mine}:recent", budget=8)


@pytest.mark.sampled(0)
def test_an_edit_during_a_sweep_changes_nothing_of_it(small, tmp_path, monkeypatch):
    """Results are of the files that they are named by, also of those whose turn comes after an edit."""
    mine = tmp_path / "mine.py"
    mine.write_text(HELPER)
    small.policy, small.baselines = PolicyConfig(name=f"{mine}:kept", budget=8), ()
    _, (reference,) = sweep.sweep(small, [("policy.name", [f"{mine}:kept"])])
    attempt = sweep._attempt

    def edited(*arguments):
        mine.write_text(HELPER.replace("sinks=0", "sinks=2 + 0"))
        return attempt(*arguments)

    monkeypatch.setattr(sweep, "_attempt", edited)
    axes = [("policy.name", ["h2o", f"{mine}:kept"])]
    _, (_, during) = sweep.sweep(small, axes, rerun=True)
    assert during["file"] == reference["file"] and during["contents"] == reference["contents"]
    assert during["rows"][-1]["perplexity"] == reference["rows"][-1]["perplexity"]
    _, (_, after) = sweep.sweep(small, axes)
    assert after["file"] != reference["file"]
    assert after["rows"][-1]["perplexity"] != reference["rows"][-1]["perplexity"]


@pytest.mark.sampled(0)
def test_a_text_that_is_edited_during_a_sweep(small, calls, tmp_path, monkeypatch):
    """A run that would read other contents than its result is named by fails, and is run by the next call."""
    text = tmp_path / "text.txt"
    text.write_text("The cat sat on the mat. " * 20)
    small.data.text, small.baselines = str(text), ()
    attempt, counted = sweep._attempt, session.measure

    def edited(*arguments):
        if len(calls) == 1:
            text.write_text("The dog sat on the log. " * 20)
        return attempt(*arguments)

    monkeypatch.setattr(sweep, "_attempt", edited)
    axes = [("policy.budget", [4, 8])]
    _, (first, second) = sweep.sweep(small, axes, full=False)
    assert first["status"] == "ok" and second["status"] == "failed" and len(calls) == 1
    assert "text.txt changed after this began" in second["error"]
    monkeypatch.setattr(sweep, "_attempt", attempt)
    _, again = sweep.sweep(small, axes, full=False)
    assert [each["status"] for each in again] == ["ok", "ok"] and len(calls) == 3

    def measured_after(*arguments, **settings):
        text.write_text("A bird sat on the log. " * 20)
        return counted(*arguments, **settings)

    monkeypatch.setattr(session, "measure", measured_after)
    _, (during,) = sweep.sweep(small, [("policy.budget", [5])], full=False)
    assert during["status"] == "failed" and "changed after this began" in during["error"]


def test_files_of_a_model_are_contents(small, tmp_path):
    small.model.path = str(tmp_path / "model")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "merges.txt", "chat_template.jinja", "README.md"):
        (tmp_path / "model" / name).write_text("{}")
    names = {Path(name).name for name in identity.contents(small)}
    assert names == {"config.json", "merges.txt", "chat_template.jinja"}


OTHER = table.OTHER_CODE


def commit_of(result) -> str:
    return (result["environment"]["commit"] or "unknown")[: table.COMMIT]


def test_a_mean_over_seeds():
    def result(seed, perplexity):
        row = {"policy": "h2o", "perplexity": perplexity, "budget": 0.5, "kv_bytes": 1, "full_kv_bytes": 4,
               "slots": 8, "least_slots": 8, "keeps_all": False, "agreement": 0.5, "same_until": 2.0, "new_tokens": 4,
               "prefill_tokens_per_second": 1.0, "decode_tokens_per_second": None,
               "recall": {"copy": 0.1 * seed}}  # fmt: skip
        about = {"status": "ok", "policy": "h2o", "environment": {"code": identity.code()}, "rows": [row]}
        return about | {"swept": {"seed": seed, "policy.budget": 0.5}}

    found = [result(0, 3.0), result(1, 3.2), result(2, 3.4)]
    (line,) = sweep.cells(found)
    assert (line["seed"], line["perplexity"], line["copy"]) == ("3 seeds", "3.20 ± 0.20", "10 ± 10 %")
    assert line["agrees with full"] == "50.0 ± 0.0 %" and line["budget (slots)"] == "50 % (8)"
    (point,) = table.points(found, "perplexity")
    assert (point["y"], point["error"]) == (pytest.approx(3.2), pytest.approx(0.2))
    assert sweep.cells(found[:1])[0]["seed"] == "0"


def test_a_folder_that_takes_no_results(small, calls, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        sweep.sweep(dataclasses.replace(small, output=str(tmp_path / "file")), [("policy.budget", [4])])
    assert not calls
    # The disk is full when the first result is there.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = results.write

    def full(path, content):
        if str(path).startswith(small.output):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(results, "write", full)
    folder, (found,) = sweep.sweep(small, [("policy.budget", [4])])
    assert str(folder).startswith(str(tmp_path / "cache")) and (folder / found["file"]).is_file()
    assert f"They go to {folder}/ instead" in capsys.readouterr().err


def test_what_the_plot_shows():
    def result(policy, budget, perplexity, **swept):
        rows = [
            {"policy": "full", "perplexity": 2.0, "budget": None},
            {"policy": policy, "perplexity": perplexity, "budget": budget, "kv_bytes": 1, "full_kv_bytes": 4},
        ]
        swept = {"policy.budget": budget, "policy.name": policy} | swept
        return {"status": "ok", "policy": policy, "rows": rows, "swept": swept}

    shown = table.points([result("h2o", 0.1, 5.0), result("window", 0.2, 4.0), {"status": "failed"}], "perplexity")
    assert [(p["label"], p["x"], p["y"], p["full"]) for p in shown] == [("h2o", 10, 5.0, 2.0), ("window", 20, 4.0, 2.0)]
    assert shown[0]["x_name"] == "budget, % of the prompt"
    shown = table.points([result("h2o", 16, 5.0, prefill_block=8)], "perplexity")
    assert (shown[0]["label"], shown[0]["x"], shown[0]["x_name"]) == (
        "h2o prefill_block=8",
        16,
        "budget, slots per KV head",
    )
    assert table.points([result("h2o", 16, 5.0), result("h2o", 0.5, 5.0)], "perplexity")[0]["x"] == 25


def test_the_command(small, monkeypatch, tmp_path, capsys):
    path = tmp_path / "mine.py"
    path.write_text("import builtins\ndef get_config():\n    return builtins.small\n")
    monkeypatch.setattr("builtins.small", small, raising=False)
    small.baselines = ()
    status = experiments.sweep.main(["sweep", f"--config={path}", "--sweep=policy.budget=6,0"])
    out, err = capsys.readouterr()
    assert status == 1
    assert "1 of 2 runs done" in out
    assert "failed, policy.budget=0: policy window: budget 0" in err
    assert Path(small.output, "small-sweep", "sweep.md").is_file()
