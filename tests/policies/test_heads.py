"""Heads under policies of their own: slot for slot, in arrays of their own size; and which heads need everything."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from experiments.training.config import TrainConfig, decoder_config
from experiments.training.induction import initial_parameters
from kvjax import analysis, cache, policies
from kvjax.cache import Limits
from kvjax.errors import InputError, PolicyError
from kvjax.numerics.rope import Rope
from kvjax.planning import plan
from kvjax.specs.parse import build
from tests import layers, reference
from tests.laws.test_slots import LENGTHS, PROMPTS, TOKENS
from tests.tiny import random_tokens, tiny

HALF = ((1, 0), (0, 1))  # of a model with two layers of two KV heads
NONE = ((0, 0), (0, 0))


def expected_policy(
    heads, chosen: reference.policies.Policy, others: reference.policies.Policy
) -> reference.policies.Policy:
    by_head = tuple(tuple(chosen if each else others for each in row) for row in heads)
    return dataclasses.replace(
        reference.policies.full(positions=chosen.positions),
        by_head=by_head,
        statistics={**chosen.statistics, **others.statistics},
    )


def razor(budget, sinks: int, **options) -> reference.policies.Policy:
    return dataclasses.replace(reference.policies.window(budget, sinks=sinks + 1, **options), compensates=sinks)


full, own = reference.policies.full, reference.policies
CASES = {
    "h2o-window": (
        policies.split_heads(HALF, policies.h2o(0.4), policies.window(9, sinks=2)),
        expected_policy(HALF, own.h2o(0.4), own.window(9, sinks=2)),
    ),
    "layer without": (
        policies.split_heads(((0, 0), (1, 0)), policies.roco(14), policies.tova(0.3, share_heads=False)),
        expected_policy(((0, 0), (1, 0)), own.roco(14), own.tova(0.3, share_heads=False)),
    ),
    "duo": (policies.duo_attention(HALF, sinks=3, recent=8), expected_policy(HALF, full(), own.window(11, sinks=3))),
    "razor": (policies.razor_attention(HALF, 9, sinks=2), expected_policy(HALF, full(), razor(9, 2))),
    "razor-cache": (
        policies.razor_attention(NONE, 0.4, sinks=0, positions="cache"),
        expected_policy(NONE, full(positions="cache"), razor(0.4, 0, positions="cache")),
    ),
}


def kept_by_head(state: cache.KVState, split: policies.Split, row: int) -> list[list[list[int]]]:
    """[layer][head] ascending live positions, in the model's order of heads."""
    found: list[list[list[int]]] = []
    for index, layer in enumerate(state.layers):
        heads = {}
        members = [split.members(chosen)[index] for chosen in (True, False)]
        for own, group in zip(filter(None, members), layer, strict=True):
            for place, head in enumerate(own):
                heads[head] = sorted(int(p) for p in np.asarray(group.position)[row, place] if p >= 0)
        found.append([heads[head] for head in sorted(heads)])
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "block"), [(name, (None, 8)[i % 2]) for i, name in enumerate(CASES)])
def test_slot_for_slot(name, block):
    policy, expected_policy = CASES[name]
    model = tiny("gqa")
    got = kvjax.log_likelihood(model.model, TOKENS, policy, prompt_length=PROMPTS, lengths=LENGTHS, prefill_block=block)
    expected = reference.reference_run(model.params, model.config, TOKENS, expected_policy, PROMPTS, LENGTHS, block)
    assert expected.evict_gap.min() > 1e-6
    for row in range(len(PROMPTS)):
        live = kept_by_head(got.state, policy, row)
        for index in range(2):
            for head in range(2):
                np.testing.assert_array_equal(live[index][head], expected.kept[index][row][head])
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=5e-5)


ONE_LAYER = layers.Case(
    layers.random_streams([0, 1], 36), prompts=np.array([24, 10]), ends=np.array([36, 22]), rope=Rope(dim=8)
)


def test_a_table_of_one_kind_is_that_policy():
    h2o, window = policies.h2o(0.5), policies.window(7)
    for table, alone in ((((1, 1),), h2o), (((0, 0),), window)):
        split = policies.split_heads(table, h2o, window)
        one, two = (layers.run(policy, ONE_LAYER) for policy in (split, alone))
        np.testing.assert_allclose(one.output, two.output, atol=1e-6)
        np.testing.assert_array_equal(one.position, two.position)
        assert one.layout.bytes() == two.layout.bytes()


@pytest.mark.sampled(0)
def test_random_draws_by_the_model_s_own_heads():
    chance = policies.random(7, seed=4)
    for table in (((1, 0),), ((0, 1),)):
        split = policies.split_heads(table, chance, policies.full())
        own, alone = (layers.run(policy, ONE_LAYER) for policy in (split, chance))
        head = table[0].index(1)
        for row in range(2):
            assert own.live(-1, row, head) == alone.live(-1, row, head)
            assert own.live(-1, row, 1 - head) == list(range(ONE_LAYER.ends[row]))
    protected = layers.run(policies.random(7, seed=4, recent=5), ONE_LAYER)
    for row, head in np.ndindex(2, 2):
        newest = set(range(ONE_LAYER.ends[row] - 5, ONE_LAYER.ends[row]))
        assert newest < set(protected.live(-1, row, head)) and not newest <= set(alone.live(-1, row, head))


PROMPT = random_tokens(2, 40, seed=3)


