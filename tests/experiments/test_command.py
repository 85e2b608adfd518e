"""The console command ``kvjax`` finds programs by name, starts them as ``python -m`` does, and says what is wrong."""

import importlib.util
import os
import runpy
import subprocess
import sys
import tomllib

import pytest

import kvjax_command as command
from experiments import cli, fields, help_text
from experiments.config import ExperimentConfig
from kvjax.version import __version__
from tests.conftest import ROOT
from tests.experiments.test_missing import BLOCKED
from tests.test_imports import entry_points
from tests.test_imports import run as run_watched

NAMED_IN_PAGES = {
    "run", "sweep", "bench", "train", "plan", "paper", "serve", "batch", "lm-eval", "demo", "leaderboard", "capacity",
}  # fmt: skip
#: Programs that work on the files of a clone.
OF_A_CLONE = {"experiments.storage_tables"}
START = "import sys, kvjax_command; sys.argv[1:] = {argv}; sys.exit(kvjax_command.main())"


@pytest.fixture
def started(monkeypatch):
    """Programs that were started, with their arguments; none runs."""
    found = []
    monkeypatch.setattr(sys, "argv", ["kvjax"])
    monkeypatch.setattr(runpy, "run_module", lambda module, run_name: found.append((module, run_name, *sys.argv)))
    return found


def test_the_script_is_declared():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"kvjax": f"{command.__name__}:{command.main.__name__}"}


def test_every_program_has_a_command():
    assert {each.module for each in command.ALL.values()} == {*entry_points()} - OF_A_CLONE
    assert {*command.ALL} >= NAMED_IN_PAGES
    for each in command.ALL.values():
        assert importlib.util.find_spec(each.module) is not None


def test_programs_get_their_arguments(started):
    assert command.main(["sweep", "--config=h2o_tiny", "--sweep=seed=0,1"]) == 0
    assert command.main(["demo", "--config.seed=1"]) == 0
    assert command.main(["plan", "--config=h2o_opt30b", "-topology", "v5e:2x4"]) == 0
    assert command.main(["plan", "--help"]) == 0
    assert started == [
        ("experiments.sweep", "__main__", "kvjax sweep", "--config=h2o_tiny", "--sweep=seed=0,1"),
        ("experiments.run", "__main__", "kvjax demo", "--config=demo_tiny", "--config.seed=1"),
        ("experiments.run", "__main__", "kvjax plan", "--config=h2o_opt30b", "-topology", "v5e:2x4"),
        ("experiments.run", "__main__", "kvjax plan", "--help"),
    ]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["sweeep"], "error: unknown command 'sweeep'; did you mean 'sweep'? commands: demo, run, sweep,"),
        (["--config=h2o_tiny"], "error: unknown command '--config=h2o_tiny'; "),
        (["plan", "--config=h2o_tiny"], "error: kvjax plan needs --topology, for example --topology=v5e:2x4."),
    ],
)
def test_mistakes(argv, says, started, capsys):
    assert command.main(argv) == 2 and not started
    shown = capsys.readouterr()
    assert shown.err.startswith(says) and shown.err.count("\n") == 1 and not shown.out


def test_help_and_version(capsys):
    assert command.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert command.main([]) == 2  # a command is absent
    assert capsys.readouterr().out == shown and "Not available" not in shown
    lines = [line for line in shown.splitlines() if line.startswith("  ")]
    assert [line.split()[0] for line in lines] == [*command.ALL]
    assert max(map(len, lines)) <= 100
    assert command.main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvjax {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["--help"], 0, "usage: kvjax COMMAND"),
        (["run", "--help"], 0, "kvjax run --config=h2o_tiny"),
        (["serve", "--help"], 0, "--port"),
        (["run", "--config=nothing"], 2, ""),
        (["nothing"], 2, ""),
    ],
)
def test_no_help_and_no_mistake_imports_jax(argv, status, says, tmp_path):
    """The program's own exit status passes through."""
    done, found = run_watched(START.format(argv=argv), tmp_path)
    assert (done.returncode, found) == (status, []) and says in done.stdout
    assert done.stderr.startswith("error: ") == (status == 2) and "Traceback" not in done.stderr


def test_help_says_what_fields_mean(capsys):
    """The meaning is that of the docstring, and the default that of the dataclass."""
    assert [*fields.meanings(ExperimentConfig)] == fields.leaves(ExperimentConfig)
    with pytest.raises(SystemExit):
        cli.parse(["kvjax read-fraction", "--help"], about="Runs. python -m experiments.read_fraction --x=1")
    shown = capsys.readouterr().out
    assert shown.startswith("Runs. kvjax read-fraction --x=1\n")
    assert "\n  --config.data.num_sequences: the number of rows (at least 1, default 4)\n" in shown
    assert "none = the whole prompt in one block (at least\n      0, default none)\n" in shown
    assert max(map(len, shown.splitlines())) <= help_text.WIDTH and "snapkv, " in shown
    with pytest.raises(SystemExit):
        cli.parse(["program", "--helpfull"], about="about")
    assert "\n  snapkv(budget, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "status"), [(["run", "--help"], 2), (["--help"], 0), (["serve", "--help"], 0), (["lm-eval", "--help"], 0)]
)
def test_without_the_extra_of_experiments(argv, status, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = os.environ | {"BLOCKED": "absl,lm_eval", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    line = [sys.executable, "-c", START.format(argv=argv)]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    message = "experiments need absl: pip install 'kvjax[experiments]'"
    assert done.returncode == status
    assert done.stderr == (f"error: {message}\n" if status else "")
    assert (message in done.stdout) == (argv == ["--help"])


def test_another_package_named_experiments(tmp_path, monkeypatch, capsys):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.split(".")[0] == "experiments"]:
        monkeypatch.delitem(sys.modules, name)
    assert command.main(["run", "--config=h2o_tiny"]) == 2
    assert f"another package of the name experiments comes first: {tmp_path}" in capsys.readouterr().err
