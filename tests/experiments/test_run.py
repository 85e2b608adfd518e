"""A run writes one whole folder or none, the same numbers every time, and says what it ran on."""

import contextlib
import dataclasses
import errno
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import numpy as np
import pytest

import experiments.calibrate
import experiments.run
import experiments.skew
import kvjax
from experiments import cli, fields, results
from experiments import config as configs
from experiments.config import DataConfig, PolicyConfig
from experiments.programs import run
from experiments.runs import data, machine, resolve, session
from experiments.runs.measure import Measurement
from experiments.sweeps import claims
from kvjax import planning, storage
from kvjax.errors import ConfigError, InputError, KvjaxError
from kvjax.models.model import Model
from kvjax.models.parameters import parameter_count
from kvjax.specs import parse
from tests.conftest import ROOT

FILES = {"config.json", "metrics.jsonl", "environment.json", "report.md", "report.html", "report.png"}
TIMINGS = {"prefill_tokens_per_second", "decode_tokens_per_second", "compile_seconds"}


def lines(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def measured_as(policy: str, budget: int | None) -> Measurement:
    """A measurement that was not made."""
    return Measurement(
        policy=policy, budget=budget, slots=8, least_slots=8, keeps_all=budget is None, logprobs=None,
        tokens=np.zeros((1, 2), np.int32), prefill_rate=1.0, decode_rate=1.0, compile_seconds=0.0, kv_bytes=8,
        full_kv_bytes=8, footprint=1.0, read=1.0, explain="line",
    )  # fmt: skip


def test_a_generated_text_ends_before_its_end_token():
    tokens = np.array([[5, 6, 5, 6, 9, 1], [1, 2, 3, 4, 5, 6]], np.int32)
    found = dataclasses.replace(measured_as("h2o", 8), tokens=tokens, ends=(9, 7)).generated()
    # The first text is 5 6 5 6: two of its three pairs are distinct, and the longest repeat has two tokens.
    expected = {"tokens": 5, "distinct-1": 75, "distinct-2": pytest.approx(250 / 3), "longest repeat": 1}
    assert found == expected


@pytest.mark.sampled(0)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="memory maps are read from Linux's /proc")
def test_a_session_of_many_runs_does_not_use_up_the_memory_maps(small, monkeypatch):
    """A sweep of 57 storages and policies once ended in a segmentation fault of the compiler."""
    program = jax.jit(lambda x: x + 1)
    program(1)
    runs = session.Session()
    runs.run(small)
    assert program._cache_size() == 1, "kept while there is room"
    monkeypatch.setattr(machine, "MAX_MAPS", 0)
    first = runs.run(dataclasses.replace(small, seed=1))
    assert program._cache_size() == 0
    assert [m.kv_bytes for m in first.measurements] and program(1) == 2


def test_a_run_writes_a_whole_folder_and_the_same_numbers_again(small, capsys):
    folder = run.run(small, command="the command")
    shown = capsys.readouterr().out
    assert shown.startswith("RANDOM WEIGHTS: no checkpoint was given")
    assert {path.name for path in folder.iterdir()} == FILES
    assert json.loads((folder / "config.json").read_text()) == fields.to_dict(small)
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["command"] == "the command"
    assert environment["jax"]
    assert environment["platform"]
    assert list(environment["explain"]) == ["full", "window"]
    assert environment["explain"]["window"][0].startswith("window: ")
    assert any("attention by xla" in line for line in environment["explain"]["window"])
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "report.md").read_text()
    assert "RANDOM WEIGHTS" in text
    assert "| window" in text
    assert "report.png" in text

    full, window = (line for line in lines(folder) if line["kind"] == "summary")
    assert (full["policy"], full["budget"], full["slots"], full["agreement"]) == ("full", None, 21, 1.0)
    assert (window["policy"], window["budget"], window["slots"]) == ("window", 8, 8)
    # 16 prompt tokens and all new ones but the last; the budget and one slot: keys and values of 8 float32, 2 rows.
    assert full["kv_bytes"] == full["full_kv_bytes"] == window["full_kv_bytes"] == 2 * 21 * 8 * 4 * 2
    assert window["kv_bytes"] == 2 * 9 * 8 * 4 * 2
    for loss, summary in zip([x for x in lines(folder) if x["kind"] == "loss"], (full, window), strict=True):
        assert np.exp(np.mean(loss["nats_by_token"])) == pytest.approx(summary["perplexity"], rel=1e-5)
    assert f"{window['perplexity']:,.2f}" in shown

    again = run.run(small)
    assert again != folder
    assert again.is_dir()
    for first, second in zip(lines(folder), lines(again), strict=True):
        assert {k: v for k, v in first.items() if k not in TIMINGS} == {
            k: v for k, v in second.items() if k not in TIMINGS
        }


