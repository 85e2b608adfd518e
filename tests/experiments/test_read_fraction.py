"""Recall against the share of slots that is read: a run of few prompts, and its plot drawn again."""

import json

import pytest

from experiments import read_fraction
from experiments.programs.read_fraction import METHODS, Sizes
from experiments.read_fraction import main
from kvjax.errors import ConfigError
from tests.tiny import tiny


def test_methods_that_flags_name():
    assert list(METHODS) == list(read_fraction.METHODS)
    # Each can be built with any pages and blocks of queries.
    for name, cache in METHODS.items():
        assert cache(128, tiny().model, Sizes(16, 16)).policy.name, name


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_points_of_a_selection_and_a_policy(tmp_path, capsys):
    output, plot = tmp_path / "results" / "points.json", tmp_path / "plots" / "points.png"
    quick = ("--prompts=2", "--rows=1", "--length=300", "--shares=0.05", "--methods=infinigen,window")
    assert main(["reading", *quick, f"--output={output}", f"--plot={plot}"]) == 0
    full, guessed, window = json.loads(output.read_text())["points"]
    assert [point["method"] for point in (full, guessed, window)] == ["full", "infinigen", "window"]
    assert full["share"] == 1 and window["share"] == 15 / 300
    # At most 15 chosen of 300 to 310, and the new one.
    assert 1 / 310 < guessed["share"] <= 16 / 300
    assert set(full["recall"]) == {"passkey", "associative"} and len(full["perplexity"]) == 4
    assert full["perplexity"][-1] < guessed["perplexity"][-1] < window["perplexity"][-1]
    first = plot.read_bytes()
    assert main(["reading", f"--input={output}", f"--plot={plot}"]) == 0
    assert first == plot.read_bytes() and "infinigen" in capsys.readouterr().out


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("flag", "match"),
    [
        ("--methods=mine", "unknown method 'mine'; known methods: infinigen"),
        ("--shares=0,0.5", "fractions in"),
        ("--shares=few", "could not convert"),
        ("--input=nowhere.json", "was not written by --output"),
        ("--methods=infinigen_skewed", "needs --skew=FILE"),
        ("--text_prompt=1024", "leaves nothing to score within the model's 1024 positions"),
    ],
)
def test_wrong_flags_are_refused(flag, match):
    with pytest.raises(ConfigError, match=match):
        main(["reading", flag])


@pytest.mark.parametrize("flag", ["output", "plot"])
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_measured(flag, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="taken' cannot be written"):
        main(["reading", "--prompts=2", f"--{flag}={tmp_path}/taken/points"])
