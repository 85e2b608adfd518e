"""Joint heads: the worked case, CSKV's blocks, what is held against float64, and models with fewer KV heads."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.errors import StorageError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Integer, Joint, Samples
from kvjax.storage.joint import JointDirections
from kvjax.storage.kivi import Channels
from tests.laws import read, replay
from tests.storage.test_blocks import lowered
from tests.storage.test_sides import DIM, LENGTHS, STEPS, examples, random  # noqa: F401
from tests.tiny import random_tokens, random_weights, tiny

ROPE = Rope(dim=DIM)


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: programs are many, and small."""


def samples(heads: int = 2) -> Samples:
    key, value = np.random.default_rng(4).normal(size=(2, 50, heads, DIM)).astype(np.float32)
    return Samples(own=key, query=None, key=key, value=value)


def projected(x: np.ndarray, basis: np.ndarray, heads: int) -> np.ndarray:
    """Vectors [n, K, D] in the directions [K, D, r] of each group of heads, and back, in float64."""
    back = np.zeros(x.shape)
    for start in range(0, x.shape[1], heads):
        own = slice(start, start + heads)
        u = basis[own].reshape(-1, basis.shape[2]).astype(np.float64)
        flat = x[:, own].reshape(len(x), -1).astype(np.float64)
        back[:, own] = (flat @ u @ u.T).reshape(len(x), heads, -1)
    return back


def test_heads_of_a_group(examples):  # noqa: F811
    x, heads, rank = examples["21_x"], 2, 6
    side = JointDirections(rank, heads)
    basis = side.prepare(Samples(own=x, query=None, key=x, value=x))["basis"]
    np.testing.assert_allclose(basis.reshape(2, 12, rank), examples["21_basis"], atol=1e-5)
    codec = Joint(rank, heads)
    shared = side.aligned({"basis": jnp.asarray(basis, jnp.float32)}, 4)
    # [1, K, n, D]
    own = jnp.asarray(x).swapaxes(0, 1)[None]
    parts = codec.encode(own, shared, jnp.float32)
    # Each head of a group holds a share of the latent, in order.
    latent = np.asarray(parts["latent"][0]).reshape(2, heads, len(x), 3).transpose(2, 0, 1, 3).reshape(len(x), 2, rank)
    np.testing.assert_allclose(latent, examples["21_latent"], atol=1e-4)
    np.testing.assert_allclose(codec.decode(parts, shared, 6)[0].swapaxes(0, 1), examples["21_back"], atol=1e-4)
    assert codec.bytes(6, "float32") == 4 * rank // heads


def tokens_of(prompt, decode, row: int) -> list[np.ndarray]:
    """Keys and values [T, K, D] of a row."""
    pairs = zip(prompt[1:], decode[1:], strict=True)
    return [np.concatenate([x[row, :, : LENGTHS[row]], y[row]], axis=1).swapaxes(0, 1) for x, y in pairs]


@pytest.mark.parametrize("kind", ["slots", "blocks"])
def test_what_is_held_is_the_projection_of_all_heads(kind):
    """Keys are projected before rotation; CSKV encodes whole windows, the other storage the tokens of some age."""
    window, residual, heads, rank = 4, 3, 2, 5
    held = storage.cskv(rank, window) if kind == "blocks" else storage.kv_heads(heads, rank, residual)
    given = samples()
    kernels = {name: np.random.default_rng(5).normal(size=(12, 2, DIM)) for name in ("key", "value")}
    given = given._replace(inputs=np.random.default_rng(6).normal(size=(50, 12)), kernels=kernels)
    made = Calibration.of(held, [given], ROPE)
    prompt, decode = random(3)
    policy = policies.full() if kind == "blocks" else policies.window(9, sinks=1)
    _, layer = replay(held, prompt, decode, LENGTHS, policy, ROPE, calibration=made)
    found = read(held, layer, made)
    for row in range(2):
        total = LENGTHS[row] + STEPS
        coded = total // window * window if kind == "blocks" else total - residual
        for name, x, own in zip(("key", "value"), found, tokens_of(prompt, decode, row), strict=False):
            expected = projected(own, np.asarray(made.layers[0][name]["basis"]), heads)
            for head, slot in itertools.product(range(2), range(x.shape[2])):
                at = int(found[2][row, head, slot])
                if at >= 0:
                    exact = own[at, head] if at >= coded else expected[at, head]
                    np.testing.assert_allclose(x[row, head, slot], exact, atol=1e-5)
    if kind == "blocks":
        u = np.asarray(made.layers[0]["key"]["basis"]).reshape(-1, rank)
        size = np.sqrt(np.abs(given.inputs).mean(axis=0) + 1e-6)
        left = np.linalg.svd(kernels["key"].reshape(12, -1).T * size)[0][:, :rank]
        np.testing.assert_allclose(np.abs(np.sum(u * left, axis=0)), 1, atol=1e-4)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", [None, 5])
