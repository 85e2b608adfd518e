"""Training of learned reuse by its command: resumes exactly, and saves what it measured."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import experiments.train_reuse
import kvjax
from experiments import fields
from experiments.programs import train_reuse
from experiments.tuning import reuse_measures
from experiments.tuning.config import EvaluationConfig, TunedModel, TuneOptimizer
from experiments.tuning.reuse_config import (
    AUGMENTATION,
    AugmentationConfig,
    PredictionConfig,
    ReuseWindowConfig,
    TrainReuseConfig,
)
from experiments.tuning.windows import Windows
from kvjax import contexts, policies, reuse
from kvjax.errors import ConfigError
from kvjax.models.parameters import parameter_shapes
from tests.experiments.test_tune import folder, losses
from tests.tiny import tiny

__all__ = ["folder"]


@pytest.fixture
def config(folder, tmp_path) -> TrainReuseConfig:
    return TrainReuseConfig(
        model=TunedModel(path=str(folder / "random"), dtype="float32"),
        prediction=PredictionConfig(auxiliaries=("0",)),
        augmentation=AugmentationConfig(latents=(1, 2), points=2, ahead=4),
        texts=(str(folder),),
        held_out=("two",),
        windows=ReuseWindowConfig(prompt_length=24, new_tokens=8),
        evaluation=EvaluationConfig(windows=3, new_tokens=8),
        optimizer=TuneOptimizer(learning_rate=1e-2, warmup_steps=1),
        rows=2,
        steps=5,
        evaluate_every=2,
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
            train_reuse.train_reuse(config, progress=False)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("method", ["prediction", "augmentation"])
def test_an_interrupted_run_resumes_exactly_and_saves_what_it_measured(config, method, tmp_path, monkeypatch):
    config = dataclasses.replace(config, method=method)
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    train_reuse.train_reuse(whole, command="python -m experiments.train_reuse", progress=False)
    interrupted(config, monkeypatch, 3)
    with pytest.raises(ConfigError, match="contains a run at step 2 with different seed; give its settings"):
        train_reuse.train_reuse(dataclasses.replace(config, seed=1), progress=False)
    train_reuse.train_reuse(config, command="python -m experiments.train_reuse", progress=False)
    assert losses(config) == losses(whole) and sorted(losses(config)) == [1, 2, 3, 4, 5]
    one, two = (json.loads((Path(each.output) / "results.json").read_text()) for each in (config, whole))
    assert one == two and [each["step"] for each in one["curve"]] == [0, 2, 4, 5]
    assert str(tmp_path) not in json.dumps(one) and one["held_out"] == ["two.txt"]
    assert (Path(config.output) / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert "nats above" in (Path(config.output) / "report.md").read_text()
    model = kvjax.load(config.model.path, dtype="float32")
    text = np.frombuffer((Path(config.texts[0]) / "two.txt").read_bytes(), np.uint8).astype(np.int32)
    rows = Windows([], [text], [], 0).evaluation(3, 32)
    points = {(each.get("kind"), each["name"]): each["nats_by_window"] for each in one["points"]}
    if method == AUGMENTATION:
        assert list(points) == [
            (None, name) for name in ("unchanged", "1 untrained", "1 trained", "2 untrained", "2 trained")
        ]
        made = reuse.load_coprocessor(Path(config.output) / "coprocessor-2.safetensors", model)
        assert len(made.latents) == 2
        assert one["curve"][-1]["2"] == pytest.approx(np.mean(points[None, "2 trained"]), abs=1e-5)
        assert one["curve"][0]["2"] == pytest.approx(np.mean(points[None, "2 untrained"]), abs=1e-5)
        return
    predictor = reuse.load_predictor(Path(config.output) / "predictor-0", model)
    context = reuse.predict(model, predictor, rows[:, :24])
    after = contexts.extend(model, context, rows[:, 24:25])
    first, second = (np.asarray(each.logits, np.float64) for each in (context, after))
    nats = [-(x[y] - np.log(np.exp(x).sum())) for x, y in zip([*first, *second], rows[:, 24:26].T.ravel(), strict=True)]
    # The first two of eight tokens have a part in these means that is known.
    assert 0 < np.sum(nats) / 8 < np.sum(points["prediction", "0"])
    assert one["curve"][-1]["0"] == pytest.approx(np.mean(points["prediction", "0"]), abs=1e-4)
    assert one["curve"][-1]["0 alone"] > 0
    full = kvjax.log_likelihood(model, rows, policies.full(), prompt_length=24).logprobs
    np.testing.assert_allclose(points["base", "base"], -np.asarray(full)[:, 23:].mean(axis=1), atol=1e-5)


def test_flops_count_matrices_and_causal_attention():
    """A prompt of 3 tokens, by hand: a product for each token and element of a matrix, and 2·D for each pair."""
    config = tiny().model.config
    layer = parameter_shapes(config)["layer_0"]
    elements = sum(
        leaf["kernel"].size for part in ("attention", "mlp") for leaf in layer[part].values() if "kernel" in leaf
    )
    assert reuse_measures.layer_weights(config) == elements
    pairs, heads = 9, config.num_heads * config.head_dim
    layers = config.num_layers * (2 * 3 * elements + 2 * heads * pairs)
    head = 2 * config.vocab_size * config.hidden_size
    assert reuse_measures.prompt_flops(config, 3) == layers + head
    one = dataclasses.replace(config, num_layers=1, windows=(None,))
    side = config.num_kv_heads * config.head_dim
    maps = 2 * 2 * (config.num_layers * 2 * side * side)
    auxiliary = 2 * 2 * elements + 2 * heads * 4
    last = config.num_layers * (2 * elements + 4 * heads * 3) + head
    assert reuse_measures.predicted_flops(config, one, 3) == auxiliary + maps + last


def test_differences_have_intervals():
    mean, half = reuse_measures.above([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert mean == pytest.approx(4 / 3) and half == pytest.approx(1.96 * np.std([0, 1, 3], ddof=1) / np.sqrt(3))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("method", "predict", "did you mean 'prediction'"),
        ("prediction.auxiliaries", ("0+x",), "give layers such as 0[+]3"),
        ("prediction.auxiliaries", (), "give different ones, at least one"),
        ("prediction.auxiliaries", ("0", "0"), "give different ones"),
        ("prediction.auxiliaries", ("9",), "prediction.auxiliaries: layers must be ascending indices"),
        ("optimizer.warmup_steps", 5, "must be below steps=5"),
        ("optimizer.clip", 0.0, "sets every gradient to 0"),
        ("windows.prompt_length", 1, "leaves nothing to predict"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_a_folder_is_left(config, path, value, message):
    with pytest.raises(ConfigError, match=message):
        train_reuse.train_reuse(fields.override(config, path, value), progress=False)
    assert not Path(config.output).exists()


def test_more_tokens_ahead_than_a_window_has_are_refused(config):
    config = dataclasses.replace(config, method=AUGMENTATION, augmentation=AugmentationConfig(ahead=32))
    with pytest.raises(ConfigError, match="must be below the 32 tokens of a window"):
        train_reuse.train_reuse(config, progress=False)


def test_an_unknown_config_names_those_of_the_command():
    known = "train_augmentation_tiny, train_prediction_tiny"
    with pytest.raises(ConfigError, match=rf"known configs: {known}"):
        experiments.train_reuse.main(["train_reuse", "--config=nothing"])
