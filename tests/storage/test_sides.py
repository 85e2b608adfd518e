"""Sides that vectors share, and vectors that are held shorter: the worked cases, bytes, and what is refused."""

import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.errors import StorageError
from kvjax.numerics.rope import Rope
from kvjax.storage import Chain, Codec, Dims, Exact, Integer, Scaled, Side, Storage, ThinK
from tests.laws import replay

LENGTHS, STEPS, DIM = np.array([12, 7]), 5, 8


@pytest.fixture(autouse=True)
def optimised():
    """Nothing, instead of the folder's: programs are many, and small."""


@pytest.fixture(scope="module")
def examples(shared_data):
    return np.load(shared_data / "examples" / "storage_cases.npz")


def given(examples, case: int):
    triples = [
        tuple(examples[f"{case}_{kind}_{name}"] for kind in ("query", "key", "value")) for name in ("prompt", "decode")
    ]
    return json.loads(bytes(examples["cases"]))[case], *triples, examples[f"{case}_lengths"]


def random(seed: int = 0, heads: tuple[int, int] = (4, 2)) -> list[tuple[np.ndarray, ...]]:
    """Queries, keys and values of prompts and of decoding steps."""
    rng = np.random.default_rng(seed)
    return [tuple(rng.normal(size=(2, heads[i > 0], n, DIM)).astype(np.float32) for i in range(3)) for n in (12, STEPS)]


def widths(view) -> dict:
    return {"scale": 1 / jnp.max(jnp.where(view.real[:, None, :, None], jnp.abs(view.own), 1e-3), axis=2)}


def scale_parts(dim: int, dtype) -> dict:
    return {"scale": ((dim,), dtype)}


BY_WIDTH = Side(widths, scale_parts)  # the largest magnitude of each channel of the prompt becomes 1


def test_think(examples):
    about, prompt, decode, lengths = given(examples, 17)
    held = storage.think(about["ratio"], about["window"], about["recent"])
    out, layer = replay(held, prompt, decode, lengths)
    np.testing.assert_allclose(out, examples["17_out"], atol=1e-4)
    for row in range(2):
        np.testing.assert_array_equal(layer.sides["key"]["channels"][row, 0], examples[f"17_channels_{row}_0"])


def test_a_side_is_of_each_rows_prompt():
    """Coded slots decode to what the codec makes of x·b with the b of the row's real tokens, padding left out."""
    held = Storage(key=Scaled(Integer(4, DIM), BY_WIDTH), value=Exact(), residual=2)
    prompt, decode = random()
    prompt[1][1, :, LENGTHS[1] :] = 1e6
    _, layer = replay(held, prompt, decode, LENGTHS)
    key, _, position = storage.read(held, layer)
    for row, head in np.ndindex(2, 2):
        own = prompt[1][row, head, : LENGTHS[row]]
        tokens = np.concatenate([own, decode[1][row, head]])
        scale = 1 / np.abs(own).max(axis=0)
        np.testing.assert_allclose(layer.sides["key"]["scale"][row, head], scale, rtol=1e-6)
        for slot, at in enumerate(np.asarray(position)[row, head]):
            if at < 0:
                continue
            y = tokens[at] * scale
            step = (y.max() - y.min()) / 15 / scale
            exact = at > LENGTHS[row] + STEPS - 1 - 2
            assert (np.abs(key[row, head, slot] - tokens[at]) <= (0 if exact else 0.51 * step)).all()


