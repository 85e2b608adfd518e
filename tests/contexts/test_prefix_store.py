"""`PrefixStore`: a lookup returns what the text would have had, never what another text has left."""

import dataclasses
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, contexts, policies, storage
from kvjax.contexts.state_trie import Key, StateTrie
from kvjax.errors import InputError
from kvjax.generation.context import Span
from kvjax.models import digest
from tests.tiny import assert_same_state, kept, random_tokens, tiny

TOKENS = random_tokens(1, 32, seed=11)[0]
LIMITS = kvjax.Limits(prompt=32, new_tokens=16)


def model():
    return tiny(layers=1).model


def prefill(spec, length=32, **options):
    return contexts.prefill(model(), TOKENS[:length], spec, limits=LIMITS, **options)


def store_of(*made, max_bytes=1 << 30):
    store = kvjax.PrefixStore(max_bytes)
    for each in made:
        assert store.add(each)
    return store


def test_a_full_cache_is_found_at_any_length():
    whole = prefill(policies.full())
    store = store_of(whole, prefill(policies.full(), 12))
    assert store.longest(TOKENS) is whole and store.saved_tokens == 32
    # A text that leaves it after 20 tokens, and one that ends there.
    other = np.concatenate([TOKENS[:20], (TOKENS[20:26] + 1) % 64])
    expected = prefill(policies.full(), 20)
    for text in (other, TOKENS[:20]):
        found = store.longest(text)
        np.testing.assert_array_equal(found.text[0], TOKENS[:20])
        np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)
        assert_same_state(found.state, expected.state, 0, atol=1e-4)
    # The shorter context, as it is: it was not shortened.
    assert len(store.longest([*TOKENS[:12], 1, 2]).text[0]) == 12
    assert store.longest((TOKENS + 1) % 64) is None
    assert (len(store), store.hits, store.misses) == (2, 4, 1) and store.saved_tokens == 32 + 19 + 19 + 12
    assert len(whole.text[0]) == 32


