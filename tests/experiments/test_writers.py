"""Metrics that go to TensorBoard or Weights & Biases too, with fakes of both libraries."""

import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
from absl import flags

from experiments import fields, run, train, writers
from experiments.programs import run as run_program
from experiments.programs import train as program
from experiments.training.config import TrainConfig
from experiments.training.run_folder import Log
from kvjax.errors import ConfigError


class Board:
    """tensorboardX's writer, as far as it is used."""

    def __init__(self, logdir, purge_step, filename_suffix):
        self.made, self.scalars, self.closed = (logdir, purge_step), [], False
        BOARDS.append(self)

    def add_scalar(self, tag, value, step):
        self.scalars.append((tag, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


class Run:
    """A run of wandb, which drops steps that come after a later one."""

    def __init__(self, **settings):
        self.settings, self.steps, self.finished = settings, [], False
        RUNS.append(self)

    def log(self, values, step):
        assert not self.steps or step >= self.steps[-1][0]
        self.steps.append((step, values))

    def finish(self):
        self.finished = True


BOARDS: list[Board] = []
RUNS: list[Run] = []


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    BOARDS.clear()
    RUNS.clear()
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    for name, attribute, value in (("tensorboardX", "SummaryWriter", Board), ("wandb", "init", Run)):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        setattr(module, attribute, value)
        monkeypatch.setitem(sys.modules, name, module)


def selected(*argv):
    values = flags.FlagValues()
    writers.define(values)
    values(["program", *argv])
    return writers.selected(values)


def test_writers_are_selected_by_name():
    assert selected() == [] and selected("--writers=tensorboard,wandb") == ["tensorboard", "wandb"]
    with pytest.raises(ConfigError, match=r"did you mean 'tensorboard'\? known writers: tensorboard, wandb"):
        selected("--writers=tensorbord")


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_one_that_is_not_installed(name, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{module}: pip install 'kvjax\[{name}\]'"):
        selected(f"--writers={name}")


def test_numbers_of_events():
    event = {"kind": "summary", "policy": "h2o", "budget": 3, "loss": 1.5, "timed": True, "note": "x", "none": None}
    assert [*writers.numbers(event)] == [(0, {"summary/h2o/budget": 3, "summary/h2o/loss": 1.5})]
    assert [*writers.numbers({"kind": "loss", "step": 7, "total": 2.0})] == [(7, {"loss/total": 2.0})]
    steps = [*writers.numbers({"kind": "loss", "nats": [1.0, 2.0]})]
    assert steps == [(0, {"loss/nats": 1.0}), (1, {"loss/nats": 2.0})]


def test_a_finished_run_is_copied_in_the_order_of_its_steps(tmp_path):
    (tmp_path / "config.json").write_text('{"name": "mine"}')
    events = [{"kind": "loss", "policy": policy, "nats": [1.0, 2.0]} for policy in ("h2o", "full")]
    events.append({"kind": "summary", "policy": "h2o", "perplexity": 3.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    writers.copy(["wandb", "tensorboard"], tmp_path)
    (run,), (board,) = RUNS, BOARDS
    assert run.steps[0] == (0, {"loss/h2o/nats": 1.0, "loss/full/nats": 1.0, "summary/h2o/perplexity": 3.0})
    assert [step for step, _ in run.steps] == [0, 1] and run.finished and run.settings["name"] == "mine"
    assert ("loss/full/nats", 2.0, 1) in board.scalars and board.closed and board.made[1] is None


def test_a_resumed_training_is_the_same_run(tmp_path):
    """Its later steps are dropped by TensorBoard, and Weights & Biases gets the same id."""
    path, names = tmp_path / "metrics.jsonl", ["tensorboard", "wandb"]
    log = Log(path, 0, TrainConfig(name="small"), names)
    log.write(kind="start", step=0, cores=2)
    log.write(kind="loss", step=10, total=2.0)
    Log(path, 5, TrainConfig(name="small"), names)
    first, second = RUNS
    assert first.steps == [(10, {"loss/total": 2.0})] and first.settings["config"]["name"] == "small"
    assert first.settings["id"] == second.settings["id"] and first.settings["project"] == "kvjax"
    assert [board.made for board in BOARDS] == [(str(tmp_path / "tensorboard"), step) for step in (None, 6)]
    Log(path, 0, TrainConfig(), names)  # from the beginning
    assert RUNS[2].settings["id"] != first.settings["id"]


def test_train_takes_the_flag(monkeypatch, tmp_path):
    given = {}
    monkeypatch.setattr(program, "train", lambda config, **arguments: given.update(arguments))
    assert train.main(["train", "--config=train_nano", "--writers=wandb"]) == 0
    assert given["writers"] == ["wandb"]


def test_run_takes_the_flag(monkeypatch, tmp_path):
    def finished(config, command):
        (tmp_path / "config.json").write_text(json.dumps(fields.to_dict(config)))
        (tmp_path / "metrics.jsonl").write_text('{"kind": "summary", "policy": "h2o", "perplexity": 3.0}\n')
        return tmp_path

    monkeypatch.setattr(run_program, "run", finished)
    assert run.main(["run", "--config=h2o_tiny", "--writers=tensorboard"]) == 0
    (board,) = BOARDS
    assert board.scalars == [("summary/h2o/perplexity", 3.0, 0)] and not RUNS
    with pytest.raises(ConfigError, match="known writers"):
        run.main(["run", "--config=h2o_tiny", "--writers=paper"])
