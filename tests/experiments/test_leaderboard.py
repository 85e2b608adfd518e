"""Leaderboards: cells, intervals, ranks, the page, and a small one from end to end."""

import json
import math
import re

import numpy as np
import pytest

import kvjax
from experiments import cli, leaderboard, specs
from experiments.config import DataConfig, ModelConfig
from experiments.leaderboards import caches, cells, generation, page, pareto, peaks, scores
from experiments.leaderboards import turns as turns_page
from experiments.leaderboards.cells import Cell
from experiments.leaderboards.config import LeaderboardConfig
from experiments.programs import leaderboard as program
from experiments.reports.bootstrap import interval
from experiments.runs.resolve import decoder_config
from experiments.tasks import registry, ruler
from kvjax import policies
from kvjax.errors import ConfigError, PolicyError
from kvjax.planning import make_plan

SMALL = DataConfig(num_sequences=3, prompt_length=48, new_tokens=6)


def config(**changes) -> LeaderboardConfig:
    given = {"caches": ("window", "h2o"), "budgets": (0.25, 0.5), "model": ModelConfig(shape="tiny"), "data": SMALL}
    return LeaderboardConfig(**given | changes)


def made(cache, budget, nats, scores, held=50):
    """A row of leaderboard.json, whose full cache has 1 nat a token and scores of 100."""
    return {
        "cache": cache, "budget": budget, "status": "ok", "kv_bytes": held, "full_kv_bytes": 100, "command": "x",
        "nats": {"a.txt": nats}, "full_nats": {"a.txt": [1.0] * len(nats)},
        "tasks": {"needle(depths=5)": {"scores": scores, "full": [100.0] * len(scores)}},
        "machine": {"device": "cpu", "cpu": "a cpu", "jax": "0", "commit": None},
    }  # fmt: skip


def test_all_policies_are_on_the_leaderboard_of_policies_or_left_out_with_a_reason():
    """A policy that is registered later is missed here until it has a row, or a reason to have none."""
    # Names, and not those of arguments: window, but not snapkv(window=16).
    listed = {name for cache in caches.POLICIES for name in re.findall(r"[a-z]\w*(?!\w|\s*=)", cache)}
    registered = {*policies.POLICIES, *policies.COMBINATORS, *policies.HEAD_PLANS}
    assert listed <= registered and set(caches.LEFT_OUT) <= registered
    assert registered - listed == set(caches.LEFT_OUT)
    assert all(len(reason) > 10 for reason in caches.LEFT_OUT.values())
    first = {cache.split("(")[0] for cache in caches.POLICIES}
    # The gradients of kvgrad on SmolLM2 need more memory than the machine of the other rows has.
    for name, missing in (("leaderboard_policies_tiny", set()), ("leaderboard_policies_smollm2", {"kvgrad"})):
        own, _ = cli.parse(["leaderboard", f"--config={name}"], about="", cls=LeaderboardConfig)
        assert first - {cache.split("(")[0] for cache in own.caches} == missing


def test_the_leaderboard_of_a_gpu_has_all_tasks_of_ruler():
    own, _ = cli.parse(["leaderboard", "--config=leaderboard_smollm2"], about="", cls=LeaderboardConfig)
    found = [registry.build(name) for name in own.tasks.names]
    asked = {(each.task, each.length) for each in found if isinstance(each, ruler.Ruler)}
    assert asked == {(task, own.data.prompt_length) for task in ruler.TASKS}


def test_cells_and_experiments_of_a_config():
    own = config(unlimited=("full + int4",), texts=("a.txt", "b.txt"))
    found = cells.cells(own)
    assert found["h2o"] == [Cell("h2o", 0.25), Cell("h2o", 0.5)]
    assert found["full + int4"] == [Cell("full + int4", None)]
    (swept, first), (_, second) = cells.experiments(own, Cell("h2o + int8 + quest(page=4, budget=8)", 0.25))
    assert swept == {"cache": "h2o + int8 + quest(page=4, budget=8)", "budget": 0.25, "text": "a.txt"}
    assert (first.policy.name, first.policy.budget, first.storage) == ("h2o", 0.25, "int8")
    assert (first.selection, first.baselines) == ("quest(page=4, budget=8)", ("full",))
    assert (first.data.text, second.data.text) == ("a.txt", "b.txt")


