"""Configs by name, overrides with type checks, and what a wrong one says."""

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments import cli, fields, specs
from experiments import config as configs
from experiments.config import ModelConfig, PolicyConfig
from experiments.runs import identity, machine
from experiments.runs.resolve import check_fit, codes_of, decoder_config, layout_of, specs_of
from kvjax import host
from kvjax.checkpoint import locate
from kvjax.errors import ConfigError, KvjaxError, PolicyError
from kvjax.models import shapes
from kvjax.models.quantize import WeightCodes
from tests.conftest import ROOT


def parse(*arguments):
    return cli.parse(["program", *arguments], about="about")[0]


@pytest.mark.parametrize("name", configs.names())
def test_every_config_is_complete(name):
    config = configs.by_name(name)
    assert config.name == name
    if config.model.path in locate.PACKAGED and (
        locate.PACKAGED[config.model.path].path() is None or importlib.util.find_spec("gguf") is None
    ):
        pytest.skip(f"the package of {config.model.path} is not installed")
    assert specs_of(config)
    decoder = decoder_config(config.model)
    assert decoder is not None
    assert config.data.prompt_length + config.data.new_tokens <= decoder.max_positions
    docstring = (fields.FOLDER / f"{name}.py").read_text().split('"""')[1]
    for part in ("Paper:", "Expected", "Hardware:"):
        assert part in docstring
    assert re.search(rf"python -m experiments\.(run|after_prompt) --config={name}\b", docstring)


def test_configs_of_the_project():
    assert set(configs.names()) >= {
        "h2o_tiny", "h2o_opt125m", "h2o_opt6_7b", "h2o_opt30b", "full_opt30b", "h2o_llama2_7b", "window_llama2_7b",
    }  # fmt: skip


def test_overrides():
    config = parse(
        "--config.seed=3", "--config=h2o_tiny", "--config.policy.recent=7", "--config.model.path=none",
        "--config.baselines=full,window", "--config.data.text=a=b.txt", "--config.prefill_block", "32",
    )  # fmt: skip
    assert (config.seed, config.policy.recent, config.model.path, config.prefill_block) == (3, 7, None, 32)
    assert config.baselines == ("full", "window")
    assert config.data.text == "a=b.txt"
    assert parse("--config=h2o_tiny", "--config.baselines=none").baselines == ()


def test_an_override_leaves_the_next_parse_alone():
    assert parse("--config=h2o_tiny", "--config.policy.budget=7").policy.budget == 7
    assert parse("--config=h2o_tiny").policy.budget == 0.2


@pytest.mark.parametrize(
    ("text", "value"), [("256", 256), ("1", 1), ("1.0", 1.0), ("0.2", 0.2), ("2e-1", 0.2), ("-4", -4)]
)
def test_budget_is_slots_or_a_fraction(text, value):
    budget = parse("--config=h2o_tiny", f"--config.policy.budget={text}").policy.budget
    assert budget == value
    assert type(budget) is type(value)