def test_every_direction_is_lossless(block):
    held = storage.cskv(2 * DIM, 4) if block is None else storage.kv_heads(2, 2 * DIM)
    given = samples()._replace(
        inputs=np.ones((50, 20)),
        kernels=dict.fromkeys(("key", "value"), np.random.default_rng(7).normal(size=(20, 2, DIM))),
    )
    arguments = (*random(8), LENGTHS, policies.full() if block is None else policies.tova(7), ROPE)
    plain, _ = replay(storage.dense(), *arguments, prefill_block=block)
    output, layer = replay(held, *arguments, prefill_block=block, calibration=Calibration.of(held, [given], ROPE))
    np.testing.assert_allclose(output, plain, atol=2e-4)
    size = 12 + STEPS if block is None else 7
    counted = storage.breakdown(layer)
    assert counted["codes"] == 2 * 2 * 2 * (size // 4 * 4 if block is None else size) * DIM * 4


def test_latents_in_integers():
    """As in KIVI: keys per channel of a block, values per token."""
    held = storage.cskv(2 * DIM, 4, 2, key_codec=Channels(8, 4), value_codec=Integer(8, DIM))
    given = samples()._replace(
        inputs=np.ones((50, 20)),
        kernels=dict.fromkeys(("key", "value"), np.random.default_rng(7).normal(size=(20, 2, DIM))),
    )
    arguments = (*random(8), LENGTHS, policies.full(), ROPE)
    plain, _ = replay(storage.dense(), *arguments)
    output, layer = replay(held, *arguments, calibration=Calibration.of(held, [given], ROPE))
    np.testing.assert_allclose(output, plain, atol=3e-2)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(layer.stores)} == {"uint8", "float32"}


@pytest.mark.sampled(0)
def test_gradients_reach_the_directions():
    own, tokens, held = tiny().model, random_tokens(1, 14, seed=7), storage.cskv(6, 4)
    made = kvjax.calibrate(own, tokens, held)

    def loss(made):
        options = {"prompt_length": 5, "storage": held, "calibration": made}
        return -jnp.sum(kvjax.log_likelihood(own, tokens, policies.full(), **options).logprobs)

    gradient = jax.jit(jax.grad(loss))(made)
    assert all(float(jnp.abs(x).max()) > 0 for x in jax.tree.leaves(gradient))


