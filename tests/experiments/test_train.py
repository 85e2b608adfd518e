"""Training: resumes exactly after a kill, the same on many devices, exports what transformers loads."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import experiments.card
import experiments.train
import kvjax
from experiments import fields
from experiments.programs import card, train
from experiments.runs.data import generated_text
from experiments.training import activations
from experiments.training import config as training
from experiments.training.config import DecoderShape, MixtureConfig, OptimizerConfig, TrainConfig
from experiments.training.optimizer import schedule
from kvjax import devices
from kvjax.errors import ConfigError
from kvjax.models.decoder import Decoder
from kvjax.models.parameters import parameter_shapes, random_parameters
from kvjax.planning import served_model
from tests.conftest import ROOT, XLA_FLAGS

STEPS = 12


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's Muon relies on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for seed, name in enumerate(("one", "two", "three")):
        (folder / f"{name}.txt").write_text(generated_text(30_000, seed))
    return folder


@pytest.fixture
def config(texts, tmp_path) -> TrainConfig:
    return TrainConfig(
        texts=(str(texts),),
        held_out=("two",),
        decoder=DecoderShape(vocab_size=320, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=48),
        mixture=MixtureConfig(
            repeat_fraction=(0.5, 0.0), invented_fraction=(0.0, 0.5), wordy_fraction=(0.5, 0.5), common_words=20
        ),
        optimizer=OptimizerConfig(warmup_steps=3, decay_steps=(4,)),
        contexts=(32, 64),
        stage_ends=(5,),
        batch_tokens=512,
        steps=STEPS,
        evaluate_every=6,
        checkpoint_every=2,
        log_every=1,
        output=str(tmp_path / "run"),
    )


def events(config: TrainConfig, kind: str):
    lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["kind"] == kind]


def losses(config: TrainConfig):
    return {event["step"]: event["total"] for event in events(config, "loss")}


def command(config: TrainConfig):
    """The program on this config, as a user would run it."""
    path = Path(config.output).with_suffix(".py")
    settings = json.dumps(json.dumps(fields.to_dict(config)))
    path.write_text(
        "import json\nfrom experiments import fields\nfrom experiments.training.config import TrainConfig\n"
        f"def get_config():\n    return fields.from_dict(TrainConfig, json.loads({settings}))\n"
    )
    return [sys.executable, "-m", "experiments.train", f"--config={path}"]


def tensors(config: TrainConfig):
    return (Path(config.output) / "model" / "model.safetensors").read_bytes()


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_a_killed_run_goes_on_as_if_it_had_not_been(config, tmp_path):
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    train.train(whole, progress=False)
    process = subprocess.Popen(command(config), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    checkpoints = Path(config.output) / "checkpoints"
    deadline = time.monotonic() + 120
    while not (checkpoints / "4").is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    started = max(int(path.name) for path in checkpoints.iterdir() if path.name.isdigit())
    assert 4 <= started < STEPS, "the process ended before it was killed"
    train.train(config, progress=False)
    assert [event["step"] for event in events(config, "start")] == [0, started]
    assert losses(config) == losses(whole)
    assert sorted(losses(config)) == list(range(1, STEPS + 1))
    assert tensors(config) == tensors(whole)
    assert events(config, "evaluation") == events(whole, "evaluation")


def one_stage(config: TrainConfig, context: int) -> None:
    """Half the programs to compile."""
    config.contexts, config.stage_ends = (context,), ()
    config.mixture = dataclasses.replace(
        config.mixture, repeat_fraction=(0.5,), invented_fraction=(0.0,), wordy_fraction=(0.5,)
    )


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_many_devices_train_the_same_model(config, tmp_path):
    one_stage(config, 32)
    train.train(config, progress=False)
    many = dataclasses.replace(config, output=str(tmp_path / "many"))
    environment = os.environ | {"XLA_FLAGS": f"{XLA_FLAGS} --xla_force_host_platform_device_count=6"}
    subprocess.run(command(many), cwd=ROOT, env=environment, check=True, capture_output=True)
    # 16 windows a step are divided among two of six.
    assert (events(many, "start")[0]["devices"], events(many, "start")[0]["devices_used"]) == (6, 2)
    one, two = losses(config), losses(many)
    np.testing.assert_allclose([two[step] for step in sorted(one)], [one[step] for step in sorted(one)], rtol=2e-4)


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_the_loss_falls_and_the_export_is_what_was_trained(config):
    folder = train.train(dataclasses.replace(config, steps=40, stage_ends=(20,)), progress=False)
    found = losses(dataclasses.replace(config))
    assert found[40] < 0.75 * found[1]
    evaluation = events(config, "evaluation")[-1]
    assert evaluation["step"] == 40
    # An untrained decoder takes 8.
    assert 0 < evaluation["two.txt"] < 4
    model = kvjax.load(folder)
    assert model.config.rope.theta == training.ROPE_THETA
    assert model.tokenizer.adds_bos
    text = generated_text(200, seed=9)
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text)["input_ids"]
    assert ids == model.tokenizer.encode(text)
    with torch.inference_mode():
        theirs = torch.log_softmax(peer(torch.tensor([ids])).logits, -1).numpy()
    logits, _ = Decoder(model.config).apply({"params": model.params}, np.asarray([ids], np.int32))
    np.testing.assert_allclose(jax.nn.log_softmax(logits), theirs, atol=1e-4)


@pytest.mark.sampled(0)
def test_a_run_goes_on_only_under_the_settings_that_led_to_it(config):
    config.steps = 4
    config.optimizer.decay_steps = (1,)
    train.train(config, progress=False)
    other = fields.override(config, "optimizer.learning_rate", 1e-3)
    with pytest.raises(ConfigError, match="contains a run at step 4 with different optimizer"):
        train.train(other, progress=False)
    # The decay had begun: a longer plateau would have led elsewhere.
    with pytest.raises(ConfigError, match="with different decays"):
        train.train(fields.override(config, "steps", 8), progress=False)
    with pytest.raises(ConfigError, match="schedule_steps=none the schedule is not scaled to steps"):
        train.train(dataclasses.replace(config, steps=8, schedule_steps=4), progress=False)


def test_a_longer_run_shares_its_plateau(config):
    """Before decay and later stages begin, they can still be changed."""
    longer = dataclasses.replace(config, steps=50, stage_ends=(8,))
    assert training.past(config, 5) == training.past(longer, 5)
    assert training.past(config, 6) != training.past(longer, 6)
    # The first parameters depend on the longest context.
    assert training.past(config, 5) != training.past(dataclasses.replace(config, contexts=(32, 128)), 5)
    assert training.past(config, 5) != training.past(dataclasses.replace(config, seed=1), 5)


def test_a_finished_run_goes_on_in_another_cycle(config):
    """The rate has come down to 0; from there it may rise anew."""
    cycles = dataclasses.replace(config.optimizer, cycle_ends=(STEPS,), decay_steps=(4, 2))
    longer = dataclasses.replace(config, steps=STEPS + 6, optimizer=cycles)
    assert training.past(config, STEPS) == training.past(longer, STEPS)
    assert training.past(longer, STEPS + 5) != training.past(dataclasses.replace(longer, steps=STEPS + 7), STEPS + 5)
    one, both = schedule(config, 1.0), schedule(longer, 1.0)
    assert [float(one(step)) for step in range(STEPS)] == [float(both(step)) for step in range(STEPS)]
    assert [float(both(STEPS + step)) for step in (0, 3, 4, 5)] == pytest.approx([0, 1, 1, 0.5])


def test_learning_rates_warm_up_and_decay():
    config = TrainConfig(steps=100, optimizer=OptimizerConfig(warmup_steps=10, decay_steps=(40,)))
    rate = schedule(config, 2.0)
    assert [float(rate(step)) for step in (0, 5, 10, 60, 80, 100)] == pytest.approx([0, 1, 2, 2, 1, 0])


def test_a_schedule_follows_the_number_of_steps(config):
    config.schedule_steps = STEPS
    config.optimizer = dataclasses.replace(config.optimizer, cycle_ends=(8,), decay_steps=(4, 2))
    plain = dataclasses.replace(config, schedule_steps=None)
    assert training.scheduled(config) == training.scheduled(plain) == plain
    longer = training.scheduled(fields.override(config, "steps", 5 * STEPS))
    assert (longer.stage_ends, longer.schedule_steps) == ((25,), None)
    assert (longer.optimizer.warmup_steps, longer.optimizer.cycle_ends, longer.optimizer.decay_steps) == (
        15, (40,), (20, 10),
    )  # fmt: skip
    one, other = schedule(plain, 1.0), schedule(longer, 1.0)
    assert [float(other(5 * step)) for step in range(STEPS)] == pytest.approx([float(one(s)) for s in range(STEPS)])
    # However short, every number is one of a run.
    for steps in range(1, STEPS):
        shorter = training.scheduled(fields.override(config, "steps", steps))
        assert all(0 <= float(schedule(shorter, 1.0)(step)) <= 1 for step in range(steps))
    # A config's own check is that of the run that it describes.
    training.check(fields.override(config, "steps", 3))
    with pytest.raises(ConfigError, match="must ascend and be below schedule_steps=8"):
        training.check(fields.override(config, "schedule_steps", 8))


def test_configs_are_scaled_from_their_own_length():
    for name in fields.names(TrainConfig):
        config = fields.by_name(name, TrainConfig)
        assert config.schedule_steps == config.steps
        training.check(fields.override(config, "steps", 500))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("texts", ("nowhere/*.txt",), "texts='nowhere/.*' is not a text file"),
        ("texts", (), "there is no text to train on"),
        ("held_out", ("four",), "held_out='four' is not among the texts: one.txt, three.txt, two.txt"),
        ("batch_tokens", 500, "batch_tokens=500 is not a multiple of a window's 32 tokens"),
        ("stage_ends", (), "has 2 stages, which need 1 ascending stage_ends"),
        ("stage_ends", (5, 9), "has 2 stages, which need 1 ascending stage_ends"),
        ("contexts", (64, 32), r"contexts=\(64, 32\) must ascend from at least 16"),
        ("mixture.repeat_fraction", (1.5, 0.0), "are shares; give numbers from 0 to 1"),
        (
            "optimizer.decay_steps",
            (4, 4),
            "must ascend and be below steps=.*, and optimizer.decay_steps=.* must be 1 numbers",
        ),
        ("mixture.invented_fraction", (0.5,), "has 2 stages; give 2 of mixture.invented_fraction"),
        ("mixture.task_shares", (1.0, 2.0), "must be 5 numbers, not all 0, for passkey, multi_key, associative"),
        ("decoder.num_kv_heads", 3, "decoder.num_heads=4, which must be a multiple of decoder.num_kv_heads=3"),
        ("decoder.num_layers", 1, "are too few for the induction head"),
        ("output", "/dev/null/run", "output='/dev/null/run' cannot be written"),
        ("decoder.vocab_size", 200, "decoder.vocab_size=200 is too small"),
        ("activations", "drop", "activations='drop' is not valid; use 'keep', 'recompute' or 'offload'"),
        ("offload_share", 1.5, "offload_share=1.5 is a share"),
    ],
)
def test_settings_that_cannot_work_are_refused(config, path, value, message):
    with pytest.raises(ConfigError, match=message):
        train.train(fields.override(config, path, value), progress=False)


SHAPE = training.decoder_config(
    TrainConfig(
        decoder=DecoderShape(vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, mlp_size=48)
    ),
    bos=0,
)


@pytest.fixture(scope="module")
def gradients():
    """The gradients of a tiny decoder by where its activations are."""
    params = random_parameters(SHAPE, jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (2, 17), 0, SHAPE.vocab_size)
    kind = np.ones((2, 17), np.int32)

    @functools.cache
    def of(where, share):
        apply = activations.forward(SHAPE, where, share)
        with jax.numpy_dtype_promotion("standard"):
            return jax.jit(jax.grad(lambda params: train.loss_of(params, apply, tokens, kind, 4.0)[0]))(params)

    return of


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("where", "share"), [("offload", 0.5), ("offload", 1.0), ("recompute", 1.0)])
def test_gradients_are_the_same_wherever_activations_are(gradients, where, share):
    """A CPU runs the copies to host memory, which is its own memory."""
    kept, found = gradients("keep", 1.0), gradients(where, share)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-7), kept, found)
    assert max(float(np.abs(each).max()) for each in jax.tree.leaves(kept)) > 0.01


def test_what_moves_to_the_host():
    """Queries, keys, values, the output of attention, and both hidden vectors of the MLP, in float32."""
    assert activations.activation_bytes(SHAPE) == 4 * (32 + 2 * 16 + 32 + 2 * 48)

    def kept(where, share):
        """Returns the bytes on the device and on the host between the passes, without the parameters."""
        shapes, tokens = parameter_shapes(SHAPE), jax.ShapeDtypeStruct((2, 16), np.int32)
        apply = activations.forward(SHAPE, where, share)

        def residuals(params, tokens):
            return jax.tree.leaves(jax.vjp(lambda params: apply({"params": params}, tokens)[0], params)[1])

        sizes = {False: 0, True: 0}
        for each in jax.make_jaxpr(residuals)(shapes, tokens).out_avals:
            sizes[each.memory_space == jax.memory.Space.Host] += each.size * each.dtype.itemsize
        return sizes[False], sizes[True]

    each = 32 * activations.activation_bytes(SHAPE)
    (all_kept, none), (recomputed, zero), offloaded, half = (
        kept(*given) for given in (("keep", 1.0), ("recompute", 1.0), ("offload", 1.0), ("offload", 0.5))
    )
    assert none == zero == 0 and recomputed < all_kept
    assert (offloaded[1], half[1]) == (2 * each, each)
    assert recomputed <= half[0] <= offloaded[0] < all_kept
    assert activations.moved_layers(5, 0.4) == [False, False, True, False, True]
    assert sum(activations.moved_layers(10, 0.3)) == 3 and all(activations.moved_layers(3, 1.0))


def test_the_share_that_is_recommended(config):
    device = devices.Device("given", 1e9, 1e9, 1e9, "given", link=1e6)
    share = activations.recommended_share(SHAPE, device, rows=3, tokens=100, host_bytes=1e12)
    per_token = activations.activation_bytes(SHAPE)
    layer = 3 * served_model.ServedModel.of(SHAPE).prefill_flops(100) / 2 / 1e9
    assert share == pytest.approx(1e6 * layer / (per_token * 300)) and 0 < share < 1
    small = activations.recommended_share(SHAPE, device, rows=3, tokens=100, host_bytes=2 * 300 * per_token * share / 4)
    assert small == pytest.approx(share / 4)
    unknown = dataclasses.replace(device, link=None)
    assert activations.recommended_share(SHAPE, unknown, rows=3, tokens=100, host_bytes=1e12) is None
    # A run may go on with its activations elsewhere.
    moved = dataclasses.replace(config, activations="offload", offload_share=0.5)
    assert training.past(config, 5) == training.past(moved, 5)


def test_devices_that_read_no_host_memory_do_not_offload():
    class Memory:
        kind = "device"

    class Old:
        device_kind = "old"

        def addressable_memories(self):
            return [Memory()]

    activations.check_devices("recompute", [Old()])
    activations.check_devices("offload", jax.local_devices())
    with pytest.raises(ConfigError, match=r"old has device\. Give activations=recompute"):
        activations.check_devices("offload", [Old()])


@pytest.mark.parametrize("short", ["two", "three"])
def test_a_text_shorter_than_a_window_is_refused(config, texts, tmp_path, short):
    for path in texts.iterdir():
        (tmp_path / path.name).write_text(path.read_text() if path.stem != short else "A few words.")
    with pytest.raises(ConfigError, match=rf"{short}\.txt has [0-9]+ tokens, fewer than a window of 64"):
        train.train(fields.override(config, "texts", (str(tmp_path),)), progress=False)


def test_the_command_line_lists_its_own_configs():
    with pytest.raises(ConfigError, match=r"did you mean 'train_tiny'\? known configs: train_nano, train_tiny"):
        experiments.train.main(["train", "--config=train_tinny"])


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_a_card_says_what_was_trained(config, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "EVALUATION_PROMPTS", 8)
    monkeypatch.setattr(train, "EVALUATION_WINDOWS", 8)
    one_stage(config, 1024)
    config.batch_tokens, config.steps = 1024, 4
    first = train.train(config, command="the command", progress=False)
    before = kvjax.load(first, dtype="float32")
    second = dataclasses.replace(config, start=str(first), seed=1, steps=3, output=str(tmp_path / "second"))
    second.optimizer = dataclasses.replace(second.optimizer, learning_rate=0.0, embedding_learning_rate=0.0)
    layers = before.config.num_layers
    second.decoder, second.new_layers = dataclasses.replace(second.decoder, num_layers=layers + 1), (1,)
    train.train(second, command="another command", progress=False)
    after = kvjax.load(Path(second.output) / "model", dtype="float32")
    kept = {name: leaf for name, leaf in after.params.items() if name != "layer_1"}
    for layer in range(1, layers):
        kept[f"layer_{layer}"] = kept.pop(f"layer_{layer + 1}")
    jax.tree.map(
        lambda one, two: np.testing.assert_array_equal(one, two, "it began with these, and learned nothing"),
        before.params, kept,
    )  # fmt: skip
    tokens = np.arange(3, 40)[None]
    one, two = (kvjax.log_likelihood(m, tokens, kvjax.policies.full(), prompt_length=9) for m in (before, after))
    np.testing.assert_array_equal(one.logprobs, two.logprobs, "the new layer is the identity")
    assert after.tokenizer.encode("It was dark.") == before.tokenizer.encode("It was dark.")
    monkeypatch.setattr(card, "TASKS", ("passkey",))
    monkeypatch.setattr(card, "PROMPTS", 2)
    monkeypatch.setattr(card, "WINDOWS", 4)
    monkeypatch.setattr(card, "GAIN_WINDOWS", 1)
    monkeypatch.setattr(card, "POLICIES", ("full", "window"))
    output = tmp_path / "shown"
    assert experiments.card.main(["card", f"--run={second.output}", f"--output={output}"]) == 0
    text = (output / "README.md").read_text()
    text = " ".join(text.split())
    for part in (
        "`the command`",
        "one, three",
        "two.txt",
        "| passkey",
        "4 steps of 1,024 tokens",
        "Apache-2.0",
        "`another command`",
        "3 steps of 1,024 tokens",
        f"It began with the weights of `{first}`",
        "Layer 1 was new, and began as the identity",
    ):
        assert part in text
    assert "{" not in text
    assert {path.name for path in (output / "training").iterdir()} == {"run_1", "run_2", "curve.png"}
    assert (output / "training" / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert kvjax.load(output).config.max_positions == 1024


@pytest.mark.parametrize(("start", "new"), [("", (1,)), ("kvjax-tiny", (9,)), ("kvjax-tiny", (2, 1))])
def test_new_layers_that_cannot_be_are_refused(config, start, new):
    config.start, config.new_layers = start, new
    with pytest.raises(ConfigError, match=r"new_layers=\(.*\) needs start, got .*ascending numbers below"):
        train.train(config, progress=False)


def test_a_start_of_another_shape_is_refused(config):
    config.start = "kvjax-tiny"
    with pytest.raises(ConfigError, match=r"start='kvjax-tiny' is DecoderConfig.*this run's decoder is DecoderConfig"):
        train.train(config, progress=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--run=nowhere", "--output=x"], "nowhere is not a finished run"),
        (["--run=nowhere"], "give --run=FOLDER and --output=FOLDER"),
        (["--ran=nowhere"], "known flags: .*--license, --output, --run, --help"),
    ],
)
def test_a_card_needs_a_finished_run(arguments, message):
    with pytest.raises(ConfigError, match=message):
        experiments.card.main(["card", *arguments])