def test_one_slot_and_the_whole_prompt_are_different_experiments():
    one, whole = (fields.override(configs.by_name("h2o_tiny"), "policy.budget", text) for text in ("1", "1.0"))
    assert identity.digest(one) != identity.digest(whole)
    assert identity.digest(one) == identity.digest(fields.override(one, "output", "elsewhere"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config=NAME; known configs: .*h2o_tiny"),
        (["--config=h2o_tiny", "--config=h2o_opt125m"], "given more than once; known configs: .*h2o_tiny"),
        (["--config=h2o_tinny"], "unknown config 'h2o_tinny'; did you mean 'h2o_tiny'.*window_llama2_7b"),
        (["--config=h2o_tiny", "--config.policy.every=8"], "every is an argument of some policies, to be given in the"),
        (["--config=h2o_tiny", "--config.polcy.budget=1"], "unknown field 'polcy.budget': a config has name, model, "),
        (["--config=h2o_tiny", "--config.policy.bugdet=1"], "policy has name, budget, .*mean 'policy.budget'"),
        (["--config=h2o_tiny", "--config.policy.budget.x=1"], "no fields of its own"),
        (["--config=h2o_tiny", "--config.policy=h2o"], "'policy' is a group of fields; set one of policy.name"),
        (["--config=h2o_tiny", "--config.policy.budget=many"], "'many' is not valid here; give slots"),
        (["--config=h2o_tiny", "--config.policy.budget=nan"], "'nan' is not valid here; give slots"),
        (["--config=h2o_tiny", "--config.data.new_tokens=1.5"], "'1.5' is not valid here; give a whole number"),
        (["--config=h2o_tiny", "--config.data.num_sequences=0"], "give a whole number of at least 1"),
        (["--config=h2o_tiny", "--budget=1"], "unknown flag --budget; known flags: .*--config, .*--config.FIELD"),
        (["--config=h2o_tiny", "extra"], "unexpected argument 'extra'"),
    ],
)
def test_a_wrong_command_line_names_what_is_valid(arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (PolicyConfig(name="h3o"), "unknown policy 'h3o'; did you mean 'h2o'.*known policies: .*full, gkv, h2o"),
        (PolicyConfig(budget=0), "budget 0 is out of range"),
        (PolicyConfig(budget=-1), "budget -1 is out of range"),
        (PolicyConfig(budget=1.5), "budget 1.5 is out of range"),
        (PolicyConfig(budget=8, recent=9), "protects 9 slots, more than its budget of 8"),
        (PolicyConfig(name="h2o", sinks=4), "h2o does not take policy.sinks=4; it takes budget, "),
        (PolicyConfig(positions="sideways"), "positions='sideways' is not valid"),
    ],
)
def test_a_wrong_policy_is_refused_before_anything_is_loaded(policy, message):
    config = configs.by_name("h2o_tiny")
    config.policy = policy
    with pytest.raises(KvjaxError, match=message):
        specs_of(config)


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        ({"storage": "int8"}, ["full", "window", "h2o + int8"]),
        ({"storage": "int8", "baselines": "full,h2o"}, ["full", "h2o", "h2o + int8"]),
        ({"policy.name": "full", "selection": "optimal(64)"}, ["full", "window", "full + optimal(64)"]),
        ({"policy.name": "snapkv", "storage": "fp8", "selection": "quest(page=8, budget=64)", "baselines": "none"},
         ["snapkv + fp8 + quest(page=8, budget=64)"]),
        ({"policy.name": "full", "baselines": "full,window"}, ["full", "window"]),
        ({"policy.name": "window", "baselines": "h2o,full"}, ["full", "h2o", "window"]),
    ],
)  # fmt: skip
def test_storage_and_selection_are_the_policys_own(overrides, names):
    config = configs.by_name("h2o_tiny")
    for path, text in overrides.items():
        config = fields.override(config, path, text)
    found = specs_of(config)
    assert [spec.name for spec in found] == names
    assert specs.name_of(config) == (names[-1] if config.policy.name != "full" or len(names) > 2 else "full")
    assert all(spec.storage.exact and spec.selection.reads_all for spec in found[:-1])
    decoder = decoder_config(config.model)
    for spec in found:
        assert layout_of(config, spec, decoder, 768).bytes(4) > 0


