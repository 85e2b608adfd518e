"""Measures of a policy against the reference's whole attention matrices, its own and the full cache's."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies, selection, storage
from kvjax.analysis import compare, scan
from kvjax.cache import CacheSpec, KVState
from kvjax.cache.empty import empty_layers
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import as_spec
from kvjax.errors import InputError, PolicyError
from kvjax.models.parameters import parameter_shapes
from tests import examples, reference
from tests.analysis.dense import Dense, dense, full, projected, top
from tests.tiny import Tiny, random_tokens, tiny

PROMPTS, LENGTHS = np.array([20, 12]), np.array([44, 27])
TOKENS = random_tokens(2, 44, seed=3)
# No token twice in a prompt: equal tokens have equal key norms in layer 0, and rounding would settle such ties.
TOKENS[:, :20] = [np.random.default_rng(row).permutation(64)[:20] for row in range(2)]

COMPARED = {
    "h2o": {"budget": 8},
    "h2o-masked": {"name": "h2o", "budget": 14, "variant": "masked", "recent": 8},
    "h2o-cache": {"name": "h2o", "budget": 0.5, "positions": "cache"},
    "tova": {"budget": 7},
    "snapkv": {"budget": 8, "window": 3, "kernel": 3},
}
HALF = ((1, 0), (0, 1))  # of two layers of two KV heads


def by_head(chosen: reference.policies.Policy, others: reference.policies.Policy) -> reference.policies.Policy:
    """The reference's policy whose heads are split as `HALF` says."""
    table = tuple(tuple(chosen if each else others for each in row) for row in HALF)
    statistics = {**chosen.statistics, **others.statistics}
    return dataclasses.replace(reference.policies.full(), by_head=table, statistics=statistics)


own = reference.policies
#: Split heads: the library's policy and the reference's. The second has slots that stand for several tokens.
SPLIT = {
    "split": (
        policies.split_heads(HALF, policies.h2o(8), policies.window(9, sinks=2)),
        by_head(own.h2o(8), own.window(9, sinks=2)),
    ),
    "razor": (
        policies.razor_attention(HALF, 9, sinks=2),
        by_head(own.full(), dataclasses.replace(own.window(9, sinks=3), compensates=2)),
    ),
}


def build(name: str, package: Any) -> Any:
    """A policy of the library's package, or of the reference's."""
    if name in SPLIT:
        return SPLIT[name][package is reference.policies]
    if name in COMPARED:
        return package.by_name(**({"name": name} | COMPARED[name]))
    return examples.policy(name, 8, package=package)


def model_for(heads: str, name: str) -> Tiny:
    """Returns a model with two layers for policies whose layers differ and for one other, with one layer otherwise."""
    two = name in SPLIT or name == "pyramidkv" or (heads, name) == ("gqa", "h2o")
    return tiny(heads, layers=2 if two else 1)


@functools.cache
def runs(heads: str, name: str) -> list[tuple[Dense, Dense]]:
    """For each row, the full cache's attention and the policy's."""
    own = model_for(heads, name)
    texts = [TOKENS[row, : LENGTHS[row]] for row in range(2)]
    policy = build(name, reference.policies)
    pairs = [(full(own, text), dense(own, text, policy, int(PROMPTS[row]))) for row, text in enumerate(texts)]
    assert min(run.gap for _, run in pairs) > 1e-6, "a choice of the reference is a near-tie: use another seed"
    return pairs


def queries(got: np.ndarray) -> Any:
    """(layer, row, head, t) of every measured query; every other entry must be NaN."""
    at = np.arange(got.shape[-1])
    measured = (at >= PROMPTS[:, None]) & (at < LENGTHS[:, None])
    np.testing.assert_array_equal(np.isnan(got), np.broadcast_to(~measured[:, None], got.shape))
    return np.argwhere(~np.isnan(got))


