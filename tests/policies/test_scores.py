"""Scores of single slots against the worked examples, and against the reference on random keys and values."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.errors import PolicyError
from kvjax.numerics import recurrence, statistics
from kvjax.numerics.rope import Rope
from kvjax.planning.roofline import average_slots
from kvjax.policies.compactor import noncausal_mass
from kvjax.policies.components import KeyFrame
from kvjax.policies.leverage import leverage_scores
from kvjax.policies.pools import protecting
from kvjax.policies.query_window import redundancy
from kvjax.policies.row_memory import Queries
from kvjax.policies.vase import pooled_attention
from tests import layers
from tests.reference import scores as reference
from tests.tiny import tiny

CASE = layers.Case(layers.random_streams([0], 27), prompts=np.array([20]), ends=np.array([27]), rope=None)
CASES = {
    "expected_attention": (24, 25, 26),
    "redundancy": (36,),
    "rkv_attention": (37,),
    "gkv_attention": (44,),
    "caote": range(27, 33),
    "lagkv": (34, 35),
    "leverage": (41, 42),
    "noncausal_mass": (43,),
    "cur": (45,),
    "vase": range(46, 50),
    "lazy_score": (38,),
    "lazy_statistic": (39,),
}


def view_of(position, key, value, budget=0):
    """A view of one head: position [S], key and value [S, D]."""
    key, value = (None if x is None else jnp.asarray(x, jnp.float32)[None, None] for x in (key, value))
    row = jnp.full(1, budget, jnp.int32)
    newest = jnp.full(1, int(np.max(position)), jnp.int32)
    positions = jnp.asarray(position, jnp.int32)[None, None]
    return policies.View(positions, key, value, newest, row, row, 0, True, None, KeyFrame())


class Scored(policies.Importance):
    """Scores that are given."""

    needs = frozenset()

    def __init__(self, score):
        self.given = jnp.asarray(score, jnp.float32)[None, None]

    def score(self, stats, view):
        return self.given


@pytest.fixture(scope="module")
def worked(shared_data):
    return np.load(shared_data / "examples" / "methods_cases.npz")


def expected_attention(arguments, given, view):
    """The score [S] of a worked case, for queries that come in two blocks."""
    sinks, query = arguments["sinks"], jnp.asarray(given["query_unrotated"], jnp.float32)[None, None]
    moments, rope = policies.QueryMoments(sinks), Rope(dim=query.shape[-1])
    position = sinks + jnp.arange(query.shape[3])[None]
    memory = moments.empty((1, 1, query.shape[2]), query.shape[-1])
    for part in (slice(0, 30), slice(30, None)):
        memory = moments.update(memory, Queries(query[:, :, :, part], query[:, :, :, part], position[:, part]))
    view = view._replace(
        newest=jnp.full(1, arguments["seen"] - 1, jnp.int32), frame=KeyFrame(True, rope, rope.frequencies(view.prompt)),
        memory={moments.name: memory}, scale=query.shape[-1] ** -0.5,
    )  # fmt: skip
    importance = policies.ExpectedAttention(
        arguments["future"], sinks, True, arguments["value_norm"], arguments["epsilon"]
    )
    return np.asarray(importance.score({}, view))[0, 0]


def newest_left_out(name, arguments):
    """The number of newest slots that are not in the result of a case."""
    return arguments.get({"rkv_attention": "window", "gkv_attention": "window", "vase": "protected"}.get(name), 0)


def last_queries(query, first=0):
    """A view's memory of queries [G, w, D] from a position on."""
    window = query.shape[1]
    memory = {"query": jnp.asarray(query)[None, None], "position": first + jnp.arange(window)[None, None]}
    return {policies.RecentQueries(window).name: memory}


def lazy_score(arguments, given):
    """The score [S] of a worked case, of slots that are as old as the last query that counted."""
    importance, now, size = policies.Recurrence(), arguments["now"], len(given["gap"])
    position = np.minimum(np.arange(size), given["last"] + 1)
    kept = jnp.stack([jnp.asarray(given["last"] - position + 1), jnp.asarray(given["gap"])], axis=1)
    view = view_of(position, None, None)._replace(newest=jnp.full(1, now, jnp.int32))
    kept = kept.astype(jnp.float32)[None, None]
    return np.asarray(importance.score({importance.statistic.name: kept}, view))[0, 0]


