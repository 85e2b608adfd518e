"""Training of a gate: resumes exactly, saves what `learned` runs with, and measures what it saved."""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

import experiments.train_gate
import kvjax
from experiments import fields
from experiments.programs import train_gate
from experiments.tasks import words
from experiments.tuning import windows
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer, WindowConfig
from experiments.tuning.gate_config import GateConfig, KeepConfig, RecallWindowsConfig, TrainGateConfig, check
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


def interrupted(config, monkeypatch, step: int) -> None:
    """Runs until the windows of a step are asked for."""
    batch = Windows.batch

    def ended(self, number, rows, size):
        if number == step:
            raise KeyboardInterrupt
        return batch(self, number, rows, size)

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch", ended)
        with pytest.raises(KeyboardInterrupt):
            train_gate.train_gate(config, progress=False)


@pytest.mark.sampled(0)
def test_an_interrupted_run_resumes_exactly(config, tmp_path, monkeypatch):
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    train_gate.train_gate(whole, progress=False)
    interrupted(config, monkeypatch, 5)
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
    # Another run can start from it, if its gate is the same.
    wider = GateConfig(kind="mlp", width=5)
    other = dataclasses.replace(config, gate=wider, start=f"{config.output}/gate.safetensors", output=f"{tmp_path}/new")
    with pytest.raises(KvjaxError, match="the policy needs MlpGate"):
        train_gate.train_gate(other, progress=False)


@pytest.mark.sampled(0)
def test_windows_with_recall_material_have_none_that_evaluations_ask_for(config, tmp_path):
    model, book = kvjax.load("kvjax-tiny", dtype="float32"), tmp_path / "book.txt"
    book.write_text("The old man looked at the sea, and said nothing. " * 400)
    config = dataclasses.replace(
        config, texts=(str(book),), held_out=(), windows=WindowConfig(prompt_length=384),
        mixture=RecallWindowsConfig(share=1.0, recall_fraction=0.4, invented_fraction=0.3),
    )  # fmt: skip
    every, none, some = (
        windows.load(dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, share=share)), model)
        for share in (1.0, 0.0, 0.5)
    )
    tokens = every.batch(3, 16, 384)
    assert tokens.shape == (16, 384) and tokens.dtype == np.int32 and (tokens[:, 0] == model.tokenizer.bos_id).all()
    np.testing.assert_array_equal(tokens, dataclasses.replace(every, batches=4).batch(7, 16, 384))
    texts = [model.tokenizer.decode(row) for row in tokens]
    number = re.compile(r"\d{3}")
    assert sum(bool(number.search(text)) for text in texts) > 4  # of 16; words and variables have other answers
    assert 2 < sum("old man" in text for text in texts) < 14  # the others are stories
    held_out = (*words.HELD_OUT.things, *words.HELD_OUT.names)  # nouns are places of stories too
    assert not [word for word in held_out for text in texts if re.search(rf"\b{word}\b", text)]
    plain = "".join(model.tokenizer.decode(row) for row in none.batch(3, 16, 384))
    assert plain.count("sea") > 100 and not number.search(plain)
    mixed = [bool(set(model.tokenizer.decode(row)) - set(plain)) for row in some.batch(0, 64, 384)]
    assert 12 < sum(mixed) < 52


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize("objective", ["replay", "replay_share", "distill", "answer", "prompt_eviction"])
def test_objectives_lower_their_losses(config, objective, monkeypatch):
    config = dataclasses.replace(
        config, objective=objective, steps=12, checkpoint_every=100, keep=KeepConfig(budget=8, recent=2),
        windows=WindowConfig(prompt_length=24, new_tokens=8), optimizer=TuneOptimizer(learning_rate=0.1),
    )  # fmt: skip
    config.optimizer.warmup_steps = 1
    monkeypatch.setattr(train_gate, "_nats", lambda *_: [0.0])  # losses under caches are those of other tests
    train_gate.train_gate(config, progress=False)
    found = losses(config)
    assert min(found[11], found[12]) < found[1]


def test_a_gate_in_closed_form_resumes_exactly(config, monkeypatch):
    """Checkpoints have the sums over windows. The gate is fitted where a line of the log or an evaluation is due."""
    config = dataclasses.replace(
        config, gate=GateConfig(), keep=KeepConfig(budget=8, recent=2), objective="replay", solver="least_squares",
        evaluation=EvaluationConfig(windows=1, new_tokens=2), steps=3, evaluate_every=3, checkpoint_every=1,
        log_every=2,
    )  # fmt: skip
    whole = dataclasses.replace(config, output=f"{config.output}-whole")
    monkeypatch.setattr(train_gate, "_nats", lambda *_: [0.0])  # losses under caches are those of other tests
    interrupted(config, monkeypatch, 2)
    for each in (whole, config):
        train_gate.train_gate(each, progress=False)
    one, two = (kvjax.load_calibration(Path(each.output) / "gate.safetensors") for each in (whole, config))
    assert one.hash == two.hash and losses(whole) == losses(config) and list(losses(config)) == [2, 3]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("objective", "answer", "objective='answer' does not fit solver=least_squares: .* give replay"),
        ("gate.kind", "mlp", "gate.kind='mlp' does not fit .* give linear, or solver=gradient"),
        ("batches", 3, "batches=3 does not fit solver=least_squares: .* give none"),
        ("start", "gate.safetensors", "the result does not depend on the first parameters; give ''"),
        ("solver", "newton", "valid: gradient, least_squares"),
    ],
)
def test_settings_that_have_no_closed_form(config, path, value, message):
    config = dataclasses.replace(config, gate=GateConfig(), objective="replay", solver="least_squares")
    check(dataclasses.replace(config, steps=1))
    with pytest.raises(ConfigError, match=message):
        check(fields.override(config, path, value))


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
        ("batches", 0, "batches=0 leaves nothing to train on"),
        ("mixture.share", 1.5, "mixture.share=1.5 is a share"),
        ("mixture.task_shares", (1.0,), "must be 5 numbers, not all 0, for passkey"),
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
    known = "train_gate_recall, train_gate_smollm2, train_gate_tiny"
    with pytest.raises(ConfigError, match=rf"did you mean 'train_gate_tiny'\? known configs: {known}"):
        experiments.train_gate.main(["train_gate", "--config=train_gate_tinny"])
