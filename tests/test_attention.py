"""Attention in XLA against a naive n × S computation in float64; and over parts of the slots, against the whole."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention, products
from kvjax.attention import Attended
from kvjax.errors import ConfigError, PolicyError
from kvjax.kernels.coded import Coded
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.numerics.statistics import ABOVE, COUNT, EXACT, LAST, MASS, MASS_SQ, Statistic, decayed, recurrence
from kvjax.products import native
from kvjax.storage import Fp16
from tests.kernels import cases
from tests.kernels.cases import Case

DECAYED = decayed(0.9)
PEAK, PEAK_SQ = Statistic("peak", accumulate="max"), Statistic("peak_sq", "square", "max")
ONCE_ABOVE = Statistic("once_above", "above", "max")
#: Statistics of queries that see a slot, whatever their attention.
SEEN, NOW = Statistic("seen", "one", "max"), Statistic("now", "one", "replace")
SEEN_DECAYED = Statistic("seen_decayed", "one", "decay", gamma=0.9)
EVERY = frozenset(
    {MASS, MASS_SQ, COUNT, ABOVE, LAST, DECAYED, PEAK, PEAK_SQ, ONCE_ABOVE, SEEN, NOW, SEEN_DECAYED}
)  # fmt: skip
BATCH, DIM = 3, 8


@pytest.fixture
def machine():
    return 2e-6


class TestDecode(cases.DecodeCases):
    implementation = "xla"


class TestPrefill(cases.PrefillCases):
    implementation = "xla"

    def small_tiles(self, monkeypatch, case):
        monkeypatch.setattr(prefill_xla, "TILE_BYTES", 1 << 16)


def naive(
    query, key, value, query_position, key_position, *, window=None, group_reduce="mean", gamma=0.9,
    scale=DIM**-0.5, soft_cap=None, offset=None,
):  # fmt: skip
    """Loops over rows, heads and queries; POLICIES.md, "Column statistics", word by word."""
    batch, heads, n, dim = query.shape
    kv_heads, size = key.shape[1:3]
    group = heads // kv_heads
    output = np.zeros((batch, heads, n, dim))
    columns = {s.name: np.zeros((batch, kv_heads, size)) for s in EVERY}
    nearest = np.inf  # how close any m came to the uniform share, where float32 may decide otherwise
    for b in range(batch):
        for g in range(kv_heads):
            for i in range(n):
                p = query_position[b, i]
                if p < 0:
                    continue
                sees = (key_position[b, g] >= 0) & (key_position[b, g] <= p)
                if window is not None:
                    sees &= key_position[b, g] > p - window
                weights = np.zeros((group, size))
                for h in range(group):
                    score = key[b, g, sees].astype(np.float64) @ query[b, g * group + h, i].astype(np.float64)
                    score = score * scale + (0 if offset is None else offset[b, g, h, i])
                    score = score if soft_cap is None else soft_cap * np.tanh(score / soft_cap)
                    score = np.exp(score - score.max())
                    weights[h, sees] = score / score.sum()
                    output[b, g * group + h, i] = weights[h] @ value[b, g].astype(np.float64)
                m = weights.mean(axis=0) if group_reduce == "mean" else weights.max(axis=0)
                share = 1 / sees.sum()
                nearest = min([nearest, *np.abs(m[sees] - share)]) if sees.sum() > 1 else nearest
                for name, new in {
                    "mass": columns["mass"][b, g] + m,
                    "mass_sq": columns["mass_sq"][b, g] + m**2,
                    "count": columns["count"][b, g] + sees,
                    "above": columns["above"][b, g] + (sees & (m >= share)),
                    "last": m,
                    DECAYED.name: gamma * columns[DECAYED.name][b, g] + (1 - gamma) * m,
                    "peak": np.maximum(columns["peak"][b, g], m),
                    "peak_sq": np.maximum(columns["peak_sq"][b, g], m**2),
                    "once_above": np.maximum(columns["once_above"][b, g], sees & (m >= share)),
                    "seen": np.maximum(columns["seen"][b, g], sees),
                    "now": sees,
                    "seen_decayed": gamma * columns["seen_decayed"][b, g] + (1 - gamma) * sees,
                }.items():
                    columns[name][b, g] = new
    return output, columns, nearest


def arrays(heads: int, kv_heads: int, n: int, before: int, *, seed: int = 0, queries=(None, None, None)):
    """A block of n tokens, some of them padding, behind `before` older positions of which half survive, in any order.

    Returns query, key, value, query_position [B, n], key_position [B, K, S] with S = before + n.
    """
    rng = np.random.default_rng(seed)
    size = before + n
    query = rng.standard_normal((BATCH, heads, n, DIM)).astype(np.float32) * 2
    key, value = (rng.standard_normal((BATCH, kv_heads, size, DIM)).astype(np.float32) for _ in range(2))
    real = np.array([n if q is None else q for q in queries])
    query_position = np.where(np.arange(n) < real[:, None], before + np.arange(n), -1).astype(np.int32)
    key_position = np.full((BATCH, kv_heads, size), -1, np.int32)
    for b in range(BATCH):
        for g in range(kv_heads):
            old = rng.choice(before, before // 2, replace=False) if before else []
            live = [*old, *query_position[b, : real[b]]]
            key_position[b, g, rng.permutation(size)[: len(live)]] = live
    return query, key, value, query_position, key_position


def build(query, key, value, query_position, key_position, needs=EVERY, **options):
    return attention.problem(
        query, key, value, query_position=query_position, key_position=key_position, needs=needs, **options
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("window", "group_reduce", "needs", "causal", "tile"))
def _attend(*inputs, tile=None, **options):
    del tile  # a trace of its own for each TILE_BYTES
    output, (columns,) = attention.attend_parts([build(*inputs, **options)])
    return attention.ungroup(output), columns


def assert_close(got, expected) -> None:
    output, got_columns = got
    golden, columns, nearest = expected
    assert nearest > 1e-6, "a probability is too close to the uniform share: use another seed"
    np.testing.assert_allclose(output, golden, atol=2e-6)
    assert set(got_columns) == set(columns)
    for name, column in columns.items():
        assert got_columns[name].dtype == jnp.float32
        np.testing.assert_allclose(got_columns[name], column, rtol=2e-6, atol=2e-6, err_msg=name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "before", "window", "group_reduce", "tile"),
    [
        (4, 4, 1, 30, None, "mean", None),
        (4, 2, 1, 30, 12, "max", None),
        (4, 1, 1, 0, None, "mean", None),
        (4, 2, 16, 20, None, "mean", None),
        (4, 2, 13, 20, None, "max", 8),
        (4, 1, 21, 31, 9, "mean", 4),
        (4, 4, 37, 0, 5, "max", 16),
        (6, 2, 7, 40, None, "mean", 1),
    ],
)
def test_output_and_every_statistic(heads, kv_heads, n, before, window, group_reduce, tile, monkeypatch):
    """Tiles that do and do not divide the block, holes, padding at a row's end, and a row that is all padding."""
    if tile:
        monkeypatch.setattr(prefill_xla, "TILE_BYTES", 4 * BATCH * heads * (before + n) * tile)
        assert prefill_xla.tile_rows(BATCH * heads * (before + n), n) == tile
    inputs = arrays(heads, kv_heads, n, before, queries=(None, (n + 1) // 2, 0))
    options = {"window": window, "group_reduce": group_reduce}
    assert_close(_attend(*inputs, tile=tile, **options), naive(*inputs, **options))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("n", "tile", "window"), [(23, 4, None), (23, None, 7), (30, 2, 10), (1, None, None)])
def test_a_prompt_attends_to_itself(n, tile, window, monkeypatch):
    """The path that skips the future equals the general one and the naive one, padding included."""
    monkeypatch.setattr(prefill_xla, "SEGMENTS", 3)
    if tile:
        monkeypatch.setattr(prefill_xla, "TILE_BYTES", 4 * BATCH * 4 * n * tile)
    query, key, value, query_position, _ = arrays(4, 2, n, 0, queries=(None, max(1, n // 3), max(1, n - 1)))
    key_position = np.broadcast_to(query_position[:, None], (BATCH, 2, n))
    inputs = (query, key, value, query_position, key_position)
    expected = naive(*inputs, window=window)
    for causal in (True, False):
        assert_close(_attend(*inputs, tile=tile, window=window, causal=causal), expected)


def test_merging_blocks_is_one_block():
    """Any cut of the queries gives the same statistics: sums add, maxima stay, `last` is replaced, `decayed` decays."""
    query, key, value, query_position, _ = arrays(4, 2, 32, 0)
    key_position = np.broadcast_to(query_position[:, None], (BATCH, 2, 32))
    _, columns, _ = naive(query, key, value, query_position, key_position)
    for cut in (1, 8, 16):
        stats = {s: jnp.zeros((BATCH, 2, 32)) for s in EVERY}
        for start in range(0, 32, cut):
            block = slice(start, start + cut)
            inputs = query[:, :, block], key, value, query_position[:, block], key_position
            _, seen = _attend(*inputs)
            queries = build(*inputs).num_queries
            stats = {s: s.merge(old, seen[s.name], queries) for s, old in stats.items()}
        for s, stat in stats.items():
            np.testing.assert_allclose(stat, columns[s.name], rtol=1e-5, atol=2e-6, err_msg=f"{s.name} {cut=}")


@pytest.mark.parametrize("group_reduce", ["mean", "max"])
def test_tiles_of_queries_give_the_hits_and_gaps_of_single_queries(group_reduce, monkeypatch):
    """In tiles that hit nothing of some slots, and in segments of a prompt that attends to itself."""
    statistic = recurrence(0.15)
    options = {"needs": frozenset({statistic}), "group_reduce": group_reduce}
    query, key, value, query_position, _ = arrays(4, 2, 23, 0, queries=(None, 9, 0))
    key_position = np.broadcast_to(query_position[:, None], (BATCH, 2, 23))
    alone = statistic.empty((BATCH, 2, 23))
    for t in range(23):
        inputs = query[:, :, t : t + 1], key, value, query_position[:, t : t + 1], key_position
        columns = _attend(*inputs, **options)[1]
        alone = statistic.merge(alone, columns[statistic.name], build(*inputs).num_queries)
    assert len(np.unique(alone[0, ..., 1])) > 4
    monkeypatch.setattr(prefill_xla, "SEGMENTS", 3)
    monkeypatch.setattr(prefill_xla, "TILE_BYTES", 4 * BATCH * 4 * 23 * 4)
    inputs = query, key, value, query_position, key_position
    for causal in (True, False):
        columns = _attend(*inputs, tile=4, causal=causal, **options)[1][statistic.name]
        assert columns.shape == (BATCH, 2, 23, 3)
        together = statistic.merge(statistic.empty((BATCH, 2, 23)), columns, build(*inputs).num_queries)
        np.testing.assert_array_equal(together, alone)


def test_a_row_without_queries_keeps_its_statistics():
    for statistic in EVERY:
        old = jnp.arange(12.0).reshape(1, 2, 6) + 1
        merged = statistic.merge(old, jnp.zeros((1, 2, 6)), jnp.zeros((1,), jnp.int32))
        np.testing.assert_array_equal(merged, old, statistic.name)


@pytest.mark.parametrize("n", [1, 24])
def test_bfloat16_reports_float32(n):
    inputs = arrays(4, 2, n, 16)
    low = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    output, columns = _attend(*low, *inputs[3:])
    assert output.dtype == jnp.bfloat16
    golden, expected, _ = naive(*(np.asarray(x, np.float32) for x in low), *inputs[3:])
    np.testing.assert_allclose(np.asarray(output, np.float32), golden, atol=0.03)
    for name in ("mass", "mass_sq", "last", DECAYED.name):
        assert columns[name].dtype == jnp.float32
        # Float32's own rounding, not bfloat16's 4e-3: scores and probabilities are never rounded.
        np.testing.assert_allclose(columns[name], expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_are_finite_and_right(causal):
    query, key, value, query_position, _ = arrays(4, 2, 12, 0, queries=(None, 5, 0))
    key_position = np.broadcast_to(query_position[:, None], (BATCH, 2, 12))
    weight = np.random.default_rng(1).standard_normal((BATCH, 4, 12, DIM)).astype(np.float32)

    def loss(query, key, value):
        output, seen = _attend(query, key, value, query_position, key_position, causal=causal, needs=frozenset({MASS}))
        return jnp.sum(output * weight) + jnp.sum(jnp.square(seen["mass"]))

    def plain(query, key, value):
        q = query.reshape(BATCH, 2, 2, 12, DIM)
        logits = jnp.einsum("bkgtd,bksd->bkgts", q, key) / np.float32(DIM**0.5)
        i, real = np.arange(12), query_position >= 0
        mask = (i[None, :] <= i[:, None]) & real[:, None, :] & real[:, :, None]
        p = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -1e9)) * mask[:, None, None].astype(jnp.float32)
        output = jnp.einsum("bkgts,bksd->bkgtd", p, value).reshape(BATCH, 4, 12, DIM)
        return jnp.sum(output * weight) + jnp.sum(jnp.square(p.mean(axis=2).sum(axis=2)))

    inputs = (query, key, value)
    got, expected = (jax.jit(jax.grad(f, argnums=(0, 1, 2)))(*inputs) for f in (loss, plain))
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=2e-5)
        assert not np.asarray(a)[2].any(), "a row of padding has no gradient"


def test_only_what_is_needed_is_reported():
    inputs = arrays(4, 2, 4, 8)
    _, columns = _attend(*inputs, needs=frozenset({LAST}))
    assert set(columns) == {"last"}


@pytest.mark.parametrize("n", [1, 13])
def test_a_band_is_a_window_per_row(n):
    """The smaller of window and band holds; exempt slots are seen beyond both."""
    inputs, bands = arrays(4, 2, n, 20), jnp.array([5, 9, 40], jnp.int32)
    exempt = jnp.asarray(np.random.default_rng(2).random(inputs[4].shape) < 0.2)
    for options in ({}, {"window": 7}, {"window": 7, "exempt": exempt}):
        problem = build(*inputs, band=bands, **options)
        attended, columns = jax.jit(attention.attend_and_reduce)(problem)
        cases.assert_golden(attended.output, columns, problem, 2e-6)


@pytest.mark.parametrize("n", [1, 13])
def test_a_soft_cap_is_of_scaled_logits(n, monkeypatch):
    """Also of logits to which a number of each query is added, in one part and in two, and in tiles."""
    monkeypatch.setattr(prefill_xla, "TILE_BYTES", 4 * BATCH * 4 * (20 + n) * 4)
    inputs = arrays(4, 2, n, 20, queries=(None, (n + 1) // 2, 0))
    offset = np.random.default_rng(4).standard_normal((BATCH, 2, 2, n)).astype(np.float32)
    options = {"scale": 0.7, "soft_cap": 1.5, "offset": offset}
    whole = build(*inputs, **options)
    query, key, value, query_position, key_position = inputs
    other = build(query, key[:, :, 9:], value[:, :, 9:], query_position, key_position[:, :, 9:], **options)
    one, two = jax.jit(lambda *parts: (attention.attend_parts(parts[:1]), attention.attend_parts(parts[1:])))(
        whole, whole.only_slots(9), other
    )
    for output, columns in (one, two):
        assert_close((attention.ungroup(output), joined(columns, np.arange(20 + n))), naive(*inputs, **options))


# Parts of the slots


def at_hand(x):
    """An array in NumPy, whose indexing is no program to compile, unless it is traced."""
    return x if isinstance(x, jax.core.Tracer) else np.asarray(x)


def split(problem, count, seed=0):
    """The problem in `count` parts of any slots, and which slots each part has; the second part has no live slot."""
    order = np.random.default_rng(seed).permutation(problem.slots)
    cuts = np.sort(np.random.default_rng(seed + 1).choice(np.arange(1, problem.slots), count - 1, replace=False))
    chosen, parts = np.split(order, cuts), []
    if count > 1:
        dead = np.broadcast_to(np.isin(np.arange(problem.slots), chosen[1]), problem.key_position.shape)
        problem = problem.replace(key_position=np.where(dead, np.int32(-1), np.asarray(problem.key_position)))
    names = ("key", "value", "key_position", "exempt", "log_weight")
    for own in chosen:
        arrays = {name: at_hand(getattr(problem, name)) for name in names if getattr(problem, name) is not None}
        parts.append(problem.replace(causal=False, **{name: x[:, :, own] for name, x in arrays.items()}))
    return problem, parts, np.concatenate(chosen)


def joined(columns, order):
    """The columns of all parts, in the order of the whole's slots."""
    whole = {name: np.concatenate([np.asarray(part[name]) for part in columns], axis=2) for name in columns[0]}
    return {name: x[:, :, np.argsort(order)] for name, x in whole.items()}


SPLIT = [
    Case((1, 0, 1), 2, 3, 1, 60, 16, jnp.float32),
    Case((1, 1), 2, 2, 1, 60, 16, jnp.bfloat16, window=25, exempt=True, group_reduce="max"),
    Case((21, 9, 0), 2, 2, 21, 40, 16, jnp.float32, log_weight=True),
    Case((21, 21), 1, 3, 21, 40, 16, jnp.bfloat16, window=20, group_reduce="max"),
    Case((40, 17), 1, 2, 40, 0, 16, jnp.float32),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("case", "count"),
    [*((case, 2) for case in SPLIT), (SPLIT[0], 1), (SPLIT[2], 3), (SPLIT[0], 4), (SPLIT[3], 4)],
    ids=str,
)
def test_parts_are_the_whole(case, count, monkeypatch):
    """Output, log-sum-exps and every statistic, also with tiles of queries, and where a part has no live slot."""
    monkeypatch.setattr(prefill_xla, "TILE_BYTES", 4 * 8 * 6 * 60)
    whole, parts, order = split(case.given(), count, seed=count)

    @jax.jit
    def run(whole, parts):
        combined = attention.combine(*map(attention.attend, parts))
        counts = sum(map(attention.count_seen, parts)), attention.count_seen(whole)
        return *attention.attend_parts(parts), combined, attention.attend(whole), counts

    output, columns, combined, alone, (seen, seen_by_all) = run(whole, parts)
    assert output.dtype == case.dtype
    cases.assert_golden(output, joined(columns, order), whole, 2e-6 if case.dtype == jnp.float32 else 0.02)
    np.testing.assert_allclose(combined.lse, alone.lse, rtol=1e-6, atol=1e-6)
    assert combined.output.dtype == combined.lse.dtype == jnp.float32
    assert not np.isnan(combined.output).any()
    np.testing.assert_array_equal(seen, seen_by_all)
    np.testing.assert_array_equal(
        np.isneginf(combined.lse), np.repeat(np.asarray(seen)[:, :, None], case.group, axis=2) == 0
    )


@pytest.mark.parametrize("tile", [None, 4])
def test_old_slots_and_the_block_itself_are_two_parts(tile, monkeypatch):
    """As in block-wise prefill: the cache, and the block's own exact keys, which are causal."""
    monkeypatch.setattr(prefill_xla, "SEGMENTS", 3)
    if tile:
        monkeypatch.setattr(prefill_xla, "TILE_BYTES", 4 * BATCH * 4 * 16 * tile)
    inputs = list(arrays(4, 2, 16, 20, queries=(None, 5, 0)))
    rng = np.random.default_rng(3)
    old = np.stack([[np.where(rng.random(20) < 0.5, np.arange(20), -1) for _ in range(2)] for _ in range(BATCH)])
    own = np.broadcast_to(inputs[3][:, None], (BATCH, 2, 16))
    inputs[4] = np.concatenate([old, own], axis=2).astype(np.int32)
    query, key, value, query_position, key_position = inputs
    first = build(query, key[:, :, :20], value[:, :, :20], query_position, key_position[:, :, :20])
    second = build(query, key[:, :, 20:], value[:, :, 20:], query_position, key_position[:, :, 20:], causal=True)
    output, columns = jax.jit(lambda *parts: attention.attend_parts(parts))(first, second)
    assert_close((attention.ungroup(output), joined(columns, np.arange(36))), naive(*inputs))


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seen", ["all", "window", "band and exempt"])
def test_slots_in_float16_are_read_in_one_pass(n, dtype, seen, native_attention):
    """Without a copy in another dtype, and as the numbers that they hold; some slots are empty, a row has no query."""
    *given, query_position, key_position = arrays(4, 2, n, 60, queries=(None, 0, None))
    query, key, value = (jnp.asarray(x, dtype) for x in given)
    size = key.shape[2]
    options = {
        "all": {},
        "window": {"window": 20},
        "band and exempt": {"band": jnp.array([5, 9, 40]), "exempt": jnp.arange(size) < jnp.full((3, 2, 1), 4)},
    }[seen]
    coded = [
        Coded(parts=Fp16().encode(x.astype(jnp.float32), None, dtype), codec=Fp16(), dim=DIM, dtype=jnp.dtype(dtype))
        for x in (key, value)
    ]
    problem = build(query, *coded, query_position, key_position, needs=frozenset(), **options)
    program = jax.jit(attention.attend).lower(problem).compile()
    text, got = program.as_text(), program(problem)
    assert text.count(f'"{native.ATTEND}"') == 1
    assert f"f16[3,2,{size},{DIM}]" in text and f"f32[3,2,{size},{DIM}]" not in text
    products.use("fixed")
    # In the float32 of the reference, whatever the model's dtype.
    whole = [x.replace(dtype=jnp.dtype("float32")).decode() for x in coded]
    exact = build(query.astype(jnp.float32), *whole, query_position, key_position, needs=frozenset(), **options)
    expected = jax.jit(attention.attend)(exact)
    assert got.output.dtype == got.lse.dtype == jnp.float32
    np.testing.assert_allclose(got.output, expected.output, atol=3e-6)
    np.testing.assert_allclose(got.lse, expected.lse, atol=3e-6)
    assert (np.asarray(got.lse)[1] == -np.inf).all() and (np.asarray(got.output)[1] == 0).all()


def test_combine_is_associative_and_an_empty_part_is_neutral():
    problem = build(*arrays(4, 2, 5, 30, queries=(None, 3, 0)))
    _, parts, _ = split(problem, 4)
    combine = jax.jit(attention.combine)
    a, empty, c, d = jax.jit(lambda parts: [attention.attend(part) for part in parts])(parts)
    assert np.isneginf(empty.lse).all() and not np.any(empty.output)
    left, right = combine(combine(a, c), d), combine(a, combine(c, d))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), left, right)
    for neutral in (combine(a, empty), combine(empty, a), combine(a)):
        jax.tree.map(np.testing.assert_array_equal, neutral, a)
    jax.tree.map(np.testing.assert_array_equal, combine(empty, empty), empty)


@pytest.mark.parametrize("n", [1, 12])
def test_gradients_of_parts_are_those_of_the_whole(n):
    inputs = arrays(4, 2, n, 20, queries=(None, (n + 1) // 2, 0))
    whole, _, _ = split(build(*inputs, needs=frozenset({MASS, ABOVE})), 3)
    weight = np.random.default_rng(1).standard_normal((BATCH, 2, 2, n, DIM)).astype(np.float32)

    def loss(arrays, count):
        problem = whole.replace(**dict(zip(("query", "key", "value"), arrays, strict=True)))
        output, columns = attention.attend_parts(split(problem, count)[1] if count > 1 else [problem])
        masses = [jnp.sum(jnp.square(part["mass"])) for part in columns]
        return jnp.sum(output * weight) + sum(masses)

    arrays_of = (whole.query, whole.key, whole.value)
    got, expected = (jax.jit(jax.grad(functools.partial(loss, count=count)))(arrays_of) for count in (3, 1))
    for a, b in zip(got, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_a_gradient_of_parts_that_nothing_is_seen_of_is_zero():
    query, key, value, query_position, key_position = arrays(4, 2, 3, 8)
    nothing = np.full_like(key_position, -1)

    def loss(query, key, value):
        problem = build(query, key, value, query_position, nothing, needs=frozenset({MASS}))
        output, columns = attention.attend_parts([problem, problem])
        return jnp.sum(output) + jnp.sum(columns[0]["mass"])

    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(query, key, value):
        assert not np.any(gradient), "and not NaN"


def shapes(n, size, heads=8, kv_heads=4, dim=64):
    """Arrays of `build`, without values."""
    array = jax.ShapeDtypeStruct
    cache = array((1, kv_heads, size, dim), jnp.float32)
    at = array((1, n), jnp.int32), array((1, kv_heads, size), jnp.int32)
    return array((1, heads, n, dim), jnp.float32), cache, cache, *at


def test_two_parts_take_as_many_products_as_one():
    """While decoding, column sums reuse the products of `attend`: they are the same expressions."""

    def run(*inputs):
        problem = build(*inputs)
        parts = [problem.only_slots(300), problem]
        return attention.attend_parts(parts)

    text = jax.jit(run).lower(*shapes(1, 500)).compile().as_text()
    assert len(re.findall(r" dot\(", text)) == 4


@pytest.mark.parametrize("op", ["attend", "column_sums", "attend_and_reduce", "count_seen"])
def test_memory_is_linear_in_the_prompt(op, monkeypatch):
    monkeypatch.setattr(prefill_xla, "TILE_BYTES", 1 << 18)
    heads, n = 2, 2048

    def run(lse, *inputs):
        problem = build(*inputs, needs=frozenset({MASS, ABOVE}))
        return getattr(attention, op)(problem, *[lse] * (op == "column_sums"))

    lse = jax.ShapeDtypeStruct((1, heads, 1, n), jnp.float32)
    program = jax.jit(run).lower(lse, *shapes(n, n, heads, heads, 16)).compile()
    # A few tiles, and the queries cut into tiles; all scores would be 32 MiB.
    assert program.memory_analysis().temp_size_in_bytes < 6 << 20


def test_what_cannot_run_says_so():
    inputs = arrays(4, 2, 4, 8)
    problem = build(*inputs)
    with pytest.raises(ConfigError, match="'cuda' is unknown; use auto, xla, pallas_tpu, pallas_gpu"):
        attention.attend_and_reduce(problem, "cuda")
    with pytest.raises(ConfigError, match="'pallas_tpu' attends to one part, not to several parts; use 'xla'"):
        attention.attend_parts([problem, problem], "pallas_tpu")
    band = build(*inputs, band=jnp.full(BATCH, 5, jnp.int32))
    with pytest.raises(ConfigError, match="prefill/pallas_tpu: it takes one window for all rows, not a band per row"):
        attention.attend_and_reduce(band, "pallas_tpu")
    largest = build(*inputs, needs=frozenset({PEAK}))
    for backend in ("tpu", "gpu"):
        with pytest.raises(ConfigError, match=f"prefill/pallas_{backend}: it adds up .* statistic peak is the maximum"):
            attention.attend_and_reduce(largest, f"pallas_{backend}")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "its name must be a non-empty string"),
        ({"transform": "cube"}, "transform='cube' is not valid; use 'identity'"),
        ({"accumulate": "mean"}, "accumulate='mean' is not valid; use 'sum', 'max'"),
        ({"accumulate": "decay", "gamma": 1.5}, "gamma must be a number from 0 to 1; got 1.5"),
        ({"accumulate": "decay", "gamma": float("nan")}, "gamma must be a number from 0 to 1; got nan"),
        ({"transform": "above", "accumulate": "recall"}, "history must be a whole number of at least 1; got 0"),
        ({"accumulate": "latest"}, "history must be a whole number of at least 1; got 0"),
        (
            {"accumulate": "latest", "transform": "one", "history": 4},
            "latest needs a transform of attention, not 'one'",
        ),
        ({"accumulate": "recurrence"}, "recurrence compares m with a threshold greater than 0"),
        ({"accumulate": "recall", "history": 8}, "recall stores bits, which transform='above' gives, not 'identity'"),
        ({"tail": 0}, "tail must be a whole number of at least 1; got 0"),
        ({"tail": 8, "accumulate": "decay"}, "tail=8 needs a transform of attention and accumulate='sum' or 'max'"),
        ({"tail": 8, "transform": "one"}, "tail=8 needs a transform of attention"),
        ({"saturate": 255}, "saturate=255 needs transform='chosen' and accumulate='sum'"),
        ({"transform": "chosen", "accumulate": "decay"}, "takes accumulate='sum', 'max' or 'replace'"),
    ],
)
def test_statistics_that_depend_on_blocks_are_refused(fields, message):
    with pytest.raises(PolicyError, match=message):
        Statistic(**{"name": "mine"} | fields)


@pytest.mark.parametrize("n", [1, 64])
def test_counts_and_sums_stop_at_two_to_the_24th(n):
    """As `kvjax.numerics.statistics` says: exact up to `EXACT`, and from there on neither larger nor smaller."""
    block, queries = jnp.full((1, 1, 1), float(n)), jnp.full((1,), n, jnp.int32)

    def after(statistic, old):
        return float(statistic.merge(jnp.full((1, 1, 1), old, jnp.float32), block, queries)[0, 0, 0])

    assert after(COUNT, EXACT - n) == EXACT
    assert after(COUNT, EXACT - n - 1) == EXACT - 1
    # Blocks of more than one query are added exactly for as long as their sum is a multiple of 2.
    assert after(COUNT, EXACT) == (EXACT if n == 1 else EXACT + n)
    for bounded in (LAST, DECAYED, PEAK):
        assert bounded.merge(jnp.ones((1, 1, 1)), jnp.zeros((1, 1, 1)), queries).max() <= 1


@pytest.mark.parametrize(
    "change",
    [
        {"key_position": np.zeros((BATCH, 2, 5), np.int32)},
        {"query_position": np.zeros((BATCH, 4), np.float32)},
        {"value": np.zeros((BATCH, 2, 11, DIM), np.float32)},
        {"query": np.zeros((BATCH, 5, 4, DIM), np.float32)},
        {"exempt": np.zeros((BATCH, 2, 12), np.float32)},
        {"band": np.zeros((BATCH, 1), np.int32)},
        {"causal": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_shape_or_dtype_is_noticed(change):
    names = ("query", "key", "value", "query_position", "key_position")
    given = dict(zip(names, arrays(4, 2, 4, 8), strict=True)) | change
    with pytest.raises(AssertionError):
        attention.problem(given.pop("query"), given.pop("key"), given.pop("value"), **given)


def test_an_attended_part_is_a_pytree():
    leaves = jax.tree.leaves(Attended(jnp.zeros(1), None))
    assert len(leaves) == 1


def test_worked_parts_of_attention(shared_data):
    """Parts with temperatures and exponents, as `kvjax.reuse.parallel` has them."""
    arrays, count = np.load(shared_data / "examples" / "reuse_cases.npz"), 0
    for number, case in enumerate(json.loads(bytes(arrays["cases"]))):
        if case["kind"] != "merge":
            continue
        about, own = case["arguments"], {name: arrays[f"{number}_{name}"] for name in case["outputs"]}
        logits, values = (jnp.asarray(arrays[f"{number}_in_{name}"]) for name in ("logits", "values"))
        ends = np.cumsum(about["sizes"])[:-1]
        temperatures = about.get("temperatures", [1.0] * len(about["sizes"]))
        parts = []
        for place, (part, value) in enumerate(
            zip(jnp.split(logits, ends, axis=2), jnp.split(values, ends), strict=True)
        ):
            part = part / temperatures[place]
            lse = jax.nn.logsumexp(part, axis=2)
            output = jnp.where(jnp.isfinite(lse)[..., None], jax.nn.softmax(part, axis=2) @ value, 0.0)
            np.testing.assert_allclose(output, own["part_out"][place], atol=1e-5)
            np.testing.assert_allclose(lse, own["part_lse"][place], atol=1e-5)
            parts.append(attention.Attended(output[None, None], about["exponents"][place] * lse[None, None]))
        combined = attention.combine(*parts)
        np.testing.assert_allclose(combined.output[0, 0], own["out"], atol=1e-5)
        np.testing.assert_allclose(combined.lse[0, 0], own["lse"], atol=1e-5)
        count += 1
    assert count == 5