def test_budgets_in_texts():
    assert cells.filled(Cell("full + quest(budget={tokens})", 0.2), 2048) == "full + quest(budget=416)"
    assert cells.filled(Cell("full + infinigen(cap={share})", 0.05), 2048) == "full + infinigen(cap=0.05)"
    assert cells.filled(Cell("full + quest(budget={tokens})", 0.001), 100) == "full + quest(budget=16)"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"caches": ("h2o", "h2o")}, "listed twice"),
        ({"budgets": (0.0, 0.5)}, "shares of the prompt"),
        ({"budgets": ()}, "shares of the prompt"),
        ({"caches": ("full + int8",)}, "same cache at every budget"),
        ({"caches": ("h2o(0.3)",)}, "same cache at every budget"),
    ],
)
def test_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        cells.cells(config(**changes))
    with pytest.raises(ConfigError, match="one of each"):
        list(cells.experiments(config(), Cell("full + int4 + int8", None)))


def test_commands_of_cells_keep_what_was_given():
    given = ["--config=leaderboard_tiny", "--config.seed=3", "--config.budgets=0.1,0.2", "--config.caches=h2o"]
    found = cells.command(given, Cell("full + infinigen(cap={share})", 0.1))
    assert "--config.seed=3" in found
    assert "'--config.caches=full + infinigen(cap={share})' --config.budgets=0.1" in found
    unlimited = cells.command(given, Cell("full + int4", None))
    assert unlimited.endswith("--config.caches=none '--config.unlimited=full + int4'")


def test_intervals_hold_the_mean_and_narrow_with_more_rows():
    rng = np.random.default_rng(0)
    few, many = rng.standard_normal(10), rng.standard_normal(1000)
    for values in (few, many):
        low, high = interval(values, "x")
        assert low < values.mean() < high
        # That of the normal distribution, about.
        assert high - low == pytest.approx(2 * 1.96 * values.std() / math.sqrt(values.size), rel=0.1)
    assert interval(many, "x") == interval(many, "x")


def test_ranks_are_means_over_columns_and_ties_share():
    best = made("a", 0.1, [1.0, 1.0], [100.0, 100.0])
    middle = made("b", 0.1, [1.5, 1.5], [0.0, 100.0])
    worst = made("c", 0.1, [2.0, 2.0], [0.0, 100.0])
    # By perplexity 1, 2, 3; by the task 1 and twice 2.5.
    assert scores.ranked([best, middle, worst]) == [1.0, 2.25, 2.75]


def test_the_front_has_what_no_other_beats_in_both_numbers():
    assert pareto.on_front([("a", 1, 2), ("b", 2, 1), ("c", 2, 2), ("d", 1, 2)]) == {"a", "b", "d"}
    many = [made(f"h2o{number}", 0.1, [1.0 + number, 1.1], [100.0, 0.0], held=16 + number) for number in range(20)]
    assert pareto.plot(many).startswith(b"\x89PNG")


def test_labels_of_a_plot_are_short_and_differ():
    chosen = ("full + quest(page=16, budget={tokens})", "full + alisa({tokens}, first_layer=2)", "h2o + int8")
    assert pareto.labels_of(chosen) == dict(zip(chosen, ("quest", "alisa", "h2o + int8"), strict=True))
    sizes = ("full + quest(page=16, budget={tokens})", "full + quest(page=8, budget={tokens})")
    assert pareto.labels_of(sizes) == dict(zip(sizes, ("quest(page=16)", "quest(page=8)"), strict=True))
    same = ("full + infinigen(cap={tokens})", "full + infinigen(cap={share})", "window")
    assert pareto.labels_of(same) == dict(zip(same, same, strict=True))


