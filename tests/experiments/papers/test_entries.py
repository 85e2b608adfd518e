"""The manifest: every table and figure of the three papers has an entry, and every entry asks for parts."""

import dataclasses
import pickle
import re

import pytest

import experiments.paper
from experiments.config import ModelConfig
from experiments.papers.entry import Published, published, registry, with_published
from experiments.papers.names import H2O, INFINIGEN, NAMES, ROCO
from experiments.papers.parts import check_unique
from experiments.papers.settings import FAST, FULL, HALF, LONG, TEXTS, Settings
from experiments.programs import paper
from kvjax.errors import ConfigError
from kvjax.models.shapes import by_name
from kvjax.products import native


def test_every_name_has_an_entry():
    assert (len(H2O), len(ROCO), len(INFINIGEN), len(set(NAMES))) == (19, 15, 21, 55)
    assert list(registry()) == list(NAMES), "an entry has no config"


def test_names_are_those_of_the_definitions(shared_data):
    page = shared_data / "PAPERS.md"
    if not page.is_file():
        pytest.skip("PAPERS.md is not in the shared folder")
    headings = re.findall(r"^### (.+)$", page.read_text(), re.MULTILINE)
    assert [name.strip() for heading in headings for name in heading.split(",")] == list(NAMES)


@pytest.mark.parametrize("name", sorted(registry()))
def test_parts_are_equal_each_time(name, tmp_path):
    for file in TEXTS.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    entry = registry()[name]
    counts = []
    for scale in (FULL, FAST):
        settings = Settings(ModelConfig(path="kvjax-tiny"), tmp_path, 0, scale)
        parts = check_unique(tuple(entry.parts(settings)))
        assert parts == check_unique(tuple(entry.parts(settings))) == pickle.loads(pickle.dumps(parts))
        counts.append(len(parts))
    assert counts[1] <= counts[0], "a trial measures no more"
    assert entry.question.endswith("?") and entry.published.caption and entry.here
    assert not entry.published.rows or len({tuple(row) for row in entry.published.rows}) == 1


@pytest.mark.sampled(0)
def test_an_entry_from_the_command_line(tmp_path, monkeypatch, capsys):
    for file in TEXTS.values():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    argv = ["paper", "infinigen_fig2", "--fast", f"--data={tmp_path}", f"--output={tmp_path / 'out'}"]
    assert experiments.paper.main([*argv, "--compilation_cache=none"]) == 0
    printed = capsys.readouterr().out
    assert "Verdict: CONFIRM" in printed and "OPT-30B" in printed
    assert (tmp_path / "out" / "infinigen_fig2.png").read_bytes().startswith(b"\x89PNG")
    assert experiments.paper.main(["paper", "--list"]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == list(registry())


def test_sizes_and_products_of_a_model():
    small = large = by_name("opt-125m")
    small = dataclasses.replace(
        small, num_layers=1, windows=(), hidden_size=64, mlp_size=64, embed_size=64, vocab_size=512
    )
    assert paper.scale_of(small, None, fast=False) == FULL
    assert paper.scale_of(large, None, fast=False) == paper.scale_of(None, None, fast=False) == HALF
    assert paper.scale_of(large, "full", fast=False) == FULL
    assert paper.scale_of(large, "long", fast=False) == LONG and LONG.length == large.max_positions
    short = paper.scale_of(dataclasses.replace(large, max_positions=1024), "long", fast=False)
    names = ("length", "prompt", "new", "recall", "pattern")
    assert [getattr(short, name) for name in names] == [getattr(FULL, name) for name in names]
    assert paper.scale_of(large, "trial", fast=True) == paper.scale_of(small, None, fast=True) == FAST
    with pytest.raises(ConfigError, match="--fast means --sizes=trial, but --sizes=full was given"):
        paper.scale_of(small, "full", fast=True)
    assert paper.form_of(small) == "fixed"
    assert paper.form_of(large) == ("native" if native.load() is None else "fixed")


def test_published_numbers():
    """As the paper prints them; a name that no file has is an error that says which there are."""
    found = published("h2o_table5")
    assert found.caption.startswith("Table 5") and found.rows[1] == {
        "cache": "H2O", "COPA": "84.00", "OBQA": "43.00", "PiQA": "78.45"
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"no table \[h2o_table0\]; they have h2o_"):
        published("h2o_table0")


def test_numbers_beside():
    theirs = Published("Table 0", [{"policy": "Full", "A": "1", "B": "2"}])
    rows = with_published(
        [{"policy": "full", "x": "3"}, {"policy": "h2o", "x": "4"}], theirs, {"full": "Full"}, "policy"
    )
    assert rows[0] == {"policy": "full", "x": "3", "paper: A": "1", "paper: B": "2"}
    assert rows[1]["paper: A"] == "-"
