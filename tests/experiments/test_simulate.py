"""Plans of serving from the command line."""

import json

import pytest

import experiments.simulate
from kvjax.errors import ConfigError

ARGUMENTS = ["--shape=llama2-7b", "--topology=h100:1"]


def run(*argv):
    return experiments.simulate.main(["simulate", *argv])


@pytest.mark.parametrize("subject", experiments.simulate.SUBJECTS)
def test_a_table_and_a_file(subject, tmp_path, capsys):
    file = tmp_path / "made.json"
    small = ["--users=6", "--turns=2", "--rate=100", "--requests=12", "--long=4000", "--flash_rate=12e9"]
    assert run(subject, *ARGUMENTS, *small, f"--output_file={file}") == 0
    made = json.loads(file.read_text())
    assert (made["subject"], made["shape"], made["topology"]) == (subject, "llama2-7b", "h100:1")
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed
    for row in made["rows"]:
        assert str(next(iter(row.values()))) in printed
    if subject == "serving":
        full, slots = made["rows"]
        assert full["rows"] < slots["rows"] and full["prompt, s"] < slots["prompt, s"]
    if subject == "pool":
        assert [row["memory"] for row in made["rows"]] == ["own", "pool"] * 2
        assert all(row["finished"] == 12 for row in made["rows"])
    if subject == "phases":
        # Without --overlap, the link is faster than computing again.
        assert [row["phase"] for row in made["rows"]].count("recomputed") == 0 < made["rows"][-1]["on the host"]
    if subject == "activations":
        shares = [row["offloaded, %"] for row in made["rows"]]
        assert shares == sorted(shares) and 0 < shares[0] < 100


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        ([], "give what to simulate: serving"),
        (["weather"], "give what to simulate"),
        (["serving", "--shape=llama2-7b"], "--topology"),
        (["serving", *ARGUMENTS[1:]], "--shape"),
        (["storage", *ARGUMENTS], "--flash_rate"),
        (["phases", *ARGUMENTS, "--host_memory=much"], "--host_memory='much' is not valid"),
        (["phases", "--shape=llama2-70b", "--topology=h100:1"], "do not fit"),
        (["layouts", "--shape=llama2-70b", "--topology=h100:1"], "do not fit"),
    ],
)
def test_what_is_refused(argv, match):
    with pytest.raises(ConfigError, match=match):
        run(*argv)
