"""Help texts: every flag has a meaning and a default, in groups, and the names that it takes are listed."""

import contextlib
import importlib
import inspect
import io
import re

import pytest
from absl import flags

from experiments import cli, fields, help_text
from experiments.config import ExperimentConfig
from experiments.tasks import recall, registry
from kvjax import policies, selection, storage
from kvjax.checkpoint import huggingface
from kvjax.generation.decoding import CHUNK
from kvjax.lm_eval import help_text as lm_eval_help
from kvjax.models import quantize, shapes
from kvjax.planning import topologies
from kvjax.serve import __main__ as serve
from kvjax.specs import names

#: Modules whose `main` takes a command line that begins with the program's name.
PROGRAMS = (
    "run", "sweep", "train", "tune", "train_gate", "train_merge", "train_reuse", "paper", "leaderboard", "capacity",
    "simulate", "calibrate", "skew", "read_fraction", "chunk_reuse", "edit_reuse", "context_bytes", "after_prompt",
    "card", "lm_eval_tasks", "batch.__main__", "bench.__main__",
)  # fmt: skip


def shown(program, *argv) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as stopped:
        program(["program", *argv, "--help"])
    assert not stopped.value.code
    return out.getvalue()


def test_names_are_those_of_the_registries():
    expected = {
        "policies": policies.POLICIES, "combinators": policies.COMBINATORS, "head plans": policies.HEAD_PLANS,
        "storages": storage.STORAGES, "selections": selection.SELECTIONS, "weights": quantize.WEIGHTS,
        "shapes": shapes.SHAPES, "GPUs": topologies.GPUS,
    }  # fmt: skip
    for kind, table in expected.items():
        assert names.names(kind) == list(table), kind
    assert names.names("TPUs")[0] == "v2" or "v5e" in names.names("TPUs")
    assert names.DTYPES == huggingface.DTYPES
    assert help_text.listed()["recall tasks"] == list(recall.TASKS)
    listed = set(help_text.listed()["tasks"])
    assert listed == {*registry.TASKS, "FILE.jsonl"}
    with pytest.raises(KeyError, match=r"help_text.py has no table NOTHING"):
        names.keys(help_text.Path(help_text.__file__), "NOTHING")


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_flag_has_a_meaning_and_a_default(name):
    text = shown(importlib.import_module(f"experiments.{name}").main)
    flags = re.findall(r"\n  (--[^\n]*(?:\n      [^\n]*)*)", text[re.search(r"\n\n[A-Z][^\n]*:\n  --", text).start() :])
    assert len(flags) > 3
    for each in map(" ".join, map(str.split, flags)):
        _, colon, meaning = each.partition(": ")
        assert colon and len(meaning) > 8 and not re.match(r"\(", meaning), each
        # A path or a number that has no default says what holds without it, or that there is none.
        assert re.search("default|; else |; without it |; if not given", each), each
    assert max(map(len, text.split("Flags")[-1].splitlines())) <= help_text.WIDTH


def test_bounds_of_numbers_are_shown():
    """Those of flags, of lists of numbers and of fields, in one form; a meaning that has them says them once."""
    text = " ".join(shown(importlib.import_module("experiments.bench.__main__").main).split())
    assert "--rounds: number of rounds, in the order A B B A (at least 1, default 5)" in text
    assert "--gammas: for `speculate`: numbers of drafts of a round (at least 1, default 4)" in text
    assert "--top_p: for `speculate`: of samples (from 0 to 1, default 0.9)" in text
    assert "--batch: number of rows; default: that of each benchmark (at least 1)" in text
    text = " ".join(shown(importlib.import_module("experiments.chunk_reuse").main).split())
    assert "tokens that the question attends to, from 0 to 1 (default 0.25)" in text
    text = " ".join(shown(importlib.import_module("experiments.leaderboard").main).split())
    assert text.count("(at least 1, default ") > 3
    assert help_text.bounds(flags.IntegerParser(None, 7)) == "at most 7" and help_text.bounds(flags.ListParser()) == ""


