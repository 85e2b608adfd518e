"""Pairs of layers: the worked case, a float64 reference, a model that reads what was merged, bytes, what is refused."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.devices import Device
from kvjax.errors import StorageError
from kvjax.generation import generate
from kvjax.generation.prefill import prefill
from kvjax.planning.roofline import average_slots, decode_shapes, roofline
from kvjax.storage import Merged, merged_vectors
from tests.storage.test_blocks import lowered
from tests.tiny import random_tokens, tiny

LAYERS, WIDTH, NEW = 4, 12, 4
LENGTHS = np.array([12, 7])
HELD = storage.minicache(1, 0.6, 0.2)  # layers 1 and 2; the last is alone
NEWEST = policies.compress(importance=policies.recency, budget=8, name="newest")


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: nothing here is rounded to codes."""


def slerp(lower: np.ndarray, upper: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64, one vector at a time: direction [D] and angle."""
    u, v = (x / np.linalg.norm(x) if np.any(x) else x for x in (lower, upper))
    angle = np.arccos(np.clip(u @ v, -1, 1))
    if np.sin(angle) < 1e-4:
        e = (1 - t) * u + t * v
    else:
        e = (np.sin((1 - t) * angle) * u + np.sin(t * angle) * v) / np.sin(angle)
    return (e / np.linalg.norm(e) if np.linalg.norm(e) > 1e-6 else v), angle


def expected(lower: np.ndarray, upper: np.ndarray, t: float, retained: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors [n, D] of two layers as they are held, in float64."""
    made = [slerp(*pair, t) for pair in zip(lower, upper, strict=True)]
    order = sorted(range(len(made)), key=lambda i: (made[i][1], i))
    kept = order[len(made) - math.ceil(retained * len(made) - 1e-9) :]
    angles = sorted(angle for _, angle in made)
    assert len(kept) == len(made) or angles[len(made) - len(kept)] - angles[len(made) - len(kept) - 1] > 1e-5
    held = []
    for x in (lower, upper):
        back = np.stack([e * np.linalg.norm(own) for own, (e, _) in zip(x, made, strict=True)])
        back[kept] = x[kept]
        held.append(back)
    return held[0], held[1]


def test_the_worked_case(shared_data):
    case, examples = 20, np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(examples["cases"]))[case]
    lower, upper = (examples[f"{case}_{name}"] for name in ("lower", "upper"))
    made = merged_vectors(jnp.asarray(lower), jnp.asarray(upper), about["t"])
    for name, got in (("direction", made.direction), ("lower_length", made.lower), ("upper_length", made.upper)):
        np.testing.assert_allclose(got, examples[f"{case}_{name}"], atol=1e-5)
    count = about["retained"]
    codec = Merged(about["t"], count / len(lower), count=count)
    position = jnp.arange(len(lower), dtype=jnp.int32)[None, None]
    (parts, side), (length, own) = codec.encode_pair(
        jnp.asarray(lower)[None, None], jnp.asarray(upper)[None, None], position, jnp.float32
    )
    np.testing.assert_array_equal(np.sort(side["slot"][0, 0]), np.sort(examples[f"{case}_retained"]))
    for name, given, shared in (("lower", parts, side), ("upper", {**parts, **length}, {**side, **own})):
        back = codec.decode(given, codec.side.aligned(shared, 4), lower.shape[1])
        np.testing.assert_allclose(back[0, 0], examples[f"{case}_{name}_back"], atol=1e-5)


def test_vectors_that_are_parallel_opposite_or_zero():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 5)) * 10.0 ** np.arange(-18, 18, 6)[:, None]
    y = np.stack([3 * x[0], -x[1], 0 * x[2], x[3], x[4] * (1 + 1e-6), rng.normal(size=5)])
    x[3] = 0
    made = merged_vectors(jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32), 0.5)
    for i, (one, two) in enumerate(zip(x, y, strict=True)):
        np.testing.assert_allclose(made.direction[i], slerp(one, two, 0.5)[0], atol=1e-5, err_msg=f"{i}")
        np.testing.assert_allclose(made.lower[i], np.linalg.norm(one), rtol=1e-6)
    nothing = merged_vectors(jnp.zeros(4), jnp.zeros(4), 0.6)
    assert not np.any(nothing.direction) and nothing.lower == nothing.upper == 0


def test_small_angles_are_told_apart():
    """Directions that differ by little, or point almost or exactly the opposite way, as float64 has them."""
    rng = np.random.default_rng(1)
    # [40, 2, 16] orthonormal
    pairs = np.linalg.qr(rng.normal(size=(40, 16, 2)))[0].swapaxes(1, 2)
    angles = np.concatenate([[1e-6, 1e-5, 1e-4, 2e-4, 1e-3], np.pi - np.array([1e-3, 2e-4, 9e-5, 1e-5, 0])])
    angles = np.tile(angles, 4)[:, None]
    lower = pairs[:, 0].astype(np.float32)
    upper = (np.cos(angles) * pairs[:, 0] + np.sin(angles) * pairs[:, 1]).astype(np.float32)
    made = merged_vectors(jnp.asarray(lower), jnp.asarray(upper), 0.6)
    np.testing.assert_allclose(made.angle, angles[:, 0], atol=1e-6)
    opposite = merged_vectors(jnp.asarray(lower), -jnp.asarray(lower), 0.5)
    np.testing.assert_allclose(opposite.direction, -lower, atol=1e-6)


