"""The objective of CSKV: its definition in float64, its optimum and gradient, and the training of directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import hadamard

import kvjax
from kvjax import policies, storage, training
from kvjax.errors import InputError, StorageError
from kvjax.storage import Calibration, Channels, Integer, Samples
from tests.tiny import random_tokens, tiny

HEADS, DIM, RANK, VALUE_RANK = 2, 4, 3, 5
HELD = storage.cskv(RANK, 4, value_rank=VALUE_RANK).bound(HEADS)
RANKS = {"key": RANK, "value": VALUE_RANK}


def white(seed: int = 0) -> tuple[dict[str, np.ndarray], Samples]:
    """Projections, and samples whose inputs are white: XᵀX = n I, and every |x| = 1."""
    inputs = hadamard(16).astype(np.float32)[:, 4:12]
    kernels = dict(zip(("key", "value"), np.random.default_rng(seed).normal(size=(2, 8, HEADS, DIM)), strict=True))
    key, value = (np.einsum("nh,hkd->nkd", inputs, x).astype(np.float32) for x in kernels.values())
    return kernels, Samples(own=key, query=None, key=key, value=value, inputs=inputs, kernels=kernels)


def error(basis: np.ndarray, x: np.ndarray) -> float:
    """Mean of |x - U Uᵀ x|² in float64, U [K · D, r] of all heads together."""
    joint, vectors = basis.reshape(HEADS * DIM, -1).astype(np.float64), x.reshape(len(x), -1).astype(np.float64)
    return float(np.mean((vectors - vectors @ joint @ joint.T) ** 2))


def loss_of(sides, samples: Samples) -> jax.Array:
    return training.reconstruction_loss(HELD, sides, jnp.asarray(samples.key), jnp.asarray(samples.value))


def test_with_white_inputs_the_first_directions_are_the_optimum():
    """The loss is the energy of the singular values that are left out, which no directions undercut (Eckart, Young)."""
    kernels, samples = white()
    sides = Calibration.of(HELD, [samples]).layers[0]
    got, slope = jax.value_and_grad(loss_of)(sides, samples)
    assert float(got) == pytest.approx(sum(error(np.asarray(sides[x]["basis"]), getattr(samples, x)) for x in RANKS))
    left_out = {
        name: np.linalg.svd(x.reshape(8, -1), compute_uv=False)[RANKS[name] :] for name, x in kernels.items()
    }  # fmt: skip
    # A singular value σ of W is one of √n σ of X W, and its share of n · K · D numbers is σ² / (K · D).
    assert float(got) == pytest.approx(sum(float(np.sum(x**2)) for x in left_out.values()) / (HEADS * DIM), rel=1e-5)
    assert all(float(jnp.abs(x).max()) < 1e-5 for x in jax.tree.leaves(slope))


def test_gradients_are_those_of_finite_differences():
    _, samples = white(1)
    start = Calibration.of(HELD, [samples]).layers[0]
    key = jax.random.key(0)
    sides = {name: {"basis": x["basis"] + 0.3 * jax.random.normal(key, x["basis"].shape)} for name, x in start.items()}
    slope = jax.grad(loss_of)(sides, samples)
    for name in RANKS:
        basis, x = np.asarray(sides[name]["basis"], np.float64), getattr(samples, name)
        direction = np.random.default_rng(2).normal(size=basis.shape)
        expected = (error(basis + 1e-5 * direction, x) - error(basis - 1e-5 * direction, x)) / 2e-5
        assert np.sum(np.asarray(slope[name]["basis"], np.float64) * direction) == pytest.approx(expected, rel=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("rank", [3, ((2, 3), (3, 1))], ids=["joint", "by head"])
def test_training_lowers_the_loss(rank):
    """From directions of the weights, towards that of the principal directions, which is the least."""
    model, tokens = tiny().model, random_tokens(2, 32, seed=3)
    held = storage.cskv(rank, 4) if rank == 3 else storage.low_rank(rank, 2, center=False, basis="weights")
    made = kvjax.calibrate(model, tokens, held)
    found = training.train_reconstruction(model, tokens, held, made, steps=60, learning_rate=0.02)
    assert found.losses.shape == (60,) and found.losses[-1] < 0.99 * found.losses[0]
    optimum = storage.kv_heads(model.config.num_kv_heads, 3) if rank == 3 else storage.low_rank(rank, 2, center=False)
    least = kvjax.calibrate(model, tokens, optimum).replace(kind=made.kind)
    (bound,) = training.train_reconstruction(model, tokens, held, least, steps=1).losses
    assert bound <= found.losses.min() + 1e-6
    assert found.losses[-1] - bound < 0.5 * (found.losses[0] - bound)
    assert "trained for 60 steps to reconstruct" in found.calibration.method
    options = {"storage": held, "calibration": found.calibration, "prompt_length": 20}
    assert np.isfinite(kvjax.log_likelihood(model, tokens, policies.full(), **options).logprobs).all()


def test_what_cannot_be_trained_is_refused():
    model, tokens = tiny().model, random_tokens(1, 16)
    heads = model.config.num_kv_heads
    made = kvjax.calibrate(model, tokens, storage.cskv(4, 4))
    coded = storage.cskv(4, 4, key_codec=Channels(8, 4), value_codec=Integer(8, 4 // heads))
    with pytest.raises(StorageError, match=r"no gradient passes through its keys, .* takes the same calibration"):
        training.train_reconstruction(model, tokens, coded, made)
    with pytest.raises(StorageError, match="int8 needs no calibration"):
        training.train_reconstruction(model, tokens, storage.int8(), made)
    with pytest.raises(InputError, match="steps must be a whole number of at least 1; got 0"):
        training.train_reconstruction(model, tokens, storage.cskv(4, 4), made, steps=0)
