"""Layers under policies of their own: slot for slot, in arrays of their own size, and what is refused."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import PolicyError, StorageError
from kvjax.planning import plan
from kvjax.specs.parse import build
from tests import reference
from tests.laws.test_slots import LENGTHS, PROMPTS, TOKENS
from tests.tiny import random_tokens, tiny

own = reference.policies
CASES = {
    "h2o, window": (
        policies.split_layers(policies.h2o(0.4), policies.window(9, sinks=2)),
        (own.h2o(0.4), own.window(9, sinks=2)),
    ),
    "roco, full": (
        policies.split_layers(policies.roco(14), policies.full(), shares=(4, 3)),
        (own.roco(14), own.full()),
    ),
    "longgen": (
        policies.longgen(9, sinks=2, shares=(2, 2, 1), positions="cache"),
        (own.full(positions="cache"), own.window(9, sinks=2, positions="cache")),
    ),
}  # fmt: skip


def expected_policy(layers) -> reference.policies.Policy:
    statistics = {name: each for layer in layers for name, each in layer.statistics.items()}
    full = own.full(positions=layers[0].positions)
    return dataclasses.replace(full, by_head=tuple((layer,) * 2 for layer in layers), statistics=statistics)


def score(policy, block=None):
    return kvjax.log_likelihood(
        tiny("gqa").model, TOKENS, policy, prompt_length=PROMPTS, lengths=LENGTHS, prefill_block=block
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "block"), [("h2o, window", 8), ("roco, full", None), ("longgen", None)])
def test_slot_for_slot(name, block):
    policy, layers = CASES[name]
    model = tiny("gqa")
    got = score(policy, block)
    expected = reference.reference_run(
        model.params, model.config, TOKENS, expected_policy(layers), PROMPTS, LENGTHS, block
    )
    assert expected.evict_gap.min() > 1e-6
    for index, (layer,) in enumerate(got.state.layers):
        for row in range(len(PROMPTS)):
            live = np.sort(np.asarray(layer.position)[row], axis=1)
            for head in range(2):
                np.testing.assert_array_equal(live[head][live[head] >= 0], expected.kept[index][row][head])
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=5e-5)


#: A policy of layers, and another that does the same.
SAME = {
    "from_layer": (
        policies.split_layers(policies.full(), policies.knorm(0.5)), policies.from_layer(policies.knorm(0.5), first=1)
    ),
    "budgets": (policies.split_layers(policies.h2o(9), policies.h2o(14)), policies.h2o((9, 14))),
    "phases": (
        policies.split_layers(*[policies.after_prefill(policies.knorm(9), then=policies.h2o(8))] * 2),
        policies.after_prefill(policies.knorm(9), then=policies.h2o(8)),
    ),
    "one run": (policies.split_layers(policies.roco(0.4), shares=(7,)), policies.roco(0.4)),
}  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SAME)
def test_the_same_as_a_policy_that_says_so_otherwise(name):
    got, expected = map(score, SAME[name])
    np.testing.assert_array_equal(got.logprobs, expected.logprobs)
    for one, two in zip(jax.tree.leaves(got.state), jax.tree.leaves(expected.state), strict=True):
        np.testing.assert_array_equal(one, two)


def test_runs_of_layers_follow_their_shares():
    short, full = policies.window(8), policies.full()
    for layers, kept in ((32, range(10, 21)), (6, range(2, 4)), (2, range(1)), (1, ())):
        assert policies.longgen(8).of_layers(layers) == tuple(full if i in kept else short for i in range(layers))
    uneven = policies.split_layers(full, short, shares=np.array([1, 3]))
    assert uneven.of_layers(8) == (full,) * 2 + (short,) * 6


def test_a_window_s_layer_holds_no_more():
    policy, tokens = policies.longgen(8, sinks=2), random_tokens(2, 40, seed=3)
    run = kvjax.generate(
        tiny(layers=3).model, tokens, policy, max_new_tokens=21, limits=Limits(prompt=40, new_tokens=21)
    )
    assert [layer[0].position.shape[2] for layer in run.state.layers] == [9, 60, 9]
    assert [group.heads for layer in run.layout.decode for group in layer] == [None] * 3
    planned = plan(tiny(layers=3).model.config, policy, batch=2, prompt_length=40, new_tokens=21)
    assert planned.slots == (9, 60, 9)


@pytest.mark.sampled(0)
def test_storages_positions_and_selections_of_the_layers_that_keep_everything():
    model, tokens = tiny(layers=3).model, random_tokens(2, 40, seed=3)

    def scored(*args, **options):
        return kvjax.log_likelihood(model, tokens, *args, prompt_length=30, **options)

    policy = policies.longgen(8, sinks=2)
    plain = scored(policy)
    held = scored(policy, storage=storage.int8(), selection=selection.optimal(4), record=True)
    # The middle layer chooses four slots; the others read all that they hold.
    assert (held.record.number[:10] == np.array([-1, 4, -1])[:, None, None]).all()
    assert np.abs(held.logprobs - plain.logprobs).max() > 1e-3
    everything = scored(policy, selection=selection.optimal(64))
    np.testing.assert_allclose(everything.logprobs, plain.logprobs, atol=3e-5)
    placed = CacheSpec(policy, positions="cache")
    assert placed.policy == policies.longgen(8, sinks=2, positions="cache") and placed.positions == "cache"


HALVES = policies.split_layers(policies.full(), policies.window(6), shares=(1, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.split_layers(), "no policies are given"),
        (lambda: policies.split_layers(policies.full(), "window"), "'window' is not a policy"),
        (lambda: policies.split_layers(HALVES, policies.full()), "split_layers is split by itself"),
        (lambda: policies.split_layers(policies.h2o(9, variant="masked")), "hides slots"),
        (lambda: policies.split_layers(policies.full(), policies.streaming_llm(9)), "positions 'original' and 'cache'"),
        (lambda: policies.split_layers(policies.full(), shares=(1, 2)), "whole number for each of the 1 policies"),
        (lambda: policies.split_layers(policies.full(), shares=2), "shares=2 is not valid"),
        (lambda: policies.longgen(9, shares=(1, 0, 1)), "longgen: each of the shares must be a whole number of at"),
        (lambda: policies.longgen(3), "policy window: it protects 4 slots"),
        (lambda: policies.value_norm(HALVES), "its layers have policies of their own"),
        (lambda: policies.split_heads([[1, 0]], HALVES, policies.full()), "does not evict step by step"),
        (lambda: policies.phases(policies.full(), HALVES), "give a single policy"),
        (lambda: score(policies.split_layers(*[policies.full()] * 3)), "3 policies were given for a model of 2 layers"),
        (
            lambda: score(CacheSpec(policies.longgen(6, shares=(1, 1, 8)), selection=selection.optimal(4))),
            "none of its layers keeps every token",
        ),
        (lambda: score(CacheSpec(HALVES, storage.minicache(0))), "treats heads or layers differently"),
        (lambda: score(CacheSpec(HALVES, selection=policies.h2o(8, variant="masked").selection)), "splits them"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises((PolicyError, StorageError), match=message):
        make()


def test_as_text():
    made = build("policy", "split_layers(full, window(sinks=1), h2o, shares=(1, 2, 1))", budget=8)
    assert made == policies.split_layers(
        policies.full(), policies.window(8, sinks=1), policies.h2o(8), shares=(1, 2, 1)
    )
    assert build("policy", "longgen(sinks=1)", budget=8) == policies.longgen(8, sinks=1)
    made = build("policy", "random_control(every=2, recent=3)", budget=8)
    assert made == policies.phases(policies.full(), policies.random(8, recent=3, every=2))
