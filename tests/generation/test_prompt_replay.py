"""Prompts that are replayed before they are compressed; tests/laws/test_slots.py compares what they keep."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.cache import replay as storage_replay
from kvjax.cache.spec import CacheSpec
from kvjax.errors import PolicyError, StorageError
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prefill, prefill_steps, prepare
from kvjax.generation.prompt_replay import chunk_tokens
from kvjax.models.layer_loop import VARIABLE
from kvjax.serve.prompts import Prompts
from kvjax.storage.base import UNROTATED
from tests.parameters import with_parameters
from tests.tiny import in_stacks, kept, random_tokens, tiny

TOKENS, LENGTHS = random_tokens(2, 30), [30, 19]
POLICY = policies.kvzip(0.5, instruction=(5, 6, 7), later=(8,), chunk=9, sinks=2)
GRADIENT = policies.kvgrad(0.5, chunk=16)
SHARED = policies.adakv(POLICY, safeguard=0, max_share=1.5, layers=True)


def prompts(policy=POLICY, own=None, lengths=LENGTHS, **options):
    own = tiny().model if own is None else own
    return prefill(own, TOKENS[: len(lengths)], policy, max_new_tokens=4, lengths=lengths, **options)


def assert_same_slots(one, other):
    for layer in range(len(one.state.layers)):
        for mine, theirs in zip(one.kept(layer), other.kept(layer), strict=True):
            assert all(np.array_equal(*heads) for heads in zip(mine, theirs, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [None, 8])
def test_room_for_everything_is_the_full_cache(block):
    got = kvjax.generate(tiny().model, TOKENS, policies.kvzip(30, chunk=9), max_new_tokens=5, lengths=LENGTHS,
                         prefill_block=block)  # fmt: skip
    expected = kvjax.generate(tiny().model, TOKENS, policies.full(), max_new_tokens=5, lengths=LENGTHS)
    np.testing.assert_array_equal(got.tokens, expected.tokens)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=2e-5)


def test_the_prompt_itself_is_unchanged():
    """Its logits do not depend on the replay, and budgets decide how much of it stays."""
    got, expected = prompts(), prompts(policies.full())
    np.testing.assert_allclose(got.logits, expected.logits, atol=2e-5)
    assert {len(head) for layer in kept(got.state, 0) for head in layer} == {15}
    assert {len(head) for layer in kept(got.state, 1) for head in layer} == {9}


def test_tokens_of_a_chunk():
    tokens, lengths = np.arange(100, 126)[None].repeat(2, axis=0), np.array([26, 11])
    replay = policies.Replay(instruction=(1, 2, 3), later=(4,), chunk=10)
    for start, length, expected in (
        (0, 26, [1, 2, 3, *range(100, 110)]),
        (10, 26, [4, *range(102, 120)]),
        (20, 26, [4, *range(112, 126)]),
        (10, 11, [4, *range(102, 111)]),
        (20, 11, []),
    ):
        ids, position = map(np.asarray, chunk_tokens(tokens, lengths, np.int32(start), replay, 10))
        row = list(lengths).index(length)
        assert ids.shape[1] == replay.width(26) == 19
        np.testing.assert_array_equal(ids[row][position[row] >= 0], expected)
        np.testing.assert_array_equal(
            position[row], [*range(length, length + len(expected)), *[-1] * (19 - len(expected))]
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("policy", [SHARED, GRADIENT], ids=lambda policy: policy.name)
def test_layers_as_a_loop(monkeypatch, policy):
    model = tiny(layers=3 if policy is SHARED else 2).model
    looped = prompts(policy, own=in_stacks(model))
    monkeypatch.setenv(VARIABLE, "off")
    alone = prompts(policy, own=model)
    assert looped.layout.runs and not alone.layout.runs
    assert_same_slots(looped, alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("other", [policies.h2o(9), policies.qfilters(9)], ids=lambda policy: policy.name)
def test_other_layers_keep_what_they_keep_alone(other):
    """A layer under another policy holds the whole prompt for the replay, too."""
    own = with_parameters(tiny().model)
    split = prompts(policies.split_layers(POLICY, other), own)
    for layer, alone in enumerate((prompts(), prompts(other, own))):
        for mine, theirs in zip(split.kept(layer), alone.kept(layer), strict=True):
            assert all(np.array_equal(*heads) for heads in zip(mine, theirs, strict=True))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "cache",
    [
        CacheSpec(POLICY, storage.int4()),
        CacheSpec(POLICY, storage.kivi(group=4, residual=8)),
        CacheSpec(POLICY, dataclasses.replace(storage.int8(), frame=UNROTATED)),
        CacheSpec(POLICY, selection=selection.infinigen(alpha=4.0, first_layer=1, sinks=1, recent=2)),
    ],
    ids=lambda cache: cache.name,
)
def test_storage_and_selection_do_not_change_what_is_kept(cache):
    """Slots are encoded, and indexed, after the eviction."""
    assert_same_slots(prompts(cache), prompts())


def test_a_decoding_policy_follows():
    got = prompts(policies.after_prefill(POLICY, then=policies.h2o(10)))
    assert_same_slots(got, prompts())


@pytest.mark.sampled(0)
def test_scores_are_constants_to_a_gradient():
    """Also where the scores are gradients themselves."""
    own = tiny(layers=1).model

    def loss(params, policy):
        model = dataclasses.replace(own, params=params)
        return kvjax.log_likelihood(model, TOKENS, policy, prompt_length=np.array([20, 12])).logprobs.mean()

    found, expected = (
        jax.jit(jax.grad(functools.partial(loss, policy=policy)))(own.params)
        for policy in (policies.kvgrad(30, chunk=16), policies.full())
    )
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6, rtol=1e-4)


def test_a_server_runs_prompts_in_blocks():
    limits = kvjax.Limits(prompt=30, new_tokens=4)
    server = Prompts(tiny().model, CacheSpec(POLICY), limits=limits, rows=2, prefill_block=8)
    started = server.begin(server.prompt(TOKENS[0], 4))
    while (done := started.advance()) is None:
        pass
    expected = prompts(lengths=[30])
    assert kept(done.state, 0) == kept(expected.state, 0)
    np.testing.assert_allclose(done.logits, expected.logits, atol=2e-5)


@pytest.mark.sampled(0)
def test_the_layout_says_what_a_prompt_costs():
    assert "replayed in chunks of 9 tokens before slots are evicted, which takes one more prefill" in (
        prompts().layout.explain()
    )
    assert "takes one more forward and one backward pass" in prompts(GRADIENT).layout.explain()
    assert "heads of all layers share 4 x " in prompts(SHARED).layout.explain()
    assert "replayed" not in prompts(policies.snapkv(0.5, window=4)).layout.explain()


SCORE = policies.ReplayedAttention()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (
            lambda: policies.evict(importance=SCORE, budget=8),
            PolicyError,
            "takes place once, when the prompt ends",
        ),
        (
            lambda: policies.kvzip(8, instruction="Repeat"),
            PolicyError,
            "instruction='Repeat' is not a sequence",
        ),
        (
            lambda: policies.kvzip(8, later=(1.5,)),
            PolicyError,
            "later=.* give a sequence of whole numbers",
        ),
        (lambda: policies.ReplayedGradient(policies.Replay()), PolicyError, "give Replay\\(by='gradient'\\)"),
        (lambda: policies.Replay(by="keys"), PolicyError, "use 'attention' or 'gradient'"),
        (lambda: policies.kvzip(8, chunk=0), PolicyError, "chunk must be a whole number of at least 1"),
        (lambda: policies.kvzip(3), PolicyError, "protects 4 slots, more than its budget of 3"),
        (
            lambda: prompts(policies.kvzip(8, instruction=(64,))),
            PolicyError,
            "the token 64, but this model has 64",
        ),
        (lambda: prompts(CacheSpec(POLICY, storage.int8()), prefill_block=8), StorageError, "leave out prefill_block"),
        (lambda: prompts(CacheSpec(POLICY, storage.think(recent=4))), StorageError, "from queries that are not held"),
        (
            lambda: prompts(policies.split_layers(POLICY, policies.window(9)), prefill_block=8),
            PolicyError,
            "window evicts after each block",
        ),
        (
            lambda: prompts(policies.split_layers(POLICY, policies.kvzip(9))),
            PolicyError,
            "kvzip of other layers in another way",
        ),
        (lambda: policies.split_layers(SHARED, policies.full()), PolicyError, "shares the slots of all layers"),
        (lambda: policies.adakv(policies.knorm(9), layers=True), PolicyError, "the scores of a replay alone"),
        (lambda: policies.value_norm(SHARED), PolicyError, "the scores of a replay alone"),
        (
            lambda: storage_replay.replay(storage.dense(), _streams(12), _streams(2), [12, 9], policies.kvzip(6)),
            PolicyError,
            "which needs a model",
        ),
    ],
)
def test_refused_with_the_reason(make, error, match):
    with pytest.raises(error, match=match):
        make()


def _streams(length):
    return [np.zeros((2, heads, length, 8), np.float32) for heads in (4, 2, 2)]


@pytest.mark.parametrize(
    ("policy", "axis", "match"),
    [(POLICY, "context", "a mesh that divides slots over context"), (GRADIENT, "data", "is not supported on a mesh;")],
)
def test_meshes_are_refused(policy, axis, match):
    mesh = jax.sharding.AbstractMesh((2,), (axis,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(PolicyError, match=match):
        prompts(policy)


def _largest(jaxpr):
    """The most numbers of an array that a program makes."""
    sizes = [0]
    for equation in jaxpr.eqns:
        sizes += [each.aval.size for each in equation.outvars if hasattr(each.aval, "size")]
        sizes += [_largest(inner) for inner in jax.core.jaxprs_in_params(equation.params)]
    return max(sizes)


@pytest.mark.parametrize("make", [policies.kvzip, policies.kvgrad], ids=["kvzip", "kvgrad"])
def test_memory_is_linear_in_the_prompt(make):
    """No array has a number for each pair of a query and a slot of the prompt."""

    def largest(length):
        model, lengths = tiny().model, np.array([length])
        options = CacheOptions(prefill_block=128, limits=kvjax.Limits(length, 1, length))
        prepared = prepare(model, CacheSpec(make(64, chunk=128)), lengths, lengths, width=length, options=options)
        arrays = jnp.zeros((1, length), jnp.int32), jnp.asarray(lengths, jnp.int32)
        run = functools.partial(prefill_steps, config=model.config, layout=prepared.layout, score=False)
        budgets = jax.tree.map(jnp.asarray, prepared.budgets)
        made = jax.make_jaxpr(run)(model.params, *arrays, arrays[1], budgets.prompt, budgets.decode)
        return _largest(made.jaxpr)

    # The logits of a chunk of four query heads are one of them.
    assert 4 * 128 * 1024 <= largest(1024) < 1024**2 and largest(2048) < 2.1 * largest(1024)
