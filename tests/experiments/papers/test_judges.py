"""Every entry judges made-up results: its tables, claims and figure, for any numbers that parts can have."""

import json
import zlib

import numpy as np
import pytest

from experiments.config import ModelConfig
from experiments.papers import figures, page, verdict
from experiments.papers.entry import registry
from experiments.papers.parts import check_unique
from experiments.papers.settings import FAST, TEXTS, Settings

LAYERS, HEADS, VOCAB = 6, 4, 300


def _look(part, rng):
    shape = (LAYERS, part.rows, HEADS)
    mass = -np.sort(-rng.random((LAYERS, part.length)))
    return {
        "sparsity": {"sparsity": rng.random(shape)},
        "accumulated": {"mass": mass, "exponent": rng.random(shape), "fit": rng.random(shape)},
        "keys_for_mass": {"keys": rng.integers(1, part.length, (*shape, part.length)).astype(np.uint16)},
    }[part.measure_name]


#: Part -> what it could have measured.
MADE_UP = {
    "LM": lambda p, rng: {"logprobs": -rng.random((p.rows, p.new), np.float32) - 2},
    "Recall": lambda p, rng: {
        "right": rng.random(p.prompts) < 0.5, "tokens": rng.integers(0, VOCAB, (p.prompts, 9)),
        "answers": rng.integers(0, VOCAB, (p.prompts, 9)),
    },
    "Choice": lambda p, rng: {
        "score": -rng.random((p.questions, 3)), "label": rng.integers(0, 3, p.questions),
        "shots": rng.integers(0, 5, p.questions),
    },
    "Greedy": lambda p, rng: {"tokens": rng.integers(0, VOCAB, (p.rows, p.new))},
    "Look": _look,
    "Plan": lambda p, rng: {name: 1e9 * rng.random() + 1 for name in ("weights", "cache", "moved", "speed", "slots")},
    "Held": lambda p, rng: {"bytes": np.asarray(1e6 * rng.random() + 1)},
    "Decode": lambda p, rng: {
        "side": np.array(p.policies), "milliseconds": rng.random(len(p.policies)) + 1,
        "slots": np.ones(len(p.policies), np.int32),
    },
    "Algorithm": lambda p, rng: {
        "kvjax": np.zeros((p.rows, 2, p.length)), "numpy": np.zeros((p.rows, 2, p.length)),
        "live": rng.integers(-1, 9, (p.length, p.budget + 1)), "score": rng.random((p.length, p.budget + 1)),
        "evicted": rng.integers(-1, 9, p.length),
    },
    "Neurons": lambda p, rng: {"active": rng.random((LAYERS, 50), np.float32)},
    "Removal": lambda p, rng: {
        **{name: np.asarray(9 + rng.random()) for name in ("before", "after", "random", "removed")},
        "tuned": 9 + rng.random(len(p.shares)),
    },
    "Checkpoints": lambda p, rng: {
        "exponent": rng.random((len(p.shares), 2)) + 0.1, "overlap": rng.random((len(p.shares), 2))
    },
    "Skewed": lambda p, rng: MADE_UP[type(p.of).__name__](p.of, rng),
    "Recorded": lambda p, rng: {
        "logprobs": -rng.random((p.rows, p.new), np.float32) - 2, "share": rng.random(LAYERS),
        "number": np.array([np.nan, np.nan, *rng.random(LAYERS - 2)]),
        "capped": np.array([np.nan, np.nan, *rng.random(LAYERS - 2)]), "live": 9 * rng.random(LAYERS) + 1,
    },
    "Overlap": lambda p, rng: {name: np.array([np.nan, *rng.random(LAYERS - 1)]) for name in ("overlap", "mass")},
    "Cosine": lambda p, rng: {"cosine": rng.random((len(p.caches), LAYERS, p.new))},
    "Jaccard": lambda p, rng: {"jaccard": rng.random((len(p.caches), LAYERS, p.new))},
    "Deviation": lambda p, rng: {
        "curve": rng.random((LAYERS, p.late + 1)), "peak": rng.integers(0, p.late, (LAYERS, 9)),
        "halved": rng.random(LAYERS), "rising": rng.random(LAYERS),
    },
    "Kept": lambda p, rng: {"last_seen": rng.integers(p.prompt - 1, p.prompt + p.new, (LAYERS, 2, p.prompt + p.new))},
    "Likely": lambda p, rng: {"logprobs": -rng.random((p.of.rows, p.of.new), np.float32)},
    "Prefill": lambda p, rng: {"speed": 1e3 * rng.random() + 1},
    "Columns": lambda p, rng: {
        **{name: -np.sort(-rng.dirichlet(np.ones(64), LAYERS)) for name in ("plain", "skewed")},
        "outlier": rng.random(LAYERS),
    },
    "Inputs": lambda p, rng: {
        name: np.array([np.nan, *rng.random(LAYERS - 1)])
        for name in ("attention_input", "block_input", "attention_output", "mlp_output")
    },
    "Important": lambda p, rng: {
        "count": 9 * rng.random((len(p.alphas), LAYERS, p.length)) + 1, "first": rng.random(LAYERS)
    },
    "Fact": lambda p, rng: {
        **{name: rng.random((LAYERS, p.prompts, HEADS)) for name in ("silent", "paid")},
        "quiet": rng.integers(0, p.length, (LAYERS, p.prompts, HEADS)),
        "curve": np.where(np.arange(p.length) > 9, rng.random(p.length), np.nan),
        "heads": rng.random((LAYERS, HEADS // 2)) < 0.3,
    },
    "Guess": lambda p, rng: {
        "columns": rng.random((2, p.heads, 64)) < 0.3, "expected": rng.random((2, p.heads, 64)) < 0.3,
        "sums": rng.random(64) + 1, "chosen": rng.random((2, p.heads, 9)) < 0.5, "weight": rng.random((2, p.heads, 9)),
        "near": np.zeros((2, p.heads, 9), bool),
    },
    "Moved": lambda p, rng: {
        "needed": 1e9 * rng.random(4) + 1, "moved": 1e9 * rng.random(4) + 1, "offloaded": 0.0, "weights": 1e9
    },
    "Own": lambda p, rng: {
        "slots": 9 * rng.random((4, LAYERS)) + 1, "bytes": 1e3 * rng.random(4) + 1, "partial": 1e3 * rng.random() + 1
    },
    "Sides": lambda p, rng: {
        "cache": np.array(p.caches), "milliseconds": rng.random(len(p.caches)) + 1,
        "full": rng.random(len(p.caches)) + 1,
    },
}  # fmt: skip


def made_up(part, seed):
    rng = np.random.default_rng([seed, zlib.crc32(part.name.encode())])
    return {name: np.asarray(value) for name, value in MADE_UP[type(part).__name__](part, rng).items()}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for file in TEXTS.values():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return Settings(ModelConfig(path="kvjax-tiny"), folder, 0, FAST)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", list(registry()))
def test_judges_whatever_was_measured(name, settings):
    entry = registry()[name]
    parts = check_unique(tuple(entry.parts(settings)))
    if any(type(part).__name__ == "Greedy" or getattr(part, "task", "") in ("copy", "multi_key") for part in parts):
        pytest.importorskip("rouge_score")
    found = {part: made_up(part, 0) for part in parts}
    judgement = entry.judge(settings, found)
    again = entry.judge(settings, found)
    made = json.dumps(verdict.as_json(judgement))
    assert made == json.dumps(verdict.as_json(again)), "the same numbers, the same judgement"
    assert judgement.tables and all(len({tuple(row) for row in table.rows}) == 1 for table in judgement.tables)
    what = [each.what for each in judgement.comparisons]
    assert len(set(what)) == len(what), "two comparisons of one name draw the same numbers"
    assert not judgement.contradict or judgement.confirm
    text = page.Report(entry, judgement, *verdict.conclude(judgement, trial=True)).markdown()
    assert f"## {name}" in text and "**Verdict: " in text and entry.published.caption in text
    if judgement.draw is not None:
        assert judgement.draw().startswith(b"\x89PNG")


def test_many_lines_have_few_in_the_legend(monkeypatch):
    """Those of 30 layers do not fit beside a panel."""
    monkeypatch.setattr(figures.plots, "png", lambda figure: figure)
    lines = {f"layer {layer}": ([1, 2], [layer, 2 * layer]) for layer in range(30)}
    few = {name: lines[name] for name in ("layer 3", "layer 4")}
    labels = [f"layer {layer}" for layer in (0, 7, 14, 21, 29)]

    def legends(*panels) -> list[list[str]]:
        figure = figures.curves([figures.Panel("", "", "", each) for each in panels])
        found = [ax.get_legend() for ax in figure.axes]
        return [[text.get_text() for text in each.get_texts()] for each in found if each]

    assert legends(lines) == [labels]
    assert legends(lines, few) == [labels, list(few)]
    assert legends(few, few) == [list(few)]
