"""Attention matching: the fit against the float64 reference, its laws, and who sees the weights afterwards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.cache import CacheSpec
from kvjax.cache.groups import Group
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.lowering import lower
from kvjax.cache.state import Block
from kvjax.cache.step import evict
from kvjax.contexts import extend
from kvjax.errors import PolicyError
from kvjax.generation.likelihood import score_continuation
from kvjax.generation.prefill import prefill
from kvjax.generation.prompt_replay import chunk_tokens
from kvjax.models.bound import bind
from kvjax.policies.components import KeyFrame
from kvjax.policies.matched import LOG_WEIGHT
from kvjax.policies.row_memory import Queries
from tests import layers
from tests.conftest import ROOT
from tests.reference import matched as reference
from tests.tiny import random_tokens, tiny

ROWS, KV_HEADS, GROUP, DIM, SLOTS, KEPT = 3, 2, 2, 8, 60, 12
LENGTHS = np.array([60, 10, 41])  # the second row keeps all of its slots
MEMORY = policies.PromptQueries()


@functools.cache
def arrays(seed: int = 0) -> dict[str, np.ndarray]:
    """Queries, keys and values of prompts, of which the last slots of short rows are empty."""
    rng = np.random.default_rng(seed)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    position = np.where(np.arange(SLOTS) < LENGTHS[:, None], np.arange(SLOTS), -1).astype(np.int32)
    # Keys in some directions, as those of models, so that slots can stand for each other.
    key = random(ROWS, KV_HEADS, SLOTS, 3) @ random(3, DIM) + 0.3 * random(ROWS, KV_HEADS, SLOTS, DIM)
    return {
        "query": 2 * random(ROWS, KV_HEADS, GROUP, SLOTS, DIM), "key": key.astype(np.float32),
        "value": random(ROWS, KV_HEADS, SLOTS, DIM), "position": np.repeat(position[:, None], KV_HEADS, axis=1),
    }  # fmt: skip


def view_of(own: dict[str, jax.Array], kept: int = KEPT) -> policies.View:
    prompt = jnp.sum(own["position"][:, 0] >= 0, axis=1, dtype=jnp.int32)
    queries = {"query": own["query"], "position": own["position"]}
    budget = jnp.full(prompt.shape, kept, jnp.int32)
    return policies.View(
        own["position"], own["key"], own["value"], prompt - 1, budget, prompt, 0, False, None, KeyFrame(),
        {MEMORY.name: queries}, own["key"].shape[3] ** -0.5, most_left=kept,
    )  # fmt: skip


def run(
    given: dict[str, np.ndarray], ridge: float = 1e-3, kept: int = KEPT, **changes: object
) -> tuple[np.ndarray, policies.Folded]:
    """Ranks, evicts and folds, as the end of a prompt does: what is evicted, and what is left."""
    policy = policies.matched(KEPT, ridge=ridge)

    def compact(given: dict[str, jax.Array]) -> tuple[jax.Array, policies.Folded]:
        view = view_of(given, kept)._replace(**changes)
        stats = {LOG_WEIGHT: jnp.zeros(view.position.shape)}
        victim = evict.victims(policy, stats, view, one=False)
        return victim, policy.merge.fold(view.key, view.value, victim, stats, view, view.position.shape[2])

    return jax.jit(compact)(given)


def test_it_is_the_reference():
    """Values, and weights to 0.1 %: the rounding of float32 times the condition of the fit."""
    given = arrays()
    victim, folded = run(given)
    for row, head in np.ndindex(ROWS, KV_HEADS):
        live = given["position"][row, head] >= 0
        keep = ~np.asarray(victim)[row, head][live]
        assert keep.sum() == min(KEPT, LENGTHS[row])
        query = given["query"][row, head][:, live].reshape(-1, DIM).astype(np.float64)
        key, value = (given[name][row, head][live].astype(np.float64) for name in ("key", "value"))
        assert set(np.flatnonzero(keep)) == set(
            np.argsort(reference.softmax(query @ key.T / np.sqrt(DIM)).max(axis=0))[-keep.sum() :]
        )
        values, log_weight = value, np.zeros(len(value))
        if not keep.all():
            values, log_weight = reference.fitted(query, key, value, keep, 1e-3)
            assert np.abs(log_weight[keep]).max() > 0.1 and np.abs(values - value)[keep].max() > 0.1
        got = np.asarray(folded.stats[LOG_WEIGHT])[row, head]
        np.testing.assert_allclose(np.exp(got[live][keep]), np.exp(log_weight[keep]), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(np.asarray(folded.value)[row, head][live][keep], values[keep], atol=1e-3)
        # What is evicted, empty or in a head that evicts nothing has no weight.
        assert not got[~live].any() and not got[live][~keep].any()


def attended(given, keep, value, log_weight, row, head, cap=None) -> np.ndarray:
    """[N, D] the outputs of the prompt's queries over some slots."""
    real = given["position"][row, head] >= 0
    query = given["query"][row, head][:, real].reshape(-1, given["query"].shape[-1]).astype(np.float64)
    key = given["key"][row, head][keep].astype(np.float64)
    logits = query @ key.T / np.sqrt(key.shape[1])
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    return reference.softmax(logits + log_weight[keep]) @ value[keep].astype(np.float64)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0}, {"window": 25}, {"ridge": 10.0}])
def test_outputs_come_nearer(options):
    """Than those of the kept slots as they are: much nearer here, and never farther."""
    given = arrays(1)
    victim, folded = run(given, **options)
    before, after = [], []
    for row, head in np.ndindex(ROWS, KV_HEADS):
        live = given["position"][row, head] >= 0
        if window := options.get("window"):
            live &= given["position"][row, head] > LENGTHS[row] - 1 - window
        kept = live & ~np.asarray(victim)[row, head]
        value, none = given["value"][row, head], np.zeros(SLOTS)
        weights = np.asarray(folded.stats[LOG_WEIGHT], np.float64)[row, head]
        cap = options.get("soft_cap")
        whole = attended(given, live, value, none, row, head, cap)
        before.append(np.sum((attended(given, kept, value, none, row, head, cap) - whole) ** 2))
        fitted = np.asarray(folded.value)[row, head]
        after.append(np.sum((attended(given, kept, fitted, weights, row, head, cap) - whole) ** 2))
    assert (np.array(after) <= np.array(before) * (1 + 1e-5)).all()
    if "ridge" not in options:
        assert sum(after) < 0.4 * sum(before)