def test_without_repetitions_caches_are_measured_side_by_side_and_nothing_is_timed(small, monkeypatch, capsys):
    run.run(small)
    small.repeats = 0
    monkeypatch.setattr(session.os, "cpu_count", lambda: 2)
    side_by_side = run.run(small)
    assert "tok/s" not in capsys.readouterr().out.split("Wrote")[1]
    folders = sorted(side_by_side.parent.iterdir(), key=lambda path: path.stat().st_mtime)
    for timed, untimed in zip(lines(folders[0]), lines(side_by_side), strict=True):
        assert untimed == timed | dict.fromkeys(TIMINGS & timed.keys())


def test_many_caches_with_recall_tasks_have_a_row_each(monkeypatch):
    names = ["full", "razor_attention(((1,0),(0,1)))", *"abcd"]
    made = [dataclasses.replace(measured_as(name, None), recall={"passkey": 0.5, "copy": 1.0}) for name in names]
    drawn = []
    monkeypatch.setattr(run.plots, "png", lambda figure, _: drawn.append(figure) or b"")
    run.plots.run_plot(made)
    left, right = drawn[0].axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["full", "razor_attention(...)", *"abcd"]
    assert [len(bars) for bars in left.containers] == [6, 6]
    assert [bar.get_width() for bar in left.containers[0]] == [50.0] * 6
    assert [bar.get_width() for bar in right.containers[0]] == [100.0] * 6


@pytest.mark.sampled(0)
def test_ctrl_c_ends_a_compiling_run_with_one_line(tmp_path):
    command = [sys.executable, "-m", "experiments.run", "--config=h2o_tiny", f"--config.output={tmp_path / 'out'}"]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        # Who starts these tests in the background has told them, and what they start, to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout.readline()  # the model is there; now it compiles
    time.sleep(2)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)  # compilation ends first, which takes long on a busy machine
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not list((tmp_path / "out").glob("[!.]*"))


def test_an_interruption_that_was_lost_is_repeated(monkeypatch, capsys):
    """As where JAX calls Python from C++ and discards the exception."""
    monkeypatch.setattr(cli, "INTERRUPT_AGAIN", 0.05)
    monkeypatch.setattr(os, "_exit", sys.exit)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def loses_the_first(_):
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        time.sleep(60)

    try:
        with pytest.raises(SystemExit) as error:
            cli.main(loses_the_first)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert error.value.code == cli.INTERRUPTED
    assert "interrupted" in capsys.readouterr().err
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


def test_a_storage_and_a_selection_are_measured_and_named(small):
    small.policy, small.baselines = PolicyConfig(name="full"), ("full",)
    small.storage, small.selection = "int8", "optimal(6)"
    folder = run.run(small)
    full, coded = (line for line in lines(folder) if line["kind"] == "summary")
    assert (full["policy"], coded["policy"]) == ("full", "full + int8 + optimal(6)")
    assert (coded["budget"], coded["slots"], coded["least_slots"], coded["keeps_all"]) == (None, 21, 21, True)
    # A slot: 8 codes of a byte, and a scale and a zero in float32, for the key and for the value.
    assert coded["kv_bytes"] == 2 * 21 * 2 * (8 + 2 * 4)
    assert coded["perplexity"] != full["perplexity"]
    written = json.loads((folder / "config.json").read_text())
    assert (written["storage"], written["selection"]) == ("int8", "optimal(6)")
    explained = json.loads((folder / "environment.json").read_text())["explain"]["full + int8 + optimal(6)"]
    assert any("int8" in line and "reads optimal(6) (at most 7 slots)" in line for line in explained)
    assert "| full + int8 + optimal(6)" in (folder / "report.md").read_text()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, KvjaxError])
@pytest.mark.parametrize("moment", ["measure", "write"])
def test_an_interrupted_run_leaves_no_result(small, monkeypatch, error, moment):
    def interrupted(*args, **kwargs):
        raise error("now")

    if moment == "measure":
        monkeypatch.setattr(session, "measure", interrupted)
    else:
        measured = measured_as("full", None)
        monkeypatch.setattr(session, "measure", lambda *args, **kwargs: measured)
        monkeypatch.setattr(run.plots, "run_plot", interrupted)
    with pytest.raises(error):
        run.run(small)
    assert list(Path(small.output).iterdir()) == []


