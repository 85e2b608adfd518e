"""Samplers: exactly which tokens a filter leaves, and that what is left is drawn in proportion."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.generate import seen_tokens
from kvjax.generation.sampling import Greedy, Sample, check_sampling, penalised

# Probabilities 0.05, 0.4, 0.15, 0.3, 0.1 in no order.
P = np.array([0.05, 0.4, 0.15, 0.3, 0.1], np.float32)
LOGITS = jnp.log(jnp.asarray(P))[None] + np.float32(3.0)


def left(sampler: Sample, logits=LOGITS) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in np.asarray(sampler.filter(logits))]


def test_greedy_takes_the_first_of_equals():
    logits = jnp.array([[0.0, 2.0, 2.0], [1.0, -jnp.inf, 0.0]])
    tokens = Greedy()(logits, None)
    assert tokens.tolist() == [1, 0] and tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sample(), [0, 1, 2, 3, 4]),
        (Sample(top_k=1), [1]),
        (Sample(top_k=3), [1, 2, 3]),
        (Sample(top_k=99), [0, 1, 2, 3, 4]),
        (Sample(top_p=0.001), [1]),
        (Sample(top_p=0.39), [1]),
        (Sample(top_p=0.41), [1, 3]),
        (Sample(top_p=0.84), [1, 2, 3]),
        (Sample(top_p=0.86), [1, 2, 3, 4]),
        (Sample(top_p=1.0), [0, 1, 2, 3, 4]),
        # After top_k, 0.4 and 0.3 of 0.7: the first alone has 0.571.
        (Sample(top_k=2, top_p=0.5), [1]),
        # 0.3 is three quarters of 0.4, and 0.15 three eighths; their squares 9 and 9/4 sixteenths of a square.
        (Sample(min_p=1.0), [1]),
        (Sample(min_p=0.74), [1, 3]),
        (Sample(min_p=0.37), [1, 2, 3]),
        (Sample(min_p=0.37, temperature=0.5), [1, 3]),
        (Sample(min_p=0.37, top_k=2), [1, 3]),
        (Sample(top_k=2, top_p=0.6), [1, 3]),
        # 0.7 of all before the third, though 0.82 of the three that min_p leaves.
        (Sample(min_p=0.37, top_p=0.75), [1, 2, 3]),
        # After temperature 0.5 the squares: 0.16 of 0.285 is 0.561, with 0.09 it is 0.877.
        (Sample(temperature=0.5, top_p=0.6), [1, 3]),
        (Sample(temperature=0.5, top_p=0.55), [1]),
        # After temperature 2 the roots: 0.632, 0.548, 0.387 of 2.107 reach 0.744.
        (Sample(temperature=2.0, top_p=0.7), [1, 2, 3]),
    ],
)
def test_which_tokens_are_left(sampler, expected):
    both = jnp.concatenate([LOGITS, LOGITS[:, ::-1]])
    assert left(sampler, both) == [expected, sorted(4 - token for token in expected)]


def test_a_nucleus_of_everything_is_everything():
    """Rounding in the running sum must not cut the tail off."""
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 50_257)) * 3, jnp.float32)
    assert np.isfinite(Sample(top_p=1.0).filter(logits)).all()


def test_top_k_of_equals_leaves_k():
    assert len(left(Sample(top_k=2), jnp.zeros((1, 5)))[0]) == 2
    assert len(left(Sample(top_p=0.39), jnp.zeros((1, 5)))[0]) == 2


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sample(), P),
        (Sample(temperature=0.5), P**2 / np.sum(P**2)),
        (Sample(top_k=2), np.array([0, 4, 0, 3, 0]) / 7),
        (Sample(temperature=2.0, top_k=3, top_p=0.5), np.array([0, 0.4**0.5, 0, 0.3**0.5, 0]) / (0.4**0.5 + 0.3**0.5)),
    ],
)
def test_draws_follow_the_filtered_distribution(sampler, expected):
    draws = 20_000
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = jax.jit(sampler)(jnp.broadcast_to(LOGITS, (draws, 5)), keys)
    share = np.bincount(tokens, minlength=5) / draws
    error = 5 * np.sqrt(expected * (1 - expected) / draws)  # five standard deviations
    assert (np.abs(share - expected) <= error).all(), f"{share} instead of {expected}"


def test_a_row_uses_its_own_key():
    keys = jax.random.split(jax.random.key(1), 4)
    logits = jnp.zeros((4, 1000))
    tokens = Sample()(logits, keys)
    assert len(set(tokens.tolist())) > 1
    other = Sample()(logits.at[0].set(-jnp.arange(1000.0)), keys)
    assert tokens[1:].tolist() == other[1:].tolist()


@pytest.mark.parametrize(
    "arguments",
    [
        {"temperature": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "hot"},
        {"top_k": 0},
        {"top_k": 2.5},
        {"top_k": True},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": float("nan")},
        {"repetition_penalty": True},
        {"repetition_penalty": "high"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"top_p": float("nan")},
    ],
)
def test_settings_that_cannot_work(arguments):
    with pytest.raises(InputError):
        Sample(**arguments)


def test_a_repetition_penalty():
    """As transformers defines it. Tokens count once, however often they are there, and padding does not."""
    logits = np.random.default_rng(1).standard_normal((2, 9)).astype(np.float32)
    tokens = np.array([[3, 1, 3, 3], [8, 2, -1, -1]])
    prefilled = Context(jnp.asarray(logits), None, None, tokens)
    seen = seen_tokens(prefilled, Greedy(1.7))
    assert [np.flatnonzero(row).tolist() for row in seen] == [[1, 3], [2, 8]]
    got = np.asarray(penalised(jnp.asarray(logits), jnp.asarray(seen), 1.7))
    assert seen_tokens(prefilled, Greedy()) is None
    with pytest.raises(InputError, match="needs the tokens of the prompts"):
        seen_tokens(prefilled._replace(tokens=None), Sample(repetition_penalty=0.5))
    for row, ids in enumerate(tokens):
        expected = logits[row].astype(np.float64)
        for token in {*ids.tolist()} - {-1}:
            expected[token] *= 1.7 if expected[token] < 0 else 1 / 1.7
        np.testing.assert_allclose(got[row], expected, rtol=1e-6)
    assert (np.sign(logits[seen]) == 1).any() and (np.sign(logits[seen]) == -1).any()


def test_a_key_may_be_its_numbers():
    """As `jax.random.PRNGKey` gives it."""
    key = check_sampling(Greedy(), jax.random.PRNGKey(7))
    assert jnp.array_equal(jax.random.key_data(key), jax.random.key_data(jax.random.key(7)))
    assert check_sampling(Greedy(), None) is None
    for wrong in (7, jnp.zeros(3, jnp.uint32), jnp.zeros(2), jax.random.split(jax.random.key(0))):
        with pytest.raises(InputError, match="key must be a random key"):
            check_sampling(Greedy(), wrong)
