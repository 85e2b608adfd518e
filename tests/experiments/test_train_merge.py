"""Training of a merge: resumes exactly, saves what the policy runs with, and measures what it saved."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import experiments.train_merge
import kvjax
from experiments import fields
from experiments.config import PolicyConfig
from experiments.programs import train_merge
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer, WindowConfig
from experiments.tuning.merge_config import TrainMergeConfig, check
from experiments.tuning.windows import Windows
from kvjax import policies
from kvjax.errors import ConfigError, KvjaxError
from tests.experiments.test_tune import folder, losses, result

__all__ = ["folder"]


@pytest.fixture
def config(folder, tmp_path) -> TrainMergeConfig:
    return TrainMergeConfig(
        model=TunedModel(path=str(folder / "random"), dtype="float32"),
        policy=PolicyConfig(name="h2o(recent=2, every=4, merge=lococo(slots=4, kernel=3))", budget=8),
        texts=(str(folder),),
        held_out=("two",),
        windows=WindowConfig(prompt_length=24, prefill_block=4),
        evaluation=EvaluationConfig(windows=4, new_tokens=8),
        optimizer=TuneOptimizer(learning_rate=0.1, warmup_steps=1),
        rows=2,
        steps=6,
        evaluate_every=3,
        checkpoint_every=2,
        log_every=1,
        output=str(tmp_path / "run"),
    )


@pytest.mark.sampled(0)
def test_an_interrupted_run_resumes_exactly(config, tmp_path, monkeypatch):
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    train_merge.train_merge(whole, progress=False)
    batch = Windows.batch

    def ended(self, number, rows, size):
        if number == 5:
            raise KeyboardInterrupt
        return batch(self, number, rows, size)

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch", ended)
        with pytest.raises(KeyboardInterrupt):
            train_merge.train_merge(config, progress=False)
    other = fields.override(config, "policy.budget", 9)
    with pytest.raises(ConfigError, match="contains a run at step 4 with different policy; give its settings"):
        train_merge.train_merge(other, progress=False)
    train_merge.train_merge(config, progress=False)
    assert losses(config) == losses(whole) and sorted(losses(config)) == list(range(1, 7))
    one, two = (kvjax.load_calibration(Path(each.output) / "merge.safetensors") for each in (config, whole))
    assert one.hash == two.hash
    found = result(config)
    assert found == result(whole) and list(found["nats"]) == ["full", "no merge", "merged, first parameters", "merged"]
    assert found["nats"]["merged"] != found["nats"]["merged, first parameters"] != found["nats"]["no merge"]
    # The saved parameters have the reported loss.
    model = kvjax.load(config.model.path, dtype="float32")
    held_out = np.frombuffer((Path(config.texts[0]) / "two.txt").read_bytes(), np.uint8).astype(np.int32)
    rows = Windows([], [held_out], [], 0).evaluation(4, 32)
    policy = policies.h2o(8, recent=2, every=4, merge=policies.lococo(4, 3))
    options = {"prompt_length": 24, "prefill_block": 4}
    scores = kvjax.log_likelihood(model, rows, policy, calibration=one, **options).logprobs
    np.testing.assert_allclose(-np.mean(scores[:, 23:], axis=1), found["nats_by_window"]["merged"], atol=1e-5)
    plain = kvjax.log_likelihood(model, rows, policies.h2o(8, recent=2, every=4), **options).logprobs
    np.testing.assert_allclose(-np.mean(plain[:, 23:], axis=1), found["nats_by_window"]["no merge"], atol=1e-5)
    lines = map(json.loads, (Path(config.output) / "metrics.jsonl").read_text().splitlines())
    curve = [event for event in lines if event["kind"] == "evaluation"]
    assert [event["step"] for event in curve] == [3, 6]
    assert curve[-1]["merged"] == pytest.approx(found["nats"]["merged"])
    assert "| merged " in (Path(config.output) / "report.md").read_text()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("optimizer.warmup_steps", 6, "must be below steps=6"),
        ("optimizer.clip", 0.0, "sets every gradient to 0"),
        ("windows.prefill_block", 0, "not valid; give a whole number of at least 1, or none"),
        ("windows.prefill_block", 24, "no token reads merged slots"),
        ("policy.budget", 20, "windows of 24 tokens, no token reads merged slots.*longer windows or a smaller budget"),
    ],
)
def test_settings_that_do_not_fit_together(config, path, value, message):
    with pytest.raises(ConfigError, match=message):
        check(fields.override(config, path, value))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("policy.name", "h2o(every=4)", "has no merge with parameters; give one such as"),
        ("policy.name", "h2o(every=4, merge=d2o())", "has no merge with parameters"),
        ("policy.name", "after_prefill(snapkv(window=4), then=h2o)", "is made of several policies"),
        ("texts", (), "there is no text to train on"),
    ],
)
def test_policies_that_cannot_be_trained_are_refused(config, path, value, message):
    with pytest.raises(KvjaxError, match=message):
        train_merge.train_merge(fields.override(config, path, value), progress=False)
    assert not Path(config.output).exists()


def test_the_command_names_its_configs(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(train_merge, "train_merge", lambda given, **_: asked.append(given) or "folder")
    assert experiments.train_merge.main(["train_merge", "--config=train_merge_tiny", "--config.steps=3"]) == 0
    assert asked[0].steps == 3 and "merge=lococo(slots=25)" in asked[0].policy.name
    assert "Wrote folder/ (merge.safetensors" in capsys.readouterr().out
    check(asked[0].__class__())
    train_merge.policy_of(asked[0])