@pytest.mark.sampled(0)
def test_what_is_streamed_is_not_held():
    policy = policies.duo_attention(HALF, sinks=2, recent=5)
    limits = Limits(prompt=40, new_tokens=21)
    run = kvjax.generate(tiny().model, PROMPT, policy, max_new_tokens=21, limits=limits)
    assert [group.position.shape for _, group in cache.layers_of(run.state)] == [(2, 1, 60), (2, 1, 8)] * 2
    slot = 2 * 8 * 4  # bytes of a key and a value
    assert cache.nbytes(run.state) == 2 * 2 * (60 + 8) * slot
    planned = plan(
        tiny().model.config, policy, batch=2, prompt_length=40, new_tokens=21, prefill=True, prefill_block=16
    )
    numbers = jax.tree.leaves(run.state.replace(layers=()))  # lengths and budgets
    assert planned.cache == cache.nbytes(run.state, statistics=True) + sum(leaf.nbytes for leaf in numbers)
    assert planned.slots == (60, 8, 60, 8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: policies.duo_attention(5), "is not a table"),
        (lambda: policies.duo_attention(((1, 0), (1,))), "is not a table"),
        (lambda: policies.duo_attention(((1, 2),)), "true or false"),
        (lambda: policies.split_heads(HALF, policies.knorm(9), policies.full()), "does not evict step by step"),
        (lambda: policies.split_heads(HALF, policies.h2o(9, variant="masked"), policies.full()), "step by step"),
        (lambda: policies.split_heads(HALF, policies.h2o(9), policies.streaming_llm(9)), "positions"),
        (lambda: policies.value_norm(policies.duo_attention(HALF)), "apply .* to these"),
        (lambda: policies.after_prefill(policies.knorm(9), then=policies.duo_attention(HALF)), "caches of their own"),
        (lambda: policies.razor_attention(HALF, 4), "^policy razor_attention: it protects 5 slots"),
        (lambda: policies.razor_attention(HALF, positions="rank"), "^policy razor_attention: positions='rank'"),
        (lambda: policies.razor_attention(HALF, sinks=-1), "^sinks must be a whole number of at least 0; got -1"),
        (lambda: policies.duo_attention(HALF, positions="rank"), "^policy duo_attention: positions='rank'"),
        (lambda: policies.duo_attention(HALF, recent=0), "^recent must be a whole number of at least 1; got 0"),
        (lambda: kvjax.generate(tiny("mha").model, PROMPT, policies.duo_attention(HALF), max_new_tokens=2), "KV heads"),
    ],
)  # fmt: skip
def test_errors(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


def test_as_text():
    table = str(HALF).replace(" ", "")
    made = build("policy", f"split_heads({table}, chosen=h2o, others=window(sinks=1))", budget=8)
    assert made == policies.split_heads(HALF, policies.h2o(8), policies.window(8, sinks=1))
    assert made.members(True) == ((0,), (1,))
    assert made.members(False) == ((1,), (0,))
    assert build("policy", f"razor_attention({table})", budget=9) == policies.razor_attention(HALF, 9)


@pytest.mark.sampled(0)
def test_the_induction_head_of_the_first_parameters_is_found():
    config = dataclasses.replace(decoder_config(TrainConfig(), bos=0), max_positions=300)
    model = kvjax.Model(config, initial_parameters(config, jax.random.key(0)))
    scores = analysis.retrieval_scores(model)
    assert scores.induction.shape == scores.echo.shape == (4, 4)
    assert scores.induction.argmax() == 4, "layer 1, query head 0"
    assert scores.induction[1, 0] > 0.5 > 0.1 > np.delete(scores.induction, 4).max()
    np.testing.assert_array_equal(
        analysis.retrieval_heads(model, induction_share=0.06, echo_share=0.0), [[0, 0], [1, 0], [0, 0], [0, 0]]
    )
    assert analysis.retrieval_heads(model, induction_share=1.0).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"repeats": 1}, "repeats=1"),
        ({"period": 1}, "period=1"),
        ({"echo_share": 2}, "share"),
        ({"draw_from": [64]}, "token ids"),
    ],
)
def test_errors_of_the_test_of_heads(options, message):
    with pytest.raises(InputError, match=message):
        analysis.retrieval_heads(tiny().model, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("max_share", [None, 1.1])
def test_a_limit_on_each_heads_share_is_what_arrays_are_sized_for(max_share):
    """Heads hold as many slots in all, and the arrays of a layer have room for one that has reached the limit."""
    model, rows = tiny("mha", layers=1).model, random_tokens(2, 60)
    window, budget, heads, new = 4, 24, 4, 3
    policy = policies.adakv(policies.snapkv(budget, window=window), safeguard=0.1, max_share=max_share)
    made = kvjax.generate(model, rows, policy, max_new_tokens=new, limits=kvjax.Limits(prompt=60, new_tokens=new))
    following = new - 1
    limit = 60 if max_share is None else window + int(max_share * (budget - window))
    ((group,),) = made.layout.decode
    held = np.array([[len(head) for head in row] for row in made.kept(0)])
    np.testing.assert_array_equal(held.sum(axis=1), heads * (budget + following))
    assert group.capacity == limit + following
    # The limit is one that a head reaches; without it, one takes more.
    assert held.max() > budget + 2 + following if max_share is None else held.max() == limit + following
    explained = made.layout.explain()
    assert f"heads share {heads} x {budget} slots" in explained and f"may get {limit}" in explained
    assert f"{limit / budget:.2f} times the average" in explained
