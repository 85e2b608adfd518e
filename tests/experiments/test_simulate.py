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
    assert run(subject, *ARGUMENTS, "--users=6", "--turns=2", "--rate=100", f"--output_file={file}") == 0
    made = json.loads(file.read_text())
    assert (made["subject"], made["shape"], made["topology"]) == (subject, "llama2-7b", "h100:1")
    printed = capsys.readouterr().out
    assert "nothing was measured" in printed
    for row in made["rows"]:
        assert str(next(iter(row.values()))) in printed
    if subject == "serving":
        full, slots = made["rows"]
        assert full["rows"] < slots["rows"] and full["prompt, s"] < slots["prompt, s"]


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        ([], "give what to simulate: serving"),
        (["weather"], "give what to simulate"),
        (["serving", "--shape=llama2-7b"], "--topology"),
        (["serving", *ARGUMENTS[1:]], "--shape"),
        (["layouts", "--shape=llama2-70b", "--topology=h100:1"], "do not fit"),
    ],
)
def test_what_is_refused(argv, match):
    with pytest.raises(ConfigError, match=match):
        run(*argv)
