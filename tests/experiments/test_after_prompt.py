"""Scores after a kept prompt: classes of tokens, a run of two caches that is continued, and its tables."""

import json

import numpy as np
import pytest

import kvjax
from experiments.after_prompt import main
from experiments.config import DataConfig
from experiments.programs.after_prompt import classes, recurring
from experiments.reports.after_prompt_page import report
from experiments.runs import data
from kvjax import policies
from kvjax.errors import ConfigError

PROMPT, NEW, GAP = 8, 60, 5


def test_tokens_that_recur():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 4, (3, 60))
    got = recurring(tokens, PROMPT, GAP)
    for row, t in np.ndindex(got.shape):
        at = t + PROMPT
        pairs = [tuple(tokens[row, i - 1 : i + 1]) for i in range(1, at + 1)]
        before = [i + 1 for i, pair in enumerate(pairs[:-1]) if pair == pairs[-1]]
        assert got[row, t] == (bool(before) and before[-1] >= PROMPT and at - before[-1] > GAP)
    assert 0.1 < got.mean() < 0.9
    parts = classes(tokens, PROMPT, GAP, 40)
    assert list(parts) == ["all", "recurring", "others", "0 to 40", "40 to 52"]
    assert (parts["recurring"] ^ parts["others"]).all() and parts["40 to 52"][:, 40:].all()


def test_tables_compare_row_by_row():
    def cache(mean, right, error):
        nats = {
            "kv_bytes": 64,
            "mean": {"all": mean, "recurring": mean},
            "tokens": {"all": [9, 9], "recurring": [0, 2]},
        }
        found = {"tokens": [4.0, 8.0], "lost": [1.0, 4.0], "mass": [2.0, 2.0], "mass_lost": [1.0, 1.0]}
        return {
            "nats": nats,
            "facts": {"passkey": right},
            "recurrences": found,
            "errors": dict.fromkeys(("prompt", "following"), error),
        }

    page = {
        "text": "book.txt", "command": "python", "against": ["window"],
        "setting": {"gap": 80, "data": {"num_sequences": 2, "prompt_length": 8, "new_tokens": 9}},
        "caches": {
            "full": cache([1.0, 2.0], [1, 1], [[0.0, 0.0], [0.0, 0.0]]),
            "phases(full, rkv(window=8))": cache([1.5, 2.25], [1, 0], [[0.5, 0.25], [0.5, 0.25]]),
            "phases(full, window)": cache([1.25, 2.0], [0, 0], [[0.25, 0.5], [0.5, 0.5]]),
        },
    }  # fmt: skip
    text = " ".join(report(page).split())
    # The name of a policy is not that of an argument.
    assert "Nats per token above `phases(full, window)`" in text and "above `phases(full, rkv" not in text
    assert "phases(full, rkv(window=8)) +0.250 (+0.250 to +0.250) +0.250" in text
    assert "phases(full, rkv(window=8)) 50 % (0 to 100)" in text and "38 % (25 to 50) 50 % (50 to 50)" in text
    assert "phases(full, rkv(window=8)) 0.375 (0.375 to 0.375) 75 % 0.50 0.25" in text


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_caches_are_scored_and_a_run_is_continued(tmp_path, capsys):
    window = "phases(full, window(every=4))"
    quick = (
        "program", "--config=random_control_tiny", f"--config.output={tmp_path}", f"--gap={GAP}",
        "--config.data.num_sequences=3", f"--config.data.prompt_length={PROMPT}", f"--config.data.new_tokens={NEW}",
        f"--config.policy.name={window}", "--config.policy.budget=8", "--config.baselines=full",
        "--config.recall.tasks=passkey", "--config.recall.prompts=3", "--config.recall.length=70",
        "--config.recall.nearest=16", "--config.recall.farthest=24",
    )  # fmt: skip
    assert main([*quick, "--measures=nats"]) == 0
    assert main([*quick, "--config.policy.name=full", "--config.baselines=none"]) == 0
    said = capsys.readouterr()
    # What was there is not measured again, and stays if it is not asked for.
    assert said.err.count("nats of full") == said.err.count("facts of full") == said.err.count("nats of " + window) == 1
    assert f"Nats per token above `{window}`, row by row:" in said.out
    file = tmp_path / "random_control_tiny" / "results.json"
    made = json.loads(file.read_text())["caches"]
    assert main([*quick, "--config.policy.name=full", "--config.baselines=none", "--against=full"]) == 0
    assert json.loads(file.read_text())["against"] == ["full"] and "nats of" not in capsys.readouterr().err
    assert list(made) == ["full", window]
    assert made["full"]["facts"] == {"passkey": [1, 1, 1]} and "facts" not in made[window]
    model = kvjax.load("kvjax-tiny", dtype="float32")
    tokens, *_ = data.load(DataConfig(num_sequences=3, prompt_length=PROMPT, new_tokens=NEW), model, 0)
    own = policies.phases(policies.full(), policies.window(8, every=4))
    expected = kvjax.log_likelihood(model, tokens, own, prompt_length=PROMPT).logprobs[:, PROMPT - 1 :]
    np.testing.assert_allclose(made[window]["nats"]["mean"]["all"], -np.mean(expected, axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["--measures=speed"], "unknown measure 'speed'; known measures: nats, facts, recurrences, errors"),
        (["--measures=recurrences"], "needs --gap"),
        (["--config.recall.length=350", "--config.data.prompt_length=350"], "leaves no token after the prompt of"),
        (["--config.recall.tasks=none", "--config.data.prompt=Once"], "has no continuation"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, match, tmp_path):
    with pytest.raises(ConfigError, match=match):
        main(["program", "--config=random_control_tiny", f"--config.output={tmp_path}", *flags])