CASES = [("gqa", name) for name in (*COMPARED, *SPLIT)] + [("mha", "h2o"), ("mqa", "h2o-cache")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("heads", "name"), CASES)
def test_attention_cosine_and_miss_rate(heads, name):
    arguments = {"prompt_length": PROMPTS, "lengths": LENGTHS}
    own, policy = model_for(heads, name), build(name, policies)
    cosine = analysis.attention_cosine(own.model, TOKENS, policy, **arguments)
    missed = analysis.miss_rate(own.model, TOKENS, policy, top=6, **arguments)
    group = own.config.num_heads // own.config.num_kv_heads
    for layer, row, head, t in queries(cosine):
        one, two = runs(heads, name)[row]
        p, q = one.probability[layer, head, t], two.probability[layer, head, t]
        expected = p @ q / np.sqrt((p @ p) * (q @ q))
        np.testing.assert_allclose(cosine[layer, row, head, t], expected, atol=2e-5)
        seen = two.seen[layer, head // group, t]
        np.testing.assert_allclose(missed.mass[layer, row, head, t], p[~seen].sum(), atol=1e-5)
        heavy = top(p, one.seen[layer, head // group, t], 6)
        gone = sum(not seen[j] for j in heavy) / len(heavy)
        np.testing.assert_allclose(missed.tokens[layer, row, head, t], gone, atol=1e-6)
    assert np.nanmin(cosine) < 0.98 and np.nanmax(missed.tokens) > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("heads", "name", "importance"),
    [
        ("gqa", "h2o", "mass"), ("gqa", "h2o", "mean"), ("gqa", "snapkv", "mean"), ("gqa", "razor", "mean"),
        ("mqa", "h2o-cache", "mass"),
    ],
)  # fmt: skip
def test_jaccard(heads, name, importance):
    own = model_for(heads, name)
    got = analysis.jaccard(
        own.model, TOKENS, build(name, policies), prompt_length=PROMPTS, lengths=LENGTHS, top=5, importance=importance
    )
    group = own.config.num_heads // own.config.num_kv_heads
    for layer, row, head, t in queries(got):
        sets = []
        for run in runs(heads, name)[row]:
            m = run.probability[layer, head * group : (head + 1) * group, : t + 1].mean(axis=0)
            seen = run.seen[layer, head, : t + 1]
            score = np.full(m.shape[1], -np.inf)
            for j in np.flatnonzero(seen[t]):
                # Since the token was last shown again; one that is hidden loses what it had.
                since = max([i + 1 for i in range(j, t) if not seen[i, j]], default=j)
                terms = m[since : t + 1, j]
                score[j] = terms.sum() if importance == "mass" else terms.mean()
            sets.append(top(score, seen[t], 5))
        assert got[layer, row, head, t] == pytest.approx(len(sets[0] & sets[1]) / len(sets[0] | sets[1]))
    assert np.nanmin(got) < 0.9


def test_recurrences():
    heads, name = "gqa", "h2o"
    own, gap, threshold = model_for(heads, name), 3, 0.03
    got = analysis.recurrences(
        own.model, TOKENS, build(name, policies), prompt_length=PROMPTS, lengths=LENGTHS, gap=gap, threshold=threshold
    )
    group = own.config.num_heads // own.config.num_kv_heads
    for row, (first, second) in enumerate(runs(heads, name)):
        for layer, head in np.ndindex(own.config.num_layers, own.config.num_kv_heads):
            paid = first.probability[layer, head * group : (head + 1) * group]
            last = np.arange(LENGTHS[row])
            for t in range(PROMPTS[row], LENGTHS[row]):
                attended = (paid[:, t] >= threshold).any(axis=0) & (last >= PROMPTS[row]) & (np.arange(len(last)) <= t)
                again = attended & (t - last > gap)
                lost, mean = again & ~second.seen[layer, head, t], paid[:, t].mean(axis=0)
                expected = again.sum(), lost.sum(), mean[again].sum(), mean[lost].sum()
                np.testing.assert_allclose([x[layer, row, head, t] for x in got], expected, atol=1e-5)
                last[attended] = t
    queries(got.tokens)
    assert np.nansum(got.tokens) > np.nansum(got.lost) > 0


@pytest.mark.sampled(0)
def test_output_error():
    """Against float64 attention over the slots that a prompt leaves, with their weights and values."""
    own, prompt, length = tiny("gqa", layers=2), 30, 44
    made = {}
    for name, policy in {"window": policies.window(9), "matched": policies.matched(8)}.items():
        made[name] = analysis.output_error(own.model, TOKENS, policy, prompt_length=prompt)
        state = kvjax.generation.prefill.prefill(own.model, TOKENS[:, :prompt], policy, max_new_tokens=1).state
        for row, layer in np.ndindex(2, 2):
            held = state.layers[layer]
            for index, head in enumerate(dense_heads(row)[layer]):
                live = np.asarray(held.position)[row, index] >= 0
                key, value = (np.asarray(x)[row, index][live].astype(np.float64) for x in (held.key, held.value))
                weight = held.stats["log_weight"] if "log_weight" in held.stats else np.zeros(held.position.shape)
                weight = np.asarray(weight, np.float64)[row, index][live]
                squares = np.zeros((2, 2, len(head.queries[0].rotated)))  # of errors and outputs, before and after
                for t in range(length):
                    follows = slice(prompt, max(prompt, t + 1))
                    seen = slice(max(prompt, t + 1))
                    whole = attended(head.queries[t].rotated, head.key[seen], head.value[seen], 0)
                    left = attended(
                        head.queries[t].rotated, np.concatenate([key, head.key[follows]]),
                        np.concatenate([value, head.value[follows]]),
                        np.concatenate([weight, np.zeros(len(head.key[follows]))]),
                    )  # fmt: skip
                    squares[0, int(t >= prompt)] += np.sum((left - whole) ** 2, axis=1)
                    squares[1, int(t >= prompt)] += np.sum(whole**2, axis=1)
                at = slice(2 * index, 2 * index + 2)
                got = [x[layer, row, at] for x in made[name]]
                np.testing.assert_allclose(got, np.sqrt(squares[0] / squares[1]), rtol=2e-3)
    assert (made["matched"].prompt < made["window"].prompt).all()
    # Heads of which some keep everything.
    split = policies.split_heads(HALF, policies.window(9), policies.window(length))
    both = analysis.output_error(own.model, TOKENS, split, prompt_length=prompt)
    chosen = np.repeat(np.array(HALF, bool), 2, axis=1)[:, None]
    for got, one in zip(both, made["window"], strict=True):
        np.testing.assert_allclose(got, np.where(chosen, one, 0), rtol=1e-4, atol=1e-5)


@functools.cache
def dense_heads(row: int) -> list[list[reference.step.Head]]:
    return projected(tiny("gqa", layers=2), TOKENS[row])


def attended(query: np.ndarray, key: np.ndarray, value: np.ndarray, weight: Any) -> np.ndarray:
    """Returns the outputs [G, D] of queries [G, D] over keys and values [S, D] with weights [S] as logarithms."""
    logits = query @ key.T / np.sqrt(key.shape[1]) + weight
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shares @ value / shares.sum(axis=1, keepdims=True)


@pytest.mark.sampled(3)
# What stays is other tests' matter: one of every kind of eviction, and each way of hiding or splitting.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name", ["full", "window", "h2o", "tova", "scissorhands", "snapkv", "pyramidkv", "random", "h2o-masked", *SPLIT]
)
def test_retained(name):
    policy = build(name, policies)
    own = model_for("gqa", name)
    got = analysis.retained(own.model, TOKENS, policy, prompt_length=PROMPTS, lengths=LENGTHS)
    # Random priorities are the library's own, and what it keeps is asked; all others are the reference's too.
    scored = None
    if name == "random":
        scored = kvjax.log_likelihood(own.model, TOKENS, policy, prompt_length=PROMPTS, lengths=LENGTHS)
    for row, length in enumerate(LENGTHS):
        assert (got.last_seen[:, row, :, length:] == -1).all()
        for layer, head in np.ndindex(own.config.num_layers, own.config.num_kv_heads):
            last = got.last_seen[layer, row, head, :length]
            if scored is None:
                seen = runs("gqa", name)[row][1].seen[layer, head]
                np.testing.assert_array_equal(last, [max(np.flatnonzero(seen[:, j])) for j in range(length)])
            else:
                held = np.asarray(scored.state.layers[layer].position)[row, head]
                assert (last[held[held >= 0]] == length - 1).all()
    assert (got.last_seen[:, 0, :, :44] == 43).all() == (name == "full")


@pytest.mark.sampled(0)
@pytest.mark.thorough
def test_a_policy_with_room_for_everything_misses_nothing():
    arguments = {"prompt_length": PROMPTS, "lengths": LENGTHS}
    for name in ("h2o", "tova"):
        policy = policies.by_name(name, budget=44)
        model = tiny(layers=1).model
        cosine = analysis.attention_cosine(model, TOKENS, policy, **arguments)
        np.testing.assert_allclose(cosine[~np.isnan(cosine)], 1, atol=1e-5)
        missed = analysis.miss_rate(model, TOKENS, policy, top=6, **arguments)
        assert np.nanmax(missed.tokens) == np.nanmax(missed.mass) == 0
        assert np.nanmin(analysis.jaccard(model, TOKENS, policy, top=5, **arguments)) == 1


@pytest.mark.sampled(0)
def test_slots_in_a_code_and_slots_that_are_not_read():
    """Rows are those of what attention saw: decoded keys, and the slots that a selection chose."""
    arguments = {"prompt_length": PROMPTS, "lengths": LENGTHS}
    mha = model_for("mha", "full")
    coded = CacheSpec(policies.full(), storage=storage.int8())
    cosine = analysis.attention_cosine(mha.model, TOKENS, coded, **arguments)
    assert 0.999 < np.nanmin(cosine) < 1 - 1e-6
    assert np.nanmax(analysis.miss_rate(mha.model, TOKENS, coded, top=6, **arguments).mass) == 0
    chosen = CacheSpec(policies.full(), selection=selection.optimal(6))
    missed = analysis.miss_rate(mha.model, TOKENS, chosen, top=6, **arguments)
    # In the only layer both runs have the same queries and keys.
    assert np.nanmax(missed.tokens) == 0
    for _, row, head, t in queries(missed.mass):
        p = runs("mha", "full")[row][0].probability[0, head, t]
        expected = np.sort(p[:t])[:-6].sum()
        np.testing.assert_allclose(missed.mass[0, row, head, t], expected, atol=1e-5)


@pytest.mark.sampled(0)
def test_texts_of_many_lengths_share_their_programs():
    arguments = {"prompt_length": 20, "top": 5}
    policy = policies.h2o(budget=9)
    analysis.jaccard(tiny(layers=1).model, TOKENS, policy, **arguments)
    analysis.keys_for_mass(tiny(layers=1).model, TOKENS)
    programs = scan.scan_steps._cache_size(), scan.scan_tiles._cache_size()
    analysis.jaccard(tiny(layers=1).model, TOKENS[:, :39], policy, **arguments)
    analysis.keys_for_mass(tiny(layers=1).model, TOKENS[:, :39])
    assert (scan.scan_steps._cache_size(), scan.scan_tiles._cache_size()) == programs


@pytest.mark.sampled(0)
def test_a_text_of_several_calls():
    """`STEPS` steps are one call; what is carried and what each query leaves goes on."""
    policy = policies.window(budget=9)
    arguments = {"prompt_length": PROMPTS, "lengths": LENGTHS}
    one = analysis.retained(tiny(layers=1).model, TOKENS, policy, **arguments).last_seen
    cosine = analysis.attention_cosine(tiny(layers=1).model, TOKENS, policy, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "STEPS", 10)
        scan.scan_steps.clear_cache()
        np.testing.assert_array_equal(
            analysis.retained(tiny(layers=1).model, TOKENS, policy, **arguments).last_seen, one
        )
        np.testing.assert_array_equal(
            analysis.attention_cosine(tiny(layers=1).model, TOKENS, policy, **arguments), cosine
        )
    scan.scan_steps.clear_cache()


@pytest.mark.thorough
def test_memory_is_linear():
    config = tiny(layers=1).model.config

    def temporary(width):
        sizes = Sizes(
            rows=1, prompt=128, budget_prompt=128, shortest=128, following=width - 128, block=None, rounded=False
        )
        layouts = [
            lower(as_spec(policy), config, sizes, np.array([128]), implementation="xla").layout
            for policy in (compare.COUNTING, policies.h2o(budget=256))
        ]
        ints = jax.ShapeDtypeStruct((1,), jnp.int32)

        def state(phase):
            layers = empty_layers(phase, 1, config.num_kv_heads, config.head_dim, jnp.float32)
            budget = tuple(
                tuple(jnp.zeros((1,), jnp.int32) if group.has_budget else None for group in layer) for layer in phase
            )
            zero = jnp.zeros((1,), jnp.int32)
            return KVState(layers, zero, prompt=zero, total=zero, budget=budget)

        phases = tuple(layout.decode for layout in layouts)
        states = jax.eval_shape(lambda: tuple(state(phase) for phase in phases))
        line = jax.ShapeDtypeStruct((1, config.num_kv_heads, 1, width), jnp.float32)
        args = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), bool))
        lowered = scan.scan_steps.lower(
            parameter_shapes(config), states, (((line, line),) * 2,) * config.num_layers,
            jax.ShapeDtypeStruct((1, width), jnp.int32), ints, args, config=config, phases=phases,
            step=compare._similarity,
        )  # fmt: skip
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 4.5 * temporary(4096)


