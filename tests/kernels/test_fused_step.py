"""Decoding with a step in one kernel, interpreted, slot for slot against the independent float64 reference."""

import types

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax import policies
from kvjax.cache.step import evict, fused_kernel
from tests import reference
from tests.laws.test_slots import assert_same
from tests.tiny import random_tokens, tiny

pytestmark = pytest.mark.thorough

LENGTHS, PROMPTS = np.array([42, 32]), np.array([24, 17])
TOKENS = random_tokens(2, 56, seed=4)[:, : LENGTHS.max()]
#: 15 and one slot are whole groups, written inside the kernel.
BUDGETS = {("h2o", "mha"): 15}


def run(name: str, heads: str, budget: int = 12) -> tuple[kvjax.LogLikelihood, reference.ReferenceRun]:
    # An interpreted kernel takes seconds to compile, in each layer anew.
    own = tiny(heads, layers=1)
    arguments = {"budget": budget}
    with pltpu.force_tpu_interpret_mode():
        got = kvjax.log_likelihood(
            own.model, TOKENS, policies.by_name(name, **arguments), prompt_length=PROMPTS, lengths=LENGTHS,
            implementation="pallas_tpu",
        )  # fmt: skip
    policy = reference.policies.by_name(name, **arguments)
    return got, reference.reference_run(own.params, own.config, TOKENS, policy, PROMPTS, LENGTHS, None)


# Statistics of every kind, heads of every layout; test_step_tpu compares steps of each kind with the cache's, which
# tests/laws/test_slots.py compares with the reference.
CASES = [("h2o", "mha"), ("roco", "mqa"), ("scissorhands", "gqa")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "heads"), CASES)
def test_slot_for_slot(name, heads, monkeypatch):
    steps = []
    monkeypatch.setattr(fused_kernel, "step", lambda *a, step=fused_kernel.step, **k: steps.append(1) or step(*a, **k))
    assert_same(*run(name, heads, BUDGETS.get((name, heads), 12)))
    assert steps, "the kernel was traced"


def victims(policy, stats, view, *, real=evict.victims, **rest):
    """Evicts too late."""
    return real(policy, stats, view._replace(budget=view.budget + 1), **rest)


def observe(stats, needs, columns, queries, *, real=evict.observe):
    """Loses a hundredth of the attention."""
    return real(stats, needs, {name: column * 0.99 for name, column in columns.items()}, queries)


def forget(stats, position):
    """Lets the next token of a slot inherit its statistics."""
    return stats


@pytest.mark.sampled(0)
@pytest.mark.parametrize("mistake", [victims, observe, forget])
def test_a_mistake_in_the_kernel_is_noticed(mistake, monkeypatch):
    name = mistake.__name__
    if name == "forget":
        monkeypatch.setattr(fused_kernel, name, mistake)
    else:
        monkeypatch.setattr(fused_kernel, "evict", types.SimpleNamespace(**(vars(evict) | {name: mistake})))
    jax.clear_caches()
    with pytest.raises(AssertionError):
        assert_same(*run("h2o", "mha", BUDGETS["h2o", "mha"]))  # which is the same without a mistake
    jax.clear_caches()