#: The cache, how it is stored, the text's boundaries, and the number of tokens that are found of 32, or None.
CASES = {
    "one shot": (policies.h2o(8), {"length": 16}, None, None),
    "the whole prompt": (policies.h2o(0.25), {}, None, 32),
    "blocks": (policies.h2o(8), {"length": 16, "prefill_block": 8}, None, 16),
    "a part of a block": (policies.h2o(8), {"length": 12, "prefill_block": 8}, None, None),
    "codes": (CacheSpec(policies.roco(8, guard=2), storage.int8()), {"length": 16, "prefill_block": 8}, None, 16),
    "another budget": (policies.h2o(0.25), {"length": 16, "prefill_block": 8}, None, None),
    "the same turn": (policies.h2o(0.5), {"length": 16}, (Span(16, 16), Span(32, 16)), 16),
    "another turn": (policies.h2o(8), {"length": 16}, (Span(17, 17), Span(32, 15)), None),
    "a compressor": (policies.snapkv(8, window=4), {"length": 16}, None, None),
    "in blocks": (policies.snapkv(8, window=4), {"length": 16, "prefill_block": 8}, None, None),
    "its prompt": (policies.snapkv(8, window=4), {"length": 16}, (Span(16, 16), Span(32, 16, "append")), 16),
    "compressed again": (policies.snapkv(8, window=4), {"length": 16}, (Span(16, 16), Span(32, 16, "compress")), 16),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_under_eviction_boundaries_and_budgets_are_equal(name):
    spec, options, boundaries, expected = CASES[name]
    context = prefill(spec, **options)
    store = store_of(context)
    found = store.longest(TOKENS, boundaries=boundaries)
    assert found is (None if expected is None else context)
    if name == "blocks":
        # What follows is then that of the whole prompt.
        block = options["prefill_block"]
        whole, made = prefill(spec, prefill_block=block), contexts.extend(model(), found, TOKENS[16:], block=block)
        np.testing.assert_allclose(made.logits, whole.logits, atol=1e-4)
        assert kept(made.state, 0) == kept(whole.state, 0) and made.boundaries == whole.boundaries


def test_turns_and_generated_tokens_are_found_by_their_boundaries():
    """Turns that are appended to a compressed prompt evict nothing, so that their cuts make no difference."""
    for spec, cut in ((policies.h2o(8), None), (policies.snapkv(8, window=4), "append")):
        made = contexts.decode(model(), prefill(spec, 16), max_new_tokens=4).context
        text = np.concatenate([made.text[0], TOKENS[:4]])
        store = store_of(made)
        assert store.longest(text) is None
        own = (*made.boundaries[0], Span(len(text), 4, cut or "prompt"))
        assert store.longest(text, boundaries=own) is made
        other = (Span(16, 16), Span(len(text), 8, cut or "prompt"))
        assert store.longest(text, boundaries=other) is (made if cut else None)


def test_the_least_recently_used_is_dropped():
    one = prefill(policies.full(), 8)
    room = store_of(one).nbytes
    assert room > one.logits.nbytes + sum(leaf.nbytes for leaf in one.layout.kept(one.state, 0)[0])
    store = kvjax.PrefixStore(3 * room + room // 2)
    texts = [np.full(8, number) for number in range(5)]
    made = [contexts.prefill(model(), text, policies.full(), limits=LIMITS) for text in texts]
    for context in made[:3]:
        store.add(context)
    assert store.longest(texts[0]) is made[0]
    store.add(made[1])  # it is there, and used
    store.add(made[3])
    assert [store.longest(text) is not None for text in texts] == [True, True, False, True, False]
    store.add(made[4])
    assert [store.longest(text) is not None for text in texts] == [False, True, False, True, True]
    assert store.nbytes == 3 * room == store.counts(None).nbytes
    assert not kvjax.PrefixStore(room - 1).add(one)
    store.clear()
    assert (len(store), store.nbytes) == (0, 0)


def test_namespaces_and_caches_never_meet(monkeypatch):
    digested, hashed = [], digest._hashed
    monkeypatch.setattr(digest, "_hashed", lambda leaf: digested.append(leaf) or hashed(leaf))
    full, h2o = prefill(policies.full(), 16), prefill(policies.h2o(8), 16)
    store = kvjax.PrefixStore(1 << 30)
    store.add(full, namespace="one")
    assert store.longest(TOKENS, namespace="other") is None and store.longest(TOKENS) is None
    assert store.counts("other").states == store.counts("other").hits == 0 and store.counts("one").misses == 0
    store.add(h2o, namespace="one")
    with pytest.raises(InputError, match=r"contexts of several caches \(full, h2o\); give made="):
        store.longest(TOKENS, namespace="one")
    assert store.longest(TOKENS[:16], made=h2o.made, namespace="one") is h2o
    assert store.longest(TOKENS, made=full.made, namespace="one") is full
    # Of one model, parameters are compared by identity.
    assert not digested
    other, same = (
        contexts.prefill(each, TOKENS[:16], policies.full(), limits=LIMITS)
        for each in (
            tiny(layers=1, seed=1).model,
            dataclasses.replace(model(), params=jax.tree.map(jnp.copy, model().params)),
        )
    )
    assert store.longest(TOKENS, made=other.made, namespace="one") is None
    assert store.longest(TOKENS, made=same.made, namespace="one") is full


def test_contexts_that_cannot_be_stored():
    store = kvjax.PrefixStore(1e9)
    with pytest.raises(InputError, match="contexts of one row, and this one has 2"):
        store.add(contexts.rows(prefill(policies.full(), 8), [0, 0]))
    with pytest.raises(InputError, match="its tokens or its cache are not known"):
        store.add(prefill(policies.full(), 8)._replace(tokens=None))
    with pytest.raises(InputError, match="the store has contexts"):
        store.add(None)
    for wrong in (0, "1GB", True):
        with pytest.raises(InputError, match="max_bytes must be a number"):
            kvjax.PrefixStore(wrong)
    with pytest.raises(InputError, match=r"max_bytes must be a whole number of bytes; got 1\.5"):
        kvjax.PrefixStore(1.5)


def test_lookups_that_cannot_work():
    context = prefill(policies.h2o(8), 16)
    store = store_of(context)
    for wrong, message in (
        (context.boundaries, "boundaries must be the spans of one row"),
        ((), "boundaries must be the spans of one row"),
        ((Span(16, 16), Span(24, 8)), "the last one at 32, where the text ends"),
        ((Span(16, 16), Span(40, 8)), "the last one at 32, where the text ends"),
        ((Span(20, 8), Span(16, 8), Span(32, 8)), "boundaries must stop one after the other"),
        ((Span(32, 0),), "blocks must have at least 1 token"),
    ):
        with pytest.raises(InputError, match=message):
            store.longest(TOKENS, boundaries=wrong)
    assert store.hits == store.misses == 0
    for call in (
        store.counts,
        lambda it: store.add(context, namespace=it),
        lambda it: store.longest([1], namespace=it),
    ):
        with pytest.raises(InputError, match="namespace must be a value with a hash"):
            call([])
    with pytest.raises(InputError, match="got 2 namespaces"):
        store.counts("a", "b")


def test_the_trie_against_a_list():
    """Random texts that share beginnings: lookups, the order in which states are dropped, and no node is left over."""
    rng = np.random.default_rng(0)
    trie, model_of, most = StateTrie(400), [], 400
    for number in range(1_000):
        tokens = rng.integers(0, 2, rng.integers(1, 12)).astype(np.int32)
        text, key = tuple(tokens.tolist()), Key(rng.integers(2), None)
        common = [
            next((i for i, (a, b) in enumerate(zip(text, own, strict=False)) if a != b), min(len(text), len(own)))
            for place, own, _ in model_of
            if place == key
        ]  # fmt: skip
        assert trie.nearest(key, tokens)[1] == max(common, default=0)
        along = sorted((own for place, own, _ in model_of if place == key and text[: len(own)] == own), key=len)
        assert [tuple(each.tokens.tolist()) for each in trie.along(key, tokens)] == along[::-1]
        if number % 3 and along:
            used = next(iter(trie.along(key, tokens)))
            trie.use(used, 0)
            entry = next(each for each in model_of if each[:2] == (key, along[-1]))
            model_of = [*(each for each in model_of if each is not entry), entry]
        else:
            size = int(rng.integers(1, 60))
            added = trie.add(key, tokens, None, size)
            known = next((each for each in model_of if each[:2] == (key, text)), (key, text, size))
            model_of = [*(each for each in model_of if each is not known), known]
            while sum(each[2] for each in model_of) > most:
                # The first one of the namespace that has the most bytes.
                held = [sum(each[2] for each in model_of if each[0].namespace == name) for name in range(2)]
                at = next(at for at, each in enumerate(model_of) if held[each[0].namespace] == max(held))
                model_of.pop(at)
            assert added == (known in model_of)
        assert trie.total().nbytes == sum(each[2] for each in model_of) <= most
    # One namespace cannot take the room of another one that has an equal part.
    trie.clear()
    for number in range(100):
        trie.add(Key(number // 99, None), np.full(4, number, np.int32), None, 40 if number < 99 else 200)
    for number in range(100):
        trie.add(Key(0, None), np.full(5, number, np.int32), None, 40)
    assert (trie.counts(0).nbytes, trie.counts(1).nbytes) == (200, 200)
    trie.clear()
    # Whatever is asked, it stays within its bytes.
    for number in range(10_000):
        tokens = rng.integers(0, 8, 40).astype(np.int32)
        tokens[: number % 40] = 0
        trie.add(Key(None, None), tokens, None, 7)
        assert trie.total().nbytes <= most
    trie.clear()
    assert not trie._roots and trie.total().states == 0


def test_several_threads_use_one_store():
    """The bound and the counts hold while threads add, look up and clear; a state is found under its tokens alone."""
    trie, lookups, faults = StateTrie(2_000), 400, []
    keys = [Key(name, "kind") for name in ("one", "two")]

    def use(seed):
        rng = np.random.default_rng(seed)
        for turn in range(lookups):
            tokens, key = rng.integers(0, 3, size=rng.integers(1, 8)).astype(np.int32), keys[seed % 2]
            trie.add(key, tokens, (key, tokens.tolist()), 50)
            for state in trie.along(key, tokens):
                if state.value != (key, tokens[: len(state.tokens)].tolist()):
                    faults.append(state.value)
            state, _ = trie.nearest(key, tokens)
            if state is None:
                trie.miss(key.namespace)
            else:
                trie.use(state, 1)
            if trie.total().nbytes > 2_000:
                faults.append(trie.total())
            if turn % 100 == 99:
                trie.clear()

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for each in [pool.submit(use, seed) for seed in range(4)]:
                each.result()
    finally:
        sys.setswitchinterval(before)
    counts = trie.total()
    assert not faults and counts.hits + counts.misses == counts.saved_tokens + counts.misses == 4 * lookups
    trie.clear()
    assert trie.total().states == trie.total().nbytes == 0