def file(rows, command="x", **sizes):
    """The contents of a leaderboard.json."""
    return {"command": command, "sizes": page.sizes(config(texts=("a.txt",))) | sizes, "rows": rows}


def test_files_become_one_page_with_a_summary_of_budgets():
    failed = {"cache": "h2o", "budget": 0.5, "status": "failed", "error": "it broke"}
    first = file([made("h2o", 0.1, [1.2] * 3, [100.0, 0.0]), failed, made("window", 0.1, [1.5] * 3, [0.0, 0.0])], "one")
    second = file([made("h2o", 0.5, [1.1] * 3, [100.0, 100.0]), made("h2o", 0.1, [9.0] * 3, [0.0, 0.0])], "other")
    found = page.merged([first, second])
    assert found["command"] == "one\nother"
    assert found["rows"] == [first["rows"][0], second["rows"][0], first["rows"][2]], "the first result of each"
    assert page.merged([file([failed]), file([failed])])["rows"] == [failed]
    text = page.files(found)[page.PAGE]
    assert "`one`\n\n`other`" in text and "## 50 % of the prompt" in text
    assert "## All budgets" not in text, "of one cache alone"
    third = file([made("window", 0.5, [1.3] * 3, [0.0, 100.0], held=60)])
    best, other = page.over_budgets(page.merged([first, second, third])["rows"])
    assert best == {
        "mean rank": "1.0", "cache": "`h2o`", "held": "50 %", "perplexity, 10 %": "+22.1 %",
        "perplexity, 50 %": "+10.5 %", "tasks, 10 %": "50", "tasks, 50 %": "100",
    }  # fmt: skip
    assert other["cache"] == "`window`" and other["mean rank"] == "2.0" and other["held"] == "50 to 60 %"
    assert "## All budgets" in page.files(page.merged([first, second, third]))[page.PAGE]


def test_ranks_over_budgets_are_of_those_that_all_caches_have():
    rows = [made("h2o", 0.1, [1.5] * 3, [0.0]), made("h2o", 0.2, [1.1] * 3, [0.0]), made("h2o", 0.5, [1.1] * 3, [9.0])]
    better = [made("window", 0.1, [1.4] * 3, [1.0]), made("window", 0.5, [1.0] * 3, [10.0])]
    first, second = page.over_budgets(rows + better)
    assert (first["cache"], first["mean rank"], first["perplexity, 20 %"]) == ("`window`", "1.0", "")
    assert (second["cache"], second["mean rank"]) == ("`h2o`", "2.0")
    disjoint = [made("window", 0.3, [1.4] * 3, [1.0]), made("window", 0.4, [1.0] * 3, [10.0])]
    assert all("mean rank" not in row for row in page.over_budgets(rows + disjoint))


def test_files_of_other_texts_tasks_or_weights_are_refused():
    first = file([made("h2o", 0.1, [1.2] * 3, [100.0])])
    with pytest.raises(ConfigError, match="differ in prompt: 48 and 64"):
        page.merged([first, file([], prompt=64)])
    other = made("h2o", 0.5, [1.2] * 3, [100.0])
    with pytest.raises(ConfigError, match=r"perplexities of the full cache on a\.txt, 2\.72 and 3\.00"):
        page.merged([first, file([other | {"full_nats": {"a.txt": [1.1] * 3}}])])
    other["tasks"]["copa"] = other["tasks"].pop("needle(depths=5)")
    with pytest.raises(ConfigError, match=r"differ in tasks.*copa.*needle"):
        page.merged([first, file([other])])


