"""Policies as text: names, calls, combinations, files of one's own."""

import re

import numpy as np
import pytest

import kvjax
from experiments import config as configs
from experiments import fields, policy, run, sweep
from experiments.config import PolicyConfig
from kvjax import policies
from kvjax.errors import ConfigError, KvjaxError
from tests.conftest import ROOT
from tests.tiny import random_tokens, tiny


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("h2o", lambda: policies.h2o(budget=9)),
        ("h2o(recent=2)", lambda: policies.h2o(budget=9, recent=2)),
        ("h2o(budget=0.5)", lambda: policies.h2o(budget=0.5)),
        ("h2o(7, group_reduce=max)", lambda: policies.h2o(budget=7, group_reduce="max")),
        ("h2o(budget=(4, 0.5))", lambda: policies.h2o(budget=(4, 0.5))),
        ("tova(share_heads=False)", lambda: policies.tova(budget=9, share_heads=False)),
        ("h2o(merge=d2o(beta=0.5))", lambda: policies.h2o(budget=9, merge=policies.d2o(beta=0.5))),
        ("h2o(merge=d2o(0.5))", lambda: policies.h2o(budget=9, merge=policies.d2o(beta=0.5))),
        ("h2o(merge=anchors)", lambda: policies.h2o(budget=9, merge=policies.anchors())),
        ("tova(share_heads=false)", lambda: policies.tova(budget=9, share_heads=False)),
        ("value_norm(roco)", lambda: policies.value_norm(policies.roco(budget=9))),
        (
            "with_heavy_hitters(strided(stride=4, local=1), fraction=0.25)",
            lambda: policies.with_heavy_hitters(policies.strided(budget=9, stride=4, local=1), fraction=0.25),
        ),
        (
            "after_prefill(snapkv(window=4, pooling='max'), then=h2o(budget=5))",
            lambda: policies.after_prefill(
                policies.snapkv(budget=9, window=4, pooling="max"), then=policies.h2o(budget=5)
            ),
        ),
    ],
)
def test_a_text_is_a_policy(text, same):
    built = policy.build(text, budget=9)
    assert built == same()._replace(name=text)
    assert built is policy.build(text, budget=9)


def test_one_slot_is_not_the_whole_prompt():
    assert [repr(policy.build("h2o", budget=b).budget) for b in (1, 1.0)] == ["1", "1.0"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h3o", "unknown policy 'h3o'; did you mean 'h2o'.*combinators: adakv"),
        ("h2o(", "is not a policy's name, a call"),
        ("h2o.roco", "h2o.roco is not the name of a policy"),
        ("value_norm(h2o + roco)", "h2o \\+ roco is no number, name or policy"),
        ("h2o(**x)", "has no meaning here"),
        ("h2o(recnt=2)", "it accepts budget, recent"),
        ("value_norm(strided(stride=2))", "who goes first and not by how much"),
        ("nowhere.py:mine", "there is no file nowhere.py"),
    ],
)
def test_what_is_wrong_with_a_text(text, message):
    with pytest.raises(KvjaxError, match=message):
        policy.build(text, budget=9)


def test_config_fields_go_to_every_policy_that_takes_them():
    config = PolicyConfig(name="after_prefill(knorm, then=h2o)", budget=9, recent=2)
    assert configs.build_policy(config).then.protects(9) == 2
    with pytest.raises(ConfigError, match=r"policy value_norm\(tova.* does not take policy.recent=2"):
        configs.build_policy(PolicyConfig(name="value_norm(tova(share_heads=False))", budget=9, recent=2))


def test_commas_inside_of_a_call_are_its_own():
    assert fields.split("full,roco(protect=2, guard=1),h2o(budget=(1,2))") == [
        "full", "roco(protect=2, guard=1)", "h2o(budget=(1,2))",
    ]  # fmt: skip
    path, values = sweep.parse_axis("policy.name=h2o,roco(protect=2, guard=1)")
    assert (path, values) == ("policy.name", ["h2o", "roco(protect=2, guard=1)"])


@pytest.fixture
def mine(tmp_path):
    """The README's example, as a file of a user's own."""
    readme = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(# mine\.py\n.*?)```", readme, re.DOTALL)[1]
    assert len(code.strip().splitlines()) <= 16
    path = tmp_path / "mine.py"
    path.write_text(code)
    return path


def test_a_policy_in_a_users_own_file(mine, small, capsys):
    name = f"{mine}:loudest"
    loudest = policy.build(name, budget=6)
    model, tokens = tiny().model, random_tokens(2, 20)
    got = kvjax.generate(model, tokens, loudest, max_new_tokens=5)
    assert all(np.asarray(layer.position >= 0).sum(axis=2).max() == 6 for layer in got.state.layers)

    small.policy, small.baselines = PolicyConfig(name=name, budget=6), ("full", "window(sinks=2)")
    folder = run.run(small)
    assert name in (folder / "report.md").read_text()
    assert "window(sinks=2)" in capsys.readouterr().out
    _, results = sweep.sweep(
        small, [("policy.budget", [5, 6]), ("policy.name", [name, "roco(guard=2)"])], progress=False
    )
    assert [result["status"] for result in results] == ["ok"] * 4
    with pytest.raises(ConfigError, match="no factory and no policy of that name"):
        policy.build(f"{mine}:quietest", budget=6)