def test_what_a_killed_run_has_left_is_removed(tmp_path):
    """By the next one, if the process is one of this machine and is dead."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    me = claims.this_worker()
    owners = {"dead": dataclasses.replace(me, pid=dead.pid), "alive": me}
    owners["elsewhere"] = dataclasses.replace(owners["dead"], machine="another")
    for name, owner in owners.items():
        folder = tmp_path / f"{results.UNFINISHED}{name}"
        folder.mkdir()
        (folder / results.OWNER).write_text(json.dumps(dataclasses.asdict(owner)))
    (tmp_path / f"{results.UNFINISHED}unknown").mkdir()
    with results.folder(tmp_path, "next") as (unfinished, target):
        assert (unfinished / results.OWNER).is_file()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"next"} | {f"{results.UNFINISHED}{name}" for name in ("alive", "elsewhere", "unknown")}
    assert not list(target.iterdir())


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "highest"), ("bfloat16", None)])
def test_float32_is_multiplied_as_float32_on_every_device(small, monkeypatch, dtype, precision):
    asked = []

    def measured(*args, **kwargs):
        asked.append(jax.config.jax_default_matmul_precision)
        return measured_as("window", 8)

    monkeypatch.setattr(session, "measure", measured)
    small.model.dtype = dtype
    session.Session().run(small)
    assert set(asked) == {precision}


def test_a_prompt_is_continued_without_a_perplexity(small, capsys):
    small.data = DataConfig(prompt="Once upon a time", num_sequences=1, new_tokens=4)
    small.baselines = ()
    folder = run.run(small)
    (window,) = lines(folder)
    assert window["perplexity"] is None
    assert window["agreement"] is None
    assert "no true continuation" in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_planned(monkeypatch, capsys):
    asked = {}

    def plan(config, spec, **settings):
        asked.update(settings, policy=spec.name, layers=config.num_layers)
        return types.SimpleNamespace(table=lambda: "the plan")

    monkeypatch.setattr(planning, "plan", plan)
    monkeypatch.setattr(machine, "host_memory", lambda: 10**9)
    assert experiments.run.main(["run", "--config=h2o_opt30b"]) == run.ONLY_PLANNED
    shown = capsys.readouterr().out
    assert "h2o_opt30b was not run" in shown
    assert "119.9 GB for weights" in shown
    assert "1.0 GB" in shown
    assert "the plan" in shown
    assert (asked["layers"], asked["policy"], asked["topology"], asked["batch"]) == (48, "h2o", None, 8)
    before = jax.config.jax_compilation_cache_dir
    assert experiments.run.main(["run", "--config=h2o_opt30b", "--topology=v5e:2x4", "--config.mesh=model:8"]) == 0
    # What is compiled for a device that is not here cannot be read again.
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_compilation_cache_dir", before)
    assert (asked["topology"], asked["mesh_axes"], str(asked["dtype"])) == ("v5e:2x4", "model:8", "bfloat16")


@pytest.mark.parametrize(
    ("policy", "needed"),
    [
        # 12 heads of 64 features in float32, one row: slots of a layer times 2 * 12 * 64 * 4 bytes
        ("full", 12 * 767),
        ("h2o", 12 * (51 + 1)),
        ("h2o(budget=(256, 256, 256, 256, 256, 256, 32, 32, 32, 32, 32, 32))", 6 * (257 + 33)),
        # Each layer's share of the prompt, and the 511 tokens that follow.
        ("snapkv(window=16)", 12 * (51 + 511)),
        ("pyramidkv(window=16)", sum(85 - 6 * layer for layer in range(12)) + 12 * 511),
        ("h2o(variant=masked)", 12 * 767),
        (f"razor_attention({((1, *(0,) * 11),) * 12})", 767 + 11 * (51 + 1)),
    ],
)
def test_a_run_fits_if_its_slots_do(monkeypatch, policy, needed):
    config = fields.override(configs.by_name("h2o_opt125m"), "policy.name", policy)
    config = dataclasses.replace(
        config, baselines=(), data=DataConfig(num_sequences=1, prompt_length=256, new_tokens=512)
    )
    config.model.dtype = "float32"
    bytes_needed = needed * 2 * 12 * 64 * 4
    weights = 4 * parameter_count(resolve.decoder_config(config.model))
    for room, fits in ((bytes_needed, True), (bytes_needed - 2048, False)):
        monkeypatch.setattr(machine, "host_memory", lambda room=room: math.ceil((weights + room) / machine.USABLE))
        if fits:
            resolve.check_fit(config)
            with pytest.raises(resolve.CannotRun, match=r"and 0\.1 GB for the states of prompts"):
                resolve.check_fit(config, stored=10**8)
        else:
            with pytest.raises(resolve.CannotRun):
                resolve.check_fit(config)


def test_a_block_of_a_prompt_needs_room_for_all_of_it():
    config = dataclasses.replace(configs.by_name("h2o_opt125m"), policy=PolicyConfig(name="snapkv(window=16)"))
    config, decoder = dataclasses.replace(config, prefill_block=64), resolve.decoder_config(config.model)
    layout = resolve.layout_of(config, resolve.specs_of(config)[-1], decoder, 512)
    assert resolve.max_cache_bytes(layout, 1) == 12 * 512 * 2 * 12 * 64 * 4 > layout.bytes(1)


def test_a_prompt_that_is_given_is_not_held_to_the_length_of_others(small):
    small.policy, small.baselines = PolicyConfig(name="h2o", budget=0.1, recent=3), ()
    small.data = DataConfig(prompt="x" * 40, prompt_length=16, new_tokens=4)
    resolve.check_fit(small)  # 10 % of 16 tokens is less than 3


def test_memory_of_this_machine():
    assert 2**20 < machine.host_memory() < 2**50


class Words:
    """A tokenizer whose tokens are words."""

    bos_id, adds_bos = 1, True

    def encode(self, text, bos=True):
        return [2 + len(word) for word in text.split()]


def test_rows_of_a_text_begin_with_bos(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("a bb ccc " * 4)
    model = Model(config=None, params=None, tokenizer=Words())
    config = DataConfig(text=str(path), num_sequences=2, prompt_length=3, new_tokens=2)
    tokens, prompt_length, about = data.load(config, model, 0)
    assert tokens.tolist() == [[1, 3, 4, 5, 3], [1, 4, 5, 3, 4]]
    assert (prompt_length, about) == (3, "text.txt")
    with pytest.raises(InputError, match="has 12 tokens, but 9 rows of 5 need 36"):
        data.load(dataclasses.replace(config, num_sequences=9), model, 0)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        data.load(dataclasses.replace(config, text=str(tmp_path / "none")), model, 0)
    with pytest.raises(ConfigError, match="both given"):
        data.load(dataclasses.replace(config, prompt="x"), model, 0)
    with pytest.raises(InputError, match="prompt is empty"):  # not even though BOS would come before it
        data.load(dataclasses.replace(config, text=None, prompt=fields.read(fields.OptionalText, "")), model, 0)


def test_the_generated_text_is_the_same_everywhere():
    text = data.generated_text(300)
    assert text == data.generated_text(300) != data.generated_text(300, seed=1)
    assert 300 <= len(text) < 450
    assert text.isascii()


@pytest.mark.sampled(0)
def test_a_storage_is_calibrated_by_a_story_or_by_a_file(small, tmp_path):
    """The file wins; a story is no text of the run, and the same every time."""
    held = storage.low_rank(8, 8)
    made = dataclasses.replace(
        small, policy=PolicyConfig(name="full"), storage="low_rank(key_rank=8, value_rank=8)", baselines=()
    )
    (by_story,) = session.Session().run(made).measurements
    model = session.Session().model(small)
    (exact,) = session.Session().run(dataclasses.replace(made, storage="dense")).measurements
    np.testing.assert_allclose(by_story.logprobs, exact.logprobs, atol=1e-4)
    sample = data.calibration_sample(model, 2, 40)
    assert sample.shape == (2, 40) and (sample == data.calibration_sample(model, 2, 40)).all()
    calibration = kvjax.calibrate(model, sample, held)
    # Directions that hold nothing: keys and values are their means.
    empty = calibration.replace(
        layers=jax.tree.map(lambda x: x if x.ndim == 2 else 0 * x, calibration.layers), method="nothing"
    )  # fmt: skip
    empty.save(tmp_path / "nothing.safetensors")
    of_file = dataclasses.replace(made.model, calibration=str(tmp_path / "nothing.safetensors"))
    (by_file,) = session.Session().run(dataclasses.replace(made, model=of_file)).measurements
    assert np.abs(by_file.logprobs - exact.logprobs).max() > 1e-4


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("held", "objective"), [
        ("low_rank(key_rank=2, value_rank=3)", "next_token"), ("cskv(rank=4, window=4)", "reconstruction"),
        ("low_rank(key_rank=2, value_rank=3)", "distillation"),
    ],
)  # fmt: skip
def test_training_a_calibration(small, tmp_path, monkeypatch, held, objective, capsys):
    """The loss of the storage's own paper falls, and the calibration is saved with what was done."""
    model = session.Session().model(small)
    monkeypatch.setattr(kvjax, "load", lambda path, dtype=None: model)
    output = tmp_path / "made" / "own.safetensors"
    flags = [f"--storage={held}", f"--output={output}", "--rows=1", "--tokens=16", "--steps=5", "--learning_rate=0.02"]
    # Ranks are drawn in each step of a distillation, so that few steps do not tell whether the loss falls.
    flags += ["--objective=distillation", "--learning_rate=0"] if objective == "distillation" else []
    with jax.numpy_dtype_promotion("standard"):
        experiments.calibrate.main(["calibrate", "--model=small", *flags])
    said = capsys.readouterr().out
    if objective == "distillation":
        (first,) = re.findall(r"the mean loss of the first 5 steps is ([\d.]+), and of the last 5 (\d+\.\d+)", said)
        assert first[0] == first[1] and "draws ranks at random" in said
    else:
        first, last = re.findall(rf"the {objective} loss from ([\d.]+) to ([\d.]+)\.", said)[0]
        assert float(last) < float(first)
    read = kvjax.load_calibration(output)
    assert "trained for 5 steps" in read.method and read.text.tokens == 16
    kvjax.calibrated(model, parse.build("storage", held), read)
    if objective == "distillation":
        # Not trained, they are the principal directions.
        sample = data.calibration_sample(model, 1, 16)
        plain = kvjax.calibrate(model, sample, parse.build("storage", held))
        assert read.method == f"{plain.method}; trained for 5 steps"  # with the ranks that are kept
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), read.layers, plain.layers)
    with pytest.raises(ConfigError, match="give --model=FOLDER, --storage="):
        experiments.calibrate.main(["calibrate"])