def test_attention_over_shorter_vectors_is_that_over_what_they_decode_to():
    """With statistics, under a policy that ranks by them: the same slots stay."""

    class Half(Dims):
        """The first half of each vector, whose second half is a constant of keys, and the negative of values."""

        def dim(self, dim):
            return dim // 2

        def forward(self, x, side):
            return x[..., : x.shape[-1] // 2]

        def query(self, q, side):
            return q[..., : q.shape[-1] // 2], 0.5 * jnp.sum(q[..., q.shape[-1] // 2 :], axis=-1)

        def output(self, weighted, total, side):
            return jnp.concatenate([weighted, -weighted], axis=-1)

    def parts(dim, dtype):
        return {"half": ((dim // 2,), dtype)}

    def encode(x, side, dtype):
        return {"half": x[..., : x.shape[-1] // 2].astype(dtype)}

    keys = Codec(
        parts, encode, lambda p, side, dim: jnp.concatenate([p["half"], 0.5 * jnp.ones_like(p["half"])], axis=-1)
    )
    values = Codec(parts, encode, lambda p, side, dim: jnp.concatenate([p["half"], -p["half"]], axis=-1))
    half = Half()
    short = Storage(key=Chain(half), value=Chain(half), residual=2, frame="rotated")
    whole = Storage(key=keys, value=values, residual=2)
    arguments = (*random(1), LENGTHS, policies.h2o(6))
    (output, layer), (expected, other) = (replay(each, *arguments) for each in (short, whole))
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_array_equal(layer.position, other.position)
    for name, column in other.stats.items():
        np.testing.assert_allclose(layer.stats[name], column, rtol=1e-4, atol=1e-6)
    assert layer.stores[0]["key"]["latent"].shape[-1] == DIM // 2
    # A value decodes by its output, and a key by its query where there is no output.
    np.testing.assert_allclose(storage.read(short, layer)[1], storage.read(whole, other)[1], atol=1e-6)
    by_query = Chain(Dims(half.dim, half.forward, half.query)).decode(
        {"latent": jnp.ones((1, 1, 3, 4))}, None, DIM
    )  # fmt: skip
    np.testing.assert_allclose(by_query[0, 0], [[1.0] * 4 + [0.5] * 4] * 3, atol=1e-6)


def test_bytes_and_sides_are_counted():
    prompt, decode = random()
    _, layer = replay(storage.think(0.4, 4, 3), prompt, decode, LENGTHS)
    kept, total, rows = 5, 12 + STEPS, 2 * 2
    counted = storage.breakdown(layer)
    assert counted["sides"] == rows * kept
    assert counted["codes"] == rows * (total - 3) * kept * 4  # keys
    assert counted["exact"] == rows * ((total - 3) * DIM + 3 * 2 * DIM) * 4  # values, and what is recent
    assert storage.nbytes(layer) == counted["stores"] == sum(counted[name] for name in ("sides", "codes", "exact"))
    assert storage.nbytes(layer) == sum(x.nbytes for x in jax.tree.leaves((layer.stores, layer.sides)))
    ratios, exact = storage.ratios(layer, "float32"), rows * total * 2 * DIM * 4
    assert ratios == {"stores": counted["stores"] / exact, "with_rest": (counted["stores"] + counted["rest"]) / exact}


def test_all_channels_are_the_exact_keys():
    arguments = (*random(2), LENGTHS, policies.tova(6), Rope(dim=DIM))
    plain, _ = replay(storage.dense(), *arguments)
    output, _ = replay(storage.think(0.0, recent=2), *arguments)
    np.testing.assert_allclose(output, plain, atol=1e-5)


def test_they_are_values():
    made = storage.think(0.25, 8, 2, codec=Integer(4, 8))
    assert made == storage.think(window=8, ratio=0.25, recent=2, codec=Integer(4, 8)) != storage.think(0.25, 8, 2)
    assert eval(repr(made), vars(storage).copy()) == pickle.loads(pickle.dumps(made)) == made
    assert Scaled(Integer(4), BY_WIDTH) == storage.scaled(Integer(4), BY_WIDTH)
    assert storage.chain(ThinK(0.25, 8), Integer(4, 8)) == made.key
    assert made.bytes_per_slot(8, "bfloat16") == 3 + 2 * 2 + 8 * 2 and storage.think().name == "think"


KEYS = Chain(ThinK())


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.think(1.0), "ratio must be below 1"),
        (lambda: storage.think(-0.1), "ratio must be a number from 0 to 1; got -0.1"),
        (lambda: storage.think(window=0), "window must be a whole number of at least 1; got 0"),
        (lambda: storage.think(recent=-1), "residual must be a whole number of at least 0; got -1"),
        (lambda: storage.chain(Integer(4)), "dims=Integer.* must be a kvjax.storage.Dims"),
        (lambda: storage.chain(ThinK(), Scaled(Integer(4), BY_WIDTH)), "a codec without a side"),
        (lambda: storage.scaled(Scaled(Integer(4), BY_WIDTH), BY_WIDTH), "a codec without a side"),
        (lambda: storage.scaled(Integer(4), 3), "side=3 must be a kvjax.storage.Side"),
        (lambda: Side(widths, scale_parts, when="later"), "when='later' is not valid; use 'prompt' or 'calibration'"),
        (lambda: Side(widths, 3), "parts=3 must be a function"),
        (lambda: Dims(len, 3), "forward=3 must be a function"),
        (lambda: Codec(len, len, len, 3), "side=3 must be a kvjax.storage.Side, or None"),
        (lambda: Storage(key=KEYS, value=KEYS, frame="rotated"), "has no `output`, which values need"),
        (lambda: Storage(key=KEYS, value=Exact()), "use frame='rotated', not 'any'"),
        (lambda: Storage(key=KEYS, value=Exact(), frame="rotated", memory="host"), "leave out memory"),
        (lambda: Storage(key=Integer(4), value=Exact(), frame="unrotated", memory="host"), "leave out memory"),
        (lambda: Storage(key=Integer(4), value=Exact(), sinks=-1), "sinks must be a whole number of at least 0"),
    ],
)
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(StorageError, match=match) as caught:
        build()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("held", "options", "match"),
    [
        (storage.think(recent=2), {"prefill_block": 4}, "leave out prefill_block"),
        (storage.think(recent=2), {"policy": policies.streaming_llm(6)}, "use positions='original'"),
        (storage.think(recent=2), {"policy": policies.window(6, merge=policies.d2o())}, "use a policy without a merge"),
        (Storage(key=Scaled(Integer(4), BY_WIDTH), value=Exact()), {"prefill_block": 4}, "leave out prefill_block"),
    ],
)
def test_what_does_not_compose_is_refused(held, options, match):
    with pytest.raises(StorageError, match=f"storage {held.name} with policy .*{match}"):
        replay(held, *random(), LENGTHS, **options)
