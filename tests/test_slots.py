"""Slot for slot against the independent float64 reference, over 300 decoding steps of a ragged batch."""

from typing import Any, NamedTuple

import numpy as np
import pytest

import kvjax
from kvjax import policies
from tests import reference
from tests.tiny import HEADS, kept, random_tokens, tiny

PROMPTS = np.array([40, 21, 33])
LENGTHS = np.array([340, 130, 333])
TOKENS = random_tokens(3, 340, seed=2)
CLEAR = 1e-6  # no choice of the reference may be closer than this (relative), or a seed must change: no excuses


class Case(NamedTuple):
    name: str
    arguments: dict[str, Any]
    heads: str
    blocks: tuple[int | None, ...]
    seed: int = 0


CASES = [
    Case("h2o", {"budget": 0.4}, "gqa", (None, 1, 8, 16)),
    Case("h2o", {"budget": (9, 17)}, "mha", (None, 8)),
    Case("h2o", {"budget": (0.5, 5)}, "mqa", (1, 16)),
    Case("h2o", {"budget": 0.4, "recent": 2}, "gqa", (16,)),
    Case("h2o", {"budget": 12, "group_reduce": "max"}, "gqa", (8, None)),
    Case("h2o", {"budget": 0.4, "group_reduce": "max"}, "mqa", (None,)),
    Case("h2o", {"budget": 0.4, "positions": "cache"}, "gqa", (None, 8)),
    Case("h2o", {"budget": 1, "recent": 0}, "gqa", (8,)),
    Case("window", {"budget": 0.4}, "gqa", (1, None)),
    Case("window", {"budget": (7, 20), "sinks": 3, "positions": "cache"}, "mqa", (16, None)),
    Case("window", {"budget": 5, "sinks": 5}, "mha", (8,)),
    Case("local_only", {"budget": 0.4}, "mha", (16,)),
    Case("heavy_only", {"budget": 0.4}, "gqa", (None, 1)),
    Case("heavy_only", {"budget": 10}, "mha", (8,)),
    Case("full", {}, "mqa", (16,)),
    Case("full", {"positions": "cache"}, "gqa", (None,)),
]


def describe(case: Case) -> str:
    arguments = ",".join(f"{k}={v}" for k, v in case.arguments.items())
    return f"{case.name}({arguments})-{case.heads}".replace(" ", "")


def run_reference(case: Case, block: int | None) -> reference.ReferenceRun:
    own = tiny(case.heads, case.seed)
    policy = reference.policies.by_name(case.name, **case.arguments)
    return reference.reference_run(own.params, own.config, TOKENS, policy, PROMPTS, LENGTHS, block)


def run_library(case: Case, block: int | None, policy: kvjax.policies.Policy | None = None) -> kvjax.LogLikelihood:
    return kvjax.log_likelihood(
        tiny(case.heads, case.seed).model,
        TOKENS,
        policy or policies.by_name(case.name, **case.arguments),
        prompt_length=PROMPTS,
        lengths=LENGTHS,
        prefill_block=block,
    )


def assert_same(got: kvjax.LogLikelihood, expected: reference.ReferenceRun) -> None:
    """Kept slots exactly, their statistics and the log-probabilities to float32's rounding."""
    gap = expected.evict_gap.min()
    assert gap > CLEAR, f"a choice of the reference is a near-tie ({gap:.1e}): use another seed"
    for index, layer in enumerate(got.state.layers):
        for row in range(len(PROMPTS)):
            for head, live in enumerate(kept(got.state, row)[index]):
                np.testing.assert_array_equal(live, expected.kept[index][row][head], f"layer {index} {row=} {head=}")
                slot = np.argsort(np.asarray(layer.position)[row, head])[-len(live) :]
                for name, stat in expected.stats[index][row][head].items():
                    ours = np.asarray(layer.stats[name])[row, head, slot]
                    np.testing.assert_allclose(ours, stat, rtol=1e-4, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_slot_for_slot(case):
    for block in case.blocks:
        assert_same(run_library(case, block), run_reference(case, block))


def test_the_cases_cover_what_they_must():
    assert {case.name for case in CASES} == set(policies.POLICIES) & set(reference.policies.POLICIES)
    assert {case.heads for case in CASES if case.name == "h2o"} == set(HEADS)
    assert {block for case in CASES for block in case.blocks} == {None, 1, 8, 16}


def test_a_step_whose_scores_are_lost_is_noticed():
    """The comparison can fail: forgetting a thousandth of the attention changes what is kept."""
    h2o = policies.h2o(budget=0.4)

    def observe(stats, observation):
        return {"mass": h2o.observe(stats, observation)["mass"] * 0.999}

    with pytest.raises(AssertionError):
        assert_same(run_library(CASES[0], 8, h2o._replace(observe=observe)), run_reference(CASES[0], 8))