def lazy_statistic(arguments, given):
    """The last hits and widest gaps [2, S] of a worked case, of blocks whose tiles are joined first."""
    statistic = statistics.recurrence(arguments["alpha"])
    probability = jnp.asarray(given["probabilities"], jnp.float32)[None, None]
    size = probability.shape[3]
    age = jnp.arange(size)[:, None] - jnp.arange(size) + 1
    kept = statistic.empty((1, 1, size))
    for start, middle, stop in ((0, 1, 7), (7, 20, 43), (43, 59, size)):
        tiles = [
            recurrence.columns(probability[:, :, part] >= statistic.threshold, age[None, None, part])
            for part in (slice(start, middle), slice(middle, stop))
        ]
        kept = statistic.merge(kept, statistic.join(*tiles), jnp.full(1, stop - start))
    last, gap = np.moveaxis(np.asarray(kept)[0, 0], -1, 0)
    return np.stack([np.arange(size) - 1 + last, gap])


def found(name, arguments, given):
    """The library's score [S] of a worked case."""
    if name.startswith("lazy"):
        return (lazy_score if name == "lazy_score" else lazy_statistic)(arguments, given)
    size = len(given.get("value", given.get("key_unrotated", given.get("key"))))
    position = given.get("position", np.arange(size))
    view = view_of(position, given.get("key", given.get("key_unrotated")), given.get("value"), size)
    match name:
        case "expected_attention":
            return expected_attention(arguments, given, view)
        case "redundancy":
            return np.asarray(redundancy(view.key, view.position, arguments["similar"]))[0, 0]
        case "rkv_attention":
            view = view._replace(memory=last_queries(given["query"]), scale=8**-0.5)
            importance = policies.Redundancy(arguments["window"], arguments["kernel"], 1.0, 0.5)
        case "gkv_attention":
            window = arguments["window"]
            view = view._replace(memory=last_queries(given["query"], size - window), scale=8**-0.5)
            return np.asarray(policies.GlobalScore(window, 0.8).attention(view))[0, 0]
        case "caote":
            importance = policies.OutputChange(Scored(given["score"]), arguments["fast"])
        case "lagkv":
            importance = policies.LagRelative(arguments["lag"], arguments["sinks"])
        case "noncausal_mass":
            # Chunks of the case; the last is filled.
            more = -size % arguments["chunk"]
            query = np.pad(given["query"], ((0, 0), (0, more), (0, 0))).reshape(1, 1, 2, -1, arguments["chunk"], 8)
            key = np.pad(given["key"], ((0, more), (0, 0))).reshape(1, 1, -1, arguments["chunk"], 8)
            counted = (np.arange(size + more) < size).reshape(key.shape[:-1])
            chunks = noncausal_mass(*map(jnp.asarray, (query, key, counted)), 8**-0.5)
            return np.asarray(chunks).ravel()[:size]
        case "leverage" if "sketch" in given:
            sketch = jnp.asarray(given["sketch"], jnp.float32)
            return np.asarray(leverage_scores(view.key, view.live, arguments["ridge"], sketch))[0, 0]
        case "leverage":
            importance = policies.Leverage(arguments["ridge"])
        case "cur":
            importance = policies.KeyValueShare(arguments["block"])
        case "vase":
            window = arguments["protected"]
            view = view._replace(memory=last_queries(given["query"]), scale=8**-0.5)
            if arguments["what"] == "a":
                return np.asarray(pooled_attention(view, window, arguments["kernel"]))[0, 0]
            newest = policies.protect_newest(window)
            scope = policies.LargestValues(arguments["large"], arguments["measure"], newest, arguments["sinks"])
            return np.asarray(scope.protected({}, view))[0, 0].astype(float)
    return np.asarray(importance.score({}, view))[0, 0]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_worked_scores(worked, name, case):
    about = json.loads(bytes(worked["cases"]))[case]
    assert about["name"] == name
    given = {each: worked[f"{case}_in_{each}"] for each in about["inputs"]}
    expected = worked[f"{case}_out"]
    if name == "expected_attention":
        # The first slots are left out there.
        expected = np.concatenate([np.full(about["arguments"]["sinks"], np.inf), expected])
    # The newest slots are left out of some.
    if left_out := newest_left_out(name, about["arguments"]):
        expected = np.concatenate([expected, np.full(left_out, np.inf)])
    # Protected slots are +inf there; here the scope protects them.
    open_slots = np.isfinite(expected)
    got, expected = found(name, about["arguments"], given)[open_slots], expected[open_slots]
    if name == "lagkv" and about["arguments"]["lag"] == 60:
        # With fewer than two parts only the order counts.
        got, expected = np.argsort(got), np.argsort(expected)
    # The case's leverage is before rounding.
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-5 if name == "leverage" else 2e-6)