def test_page_of_rows():
    rows = [
        made("h2o", 0.1, [1.2, 1.4], [100.0, 0.0]),
        made("window", 0.1, [1.5, 1.7], [0.0, 0.0]),
        made("full + int4", None, [1.0, 1.1], [100.0, 100.0], held=16),
        {"cache": "roco", "budget": 0.1, "status": "failed", "error": "it broke"},
    ]
    sizes = page.sizes(config(texts=("folder/a.txt",)))
    rows.append(made("broken", 0.1, [1.2, math.nan], [0.0, 0.0]))
    rows.append(made("far", 0.1, [900.0, 900.0], [0.0, 0.0]))
    files = page.files({"rows": rows, "sizes": sizes, "command": "the command"})
    text = files[page.PAGE]
    assert text.index("`h2o`") < text.index("`window`")
    # exp of the mean of 0.2 and 0.4 nats is 35 % above.
    assert "+35.0 %" in text
    assert "perplexity 2.72 (a.txt)" in text
    assert "Not measured: `roco` at 0.1: it broke" in text
    assert "Not measured: `broken` at 0.1: a score is not a number" in text
    assert "## Without a budget" in text
    assert files["leaderboard.png"].startswith(b"\x89PNG")
    assert not any(name in text for name in (page.FOOTPRINT, page.READ, page.TIME)), "rows of older files lack them"
    newer = {"footprint": 0.31, "read": 0.125, "decode_tokens_per_second": 50.0, "full_decode_tokens_per_second": 40.0}
    text = page.files({"rows": [rows[0] | newer, rows[1]], "sizes": sizes, "command": "x"})[page.PAGE]
    assert "31 %" in text and "12 %" in text and "0.80" in text
    assert "*Footprint*" in text and "*Time of a step*" in text
    answers = [
        {"cache": "h2o", "budget": 0.1, "questions": 33, "answers equal": 32},
        {"cache": "window", "budget": 0.2, "questions": 33, "answers equal": 1},
        {"cache": "full + int4", "budget": 0.1, "questions": 33},
    ]
    file = {"answers": answers, "command": "answers --model=x", "model": "x"}
    compared = page.with_peer(rows[:3], file, "x")
    for model, given, match in (
        ("y", rows[:3], "answers of x, and the leaderboard is of y"),
        ("x", rows[1:2], "under none"),
    ):
        with pytest.raises(ConfigError, match=match):
            page.with_peer(given, file, model)
    text = page.files({"rows": compared, "sizes": sizes, "command": "x"})[page.PAGE]
    assert "32 of 33" in text and "1 of 33" not in text and "`python -m experiments.bench answers --model=x`" in text
    assert "No cell" in page.files({"rows": rows[3:4], "sizes": sizes, "command": "x"})[page.PAGE]


def test_rulers_tasks_of_one_length_are_one_column():
    row = made("h2o", 0.1, [1.2, 1.4], [100.0, 0.0])
    for task, values in (("niah_single_1", [100.0, 50.0]), ("vt", [0.0, 10.0])):
        row["tasks"] |= {f"ruler_{task}(length=64)": {"scores": values, "full": [100.0, 80.0]}}
    row["tasks"]["ruler_vt(length=128)"] = {"scores": [1.0, 3.0], "full": [5.0, 7.0]}
    assert scores.with_means(row)["tasks"] == {
        "needle(depths=5)": row["tasks"]["needle(depths=5)"],
        "ruler(length=64)": {"scores": [100.0, 50.0, 0.0, 10.0], "full": [100.0, 80.0, 100.0, 80.0]},
        "ruler_vt(length=128)": row["tasks"]["ruler_vt(length=128)"],
    }
    text = page.files({"rows": [row], "sizes": page.sizes(config()), "command": "x"})[page.PAGE]
    header = next(line for line in text.splitlines() if "mean rank" in line and "|" in line)
    assert [name.strip() for name in header.split("|")[5:-1]] == ["needle", "ruler", "ruler_vt"]