def spoil(layer: kvjax.cache.Layer) -> kvjax.cache.Layer:
    """Large numbers in the empty slots of the prompt."""

    def filled(leaf):
        empty = layer.position[:, :, : leaf.shape[2]] < 0
        return jnp.where(empty.reshape(*empty.shape, *(1,) * (leaf.ndim - 3)), 1e15, leaf)

    first, *others = layer.stores
    return kvjax.cache.Layer((layer[0].replace(stores=(jax.tree.map(filled, first), *others)),))


@functools.cache
def run(policy: policies.Policy):
    """The merged cache after a prompt, that of a dense one, and their layouts."""
    model, tokens = tiny(layers=LAYERS).model, random_tokens(2, WIDTH, seed=3)
    options = {"max_new_tokens": NEW, "lengths": LENGTHS, "limits": Limits(WIDTH, NEW)}
    return [prefill(model, tokens, policy, storage=held, **options) for held in (HELD, storage.dense())]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("policy", [policies.full(), NEWEST], ids=lambda policy: policy.name)
def test_a_model_reads_what_was_merged(policy):
    """Decoding is that of a dense cache whose prompt holds what float64 says, in layers 1 and 2."""
    merged, plain = run(policy)
    layers, found = list(plain.state.layers), merged.state.layers
    dense = [[np.asarray(x, np.float64) for x in (layer.key, layer.value)] for layer in layers]
    held = [[x.copy() for x in layer] for layer in dense]
    for row, head, side in np.ndindex(2, 2, 2):
        live = np.asarray(layers[1].position)[row, head] >= 0
        pair = [dense[layer][side][row, head][live] for layer in (1, 2)]
        for layer, back in zip((1, 2), expected(*pair, HELD.key.t, HELD.key.retained), strict=True):
            held[layer][side][row, head][live] = back
    for layer in range(LAYERS):
        key, value, position = storage.read(HELD, found[layer], lower=found[layer - 1] if layer == 2 else None)
        live = np.asarray(position) >= 0
        other = np.asarray(layers[layer].position) >= 0
        for got, own in zip((key, value), held[layer], strict=True):
            np.testing.assert_allclose(np.asarray(got)[live], own[other], atol=1e-5)
        layers[layer] = kvjax.cache.Layer(
            (layers[layer][0].with_exact(*(jnp.asarray(x, jnp.float32) for x in held[layer])),)
        )
    # Copies, since what decoding takes is donated; what empty slots hold does not matter.
    merged, other = (each._replace(state=jax.tree.map(jnp.copy, each.state)) for each in (merged, plain))
    merged = merged._replace(state=merged.state.replace(layers=tuple(map(spoil, merged.state.layers))))
    model = tiny(layers=LAYERS).model
    other = other._replace(state=other.state.replace(layers=tuple(layers)))
    got, own = (generate.decode(model, each, max_new_tokens=NEW) for each in (merged, other))
    np.testing.assert_array_equal(got.tokens, own.tokens)
    np.testing.assert_allclose(got.logprobs, own.logprobs, atol=1e-4)
    # Tokens that follow are exact, and what a prompt holds does not change.
    size = WIDTH if policy.budget is None else 8
    assert [group.slots for (group,) in merged.layout.decode] == [
        (size + NEW - 1,), (size, NEW - 1), (size, NEW - 1), (size + NEW - 1,)
    ]  # fmt: skip
    before, after = (
        [spoil(layer).stores[0] for layer in each.layers[1:3]] for each in (run(policy)[0].state, got.state)
    )
    jax.tree.map(np.testing.assert_array_equal, before, after)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_bytes_are_those_of_the_definition(dtype, width):
    """D·w + 2w a pair, slot and tensor, and 2·D·w + 4 for each token that keeps both vectors."""
    tokens, dim, new = 40, 16, 8
    layout = lowered(storage.minicache(0, 0.6, 0.05), policies.full(), np.array([tokens]), new, dim=dim, dtype=dtype,
                     layers=3).layout  # fmt: skip
    pair = 2 * (tokens * (dim * width + 2 * width) + 2 * (2 * dim * width + 4))
    exact = 2 * dim * width
    assert layout.bytes() == pair + 2 * new * exact + (tokens + new) * exact
    assert storage.minicache().bytes_per_slot(128, "bfloat16") == 2 * (128 * 2 + 4) / 2