@pytest.mark.parametrize(
    ("program", "flag"), [(experiments.calibrate, "--storage=low_rank(4, 4)"), (experiments.skew, "--text=story.txt")]
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work_begins(program, flag, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(ConfigError, match="taken' cannot be written"):  # and not that there is no such model
        program.main(["program", "--model=nowhere", flag, f"--output={tmp_path}/taken/own.safetensors"])


def test_a_folder_is_claimed_before_the_work_begins(tmp_path):
    """Runs that begin in the same second have folders of their own, whichever ends first."""
    with results.folder(tmp_path, "run") as (first, one):
        with results.folder(tmp_path, "run") as (second, two):
            (second / "file").write_text("second")
        (first / "file").write_text("first")
    assert ((one / "file").read_text(), (two / "file").read_text()) == ("first", "second")
    with results.folder(tmp_path, "run") as (_, three):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-2", "run-3"] and three.name == "run-3"


@pytest.mark.parametrize("nowhere", [False, True])
def test_a_full_disk_does_not_lose_a_finished_run(small, tmp_path, monkeypatch, capsys, nowhere):
    outcome = session.Outcome("a model", "a text", [], [measured_as("full", None)], ["words"])
    monkeypatch.setattr(session.Session, "run", lambda self, config, **settings: outcome)
    monkeypatch.setattr(run, "describe", lambda *_: "a model")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write = run.write

    def full(folder, *rest):
        if nowhere or str(folder).startswith(small.output):
            raise OSError(errno.ENOSPC, "No space left on device")
        write(folder, *rest)

    monkeypatch.setattr(run, "write", full)
    if nowhere:
        with pytest.raises(run.NotWritten, match=r"No space left on device.*printed above"):
            run.run(small)
        assert '{"kind": "summary", "policy": "full"' in capsys.readouterr().out
        return
    folder = run.run(small)
    assert folder.parent == tmp_path / "cache" / "kvjax" / "results"
    assert {path.name for path in folder.iterdir()} >= FILES
    assert f"No space left on device. They go to {folder}/ instead" in capsys.readouterr().err