def test_a_long_generation_is_an_experiment_with_a_page():
    """Its budget is a share of what is generated too: of 8 tokens alone it would be 2 slots."""
    given = config(caches=("h2o", "full + quest(page=16, budget={tokens})"), unlimited=("full + int4",), generated=56,
                   opening=8, texts=("a.txt", "b.txt"))  # fmt: skip
    for cache, budget, slots, selection in (
        ("h2o", 0.25, 16, "everything"),
        ("full + quest(page=16, budget={tokens})", 0.5, 32, "quest(page=16, budget=32)"),
        ("full + int4", None, 1.0, "everything"),
    ):  # fmt: skip
        *_, (swept, long) = cells.experiments(given, Cell(cache, budget))
        assert swept == {"cache": cache, "budget": budget, "text": "a.txt", "generated": 56, "opening": 8}
        assert (long.data.prompt_length, long.data.new_tokens, long.data.text) == (8, 56, "a.txt")
        assert (long.policy.budget, long.selection, long.tasks.names) == (slots, selection, ())
    row = {"status": "ok", "seconds": 1.0, "environment": {"device": "cpu", "cpu": "a", "jax": "0", "commit": None}}
    own = {
        "policy": "h2o", "slots": 16, "kv_bytes": 1, "full_kv_bytes": 4, "decode_tokens_per_second": None, "tasks": {},
        "nats_by_row": [1.0], "agreement": 0.5, "agreement_by_row": [0.25, 0.75], "same_until_by_row": [3, 9],
        "new_tokens": 56, "footprint": 0.5, "generated": {"tokens": 40.0, "distinct-2": 80.0, "longest repeat": 5.0},
    }  # fmt: skip
    full = own | {"policy": "full", "generated": {"tokens": 50.0, "distinct-2": 90.0, "longest repeat": 2.0}}
    sizes = {"text": None, "generated": 56, "opening": 8}
    found = [row | {"rows": [full, own], "swept": each} for each in ({"text": None}, sizes)]
    made_of = cells.row(Cell("h2o", 0.25), found, [])
    assert list(made_of["nats"]) == ["generated"] and made_of["generated"]["opening"] == 8
    text = generation.files({"rows": [made_of], "command": "the command"})[generation.PAGE]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[2] == ["`full`", "", "50", "90 %", "2", "100 %", "", "100 %"]
    assert lines[3] == ["`h2o`", "25 %", "40", "80 %", "5", "50 %", "6", "50 %"]
    many = dict(made_of["generated"], agreement_by_row=[0.25, 0.75] * 4)
    page_of = generation.files({"rows": [made_of | {"generated": many}], "command": "x"})[generation.PAGE]
    assert re.search(r"50 \([23]\d to [67]\d\) %", page_of)
    # A cell keeps its other scores if its generation fails.
    for changes in ({"status": "failed", "error": "too few slots"}, {"rows": [full, {**own}]}):
        if "rows" in changes:
            del changes["rows"][1]["generated"]  # of older code
        failed = cells.row(Cell("roco", 0.25), [found[0], found[1] | changes], [])
        assert failed["status"] == "ok" and failed["nats"] == {"generated": [1.0]}
        both = generation.files({"rows": [made_of, failed], "command": "x"})[generation.PAGE]
        assert f"Not measured: `roco` at 0.25: {failed['generated']['error']}" in both and "`roco` |" not in both
    missing = cells.row(Cell("roco", 0.25), [found[0], {"status": "missing", "swept": sizes}], [])
    assert missing["status"] == "missing"
    with pytest.raises(ConfigError, match="a long generation continues a text"):
        cells.cells(config(generated=8, data=DataConfig(prompt="x")))
    assert "56 tokens are generated greedily after 8 tokens" in text and "the command" in text
    assert generation.files({"rows": [made("h2o", 0.1, [1.2], [50.0])], "command": "x"}) == {}


