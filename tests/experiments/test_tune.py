"""Tuning through a cache: closes the gap, resumes exactly, the same on two devices, exports what it measured."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import experiments.tune
import kvjax
from experiments import fields
from experiments.config import PolicyConfig
from experiments.programs import tune
from experiments.tuning import parameters, windows
from experiments.tuning.config import (
    EvaluationConfig,
    LoraConfig,
    TuneConfig,
    TunedModel,
    TuneOptimizer,
    WindowConfig,
    check,
)  # fmt: skip
from experiments.tuning.windows import Windows
from kvjax import policies
from kvjax.errors import ConfigError, KvjaxError
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import random_parameters
from kvjax.numerics.rope import Rope
from tests.conftest import ROOT, XLA_FLAGS
from tests.tiny import tiny

LETTERS, SEGMENT, SHARE = 16, 160, 0.4  # letters of the texts; of each segment, one letter is a large share
DECODER = DecoderConfig(
    family="llama", vocab_size=128, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_size=16,
    max_positions=256, rope=Rope(dim=8),
)  # fmt: skip


def text(segments: int, seed: int) -> str:
    """A text whose next letter is known from many tokens back, and guessed from a few."""
    rng = np.random.default_rng(seed)
    often = rng.integers(0, LETTERS, segments).repeat(SEGMENT)
    ids = np.where(rng.random(often.size) < SHARE, often, rng.integers(0, LETTERS, often.size))
    return "".join(chr(ord("a") + each) for each in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("tune")
    (made / "one.txt").write_text(text(60, 0))
    (made / "two.txt").write_text(text(20, 1))
    kvjax.save(kvjax.Model(DECODER, random_parameters(DECODER, jax.random.key(0))), made / "random")
    return made


@pytest.fixture
def config(folder, tmp_path) -> TuneConfig:
    return TuneConfig(
        model=TunedModel(path=str(folder / "random"), dtype="float32"),
        policy=PolicyConfig(name="window", budget=4, sinks=0),
        texts=(str(folder),),
        held_out=("two",),
        windows=WindowConfig(prompt_length=32, prefill_block=4),
        evaluation=EvaluationConfig(windows=8, new_tokens=16),
        lora=LoraConfig(rank=2, alpha=4.0),
        optimizer=TuneOptimizer(learning_rate=2e-2, warmup_steps=2),
        rows=4,
        steps=6,
        checkpoint_every=2,
        log_every=1,
        output=str(tmp_path / "run"),
    )


def losses(config: TuneConfig) -> dict[int, float]:
    lines = map(json.loads, (Path(config.output) / "metrics.jsonl").read_text().splitlines())
    return {event["step"]: event["total"] for event in lines if event["kind"] == "loss"}


def tensors(config: TuneConfig) -> bytes:
    return (Path(config.output) / "model" / "model.safetensors").read_bytes()


def result(config: TuneConfig) -> dict:
    return json.loads((Path(config.output) / "results.json").read_text())


def test_first_updates_of_low_rank_change_nothing_and_later_ones_are_their_product():
    model = tiny(layers=2).model
    config = TuneConfig(lora=LoraConfig(rank=3, alpha=6.0, projections=("key", "down")))
    first = parameters.initial(config, model.params)
    assert sorted(first["layer_1"]) == ["attention", "mlp"] and list(first["layer_1"]["attention"]) == ["key"]
    jax.tree.map(np.testing.assert_array_equal, parameters.merged(model.params, first, config), dict(model.params))
    rng = np.random.default_rng(0)
    later = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), first)
    found = parameters.merged(model.params, later, config)
    for layer, group, name in (("layer_0", "attention", "key"), ("layer_1", "mlp", "down")):
        a, b = (np.asarray(later[layer][group][name]["kernel"][each], np.float64) for each in "ab")
        before = np.asarray(model.params[layer][group][name]["kernel"], np.float64)
        np.testing.assert_allclose(found[layer][group][name]["kernel"], before + 2.0 * a @ b, atol=1e-5)
    np.testing.assert_array_equal(
        found["layer_0"]["attention"]["query"]["kernel"], model.params["layer_0"]["attention"]["query"]["kernel"]
    )
    with pytest.raises(ConfigError, match="the model has no 'experts'; valid: down, gate, key, out, query, up, value"):
        parameters.initial(fields.override(config, "lora.projections", ("experts",)), model.params)


def test_windows_depend_on_the_seed_and_the_step_and_cover_the_texts():
    texts = Windows([np.arange(50), np.arange(100, 120)], [np.arange(30)], [7], seed=3)
    one, two = texts.batch(5, 64, 11), texts.batch(6, 64, 11)
    np.testing.assert_array_equal(one, texts.batch(5, 64, 11))
    assert one.shape == (64, 11) and (one[:, 0] == 7).all() and not np.array_equal(one, two)
    assert (np.diff(one[:, 1:]) == 1).all() and {0, 40, 110} & {*one[:, 1].tolist()}
    np.testing.assert_array_equal(texts.evaluation(3, 11)[:, 1], [0, 10, 20])


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_an_interrupted_run_resumes_exactly(config, tmp_path, monkeypatch):
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    tune.tune(whole, progress=False)
    batch = Windows.batch

    def ended(self, step, rows, size):
        if step == 5:
            raise KeyboardInterrupt
        return batch(self, step, rows, size)

    with monkeypatch.context() as patch:
        patch.setattr(Windows, "batch", ended)
        with pytest.raises(KeyboardInterrupt):
            tune.tune(config, progress=False)
    assert sorted(losses(config)) == [1, 2, 3, 4, 5]
    other = fields.override(config, "optimizer.clip", 0.5)
    with pytest.raises(ConfigError, match="contains a run at step 4 with different optimizer; give its settings"):
        tune.tune(other, progress=False)
    tune.tune(config, progress=False)
    assert losses(config) == losses(whole) and sorted(losses(config)) == list(range(1, 7))
    assert tensors(config) == tensors(whole)
    assert result(config) == result(whole)
    # What was measured is what was exported.
    model = kvjax.load(Path(config.output) / "model", dtype="float32")
    held_out = np.frombuffer((Path(config.texts[0]) / "two.txt").read_bytes(), np.uint8).astype(np.int32)
    rows = Windows([], [held_out], [], 0).evaluation(8, 48)
    scores = kvjax.log_likelihood(model, rows, policies.window(4, sinks=0), prompt_length=32, prefill_block=4).logprobs[
        :, 31:
    ]
    row = result(config)["rows"][3]
    assert (row["model"], row["policy"]) == ("after", "window")
    np.testing.assert_allclose(-np.mean(scores, axis=1), row["nats_by_row"], atol=1e-5)
    report = (Path(config.output) / "report.md").read_text()
    assert "Nats per token above the full cache" in report and "| after" in report
    # A text that is another one now.
    monkeypatch.setattr(windows, "checksums", lambda config: {"one.txt": "0"})
    with pytest.raises(ConfigError, match="different contents of texts"):
        tune.tune(config, progress=False)


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_two_devices_train_the_same_model(config, tmp_path):
    config.steps = 4
    tune.tune(config, progress=False)
    two = dataclasses.replace(config, output=str(tmp_path / "two"))
    path = tmp_path / "two.py"
    path.write_text(
        "import json\nfrom experiments import fields\nfrom experiments.tuning.config import TuneConfig\n"
        "def get_config():\n"
        f"    return fields.from_dict(TuneConfig, json.loads({json.dumps(json.dumps(fields.to_dict(two)))}))\n"
    )
    environment = os.environ | {"XLA_FLAGS": f"{XLA_FLAGS} --xla_force_host_platform_device_count=2"}
    command = [sys.executable, "-m", "experiments.tune", f"--config={path}"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    starts = map(json.loads, (tmp_path / "two" / "metrics.jsonl").read_text().splitlines())
    assert next(starts)["devices_used"] == 2
    np.testing.assert_allclose(list(losses(two).values()), list(losses(config).values()), rtol=2e-4)
    one, other = (result(each)["rows"][3]["nats_by_row"] for each in (config, two))
    np.testing.assert_allclose(one, other, rtol=2e-3)


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_a_model_that_looks_far_back_learns_to_do_without(config, tmp_path):
    """Trained under the full cache it counts letters over the whole window; one token of it tells less, and is taken
    for as much."""
    config = dataclasses.replace(
        config, policy=PolicyConfig(name="window", budget=1, sinks=0), rows=16, log_every=60, checkpoint_every=1000,
        windows=WindowConfig(prompt_length=32, prefill_block=1), evaluation=EvaluationConfig(windows=48, new_tokens=16),
    )  # fmt: skip
    first = dataclasses.replace(
        config, method="full", train_under="full", steps=120, output=str(tmp_path / "first")
    )  # fmt: skip
    tune.tune(first, progress=False)
    control = result(first)["gap"]["after"]
    assert control["low"] > 0.1
    second = dataclasses.replace(
        config, model=TunedModel(path=str(tmp_path / "first" / "model"), dtype="float32"), steps=120,
        lora=LoraConfig(rank=4, alpha=8.0, projections=("value", "out", "up", "down")),
        optimizer=TuneOptimizer(learning_rate=1e-2, warmup_steps=2),
    )  # fmt: skip
    tune.tune(second, progress=False)
    gap = result(second)["gap"]
    assert gap["before"]["nats"] == pytest.approx(control["nats"], abs=1e-4)
    assert gap["closed"]["low"] > 0 and gap["closed_share"] > 0.4
    # Not because the full cache had become worse.
    assert gap["gained"]["low"] > 0


OWN = """
import dataclasses
import jax
import numpy as np
from kvjax.storage import Codec, Storage