def test_attention_of_a_layer_with_a_sliding_window_and_a_soft_cap():
    """G-KV looks at what the layer's own queries pay the slots that they see."""
    rng = np.random.default_rng(4)
    size, window, cap, sees = 20, 3, 1.5, 9
    key, query = rng.normal(size=(size, 6)), 2 * rng.normal(size=(2, window, 6))
    view = view_of(np.arange(size), key, key)._replace(
        memory=last_queries(np.float32(query), size - window), scale=0.5, soft_cap=cap, window=sees
    )
    paid = np.zeros((2, window, size))
    for head, each in np.ndindex(2, window):
        own = slice(size - window + each - sees + 1, size - window + each + 1)
        weights = np.exp(cap * np.tanh(0.5 * key[own] @ query[head, each] / cap))
        paid[head, each, own] = weights / weights.sum()
    expected = paid.max(axis=0).mean(axis=0)[:-window]
    got = np.asarray(policies.GlobalScore(window, 0.8).attention(view))[0, 0]
    np.testing.assert_allclose(got[:-window], expected / expected.max(), rtol=1e-5)
    assert not got[-window:].any()


def exact_draws(weights, number):
    """The law of the first `number` of a draw without replacement: tuples of indices -> probability."""
    law = {(): 1.0}
    for _ in range(number):
        law = {
            (*path, each): chance * weights[each] / (sum(weights) - sum(weights[i] for i in path))
            for path, chance in law.items()
            for each in range(len(weights))
            if each not in path
        }
    return law


def test_slots_are_drawn_without_replacement_in_proportion_to_attention():
    """The two best of four slots, in rows that have seen different numbers of tokens."""
    rows, window, dim = 20_000, 2, 4
    rng = np.random.default_rng(0)
    key, query = rng.normal(size=(6, dim)), rng.normal(size=(2, window, dim))
    importance = policies.SampledAttention(window, 1, seed=3)
    start = jnp.arange(rows, dtype=jnp.int32)
    view = view_of(np.arange(6), key, key)._replace(
        position=start[:, None, None] + jnp.arange(6, dtype=jnp.int32), newest=start + 5, scale=1.0,
        key=jnp.broadcast_to(jnp.asarray(key, jnp.float32), (rows, 1, 6, dim)),
        memory={
            name: {part: jnp.broadcast_to(x, (rows, *x.shape[1:])) for part, x in held.items()}
            for name, held in last_queries(np.float32(query)).items()
        },
    )  # fmt: skip
    best = np.argsort(-np.asarray(importance.score({}, view))[:, 0, :4], axis=1)[:, :2]
    weights = np.asarray(pooled_attention(view, window, 1))[0, 0, :4].astype(float)
    for path, chance in exact_draws(weights, 2).items():
        share = np.mean((best == path).all(axis=1))
        assert abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / rows), (path, share, chance)


def test_a_draw_depends_on_neither_the_place_of_a_row_nor_the_other_heads():
    """But on the seed, the layer, the head, the position and the number of tokens."""
    rows, window, size = 3, 2, 9
    older = size - window

    def noise(heads, *, seed=3, layer=0, more=0, rows=rows, slots=0):
        """[B, K, S] by position: queries of zeros pay all slots alike."""
        shape = (rows, len(heads), size)
        position = np.random.default_rng(slots).permuted(np.broadcast_to(np.arange(size), shape), axis=2)
        key, row = jnp.ones((*shape, 4)), jnp.full(rows, size - 1 + more, jnp.int32)
        memory = {
            "query": jnp.zeros((*shape[:2], 1, window, 4)),
            "position": jnp.zeros((*shape[:2], window), jnp.int32),
        }
        view = policies.View(
            jnp.asarray(position, jnp.int32), key, key, row, row, row, layer, True, heads, KeyFrame(),
            {policies.RecentQueries(window).name: memory},
        )  # fmt: skip
        score = np.asarray(policies.SampledAttention(window, 1, seed).score({}, view))
        return np.take_along_axis(score, np.argsort(position, axis=2), axis=2)[:, :, :older]

    whole = noise((0, 1, 2, 3))
    np.testing.assert_array_equal(whole, np.broadcast_to(whole[:1], whole.shape))
    np.testing.assert_array_equal(noise((1, 3), rows=1, slots=1), whole[:1, [1, 3]])
    flat = whole[0].ravel()
    assert len(np.unique(flat)) == len(flat)
    for other in (noise((0, 1, 2, 3), seed=4), noise((0, 1, 2, 3), layer=1), noise((0, 1, 2, 3), more=window)):
        assert not np.isclose(other[0] - other[0, 0, 0], whole[0] - whole[0, 0, 0]).all(axis=1).any()