def test_page_by_turn():
    def turns(rows, held, tokens):
        means = {"slots held": held, "bytes": 4_096_000, "tokens recomputed": tokens, "score": 50.0}
        return turns_page.turns_of({"by_turn": rows, "scores": means})

    full = turns([[100.0, 100.0, 50.0], [100.0, 0.0]], 100.0, 0)
    rows = [made("h2o", 0.1, [1.2], [50.0]), made("full + int4", None, [1.0], [50.0])]
    rows[0]["tasks"]["recall(mode=single)"] = {
        "turns": {"full": full, "cache": turns([[100.0, 0.0, 0.0], [0.0, 100.0]], 12.5, 720)}
    }
    rows[1]["tasks"]["recall(mode=single)"] = {"turns": {"full": full, "cache": full}}
    for row, values in zip(rows, ([[100.0, 100.0, 100.0], [0.0, 50.0]], full["by_turn"]), strict=True):
        other = turns(values, 50.0, 0)
        row["tasks"]["recall(mode=multi_turn)"] = {"turns": {"full": full, "cache": other}}
    found = {"rows": [*rows, {"cache": "roco", "status": "failed"}], "command": "the command"}
    files = turns_page.files(found)
    text = files[turns_page.PAGE]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    # Later turns of the two contexts: 0 and 100 of single, 100 and 50 of multi_turn.
    assert "## Modes of recall()" in text
    assert lines[0] == ["cache", "single", "multi_turn", "multi_turn less single"]
    assert lines[3] == ["h2o, 10 %", "50 (0 to 100)", "75 (50 to 100)", "+25 (-50 to +100)"]
    lines = lines[5:10]
    assert lines[0] == ["cache", "turn 1", "turn 2", "turn 3", "later turns", "slots held", "kilobytes", "recomputed"]
    assert [line[0] for line in lines[2:]] == ["full", "h2o, 10 %", "full + int4"]
    # (0 - 100) and (100 - 0): the first context has two later turns.
    assert lines[3][1:] == ["50 (0 to 100)", "50 (0 to 100)", "0 (0 to 0)", "+0 (-100 to +100)", "12 %", "4,096", "720"]
    assert "## recall(mode=single)" in text and "needle" not in text
    assert files[turns_page.PLOT].startswith(b"\x89PNG")
    assert turns_page.files({"rows": [made("h2o", 0.1, [1.2], [50.0])], "command": "x"}) == {}


@pytest.mark.sampled(0)
@pytest.mark.filterwarnings("ignore:budget 0.* leaves")
def test_cells_share_the_work_of_prompts(tmp_path):
    """In threads too, which measure several caches at once."""
    alone = program.run(config(output=str(tmp_path / "alone")))
    with kvjax.reuse_prompts(1 << 26) as store:
        shared = program.run(config(output=str(tmp_path / "shared")))
    assert store.misses == 1 and store.hits == 4, "the full cache and four cells"
    for one, other in zip(shared, alone, strict=True):
        for text, nats in one["nats"].items():
            np.testing.assert_allclose(nats, other["nats"][text], rtol=1e-5)
        assert (one["slots"], one["kv_bytes"]) == (other["slots"], other["kv_bytes"])


def test_cells_without_a_peak(monkeypatch):
    """Policies that few layers cannot have, programs that do not fit and cells without a result stay as they are."""

    def peak(decoder, spec, config):
        if spec.policy.name == "window":
            raise PolicyError("too few layers")
        return None if spec.policy.name == "tova" else 100

    monkeypatch.setattr(peaks, "peak_bytes", peak)
    caches = ("h2o", "tova", "window", "roco")
    rows = [
        {"cache": cache, "budget": 0.25, "status": "failed" if cache == "roco" else "ok", "machine": {"device": "cpu"}}
        for cache in caches
    ]
    made = config(caches=caches)
    with_peaks = peaks.with_peaks(rows, made, page.sizes(made))
    assert with_peaks == [rows[0] | {"peak_bytes": 100, "full_peak_bytes": 100}, *rows[1:]]
    rows[1]["machine"]["device"] = "NVIDIA H200"
    with pytest.raises(ConfigError, match="that the cells were measured on: NVIDIA H200; this is cpu"):
        peaks.with_peaks(rows, made, page.sizes(made))
    rows[1]["machine"]["device"] = "cpu"
    calls = []
    monkeypatch.setattr(peaks, "peak_bytes", lambda *arguments: calls.append(arguments))
    assert peaks.with_peaks(rows, made, page.sizes(made)) == rows and len(calls) == 1, "the full cache's is refused"