def test_a_baseline_may_have_a_storage_and_a_selection():
    text = "window + int8, full + quest(budget=64) + fp8, full"
    config = fields.override(configs.by_name("h2o_tiny"), "baselines", text)
    names = ["full", "window + int8", "full + fp8 + quest(budget=64)", "h2o"]
    assert [spec.name for spec in specs_of(config)] == names


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"storage": "int9"}, "unknown storage 'int9'; did you mean 'int8'"),
        ({"selection": "quest"}, "budget must be a whole number"),
        (
            {"selection": "quest(budget=64)"},
            "policy h2o with selection=.*h2o evicts single ones while decoding",
        ),
        ({"policy.budget": "0.001", "policy.recent": "3", "baselines": "full"}, "protects 3 slots"),
        ({"policy.name": "razor_attention(((1, 0),))"}, "its table has 1 layers of 2 KV heads"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_loaded(overrides, message):
    config = configs.by_name("h2o_tiny")
    for path, text in overrides.items():
        config = fields.override(config, path, text)
    with pytest.raises(KvjaxError, match=message):
        check_fit(config)


def test_the_name_of_what_cannot_be_built():
    config = fields.override(fields.override(configs.by_name("h2o_tiny"), "policy.budget", 0), "storage", "int8")
    assert specs.name_of(config) == "h2o + int8"
    assert specs.name_of(fields.override(config, "storage", "dense")) == "h2o"


def test_a_baseline_that_cannot_take_the_budget_is_named():
    config = fields.override(configs.by_name("h2o_tiny"), "policy.budget", 2)
    for text, message in (
        ("h2o + int9", r"'int9' is not a storage or a selection; did you mean 'int\d'\?"),
        ("h2o + zzz", r"'zzz' is not a storage or a selection; there are a2ats, alisa, bfp, .*quest"),
        ("h2o + int8 + fp8", r"has two parts that are a storage; give one of each"),
    ):
        with pytest.raises(ConfigError, match=message):
            specs_of(fields.override(configs.by_name("h2o_tiny"), "baselines", text))
    with pytest.raises(PolicyError, match=r"baseline 'window'.*--config\.baselines"):
        specs_of(config)


def test_a_config_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from experiments.config import *\ndef get_config():\n    return ExperimentConfig(name='mine')\n")
    assert parse(f"--config={path}").name == "mine"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="must define get_config"):
        parse(f"--config={path}")


@pytest.fixture
def cache_settings():
    """jax's settings of compiled programs that are kept, as they were afterwards."""
    names = (
        "jax_compilation_cache_dir", "jax_compilation_cache_max_size", "jax_persistent_cache_min_compile_time_secs",
        "jax_persistent_cache_min_entry_size_bytes",
    )  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def test_compiled_programs_are_kept(cache_settings, tmp_path, monkeypatch):
    def folder(*arguments, before=None):
        jax.config.update("jax_compilation_cache_dir", before)
        monkeypatch.setattr(host._Process, "decided", False)
        parse("--config=h2o_tiny", *arguments)
        return jax.config.jax_compilation_cache_dir

    # A setting of jax itself, of JAX_COMPILATION_CACHE_DIR for example, stays.
    assert folder(before="jax's own") == "jax's own"
    assert folder(f"--compilation_cache={tmp_path}/given") == str(tmp_path / "given")
    assert (tmp_path / "given").is_dir()
    assert folder("--compilation_cache=none") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    # One folder per kind of processor, whose machine code need not run on another.
    own = Path("kvjax") / "xla" / host.processor()
    assert folder() == str(tmp_path / "xdg" / own)
    assert (tmp_path / "xdg" / own).stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_max_size == host.CACHE_BYTES
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the specification says to ignore it
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder() == str(tmp_path / ".cache" / own)
    # A home that cannot be written is no reason not to run.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(temporary))
    assert folder() == str(next(temporary.iterdir()) / own.relative_to("kvjax"))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path / "file"))
    assert folder() is None
    with pytest.raises(ConfigError, match=r"--compilation_cache='.*file/x' cannot be written"):
        folder(f"--compilation_cache={tmp_path}/file/x")


