"""Decoding with a step in one kernel, interpreted, slot for slot against the independent float64 reference."""

import types

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import kvjax
from kvjax import cache, fused, policies
from kvjax.statistics import Observation
from tests import reference
from tests.kernels.steps import FUSED
from tests.test_slots import assert_same
from tests.tiny import random_tokens, tiny

pytestmark = pytest.mark.thorough

LENGTHS, PROMPTS = np.array([56, 41]), np.array([24, 17])
TOKENS = random_tokens(2, 56, seed=4)
MORE = {"strided": {"stride": 3}, "fixed": {"block": 4, "columns": 1}, "tova": {"share_heads": False}}
BUDGETS = {"h2o": (11, 15)}  # a layer's own; 15 and one slot are whole groups, written inside the kernel


def run(name: str, heads: str, steps: int = 32) -> tuple[kvjax.LogLikelihood, reference.ReferenceRun]:
    own, arguments = tiny(heads), {"budget": BUDGETS.get(name, 12), **MORE.get(name, {})}
    ends = np.minimum(LENGTHS, PROMPTS + steps)
    tokens = TOKENS[:, : ends.max()]
    with pltpu.force_tpu_interpret_mode():
        got = kvjax.log_likelihood(
            own.model, tokens, policies.by_name(name, **arguments), prompt_length=PROMPTS, lengths=ends,
            implementation="pallas_tpu",
        )  # fmt: skip
    policy = reference.policies.by_name(name, **arguments)
    return got, reference.reference_run(own.params, own.config, tokens, policy, PROMPTS, ends, None)


@pytest.mark.parametrize(("name", "heads"), [*((name, "gqa") for name in FUSED), ("roco", "mqa"), ("h2o", "mha")])
def test_slot_for_slot(name, heads, monkeypatch):
    steps = []
    monkeypatch.setattr(fused, "step", lambda *a, step=fused.step, **k: steps.append(1) or step(*a, **k))
    assert_same(*run(name, heads))
    assert steps, "the kernel was traced"


def evict_too_late(layer, policy, view, **rest):
    return cache.evict(layer, policy, view._replace(budget=view.budget + 1), **rest)


def observe_less(layer, policy, observation):
    lost = {name: column * 0.99 for name, column in observation.columns.items()}
    return cache.observe(layer, policy, Observation(lost, observation.queries))


def forget_nothing(stats, position):
    return stats


@pytest.mark.parametrize("mistake", [evict_too_late, observe_less, forget_nothing])
def test_a_mistake_in_the_kernel_is_noticed(mistake, monkeypatch):
    """Who goes, what is noted of attention, and that the next token of a slot does not inherit it."""
    own = {mistake.__name__.split("_")[0]: mistake}
    monkeypatch.setattr(fused, "cache", types.SimpleNamespace(**(vars(cache) | own)))
    jax.clear_caches()
    with pytest.raises(AssertionError):
        assert_same(*run("h2o", "gqa"))
    jax.clear_caches()
