"""A runner with a prefix store: answers are equal to the bit, whatever the store has, and less is computed."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, policies, storage
from kvjax.cache import Limits, layers_of
from kvjax.generation.sampling import Sample
from kvjax.policies import Fraction
from kvjax.serve import Request, Runner
from tests.tiny import VOCAB, random_tokens, tiny

LIMITS, BLOCK = Limits(prompt=48, new_tokens=40), 16
TEXT = random_tokens(1, 48, seed=21)[0]


def prompt(shared, length, seed=0):
    """Begins like `TEXT`."""
    return np.concatenate([TEXT[:shared], random_tokens(1, length - shared, seed=100 + seed)[0]])


#: Common beginnings within a block, at its end and beyond; a prompt of one block; equal prompts; one that goes on.
PROMPTS = [
    TEXT[:30], prompt(20, 30), prompt(16, 29, 1), prompt(40, 44, 2), TEXT[:30], TEXT[:44], prompt(32, 44, 3),
    prompt(20, 30), TEXT[:6], prompt(10, 26, 4), prompt(40, 44, 2),
]  # fmt: skip
#: The cache, the tokens of a block, and the tokens of each prompt that are found.
SPECS = {
    "full": (policies.full(), BLOCK, [0, 16, 16, 16, 16, 32, 32, 30, 0, 0, 44]),
    # From the third prompt on: the second one finds where it leaves the first one. Statistics have the last 4 queries.
    "snapkv": (policies.snapkv(12, window=4), BLOCK, [0, 0, 16, 16, 30, 16, 32, 30, 0, 0, 44]),
    # Prompts of different lengths have different budgets.
    "h2o": (CacheSpec(policies.h2o(Fraction(0.5, min_slots=1)), storage.int8()), BLOCK,
            [0, 0, 0, 0, 30, 16, 32, 30, 0, 0, 44]),
    "one shot": (CacheSpec(policies.h2o(12), storage.int8(memory="host")), "auto",
                 [0, 0, 0, 0, 30, 0, 0, 30, 0, 0, 44]),
}  # fmt: skip


def answers(spec, block, store=None, *, order=range(len(PROMPTS)), namespaces=(None,)):
    """Returns the result of each prompt, and the runner."""
    runner = Runner(
        tiny(layers=1).model, spec, rows=2, limits=LIMITS, prefill_block=block, prefix_store=store
    )  # fmt: skip
    for number in order:
        sampler, namespace = Sample(0.9) if number % 2 else None, namespaces[number % len(namespaces)]
        runner.submit(
            Request(tokens=PROMPTS[number], max_new_tokens=4, number=number, sampler=sampler, namespace=namespace)
        )
    return dict(zip(order, sorted(runner, key=lambda result: result.id), strict=True)), runner


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.filterwarnings("ignore:budget 0.5")
def test_answers_do_not_depend_on_the_store(name):
    spec, block, found = SPECS[name]
    expected, runner = answers(spec, block)
    assert runner.counts.found_tokens == 0
    large, backwards = kvjax.PrefixStore(1 << 30), range(len(PROMPTS))[::-1]
    makes = {
        "empty": (large, {}),
        "full": (large, {"order": backwards}),
        "divided": (kvjax.PrefixStore(1 << 30), {"order": backwards, "namespaces": ("one", "other")}),
        "small": (kvjax.PrefixStore(8_000), {}),
    }
    for which, (store, options) in makes.items():
        given, runner = answers(spec, block, store, **options)
        for number, result in given.items():
            np.testing.assert_array_equal(result.tokens, expected[number].tokens)
            np.testing.assert_array_equal(result.logprobs, expected[number].logprobs)
            assert result.prompt == len(PROMPTS[number])
        if which == "empty":
            assert [each.found for each in given.values()] == found
            held = [each for each in store.trie._used[None].values() if each.label[0] == "whole"]
            if name == "snapkv":
                # A compressor's slots, without those for new tokens; and the tokens count.
                assert {each.value.state.layers[0][0].position.shape[2] for each in held} == {12}
            for each in held:
                arrays = jax.tree.leaves((each.value.state, each.value.logits))
                assert each.nbytes == sum(leaf.nbytes for leaf in arrays) + each.tokens.nbytes
        total = sum(result.found for result in given.values())
        assert runner.counts.found_tokens == total <= runner.counts.prompt_tokens == sum(map(len, PROMPTS))
        assert total > 0 and store.nbytes <= store.max_bytes
        if which == "divided":
            # The last prompt is the fourth one, and another's.
            counts = [store.counts(each) for each in ("one", "other")]
            assert given[3].found < 44 and sum(each.saved_tokens for each in counts) == total
        else:
            assert which == "small" or max(given[3].found, given[10].found) == 44


def test_states_are_not_kept_where_keys_depend_on_the_length():
    model = tiny(layers=1).model
    rope = dataclasses.replace(model.config.rope, scaling="dynamic", factor=2.0, original_max_positions=64)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, rope=rope))
    store = kvjax.PrefixStore(1 << 30)
    runner = Runner(model, policies.full(), rows=1, limits=LIMITS, prefill_block=BLOCK, prefix_store=store)
    assert "prefix store: not used: under dynamic RoPE" in runner.explain()
    runner.submit(Request(tokens=TEXT[:30], max_new_tokens=1))
    assert [each.found for each in runner] == [0] and len(store) == 0


def test_ten_thousand_requests():
    """The store stays within its bytes, no key finds what another one has asked, and answers are those without it.

    Texts of three keys: common ones, and 20 of each key alone, which another key asks once, between two of its own.
    """
    count, keys, model = 10_000, 3, tiny(layers=1).model
    rng = np.random.default_rng(8)
    texts = [rng.integers(1, VOCAB, n) for n in rng.integers(9, 17, 40 + 20 * keys)]
    # The first 40 texts are common; each of them begins like the one before it or not.
    for number in range(1, 40, 2):
        texts[number][:8] = texts[number - 1][:8]
    asked = [(number % keys, int(min(rng.geometric(0.15), 40)) - 1) for number in range(count)]
    secret = {}
    for number in range(0, count, 4):
        key = asked[number][0]
        asked[number] = key, 40 + 20 * key + int(rng.integers(20))
    for place, text in enumerate(range(40, len(texts))):
        number = count // 2 + 4 * place + 1
        secret[number] = asked[number] = ((text - 40) // 20 + 1) % keys, text

    def runner(store):
        return Runner(
            model, policies.full(), rows=64, limits=Limits(16, 2), prefill_block=8, prefix_store=store
        )  # fmt: skip

    plain = runner(None)
    for text in texts:
        plain.submit(Request(tokens=text, max_new_tokens=2))
    expected = sorted(plain, key=lambda result: result.id)
    store = kvjax.PrefixStore(150_000)
    stored, found = runner(store), {}
    for key, text in asked:
        stored.submit(Request(tokens=texts[text], max_new_tokens=2, namespace=key))
    largest = 0
    while not stored.idle:
        found |= {each.id: each.result for each in stored.step() if each.result is not None}
        largest = max(largest, store.nbytes)
        assert store.nbytes <= store.max_bytes
    assert len(found) == count and all(each.error is None for each in found.values())
    assert largest > 0.9 * store.max_bytes and len(store) < store.misses, "some states were dropped"
    assert store.hits > count / 2 and stored.counts.found_tokens == store.saved_tokens
    for number, (_, text) in enumerate(asked):
        np.testing.assert_array_equal(found[number].tokens, expected[text].tokens)
        np.testing.assert_array_equal(found[number].logprobs, expected[text].logprobs)
    assert len(secret) == 60 and not any(found[number].found for number in secret)
    # The keys that the texts belong to do find them.
    assert sum(found[number].found > 0 for number in range(0, count, 4)) > count / 16
    # Rows have copies: their bytes are those of the layout, and the store's come on top.
    held = [group for _, group in layers_of(stored._rows.state)]
    assert sum(leaf.nbytes for group in held for leaf in (group.key, group.value)) == stored.prompts.layout.bytes(64)
    states = [state for own in store.trie._used.values() for state in own.values()]
    arrays = jax.tree.leaves([(each.value.state, each.value.logits) for each in states])
    assert store.nbytes == sum(leaf.nbytes for leaf in arrays) + sum(each.tokens.nbytes for each in states)