@pytest.mark.sampled(0)
def test_a_second_process_finds_the_programs_of_the_first(tmp_path):
    program = (
        "import sys, jax\n"
        "from experiments import cli\n"
        "cli.parse(sys.argv, about='')\n"
        "found = []\n"
        "jax.monitoring.register_event_listener(lambda name, **_: found.append(name))\n"
        "jax.jit(lambda x: x * 2)(1.0)\n"
        "print(sum(name.endswith('compilation_cache/cache_hits') for name in found))\n"
    )
    command = [sys.executable, "-c", program, "--config=h2o_tiny", f"--compilation_cache={tmp_path}"]
    runs = [subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == "0\n"
    assert int(runs[1].stdout) > 0
    assert runs[1].stderr == ""


def test_errors_reach_the_user_without_a_traceback():
    command = [sys.executable, "-m", "experiments.run", "--config=h2o_tiny", "--config.policy.name=h3o"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown policy 'h3o'")
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_help_lists_configs_and_fields(capsys):
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "h2o_opt30b" in shown
    assert "--config.policy.budget" in shown
    assert "--config.storage" in shown
    assert "--compilation_cache" in shown


TOOLS = ("calibrate", "skew", "read_fraction", "card", "lm_eval_tasks", "capacity", "bench.__main__")


@pytest.mark.parametrize("name", TOOLS)
def test_every_program_has_help(name, capsys):
    program = importlib.import_module(f"experiments.{name}").main
    with pytest.raises(SystemExit) as stopped:
        program([name, "--help"])
    assert stopped.value.code == 0 and "\n  --output: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"nothing.*known flags"):
        program([name, "--nothing=1", *(["--config=h2o_tiny"] if name == "capacity" else [])])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calibrate", ["--model=nowhere", "--storage=kvquant"]),
        ("skew", ["--model=nowhere", "--text=nothing"]),
        ("read_fraction", ["--model=nowhere"]),
        ("capacity", ["--config=h2o_opt30b", "--topology=v5e:2x4"]),
        ("bench.__main__", ["products"]),
    ],
)
def test_files_are_checked_before_anything_is_computed(name, arguments, tmp_path):
    program = importlib.import_module(f"experiments.{name}").main
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a folder; give a file"):
        program([name, *arguments, f"--output={tmp_path}"])
    with pytest.raises(ConfigError, match="cannot be written"):
        program([name, *arguments, f"--output={tmp_path}/file/figures.json"])


def test_weights_are_read_as_text():
    text = "int4(group=128, head=true)"
    config = parse("--config=h2o_opt30b", f"--config.model.weights={text}")
    codes = specs.build_weights(config.model)
    assert (codes, codes.name) == (WeightCodes(4, 128, head=True), text)
    assert specs.build_weights(parse("--config=h2o_opt30b").model) is None
    refused = {"int5": "known weights: int2, int4, int8", "int4(size=3)": "size", "int4(group=0)": "group"}
    for wrong, words in refused.items():
        with pytest.raises(ConfigError, match=words):
            specs.build_weights(dataclasses.replace(config.model, weights=wrong))


def test_what_fits_counts_codes():
    """OPT-30B in float32, and in codes of 4 bits with a scale of 32 bits and a zero of 8 for each 64 weights."""
    decoder = shapes.by_name("opt-30b")
    exact, coded = (machine.fit(decoder, "float32", cache=0, codes=codes) for codes in (None, WeightCodes(4)))
    matrices = 48 * 12 * 7168**2
    assert exact.weights - coded.weights == matrices * (32 - 4) // 8 - matrices // 64 * 5


def test_codes_of_a_checkpoint_are_known_before_it_is_loaded(tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    raw = {"model_type": "llama", "quantization_config": settings}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert codes_of(ModelConfig(path=str(tmp_path))) == WeightCodes(4, 128)
    assert codes_of(ModelConfig(path="kvjax-tiny")) is None
    assert codes_of(ModelConfig(path="kvjax-tiny", weights="int8")) == WeightCodes(8)


def test_a_closed_pipe_is_no_error():
    """As in `... --help | head`."""
    program = "from experiments import cli\ndef fail(_):\n    raise BrokenPipeError\ncli.main(fail)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