def learned(heads: int = 4) -> kvjax.Model:
    """A random decoder with learned positions and biases, whose KV heads are alike in pairs."""
    config = DecoderConfig(
        family="opt", vocab_size=64, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=heads, head_dim=4,
        mlp_size=64, max_positions=64, norm="layer", learned_positions=True, qkv_bias=True, out_bias=True,
    )  # fmt: skip
    params = random_weights(config)
    rng = np.random.default_rng(1)
    for index in range(2):
        attention = params[f"layer_{index}"]["attention"]
        for name in ("key", "value"):
            for part, x in attention[name].items():
                pairs = rng.normal(size=(*x.shape[:-1], heads // 2, 1, 4)) * 0.3
                attention[name][part] = jnp.asarray(
                    np.broadcast_to(pairs, (*x.shape[:-1], heads // 2, 2, 4)).reshape(x.shape), jnp.float32
                )
    return kvjax.Model(config, params)


@pytest.mark.sampled(0)
def test_heads_that_are_alike_become_one():
    own, tokens = learned(), random_tokens(2, 24, seed=2)
    made = kvjax.calibrate(own, tokens, storage.kv_heads(2))
    fewer = kvjax.compress_kv_heads(own, made, 2)
    assert fewer.config.num_kv_heads == 2 and fewer.params["layer_0"]["attention"]["key"]["kernel"].shape == (32, 8)
    plain, less = (
        kvjax.log_likelihood(each, tokens, policies.window(12), prompt_length=16).logprobs for each in (own, fewer)
    )
    np.testing.assert_allclose(less, plain, atol=2e-4)
    four = kvjax.compress_kv_heads(own, kvjax.calibrate(own, tokens, storage.kv_heads(4)), 4)
    rough = kvjax.log_likelihood(four, tokens, policies.window(12), prompt_length=16).logprobs
    assert np.abs(rough - plain).max() > 1e-3
    embed = own.params["embed"] | {"tokens": own.params["embed"]["tokens"] + 1}
    other = dataclasses.replace(own, params=own.params | {"embed": embed})
    for build, match in (
        (lambda: kvjax.compress_kv_heads(own, made, 4), "JointDirections"),
        (
            lambda: kvjax.compress_kv_heads(own, made, "joint"),
            "heads must be a whole number of at least 1; got 'joint'",
        ),
        (lambda: kvjax.compress_kv_heads(own, None, 2), "needs a calibration"),
        (lambda: kvjax.compress_kv_heads(own, "made", 2), "calibration=str is not valid"),
        (lambda: kvjax.compress_kv_heads(other, made, 2), "made for a model with the fingerprint"),
        (lambda: kvjax.compress_kv_heads(kvjax.quantize_weights(own, group=8), made, 2), "weights are codes"),
    ):
        with pytest.raises(StorageError, match=match):
            build()


@pytest.mark.parametrize(
    "make", [lambda rank: storage.cskv(rank, 4, value_rank=6), lambda rank: storage.kv_heads(2, rank)]
)
def test_ranks_of_their_own_for_each_layer(make):
    """Bytes and calibrations of each layer are those of its rank."""
    made = {rank: lowered(make(rank), policies.full(), LENGTHS, STEPS, layers=2, heads=2) for rank in (4, 6, (4, 6))}
    found = {rank: (each.layout.bytes(), each.layout.calibration_bytes()) for rank, each in made.items()}
    assert found[4, 6] == tuple((one + other) // 2 for one, other in zip(found[4], found[6], strict=True))
    weights = {"inputs": np.ones((50, 12)), "kernels": dict.fromkeys(("key", "value"), np.ones((12, 2, DIM)))}
    own = Calibration.of(make((4, 6)), [samples()._replace(**weights)] * 2)
    assert [layer["key"]["basis"].shape for layer in own.layers] == [(2, DIM, 4), (2, DIM, 6)]


def refused(held, policy=None, **options) -> None:
    storage.replay(held, *random(), LENGTHS, policy or policies.full(), ROPE, **options)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.kv_heads(0), "heads must be a whole number of at least 1; got 0"),
        (lambda: storage.cskv(0), "rank must be a whole number of at least 1; got 0"),
        (lambda: storage.cskv(4, 0), "storage cskv: window must be a whole number of at least 1; got 0"),
        (lambda: storage.cskv((4, 0)), "rank must be a whole number of at least 1; got 0"),
        (lambda: storage.cskv((4, 3)).of_layer(0, 3), "is for 2 layers, but the model has 3; give one for all"),
        (lambda: storage.kv_heads(2, (4, 3)).bytes_per_slot(8, "float32"), r"with Storage\.of_layer"),
        (lambda: storage.cskv(4, key_codec=Joint(3)), "must be a codec without a side, of latents"),
        (lambda: storage.sparse(storage.kv_heads(2), 1), "sparse: codec=.*several KV heads together"),
        (lambda: storage.permuted(Joint(3, 2), (1, 0)), "permuted: codec=.*several KV heads together"),
        (lambda: storage.sparse(storage.minicache(), 1), "sparse: codec=.*two layers together"),
        (lambda: storage.kv_heads(3).bound(4), "groups of heads=3 do not divide 4 KV heads"),
        (
            lambda: storage.kv_heads(2, 17).bytes_per_slot(8, "float32"),
            "rank=17 exceeds the 16 features of 2 heads of 8",
        ),
        (lambda: storage.cskv(4).bytes_per_slot(8, "float32"), "its parts depend on the number of KV heads"),
        (lambda: kvjax.calibrate(tiny().model, random_tokens(1, 8), storage.kv_heads(3)), "do not divide 2 KV heads"),
        (lambda: storage.read(storage.kv_heads(2), dense_layer()), "needs its calibration to be read"),
        (
            lambda: kvjax.compress_kv_heads(tiny().model, calibration(), 2),
            r"generate with storage=kvjax.storage.kv_heads\(2\)",
        ),
        (lambda: kvjax.compress_kv_heads(learned(), calibration(), 2), "the model has a model without"),
    ],
)
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(StorageError, match=match):
        build()


def calibration() -> Calibration:
    return Calibration.of(storage.kv_heads(2), [samples()], ROPE)


def dense_layer():
    from kvjax.cache.empty import empty
    from kvjax.cache.planning.layout import Group

    return empty(Group(storage=storage.int8(), slots=(4,)), 1, 2, DIM, "float32")


@pytest.mark.parametrize(
    ("policy", "match"),
    [
        (policies.h2o(6), "under the policy h2o each head keeps its own; use full"),
        (policies.snapkv(6, window=2), "under the policy snapkv each head keeps its own"),
        (policies.window(6, merge=policies.d2o()), "use a policy without a merge"),
        (policies.split_heads(((True, False),), policies.window(6), policies.full()), "treats heads differently"),
    ],
)
def test_heads_must_hold_the_same_positions(policy, match):
    with pytest.raises(StorageError, match=f"storage kv_heads2 with policy .*{match}"):
        refused(storage.kv_heads(2), policy, calibration=calibration())


def test_windows_of_which_tokens_are_evicted():
    """Latents are then made one by one, as those of `kv_heads`; codes of a block's latents cannot be."""
    made, prompts = Calibration(calibration().layers, rope=ROPE), random(9)
    one, other = (
        replay(held, *prompts, LENGTHS, policies.window(8), ROPE, calibration=made)
        for held in (storage.cskv(DIM, 3), storage.kv_heads(2, DIM, residual=3))
    )
    np.testing.assert_array_equal(one[0], other[0])
    np.testing.assert_array_equal(*(storage.read(held, layer, made)[0] for held, layer in (
        (storage.cskv(DIM, 3), one[1]), (storage.kv_heads(2, DIM, residual=3), other[1])
    )))  # fmt: skip
    with pytest.raises(StorageError, match="storage cskv with policy window: it evicts tokens of blocks"):
        refused(storage.cskv(DIM, 4, key_codec=Channels(8, 4)), policies.window(6), calibration=made)