@pytest.mark.sampled(0)
def test_gradients_pass_straight_through():
    codec = Merged(0.6, 0.2, straight=True, count=1)
    x, y = np.random.default_rng(2).normal(size=(2, 1, 1, 5, 6)).astype(np.float32)
    position = jnp.arange(5, dtype=jnp.int32)[None, None]
    weights = np.random.default_rng(3).normal(size=x.shape).astype(np.float32)

    def loss(x, y):
        (one, _), (two, _) = codec.encode_pair(x, y, position, jnp.float32)
        return jnp.sum(weights * one["decoded"] + 2 * weights * two["decoded"]), (one["decoded"], two["decoded"])

    gradient, held = jax.grad(loss, (0, 1), has_aux=True)(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(gradient[0], weights, rtol=1e-6)
    np.testing.assert_allclose(gradient[1], 2 * weights, rtol=1e-6)
    for got, own in zip(held, expected(x[0, 0], y[0, 0], 0.6, 0.2), strict=True):
        np.testing.assert_allclose(got[0, 0], own, atol=1e-5)
    own, tokens = tiny(layers=LAYERS).model, random_tokens(1, 8)

    def score(params):
        model = kvjax.Model(own.config, params)
        return jnp.sum(kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=5, storage=HELD).logprobs)

    shapes = jax.eval_shape(jax.grad(score), own.params)
    assert jax.tree.structure(shapes) == jax.tree.structure(own.params)


SPLIT = policies.split_heads(((True, False),) * 2, policies.full(), policies.window(6))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.minicache(-1), "pairs: start must be a whole number of at least 0; got -1"),
        (lambda: storage.minicache(t=1.5), "storage minicache: t must be a number from 0 to 1; got 1.5"),
        (lambda: storage.minicache(retained="few"), "storage minicache: retained must be a number from 0 to 1"),
        (lambda: storage.Storage(key=Merged(), value=Merged()), "codecs of two layers, .* go together"),
        (lambda: storage.Storage(key=storage.Exact(), value=Merged(), layout=storage.pairs()), "go together"),
        (lambda: Merged().encode(jnp.zeros((1, 4)), None, "float32"), "encoded together"),
        (lambda: storage.read(HELD, run(policies.full())[0].state.layers[2]), "pass lower=, the layer before it"),
    ],
)
def test_what_is_not_valid(build, match):
    with pytest.raises(StorageError, match=match):
        build()


@pytest.mark.parametrize(
    ("policy", "held", "options", "match"),
    [
        (policies.full(), storage.minicache(2), {}, "start=2 is not a layer of this model; give one from 0 to 1"),
        (policies.h2o(6), storage.minicache(0), {}, "it evicts tokens of one layer while decoding"),
        (policies.window(6, merge=policies.d2o()), storage.minicache(0), {}, "use a policy without a merge"),
        (policies.snapkv(6, window=2), storage.minicache(0), {}, "under the policy snapkv each keeps its own"),
        (policies.adakv(policies.snapkv(6, window=2)), storage.minicache(0), {}, "each keeps its own"),
        (SPLIT, storage.minicache(0), {}, "treats heads or layers differently"),
        (
            policies.compress(importance=policies.recency, budget=(6, 7), name="newest"),
            storage.minicache(0),
            {},
            "layers 0 and 1 .* their budgets differ",
        ),
        (policies.full(), storage.minicache(0), {"block": 4}, "leave out prefill_block"),
        (
            CacheSpec(policies.full(), storage.minicache(0), kvjax.selection.optimal(4)),
            storage.minicache(0),
            {},
            "reads single slots",
        ),
    ],
)
def test_what_does_not_compose(policy, held, options, match):
    with pytest.raises(StorageError, match=match):
        lowered(held, policy, np.array([10, 8]), 3, layers=2, heads=2, **options)


def test_a_model_without_a_pair_is_dense():
    assert CacheSpec(policies.full(), storage.minicache()).name == "full + minicache"
    layout = lowered(storage.minicache(), policies.full(), np.array([10]), 3, layers=1).layout
    assert layout.decode[0][0].storage.exact


def test_a_step_reads_what_a_pair_shares_in_both_layers():
    """By hand, from the bytes of the layout: directions, and slots of originals, are held once and read twice."""
    config = tiny(layers=LAYERS).model.config
    rows, heads, dim, tokens = 2, config.num_kv_heads, config.head_dim, 12
    prompts = np.full(rows, tokens)
    sizes = sizes_for(prompts, 1, width=tokens, block=None, limits=Limits(tokens, 1, shortest=tokens), last_fed=True)
    made = lower(CacheSpec(policies.full(), HELD), config, sizes, prompts, implementation="xla")
    slots = average_slots(config, made, tokens, 2)
    assert [each.held for each in slots] == [tokens + 1] * LAYERS
    shapes = decode_shapes(config, made.layout, "float32", rows, None)
    step = roofline(config, shapes, slots, Device("", None, None, None, ""))
    again = rows * heads * 2 * 4 * (tokens * dim + math.ceil(HELD.key.retained * tokens))
    exact, merged = 2 * dim * 4, 2 * (dim + 1) * 4
    # The slot that is written, of the average size, and the positions of all.
    new = [exact, *[(tokens * merged + exact) / (tokens + 1)] * 2, exact]
    rest = rows * heads * sum(each + 4 * (tokens + 2) for each in new)
    assert step.cache_moved == round(made.layout.bytes(rows) + again + rest)
    assert step.cache == made.layout.bytes(rows, statistics=True) + 3 * 4 * rows, "and three lengths of each row"