@pytest.mark.parametrize("layer", [0, 3])
def test_leverage_of_a_sketch(layer):
    """The weight `blend` multiplies the leverage of keys in Gaussian directions, which each layer draws for itself."""
    rng, memory = np.random.default_rng(layer), policies.PromptQueries(2**31 - 1)
    key, value = rng.normal(size=(2, 30, 6))
    query = jnp.asarray(rng.normal(size=(1, 1, 2, 30, 6)), jnp.float32)
    row = jnp.full(1, 30, jnp.int32)
    view = view_of(np.arange(30), key, value)._replace(
        layer=jnp.int32(layer), prompt=row, budget=row // 2, memory={memory.name: {"query": query}}
    )
    one, two = (
        np.asarray(policies.LeverageAndMass(0, 0, 7, blend, 0.1, sketch=3, seed=5).score({}, view))[0, 0]
        for blend in (1.0, 2.0)
    )
    drawn = jax.random.normal(jax.random.fold_in(jax.random.key(5), layer), (6, 3)) / 3**0.5
    expected = reference.leverage_of((key - key.mean(axis=0)) @ np.asarray(drawn), 0.1)
    np.testing.assert_allclose(two - one, (expected - expected.mean()) / expected.std(ddof=1), atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("live", [3, 11, 37, 40])
def test_scores_of_slots_in_any_order(live):
    """Empty slots and the order of slots change nothing."""
    rng = np.random.default_rng(live)
    size, dim = 40, 6
    key, value = rng.normal(size=(2, size, dim))
    position = np.full(size, -1)
    slots = rng.permutation(size)[:live]
    position[slots] = np.sort(rng.choice(200, live, replace=False))[rng.permutation(live)]
    order = slots[np.argsort(position[slots])]
    view = view_of(position, key, value, live)
    for importance, expected in (
        (policies.LagRelative(5, 2), reference.lag_relative(key[order], value[order], 5, 2)),
        (policies.KeyValueShare(4), reference.key_value_share(key[order], value[order], 4)),
        (policies.Leverage(0.1), reference.leverage_of(key[order], 0.1)),
    ):
        got = np.asarray(importance.score({}, view))[0, 0][order]
        if isinstance(importance, policies.LagRelative) and live >= 12:
            got, expected = got[2:], expected[2:]  # the scope protects the first
        np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: policies.caote(policies.lagkv(8)), "lagkv.*is not an amount of attention"),
        (lambda: policies.caote(policies.knorm(8)), "knorm.*is not an amount of attention"),
        (lambda: policies.caote(policies.tova(8)), "must all hold the same positions"),
        (lambda: policies.caote(policies.full()), "keeps every token"),
        (lambda: policies.value_aware(policies.h2o(8), large=5), "protects 9 slots, more than its budget of 8"),
        (lambda: policies.value_aware(policies.h2o(8), measure="max"), "measure='max' is not valid"),
        (lambda: policies.phases(policies.h2o(8), policies.h2o(8)), "give a compressor such as snapkv"),
        (lambda: policies.phases(policies.full(), policies.snapkv(64)), "evicts token by token while decoding"),
        (lambda: policies.phases(policies.full(), policies.phases(policies.full(), policies.h2o(8))), "token by token"),
        (lambda: policies.phases(policies.full(positions="cache"), policies.h2o(8)), r"phases\(full, h2o\): positions"),
        (lambda: policies.phases(policies.snapkv(64), policies.tova(8)), r"phases\(snapkv, tova\): its heads"),
        (lambda: policies.chunkkv(policies.h2o(8)), r"chunkkv\(h2o\): it is not a compressor"),
        (lambda: policies.chunkkv(policies.lagkv(8)), "lagkv.*only orders the slots"),
        (lambda: policies.chunkkv(policies.adakv(policies.snapkv(64))), "is not a compressor that gives each head"),
        (lambda: policies.chunkkv(policies.value_aware(policies.snapkv(64))), "can protect other slots in each head"),
        (lambda: policies.chunkkv(policies.knorm(8), chunk=0), "chunk must be a whole number of at least 1"),
        (lambda: policies.adakv(policies.chunkkv(policies.knorm(8))), "must all hold the same positions"),
        (lambda: policies.h2o(8, every=0), "every must be a whole number of at least 1"),
        (lambda: policies.by_page(policies.h2o(64, every=4), page=8), "pages are evicted whole"),
        (lambda: policies.by_page(policies.gkv(64, every=1), page=8), "remembers evictions of single slots"),
        (lambda: policies.gkv(8, every=2, window=9), "protects 9 slots, more than its budget of 8"),
        (lambda: policies.vase(8, every=5, large=4), "protects 9 slots, more than its budget of 8"),
        (lambda: policies.vase(8, every=2, kernel=4), "kernel=4 is even"),
        (lambda: policies.h2o(9, variant="ring", every=2), "defined token by token"),
        (lambda: policies.adakv(policies.lagkv(8, every=4)), "is not a compressor"),
        (lambda: policies.lagkv(8, lag=0), "lag must be a whole number of at least 1"),
        (lambda: policies.compactor(8), "protects 12 slots, more than its budget of 8"),
        (lambda: policies.compactor(16, chunk=0), "chunk must be a whole number of at least 1"),
        (lambda: policies.compactor(16, blend=-1), "blend must be a number from 0"),
        (lambda: policies.caote(policies.compactor(16)), "compactor.*is not an amount of attention"),
        (lambda: policies.leverage(8, ridge=0), "ridge must be a number from"),
    ],
)
def test_what_cannot_work_is_refused(made, match):
    with pytest.raises(PolicyError, match=match):
        made()