def test_fields_are_in_groups_with_the_values_of_the_config_that_is_given():
    text = shown(importlib.import_module("experiments.run").main)
    assert "\nFields of the config, with their defaults where the config does not set them:\n" in text
    for group, meaning in fields.groups(ExperimentConfig).items():
        assert f"\n{group}: {meaning}\n" in text and meaning
    assert "--config.policy.budget: the number of slots per KV head (256), or a fraction" in text
    assert "(0.2) (default 0.2)\n" in " ".join(text.split(" ")) and "\nfields in no group:\n" in text
    text = shown(importlib.import_module("experiments.run").main, "--config=demo_tiny")
    assert "defaults of --config=demo_tiny:\n" in text and "(default int8)\n" in text
    assert "(default passkey,associative)" in " ".join(text.split())
    assert "defaults where the config" in shown(importlib.import_module("experiments.run").main, "--config=nothing")


def test_names_are_listed_once_for_the_flags_that_take_them():
    text = shown(importlib.import_module("experiments.run").main)
    assert text.count("\nPolicies (--config.policy.name, --config.baselines):\n") == 1
    policies_of = text.split("\nPolicies (")[1].split("\n\n")[0]
    assert all(name in policies_of for name in policies.POLICIES) and "adakv(...)" in policies_of
    assert "\nTopologies (--topology):\n" in text and "h100:N" in text
    assert "Policies (--policies" in shown(importlib.import_module("experiments.bench.__main__").main)
    assert "Policies" not in shown(importlib.import_module("experiments.train").main)


def test_booleans_and_repeated_flags():
    text = shown(importlib.import_module("experiments.sweep").main)
    assert (
        "\n  --[no]full: measure the full cache too, once for each text, and put it first in the table (default on)\n"
        in text
    )
    assert "--[no]rerun: " in text and "(default off)" in text and "repeat this option" not in text


def test_serve_shows_groups_defaults_and_names():
    text = serve.parser().format_help()
    assert re.findall(r"^(\w+):$", text, re.M)[:5] == ["options", "model", "cache", "requests", "network"]
    made = serve.parser()
    for action in made._actions:
        if not action.option_strings or action.dest in ("help", "model"):
            continue
        (each,) = re.findall(rf"^  {action.option_strings[0]} .*(?:\n {{20,}}.*)*", text, re.M)
        each = " ".join(each.split())
        said = re.search(rf"[( ]default {re.escape(str(action.default))}\)", each)
        assert said or (action.default in (None, [], "") and re.search(r"; else |; without it |default none", each)), (
            each
        )
    assert "(default full)" in text and "(from 0 to 65535, default 8000)" in text
    plain = " ".join(text.split())
    assert f"is sent (from 1 to {CHUNK}, default " in plain and "(at least 0, default 64)" in plain
    for table in (policies.POLICIES, storage.STORAGES, selection.SELECTIONS, quantize.WEIGHTS):
        assert all(re.search(rf"\b{name}\b", text) for name in table)
    assert max(map(len, text.split("options:")[1].splitlines())) <= serve.WIDTH


def test_arguments_of_lm_eval_are_those_of_the_model():
    pytest.importorskip("lm_eval")
    from kvjax.lm_eval.model import KVJaxLM

    taken = inspect.signature(KVJaxLM.__init__).parameters
    described = {name: each for group in lm_eval_help.ARGUMENTS.values() for name, each in group.items()}
    assert described.keys() == taken.keys() - {"self", "unknown"}
    assert {name: default for name, (default, _) in described.items()} == {
        name: taken[name].default for name in described
    }
    text = lm_eval_help.arguments()
    assert all(f"\n  {name}: " in text for name in described)


def test_help_of_a_command_is_the_commands(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(cli, "prepare_programs", lambda values: pytest.fail("help prepares nothing"))
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        cli.parse(["kvjax run", "--help"], about="python -m experiments.run --config=x")
    assert out.getvalue().startswith("kvjax run --config=x\n")
