"""Configs by name, overrides with type checks, and what a wrong one says."""

import subprocess
import sys

import pytest

from experiments import cli, fields
from experiments import config as configs
from experiments.config import PolicyConfig
from experiments.session import decoder_config, policies_of
from kvjax.errors import ConfigError, KvjaxError, PolicyError
from tests.conftest import ROOT


def parse(*arguments):
    return cli.parse(["program", *arguments], about="about")[0]


@pytest.mark.parametrize("name", configs.names())
def test_every_config_is_complete(name):
    config = configs.by_name(name)
    assert config.name == name
    assert policies_of(config)
    decoder = decoder_config(config.model)
    assert decoder is not None
    assert config.data.prompt_length + config.data.new_tokens <= decoder.max_positions
    docstring = (fields.FOLDER / f"{name}.py").read_text().split('"""')[1]
    for part in ("Paper:", "Expected", "Hardware:", f"python -m experiments.run --config={name}"):
        assert part in docstring


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
    assert configs.digest(one) != configs.digest(whole)
    assert configs.digest(one) == configs.digest(fields.override(one, "output", "elsewhere"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --config=NAME; known configs: .*h2o_tiny"),
        (["--config=h2o_tiny", "--config=h2o_opt125m"], "given more than once; known configs: .*h2o_tiny"),
        (["--config=h2o_tinny"], "unknown config 'h2o_tinny'; did you mean 'h2o_tiny'.*window_llama2_7b"),
        (["--config=h2o_tiny", "--config.polcy.budget=1"], "unknown field 'polcy.budget': a config has name, model, "),
        (["--config=h2o_tiny", "--config.policy.bugdet=1"], "policy has name, budget, .*mean 'policy.budget'"),
        (["--config=h2o_tiny", "--config.policy.budget.x=1"], "no fields of its own"),
        (["--config=h2o_tiny", "--config.policy=h2o"], "'policy' is a group of fields; set one of policy.name"),
        (["--config=h2o_tiny", "--config.policy.budget=many"], "'many' is not valid here; give slots"),
        (["--config=h2o_tiny", "--config.policy.budget=nan"], "'nan' is not valid here; give slots"),
        (["--config=h2o_tiny", "--config.data.new_tokens=1.5"], "'1.5' is not valid here; give a whole number"),
        (["--config=h2o_tiny", "--config.data.num_sequences=0"], "give a whole number of at least 1"),
        (["--config=h2o_tiny", "--budget=1"], "unknown flag --budget; known flags: --config"),
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
        (PolicyConfig(name="h3o"), "unknown policy 'h3o'; did you mean 'h2o'.*known policies: .*full, h2o"),
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
        policies_of(config)


def test_a_baseline_that_cannot_take_the_budget_is_named():
    config = fields.override(configs.by_name("h2o_tiny"), "policy.budget", 2)
    with pytest.raises(PolicyError, match=r"baseline 'window'.*--config\.baselines"):
        policies_of(config)


def test_a_config_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from experiments.config import *\ndef get_config():\n    return ExperimentConfig(name='mine')\n")
    assert parse(f"--config={path}").name == "mine"
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="must define get_config"):
        parse(f"--config={path}")


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