def callback(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="expand_dims")

@dataclasses.dataclass(frozen=True)
class Called(Codec):
    has_gradient = True

    def parts(self, dim, dtype):
        return {"own": ((dim,), dtype)}

    def encode(self, x, side, dtype):
        return {"own": callback(x)}

    def decode(self, parts, side, dim):
        return parts["own"]

def called():
    return Storage(key=Called(), value=Called())
"""


@pytest.mark.sampled(0)
def test_a_cache_without_a_gradient_is_refused_and_leaves_nothing(config, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config.storage = f"{tmp_path / 'own.py'}:called"
    with pytest.raises(ConfigError, match=r"the score under window \+ .*called has no gradient: Pure callbacks"):
        tune.tune(config, progress=False)
    assert not Path(config.output).exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("policy.budget", 32, "keeps every token of a window of 32, as the full cache does; lower policy.budget"),
        ("policy.name", "full", "keeps every token of a window of 32, as the full cache does"),
        ("policy.budget", 0, "budget"),
        ("policy.name", "snapkv(window=2)", "evicts when the prompt has ended, and windows.new_tokens=0: no token"),
        ("texts", (), "there is no text to train on"),
        ("texts", ("nowhere/*.txt",), "texts='nowhere/.*' is not a text file"),
        ("windows.prompt_length", 4000, "two.txt has 3200 tokens, fewer than the 4016 of a window of evaluation"),
        ("model.path", "/nowhere/model", "/nowhere/model"),
        ("output", "/dev/null/run", "output='/dev/null/run' cannot be written"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, path, value, message):
    if path == "policy.name":
        config.policy.sinks = None
    with pytest.raises(KvjaxError, match=message):
        tune.tune(fields.override(config, path, value), progress=False)
    assert not Path(config.output).exists()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("method", "lorra", "method='lorra' is unknown; did you mean 'lora'"),
        ("train_under", "both", "train_under='both' is unknown; valid: spec, full"),
        (
            "windows.prefill_block",
            None,
            "none reads a prompt of 32 tokens in one block.*no token reads the cache",
        ),
        ("windows.prefill_block", 0, "prefill_block=0 is not valid"),
        ("optimizer.warmup_steps", 6, "warmup_steps=6 must be below steps=6"),
        ("optimizer.clip", 0.0, "clip=0.0 sets every gradient to 0"),
        ("lora.projections", (), "lora.projections is empty"),
    ],
)
def test_settings_that_do_not_fit_together(config, path, value, message):
    with pytest.raises(ConfigError, match=message):
        check(fields.override(config, path, value))


def test_the_command_line_lists_its_own_configs():
    with pytest.raises(ConfigError, match=r"did you mean 'tune_tiny'\? known configs: tune_tiny"):
        experiments.tune.main(["tune", "--config=tune_tinny"])