def test_what_cannot_work_is_refused():
    model, policy = tiny().model, policies.h2o(budget=8)
    with pytest.raises(InputError, match="leaves no query to measure: the longest row has 44 tokens"):
        analysis.retained(model, TOKENS, policy, prompt_length=44)
    with pytest.raises(InputError, match="top must be a whole number of at least 1; got 0"):
        analysis.miss_rate(model, TOKENS, policy, prompt_length=20, top=0)
    with pytest.raises(InputError, match="gap must be a whole number of at least 1; got 0"):
        analysis.recurrences(model, TOKENS, policy, prompt_length=20, gap=0)
    with pytest.raises(InputError, match="prompt_length=44 leaves no query to measure: the rows have 44 tokens"):
        analysis.output_error(model, TOKENS, policy, prompt_length=44)
    with pytest.raises(InputError, match="does not hold exact keys at the positions of the text"):
        analysis.output_error(model, TOKENS, CacheSpec(policy, storage.int8()), prompt_length=20)
    with pytest.raises(InputError, match="importance must be 'mass' or 'mean'; got 'last'"):
        analysis.jaccard(model, TOKENS, policy, prompt_length=20, top=5, importance="last")
    with pytest.raises(PolicyError, match="is not a policy"):
        analysis.attention_cosine(model, TOKENS, "h2o", prompt_length=20)
    with pytest.raises(PolicyError, match="score whole texts"):
        analysis.retained(model, TOKENS, policies.h2o(budget=8, variant="global"), prompt_length=20)