def test_between_two_rounds_a_head_holds_more_than_its_budget():
    """From b to b + m - 1 slots after each step, and b again after each m steps."""
    run = layers.run(policies.h2o(8, every=3), CASE)
    sizes = [len(run.live(step, 0, 0)) for step in range(CASE.room[1] + 1)]
    assert sizes == [8, 9, 10, 8, 9, 10, 8, 9]


def test_arrays_have_room_for_a_round_and_no_more():
    """b + m - 1 slots and one for the step's own token."""
    tokens = np.arange(40)[None] % 7
    result = kvjax.generate(tiny("gqa").model, tokens, policies.h2o(16, every=5), max_new_tokens=8)
    assert {layer.position.shape[2] for layer in result.state.layers} == {16 + 5}


def test_the_prompt_is_kept_beside_the_budget():
    policy = policies.phases(policies.full(), policies.random(4, every=2))
    run = layers.run(policy, CASE)
    held = run.live(CASE.room[1], 0, 0)
    prompt = int(CASE.prompts[0])
    assert held[:prompt] == list(range(prompt)) and 4 <= len(held) - prompt <= 5


@pytest.mark.parametrize(("residual", "exact"), [(3, False), (6, False), (7, True)])
def test_tokens_older_than_the_residual_are_coded_between_evictions(residual, exact):
    """A head of 3 slots holds up to 7, of which only the newest are exact."""
    spec = kvjax.CacheSpec(policies.local_only(3, every=5), storage.int4(residual=residual))
    (group,) = layers.lowered(spec, CASE).layout.decode[-1]
    assert group.storage.exact == exact and sum(group.slots) == 7 + exact


@pytest.mark.parametrize("every", [1, 3])
def test_a_prompt_that_a_sliding_window_has_left_is_not_kept(every):
    """After step s, 7 - s positions of the prompt are in a window of 8."""
    run = layers.run(policies.phases(policies.full(), policies.random(3, every=every)), CASE._replace(window=8))
    prompt = int(CASE.prompts[0])
    for step in range(1, CASE.room[1] + 1):
        held = run.live(step, 0, 0)
        in_window = [each for each in range(prompt) if each > prompt - 1 + step - 8]
        assert set(in_window) <= set(held) and len(held) < len(in_window) + 3 + every
    assert not run.layout.decode[-1][0].evicts_one


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "policy",
    [
        policies.h2o(8, every=3),
        policies.h2o(19, every=3),
        policies.phases(policies.full(), policies.random(4, every=2)),
        policies.phases(policies.knorm(9), policies.random(4)),
    ],
)
def test_the_roofline_counts_what_a_step_holds(policy):
    run, steps = layers.run(policy, CASE), CASE.room[1]
    counted = average_slots(layers.config(CASE), layers.lowered(policy, CASE), int(CASE.prompts[0]), steps + 1)
    assert counted[0].held == np.mean([len(run.live(step, 0, 0)) + 1 for step in range(steps)])


def test_slots_that_a_selection_always_reads_are_protected_beside_a_prompt():
    made = policies.phases(policies.full(), policies.lru(16))
    assert protecting(made.decode, 2, 3).protects(16) == protecting(policies.lru(16), 2, 3).protects(16) > 8