@functools.cache
def trained(length: int = 300) -> dict[str, np.ndarray]:
    """Queries, keys and values of a text in kvjax-tiny, whose layers are the rows."""
    model = kvjax.load("kvjax-tiny")
    config, rope = model.config, model.config.rope
    tokens = np.asarray(model.tokenizer.encode((ROOT / "CONTRIBUTING.md").read_text()))[None, :length]
    n = jnp.full((1,), length, jnp.int32)
    place = jnp.arange(length, dtype=jnp.int32)[None]
    block = Block(position=place, prompt=n, total=n, budget=((None,),) * config.num_layers)
    phase = ((Group(),),) * config.num_layers

    @jax.jit
    def project(params, tokens):
        found = bind(config, params).projected(tokens, block, phase)[1]
        query, key, value = (jnp.concatenate([found[i][part] for i in range(config.num_layers)]) for part in range(3))
        turned = (rope.rotate(x, place, rope.frequencies(n)) for x in (query, key))
        return *turned, value

    query, key, value = (np.asarray(x) for x in project(model.params, jnp.asarray(tokens)))
    position = np.broadcast_to(np.arange(length, dtype=np.int32), key.shape[:3])
    return {
        "query": query.reshape(*key.shape[:2], -1, *query.shape[2:]), "key": key, "value": value, "position": position,
    }  # fmt: skip


