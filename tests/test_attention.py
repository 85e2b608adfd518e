"""`attention.attend` against a naive n × S computation in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.statistics import ABOVE, COUNT, LAST, MASS, MASS_SQ, decayed

DECAYED = decayed(0.9)
EVERY = frozenset({MASS, MASS_SQ, COUNT, ABOVE, LAST, DECAYED})
BATCH, DIM = 3, 8


def naive(query, key, value, query_position, key_position, *, window=None, group_reduce="mean", gamma=0.9):
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
                    score = np.exp((score - score.max()) / np.sqrt(dim))
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


@functools.partial(jax.jit, static_argnames=("window", "group_reduce", "needs", "causal", "tile"))
def _attend(query, key, value, query_position, key_position, *, tile=None, needs=EVERY, **options):
    del tile  # a trace of its own for each TILE_BYTES
    return attention.attend(
        query, key, value, query_position=query_position, key_position=key_position, needs=needs, **options
    )  # fmt: skip


def assert_close(got, expected, query_position) -> None:
    output, observation = got
    golden, columns, nearest = expected
    assert nearest > 1e-6, "a probability is too close to the uniform share: use another seed"
    np.testing.assert_allclose(output, golden, atol=2e-6)
    assert set(observation.columns) == set(columns)
    for name, column in columns.items():
        assert observation[name].dtype == jnp.float32
        np.testing.assert_allclose(observation[name], column, rtol=2e-6, atol=2e-6, err_msg=name)
    np.testing.assert_array_equal(observation.queries, (query_position >= 0).sum(axis=1))


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
    assert_close(_attend(*inputs, tile=tile, **options), naive(*inputs, **options), inputs[3])


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
        assert_close(_attend(*inputs, tile=tile, window=window, causal=causal), expected, query_position)


def test_merging_blocks_is_one_block():
    """Any cut of the queries gives the same statistics: sums add, `last` is replaced, `decayed` decays."""
    query, key, value, query_position, _ = arrays(4, 2, 32, 0)
    key_position = np.broadcast_to(query_position[:, None], (BATCH, 2, 32))
    _, columns, _ = naive(query, key, value, query_position, key_position)
    for cut in (1, 8, 16):
        stats = {s: jnp.zeros((BATCH, 2, 32)) for s in EVERY}
        for start in range(0, 32, cut):
            block = slice(start, start + cut)
            _, seen = _attend(query[:, :, block], key, value, query_position[:, block], key_position)
            stats = {s: s.merge(old, seen[s.name], seen.queries) for s, old in stats.items()}
        for s, stat in stats.items():
            np.testing.assert_allclose(stat, columns[s.name], rtol=1e-5, atol=2e-6, err_msg=f"{s.name} {cut=}")


def test_a_row_without_queries_keeps_its_statistics():
    for statistic in EVERY:
        old = jnp.arange(12.0).reshape(1, 2, 6) + 1
        merged = statistic.merge(old, jnp.zeros((1, 2, 6)), jnp.zeros((1,), jnp.int32))
        np.testing.assert_array_equal(merged, old, statistic.name)


@pytest.mark.parametrize("n", [1, 24])
def test_bfloat16_reports_float32(n):
    inputs = arrays(4, 2, n, 16)
    low = [jnp.asarray(x, jnp.bfloat16) for x in inputs[:3]]
    output, observation = _attend(*low, *inputs[3:])
    assert output.dtype == jnp.bfloat16
    golden, columns, _ = naive(*(np.asarray(x, np.float32) for x in low), *inputs[3:])
    np.testing.assert_allclose(np.asarray(output, np.float32), golden, atol=0.03)
    for name in ("mass", "mass_sq", "last", DECAYED.name):
        assert observation[name].dtype == jnp.float32
        # Float32's own rounding, not bfloat16's 4e-3: scores and probabilities are never rounded.
        np.testing.assert_allclose(observation[name], columns[name], rtol=1e-5, atol=2e-6, err_msg=name)


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
    _, observation = _attend(*inputs, needs=frozenset({LAST}))
    assert set(observation.columns) == {"last"}
    with pytest.raises(ValueError, match="xla"):
        attention.attend(*inputs[:3], query_position=inputs[3], key_position=inputs[4], implementation="cuda")