def test_no_peak_of_programs_that_are_refused(monkeypatch):
    """A compiler that refuses a program does not say how much it would need."""
    made = config(caches=("qfilters",))
    decoder = decoder_config(made.model)
    _, experiment = next(cells.experiments(made, Cell("qfilters", 0.5)))
    spec = specs.build_spec(experiment)
    held = peaks.peak_bytes(decoder, spec, experiment)
    # The peak includes keys and values of 24 tokens in 3 rows, in float32.
    assert held > 3 * 24 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * 2 * 4
    monkeypatch.setattr(make_plan, "compile_prefill", lambda *arguments: (None, "out of memory"))
    assert peaks.peak_bytes(decoder, spec, experiment) is None


@pytest.mark.sampled(0)
def test_end_to_end_and_again(tmp_path, capsys):
    command = [
        "leaderboard", "--config=leaderboard_tiny", "--config.model.path=none", "--config.model.shape=tiny",
        "--config.caches=window", "--add=h2o", "--config.unlimited=full + int8", "--config.budgets=0.25,0.5",
        "--config.tasks.names=none", "--config.data.num_sequences=2", "--config.data.prompt_length=48",
        "--config.data.new_tokens=6", "--config.generated=12", "--config.opening=4", f"--config.output={tmp_path}",
    ]  # fmt: skip
    assert leaderboard.main(command) == 0
    folder = tmp_path / "leaderboard_tiny"
    assert "12 tokens are generated greedily after 4" in (folder / generation.PAGE).read_text()
    found = json.loads((folder / program.JSON_FILE).read_text())
    assert [(row["cache"], row["budget"]) for row in found["rows"]] == [
        ("window", 0.25), ("window", 0.5), ("h2o", 0.25), ("h2o", 0.5), ("full + int8", None),
    ]  # fmt: skip
    assert str(tmp_path) not in (folder / program.JSON_FILE).read_text()
    assert all(len(row["nats"]["generated"]) == 2 for row in found["rows"])
    text = (folder / page.PAGE).read_text()
    # The second call finds all results.
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "leaderboard_tiny-sweep").glob("*.json")}
    assert len(stamps) == 10
    assert leaderboard.main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in stamps} == stamps
    # The page is that of the JSON file.
    (folder / page.PAGE).unlink()
    assert leaderboard.main([*command, f"--page={folder / program.JSON_FILE}"]) == 0
    assert (folder / page.PAGE).read_text() == text
    assert leaderboard.main([*command, f"--page={folder / program.JSON_FILE},{folder / program.JSON_FILE}"]) == 0
    assert (folder / page.PAGE).read_text() == text, "the same cells twice"
    # A worker that finds the results of others has the whole page.
    assert "5 of 5 cells" in capsys.readouterr().out
    assert page.PEAK not in (folder / page.PAGE).read_text()
    assert leaderboard.main([*command, f"--page={folder / program.JSON_FILE}", "--peaks"]) == 0
    rows = json.loads((folder / program.JSON_FILE).read_text())["rows"]
    # A full cache of two rows of 54 tokens, and what a step needs besides; that of h2o keeps scores too.
    peaks = [row["peak_bytes"] for row in rows]
    assert all(row["full_peak_bytes"] > row["full_kv_bytes"] > row["kv_bytes"] for row in rows)
    assert peaks[0] < peaks[1] and all(peak > row["kv_bytes"] for peak, row in zip(peaks, rows, strict=True))
    assert page.PEAK in (folder / page.PAGE).read_text()
    other = [f"--page={folder / program.JSON_FILE}", "--peaks", "--config.data.new_tokens=7"]
    with pytest.raises(ConfigError, match="their new is 6, the config's 7"):
        leaderboard.main([*command, *other])