def test_a_tenth_of_a_text_is_nearer_than_under_any_eviction():
    """In all heads of a trained model: H2O, SnapKV, and a window with sinks, with as many slots."""
    given, kept = trained(), 30
    length, dim = given["key"].shape[2:]
    victim, folded = run(given, kept=kept)
    for row, head in np.ndindex(*given["key"].shape[:2]):
        logits = np.einsum("gnd,sd->gns", given["query"][row, head], given["key"][row, head]) / np.sqrt(dim)
        causal = np.where(np.tri(length, dtype=bool), logits, -np.inf)
        paid = np.exp(causal - causal.max(axis=2, keepdims=True))
        paid = (paid / paid.sum(axis=2, keepdims=True)).mean(axis=0)
        age = np.arange(length)
        observed = np.convolve(paid[-16:].sum(axis=0), np.ones(5) / 5, mode="same")
        ranks = {
            "h2o": np.where(age >= length - kept // 2, np.inf, paid.sum(axis=0)),
            "snapkv": np.where(age >= length - 16, np.inf, observed),
            "window": np.where(age < 4, np.inf, age),
        }
        value, none, every = given["value"][row, head], np.zeros(length), np.ones(length, bool)
        whole = attended(given, every, value, none, row, head)

        def error(keep, value, weights):
            return np.sum((attended(given, keep, value, weights, row, head) - whole) ** 2)  # noqa: B023

        weights = np.asarray(folded.stats[LOG_WEIGHT])[row, head]
        own = error(~np.asarray(victim)[row, head], np.asarray(folded.value)[row, head], weights)
        for name, rank in ranks.items():
            keep = np.zeros(length, bool)
            keep[np.argsort(rank, kind="stable")[-kept:]] = True
            assert own < error(keep, value, none), (name, row, head)


def test_queries_at_positions_after_the_prompt_fit_those_that_follow():
    """In most layers of a trained model: outputs are nearer than those of a window, and of queries in their places."""
    prompt, kept, rope = 264, 26, kvjax.load("kvjax-tiny").config.rope
    whole = trained()
    length, dim = whole["key"].shape[2:]
    frequencies = rope.frequencies(jnp.full((1,), length, jnp.int32))
    given = {name: array[:, :, :prompt] for name, array in whole.items() if name != "query"}
    query = whole["query"][:, :, :, :prompt].reshape(len(whole["key"]), -1, prompt, dim)
    flat = rope.unrotate(query, jnp.arange(prompt, dtype=jnp.int32)[None], frequencies)
    memories = {
        policies.PromptQueries().name: {"query": whole["query"][:, :, :, :prompt], "position": given["position"]},
        policies.PromptQueries(rotated=False).name: {
            "query": flat.reshape(whole["query"][:, :, :, :prompt].shape), "position": given["position"],
        },
    }  # fmt: skip

    @functools.partial(jax.jit, static_argnames="queries")
    def compact(given, memories, queries):
        policy = policies.matched(kept, queries=queries)
        view = view_of(given | {"query": memories[policies.PromptQueries().name]["query"]}, kept)
        view = view._replace(memory=memories, frame=KeyFrame(True, rope, frequencies))
        stats = {LOG_WEIGHT: jnp.zeros(view.position.shape)}
        victim = evict.victims(policy, stats, view, one=False)
        return victim, policy.merge.fold(view.key, view.value, victim, stats, view, prompt)

    def outputs(value, weights):
        """[L, K, G, T, D] of the queries after the prompt, over slots of the prompt and what follows it."""
        logits = np.einsum("lkgtd,lksd->lkgts", whole["query"][:, :, :, prompt:], whole["key"]) / np.sqrt(dim)
        logits = np.where(np.tri(length, dtype=bool)[prompt:], logits + weights[:, :, None, None], -np.inf)
        paid = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.einsum("lkgts,lksd->lkgtd", paid / paid.sum(axis=-1, keepdims=True), value)

    full = outputs(whole["value"], np.zeros(whole["key"].shape[:3]))

    def error(queries):
        value, weights = whole["value"].copy(), np.zeros(whole["key"].shape[:3])
        if queries == "window":
            weights[:, :, 4 : prompt - kept + 4] = -np.inf
        else:
            victim, folded = compact(given, memories, queries)
            value[:, :, :prompt] = folded.value
            weights[:, :, :prompt] = np.where(victim, -np.inf, folded.stats[LOG_WEIGHT])
        return np.sqrt(np.mean((outputs(value, weights) - full) ** 2, axis=(1, 2, 3, 4)))

    following, prompt_queries, window = (error(name) for name in ("following", "prompt", "window"))
    for other in (prompt_queries, window):
        assert (following < other).sum() >= 4 and np.median(following / other) < 0.6, (following, other)


@pytest.mark.sampled(0)
def test_a_row_by_itself_and_in_wider_arrays():
    given = arrays()
    _, whole = run(given)
    padded = {
        name: np.pad(array[2:], [(0, 0)] * (array.ndim - (1 if name == "position" else 2))
                     + [(0, 7)] + [(0, 0)] * (0 if name == "position" else 1),
                     constant_values=-1 if name == "position" else 9)
        for name, array in given.items()
    }  # fmt: skip
    _, alone = run(padded)
    for one, other in ((alone.value, whole.value), (alone.stats[LOG_WEIGHT], whole.stats[LOG_WEIGHT])):
        np.testing.assert_allclose(one[0, :, : LENGTHS[2]], other[2, :, : LENGTHS[2]], atol=2e-4)


def test_queries_are_evenly_spaced_however_they_arrive():
    """At all positions, or at ⌊i·n / p⌋ - 1, in one shot and in blocks."""
    lengths, dim, step = np.array([23, 8, 5, 16]), 2, 6
    query = np.arange(4 * 2 * 3 * 24 * dim, dtype=np.float32).reshape(4, 2, 3, 24, dim)
    place = np.where(np.arange(24) < lengths[:, None], np.arange(24), -1).astype(np.int32)
    memory = policies.PromptQueries(24).bound(24, 3)  # 8 positions of 3 query heads
    whole = memory.update(memory.empty((4, 2, 3), dim), Queries(query, query, place, place[:, 0], lengths))
    parts = memory.empty((4, 2, 3), dim)
    for start in range(0, 24, step):
        own = query[:, :, :, start : start + step]
        at = place[:, start : start + step]
        parts = memory.update(parts, Queries(own, own, at, at[:, 0], lengths))
    for row, n in enumerate(lengths):
        count = min(n, 8)
        expected = [i * n // count - 1 for i in range(1, count + 1)]
        for got in (whole, parts):
            at = np.asarray(got["position"])[row, 1]
            assert at.tolist() == [*expected, *[-1] * (8 - count)]
            np.testing.assert_array_equal(got["query"][row, :, :, :count], query[row][:, :, expected])


def test_queries_of_a_replay_are_those_of_all_of_its_blocks():
    """In their order, with the tokens that are repeated before a chunk."""
    tokens = np.arange(100, 126, dtype=np.int32)[None].repeat(3, axis=0)
    lengths = np.array([26, 11, 10], np.int32)
    replay = policies.Replay(instruction=(1, 2, 3), later=(4,), chunk=10)
    for number in (60, 8):
        memory = policies.ReplayQueries(number, replay=replay).bound(26, 2)
        made, ran = memory.empty((3, 1, 2), 1), [[], [], []]
        for start in range(0, 26, 10):
            ids, position = map(np.asarray, chunk_tokens(tokens, lengths, np.int32(start), replay, 10))
            first = start + replay.added(jnp.int32(start // 10))
            total = lengths + replay.added(-(-jnp.asarray(lengths) // 10))
            query = np.broadcast_to(ids[:, None, None, :, None], (3, 1, 2, ids.shape[1], 1)).astype(np.float32)
            given = Queries(query, query, position, jnp.broadcast_to(first, (3,)), total)
            made = memory.update(made, given)
            for row in range(3):
                ran[row] += ids[row][position[row] >= 0].tolist()
        for row in range(3):
            count = min(len(ran[row]), number // 2)
            expected = [ran[row][i * len(ran[row]) // count - 1] for i in range(1, count + 1)]
            assert np.asarray(made["query"])[row, 0, 1, :count, 0].tolist() == expected
            assert (np.asarray(made["position"])[row, 0] >= 0).sum() == count


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_weights_are_seen_by_whatever_follows():
    """Tokens that are fed in one block, one at a time, and as a text have the same scores; without weights, others."""
    model = tiny("gqa", 0, layers=2).model
    tokens = random_tokens(2, 340, seed=3)[:, :40]
    made = prefill(model, tokens[:, :30], policies.matched(8), max_new_tokens=12)
    stepped = score_continuation(model, made, tokens[:, 30:])
    scored = kvjax.log_likelihood(model, tokens, policies.matched(8), prompt_length=30, prefill_block=7)
    np.testing.assert_allclose(scored.logprobs[:, 29:], stepped, atol=1e-3)
    host = CacheSpec(policies.matched(8), storage.dense(memory="host"))
    moved = score_continuation(model, prefill(model, tokens[:, :30], host, max_new_tokens=12), tokens[:, 30:])
    np.testing.assert_allclose(moved, stepped, atol=1e-3)
    block = extend(model, made, tokens[:, 30:39])
    np.testing.assert_allclose(jax.nn.log_softmax(block.logits)[np.arange(2), tokens[:, 39]], stepped[:, 9], atol=1e-3)

    def unweighted(layer):
        return layer.replace(stats={LOG_WEIGHT: jnp.zeros_like(layer.stats[LOG_WEIGHT])})

    plain = jax.tree.map(unweighted, made.state.layers, is_leaf=lambda x: isinstance(x, kvjax.LayerKV))
    other = score_continuation(model, made._replace(state=made.state.replace(layers=plain)), tokens[:, 30:])
    assert np.abs(other - stepped).max() > 0.1


@pytest.mark.sampled(0)
def test_room_for_the_prompt_changes_nothing():
    model = tiny("gqa", 0, layers=2).model
    tokens = random_tokens(2, 340, seed=3)[:, :30]
    made = prefill(model, tokens, policies.matched(30), max_new_tokens=4)
    full = prefill(model, tokens, policies.full(), max_new_tokens=4)
    for own, whole in zip(made.state.layers, full.state.layers, strict=True):
        assert not np.asarray(own.stats[LOG_WEIGHT]).any()
        np.testing.assert_array_equal(own.value[:, :, :30], whole.value[:, :, :30])


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (
            lambda: policies.matched(8, queries="all"),
            "use 'prompt', 'following' or 'replay'",
        ),
        (lambda: policies.matched(8, ridge=0), "ridge must be a number from 1e-06"),
        (lambda: policies.matched(None), "a compressor needs a budget"),
        (
            lambda: policies.after_prefill(policies.matched(8), then=policies.h2o(8, merge=policies.d2o())),
            "leaves slots of different weights",
        ),
    ],
)
def test_refused_with_the_reason(made, match):
    with pytest.raises(PolicyError, match=match):
        made()


def test_whole_steps_are_refused():
    case = layers.Case(layers.random_streams([0], 36, heads=(4, 2), dim=64), np.array([24]), np.array([36]))
    lowered = lower(
        CacheSpec(policies.matched(8)), layers.config(case), Sizes(1, 24, 24, 24, 12, None, False), case.prompts,
        implementation="pallas_tpu", platform="tpu",
    )  # fmt: skip
    ((group,),) = lowered.layout.decode
    assert group.step_implementation is None and any("a merge" in reason for reason in group.reasons)
    assert group.attn_implementation == "pallas_tpu"
