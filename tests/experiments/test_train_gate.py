"""Training of a gate: resumes exactly, saves what `learned` runs with, and measures what it saved."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import experiments.train_gate
import kvjax
from experiments import fields
from experiments.programs import train_gate
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer, WindowConfig
from experiments.tuning.gate_config import GateConfig, KeepConfig, TrainGateConfig, check
from experiments.tuning.windows import Windows
from kvjax import policies
from kvjax.errors import ConfigError, KvjaxError
from tests.experiments.test_tune import folder, losses, result

__all__ = ["folder"]


@pytest.fixture
def config(folder, tmp_path) -> TrainGateConfig:
    return TrainGateConfig(
        model=TunedModel(path=str(folder / "random"), dtype="float32"),
        gate=GateConfig(kind="mlp", width=4),
        keep=KeepConfig(budget=0.25, recent=2, every=3),
        texts=(str(folder),),
        held_out=("two",),
        windows=WindowConfig(prompt_length=32, prefill_block=1),
        evaluation=EvaluationConfig(windows=4, new_tokens=8),
        optimizer=TuneOptimizer(learning_rate=2e-2, warmup_steps=2),
        rows=4,
        steps=6,
        evaluate_every=3,
        checkpoint_every=2,
        log_every=1,
        output=str(tmp_path / "run"),
    )


def test_an_interrupted_run_resumes_exactly(config, tmp_path, monkeypatch):
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    train_gate.train_gate(whole, progress=False)
    batch = Windows.batch

    def ended(self, step, rows, size):
        if step == 5:
            raise KeyboardInterrupt
        return batch(self, step, rows, size)

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch", ended)
        with pytest.raises(KeyboardInterrupt):
            train_gate.train_gate(config, progress=False)
    other = fields.override(config, "keep.recent", 3)
    with pytest.raises(ConfigError, match="contains a run at step 4 with different keep; give its settings"):
        train_gate.train_gate(other, progress=False)
    train_gate.train_gate(config, progress=False)
    assert losses(config) == losses(whole) and sorted(losses(config)) == list(range(1, 7))
    one, two = (kvjax.load_calibration(Path(each.output) / "gate.safetensors") for each in (config, whole))
    assert one.hash == two.hash
    found = result(config)
    assert found == result(whole) and list(found["nats"]) == ["full", "h2o", "random", "learned"]
    # The saved gate has the reported loss.
    model = kvjax.load(config.model.path, dtype="float32")
    held_out = np.frombuffer((Path(config.texts[0]) / "two.txt").read_bytes(), np.uint8).astype(np.int32)
    rows = Windows([], [held_out], [], 0).evaluation(4, 40)
    policy = policies.learned(0.25, gate=policies.MlpGate(4), recent=2, every=3)
    scores = kvjax.log_likelihood(model, rows, policy, prompt_length=32, prefill_block=1, calibration=one).logprobs
    np.testing.assert_allclose(-np.mean(scores[:, 31:], axis=1), found["nats_by_window"]["learned"], atol=1e-5)
    lines = map(json.loads, (Path(config.output) / "metrics.jsonl").read_text().splitlines())
    curve = [event for event in lines if event["kind"] == "evaluation"]
    assert [event["step"] for event in curve] == [0, 3, 6]
    assert curve[-1]["learned"] == pytest.approx(found["nats"]["learned"])
    assert "| learned " in (Path(config.output) / "report.md").read_text()


@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["replay", "replay_share", "distill", "answer"])
def test_objectives_lower_their_losses(config, objective):
    config = dataclasses.replace(
        config, objective=objective, steps=12, checkpoint_every=100, keep=KeepConfig(budget=8, recent=2),
        windows=WindowConfig(prompt_length=24, new_tokens=8), optimizer=TuneOptimizer(learning_rate=0.1),
    )  # fmt: skip
    config.optimizer.warmup_steps = 1
    train_gate.train_gate(config, progress=False)
    found = losses(config)
    assert min(found[11], found[12]) < found[1]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("gate.kind", "linnear", "did you mean 'linear'"),
        ("objective", "kl", "objective='kl' is unknown; valid: next_token"),
        ("relax", "hard", "valid: st, soft"),
        ("keep.threshold", "high", "keep.threshold='high' is not valid"),
        ("temperature", 0.0, "must be greater than 0"),
        ("objective", "answer", "leaves no answer"),
        ("optimizer.warmup_steps", 6, "must be below steps=6"),
    ],
)
def test_settings_that_do_not_fit_together(config, path, value, message):
    with pytest.raises(ConfigError, match=message):
        check(fields.override(config, path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("keep.threshold", "0.5", "every=3 is not valid with threshold"),
        ("keep.recent", 20, "recent=20 and sinks=0 protect more than slots=8"),
        ("texts", (), "there is no text to train on"),
    ],
)
def test_budgets_that_cannot_be_trained_are_refused(config, path, value, message):
    with pytest.raises(KvjaxError, match=message):
        train_gate.train_gate(fields.override(config, path, value), progress=False)
    assert not Path(config.output).exists()


def test_the_command_line_lists_its_own_configs():
    with pytest.raises(ConfigError, match=r"did you mean 'train_gate_tiny'\? known configs: train_gate_tiny"):
        experiments.train_gate.main(["train_gate", "--config=train_gate_tinny"])
