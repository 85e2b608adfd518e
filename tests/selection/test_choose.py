"""The primitives: ranks, compaction."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.selection import compact
from kvjax.selection.choose import rank
from tests import conftest


@pytest.mark.parametrize(("size", "width"), [(31, 9), (32, 40), (200, 64), (70, 0)])
def test_compact(size, width):
    rng = np.random.default_rng(size)
    mask = np.zeros((2, 3, size), bool)
    for number, row in enumerate(mask.reshape(6, size)):
        row[rng.choice(size, min(size, width) * number // 5, replace=False)] = True
    slots, valid = jax.jit(compact, static_argnums=1)(mask, width)
    assert slots.shape == valid.shape == (2, 3, width) and slots.dtype == jnp.int32
    assert not width or (slots.min() >= 0 and slots.max() < size)
    for row in np.ndindex(2, 3):
        np.testing.assert_array_equal(np.asarray(slots[row])[np.asarray(valid[row])], np.flatnonzero(mask[row]))
        assert (np.sort(valid[row])[::-1] == np.asarray(valid[row])).all()


def scores() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [2, 3, 4, 20], candidates and visible slots [2, 3, 20]; a head without candidates, a row without slots."""
    rng = np.random.default_rng(5)
    score = (3 * rng.normal(size=(2, 3, 4, 20))).astype(np.float32)
    visible = rng.random((2, 3, 20)) < 0.8
    candidate = visible & (rng.random((2, 3, 20)) < 0.7)
    candidate[0, 1] = False
    candidate[1], visible[1] = False, False
    return score, candidate, visible


@pytest.fixture(scope="module")
def ranks():
    """normalise, reduce -> rank of `scores`."""
    score, candidate, visible = scores()
    kinds = [
        (normalise, reduce) for normalise in ("gap", "softmax", "probability", "none") for reduce in ("max", "mean")
    ]

    @jax.jit
    def all_of_them(score, candidate, visible):
        return [rank(score, candidate, normalise=a, reduce=b, visible=visible) for a, b in kinds]

    return dict(zip(kinds, all_of_them(score, candidate, visible), strict=True))


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("normalise", ["gap", "softmax", "probability", "none"])
def test_rank(ranks, normalise, reduce):
    score, candidate, visible = scores()
    found = np.asarray(ranks[normalise, reduce])
    assert (np.isneginf(found) == ~candidate).all()
    for row in np.ndindex(2, 3):
        own = score[row].astype(np.float64)
        among = visible[row] if normalise == "probability" else candidate[row]
        if not candidate[row].any():
            continue
        match normalise:
            case "gap":
                own = own - own[:, among].max(axis=1, keepdims=True)
            case "softmax" | "probability":
                own = np.exp(own) / np.exp(own[:, among]).sum(axis=1, keepdims=True)
        expected = own.max(axis=0) if reduce == "max" else own.mean(axis=0)
        np.testing.assert_allclose(found[row][candidate[row]], expected[candidate[row]], rtol=1e-5, atol=1e-6)


@pytest.fixture
def optimised():
    """The suite compiles without optimisations, for speed; some mistakes need them."""
    with conftest.optimised():
        yield


def test_the_gap_of_every_favourite_is_exactly_zero(optimised):
    """Also where the compiler rounds the scale's product and the difference as one."""
    score = np.random.default_rng(1).normal(size=(4, 2, 4, 64)).astype(np.float32)
    everyone = np.ones((4, 2, 64), bool)
    found = jax.jit(lambda s, c: rank(s * jnp.float32(0.35355338), c, normalise="gap", reduce="max"))(score, everyone)
    assert (np.take_along_axis(np.asarray(found), np.argmax(score, axis=-1), axis=-1) == 0.0).all()


def test_probability_needs_what_is_visible():
    score, candidate, _ = scores()
    with pytest.raises(ValueError, match="visible"):
        rank(score, candidate, normalise="probability", reduce="mean")
