"""Storages: values that compare, print and pickle, the arrays of slots, a user's own codec, what is refused."""

import functools
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import storage
from kvjax.errors import KvjaxError, StorageError
from kvjax.storage import Codec, Exact, Integer, Storage, pack, store, unpack

STORAGES = {
    "dense": storage.dense(),
    "fp16": storage.fp16(residual=4),
    "int8": storage.int8(),
    "int4": storage.int4(residual=3),
    "int2": storage.int2(32),
    "integer": storage.integer(5, 16, key_bits=8, residual=2),
    "fp8": storage.fp8(),
    "fp8 fixed": storage.fp8(0.02, residual=1),
    "bfp": storage.bfp(6, 8),
    "mxfp4": storage.mxfp4(residual=5),
    "nvfp4": storage.nvfp4(8),
    "nvfp4 fixed": storage.nvfp4(scale=0.01, residual=2),
    "rotated": storage.rotated(storage.integer(4, 8, residual=2), 3),
    "rotated, no signs": storage.rotated(storage.nvfp4()),
    "levels": storage.levels(2, (-1, -0.3, 0.3, 1)),
    "turboquant": storage.turboquant(4, 3, key_bits=3),
    "sparse": storage.sparse(storage.levels(3), 0.2),
    "permuted": storage.permuted(storage.bfp(8, 4), tuple(range(15, -1, -1))),
}
ARRANGED = {
    "kivi": storage.kivi(2, 4, 8),
    "kivi, other values": storage.kivi(2, 4, 8, value_bits=4),
    "gear": storage.gear(2, 8, rank=3),
    "kvarn": storage.kvarn(3, block=8),
    "zipcache": storage.zipcache(),
    "mikv": storage.mikv(2, 4),
    "minicache": storage.minicache(2, retained=0.1),
    "mikv, rotated": storage.rotated(storage.mikv(high=storage.int8(), balance=False)),
    "mikv, int8": storage.mikv(high=storage.int8(), balance=False, low_capacity=9),
}


#: Codecs that are made of a codec.
WRAPPERS = {
    "sparse": functools.partial(storage.sparse, outliers=1),
    "permuted": functools.partial(storage.permuted, order=(1, 0)),
    "rotated": storage.rotated,
    "scaled": functools.partial(storage.scaled, side=storage.Balance()),
    "chain": functools.partial(storage.chain, storage.ThinK()),
}


def bits_of(x: jax.Array) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def signs(residual: int = 0) -> Storage:
    """A user's storage: one bit a channel and the mean magnitude of the vector."""

    def parts(dim, dtype):
        return {"codes": ((-(-dim // 8),), jnp.uint8), "scale": ((), dtype)}

    def encode(x, side, dtype):
        return {"codes": pack(x < 0, bits=1), "scale": jnp.mean(jnp.abs(x), axis=-1).astype(dtype)}

    def decode(p, side, dim):
        return p["scale"].astype(jnp.float32)[..., None] * (1 - 2.0 * unpack(p["codes"], bits=1, dim=dim))

    codec = Codec(parts, encode, decode)
    return Storage(key=codec, value=codec, layout=storage.slots, residual=residual, name="signs")


def test_a_users_own_codec():
    own = signs(residual=4)
    x = jnp.asarray(np.random.default_rng(4).normal(size=(2, 3, 5, 12)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        held = jax.jit(lambda x: store.encode(own, x, -x, jnp.bfloat16))(x)
        key, value = jax.jit(lambda held: store.decode(own, held, 12, jnp.float32))(held)
    size = np.abs(x).mean(axis=-1, keepdims=True).astype(jnp.bfloat16).astype(np.float32)
    np.testing.assert_allclose(key, np.sign(x) * size, rtol=1e-2)
    np.testing.assert_array_equal(value, -key)
    assert own.bytes_per_slot(12, jnp.bfloat16) == 8 and own.residual == 4 and not own.exact
    assert jax.tree.map(jnp.shape, held) == jax.tree.map(jnp.shape, store.empty(own, (2, 3, 5), 12, jnp.bfloat16))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "bfloat16") for name in STORAGES] + [("dense", "float32"), ("int4", "float32")]
)
def test_a_store_of_slots(name, dtype):
    own, dim, kind = STORAGES[name], 16, jnp.dtype(dtype)
    # [B, K, S, D] each
    given = [np.asarray(x, kind) for x in np.random.default_rng(5).normal(size=(2, 2, 3, 5, dim))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nothing = store.empty(own, (2, 3, 5), dim, kind)

    @jax.jit
    def run(nothing, key, value):
        held = store.encode(own, key, value, kind)
        trips = [storage.round_trip(*each, None, kind) for each in ((own.key, key), (own.value, value))]
        return held, trips, store.decode(own, held, dim, kind), store.decode(own, nothing, dim, kind)

    held, trips, decoded, zeros = run(nothing, *given)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), held) == jax.tree.map(lambda x: (x.shape, x.dtype), nothing)
    assert sum(x.nbytes for x in jax.tree.leaves(nothing)) == 6 * store.nbytes(own, 5, dim, kind)
    for x, trip, back, zero in zip(given, trips, decoded, zeros, strict=True):
        assert back.shape == x.shape and back.dtype == kind
        np.testing.assert_allclose(back.astype(np.float32), trip.astype(kind).astype(np.float32), rtol=1e-2, atol=1e-6)
        np.testing.assert_array_equal(zero.astype(np.float32), 0)
        if own.exact:
            np.testing.assert_array_equal(bits_of(x), bits_of(back))


def test_bytes_of_the_definition():
    """Bytes of a slot of 128 channels in bfloat16, which is 512 bytes."""
    sizes = {
        storage.dense(): 512, storage.fp16(): 512,
        storage.int8(): 272, storage.int4(): 144, storage.int2(32): 96, storage.fp8(): 260,
        storage.fp8(1): 256, storage.bfp(): 264, storage.mxfp4(): 136, storage.nvfp4(): 148,
        storage.nvfp4(scale=1): 144, storage.rotated(storage.int4()): 144, storage.turboquant(4): 132,
        storage.turboquant(3): 100, storage.turboquant(2): 68, storage.levels(3): 2 * (48 + 4),
        storage.sparse(storage.levels(3), 0.01): 2 * (48 + 4 + 2 * 3),
    }  # fmt: skip
    assert {each: each.bytes_per_slot(128, jnp.bfloat16) for each in sizes} == sizes


def test_a_codec_that_saves_nothing_is_warned_of():
    with pytest.warns(UserWarning, match="key of 67 channels takes 335 bytes .* 134 bytes in bfloat16") as warned:
        store.empty(Storage(key=Integer(8), value=Exact()), (1, 1, 2), 67, jnp.bfloat16)
    assert [each.filename for each in warned] == [__file__]


@pytest.mark.parametrize("name", STORAGES | ARRANGED)
def test_storages_are_values(name):
    own = (STORAGES | ARRANGED)[name]
    assert eval(repr(own), vars(storage).copy()) == own
    for other in (pickle.loads(pickle.dumps(own)), eval(repr(own), vars(storage).copy())):
        assert other == own and hash(other) == hash(own) and repr(other) == repr(own)
    assert Storage(**{**vars(own), "name": "another"}) == own
    of_pairs = isinstance(own.layout, storage.Pairs)
    other = {"value": storage.Merged(0.1)} if of_pairs else {"value": Integer(7)}
    other = {"residual": own.residual + 1} if own.layout == storage.slots else other
    assert Storage(**{**vars(own), **other}) != own
    assert own.exact == (name == "dense")
    assert len(set(STORAGES.values())) == len(STORAGES)


def test_equal_arguments_are_equal_storages():
    assert storage.int8() == storage.integer(np.int64(8), 64) == storage.by_name("integer", bits=8)
    assert storage.fp8(np.float32(0.5)) == storage.fp8(scale=0.5) != storage.fp8()
    by_layer = storage.fp8((0.5, 0.25), value_scale=[0.1, 0.2])
    assert [by_layer.of_layer(i, 2) for i in (0, 1)] == [
        storage.fp8(0.5, value_scale=0.1),
        storage.fp8(0.25, value_scale=0.2),
    ]
    assert by_layer.bytes_per_slot(128, "bfloat16") == 256
    assert storage.integer(8, value_bits=4) == Storage(key=Integer(8), value=Integer(4))
    assert Codec(len, len, len) == Codec(parts=len, encode=len, decode=len) != Codec(len, len, max)
    assert storage.turboquant(4) == storage.turboquant(2, key_bits=4, value_bits=4) != storage.turboquant(4, seed=1)
    assert storage.levels(4, storage.normal_levels(4)) == storage.levels(4) == storage.by_name("levels")
    named = {
        "dense",
        "fp16",
        "int8",
        "int4",
        "int2",
        "integer",
        "fp8",
        "bfp",
        "mxfp4",
        "nvfp4",
        "rotated",
        "levels",
        "turboquant",
        "think",
        "kivi",
        "mikv",
        "gear",
        "zipcache",
    }
    assert set(storage.STORAGES) >= named
    assert storage.accepts("int4") == {"group", "residual", "memory"}
    assert storage.accepts("dense") == {"residual", "memory"}
    assert storage.dense(memory=["host", "host"]) == storage.dense(memory="host") != storage.dense()
    assert storage.int4(memory=("device", "host")).memories == {"key": "device", "value": "host"}


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: storage.integer(0), "storage integer: bits must be a whole number from 1 to 8; got 0"),
        (lambda: storage.integer(9), "from 1 to 8; got 9"),
        (lambda: storage.integer(4.0), "bits .* got 4.0"),
        (lambda: storage.integer(True), "bits .* got True"),
        (lambda: storage.integer(4, key_bits=0), "bits .* got 0"),
        (lambda: storage.int4(0), "storage integer: group must be a whole number of at least 1; got 0"),
        (lambda: storage.int4(residual=-1), "storage int4: residual must be a whole number of at least 0; got -1"),
        (lambda: storage.int4(residual="8"), "residual .* got '8'"),
        (lambda: storage.fp8(0), "storage fp8: scale must be a number from 1.17549e-38 to .*; got 0"),
        (lambda: storage.fp8(float("nan")), "scale .* got nan"),
        (lambda: storage.fp8(1e37), "scale .* got 1e"),
        (lambda: storage.fp8(True), "scale .* got True"),
        (lambda: storage.fp8(()), "scale must be a number, or one for each layer; got "),
        (lambda: storage.sparse(Integer(4), 1.0), "sparse: outliers, as a share, must be above 0 and below 1; got 1.0"),
        (lambda: storage.fp8((1.0, 0)), "scale must be a number .* got 0"),
        (lambda: storage.fp8((1.0, 2.0)).of_layer(0, 3), "is for 2 layers, but the model has 3; give one for all"),
        (lambda: storage.fp8((1.0, 2.0)).key.encode(jnp.zeros(4), None, "float32"), r"with Storage\.of_layer"),
        (lambda: storage.bfp(1), "storage bfp: bits must be a whole number from 2 to 8; got 1"),
        (lambda: storage.bfp(8, 0), "storage bfp: group .* got 0"),
        (lambda: storage.mxfp4(0.5), "storage mxfp4: group .* got 0.5"),
        (lambda: storage.nvfp4(0), "storage nvfp4: group .* at least 1; got 0"),
        (lambda: storage.nvfp4(scale=0), "storage nvfp4: scale must be a number from .* got 0"),
        (lambda: storage.kvarn(9), "storage kvarn: bits .* from 1 to 8; got 9"),
        (lambda: storage.kvarn(block=1), "storage kvarn: block .* at least 2; got 1"),
        (lambda: storage.kvarn(iterations=-1), "storage kvarn: iterations .* got -1"),
        (lambda: storage.rotated(storage.kvarn()), "rotated: storage kvarn_k4v2 holds blocks of tokens"),
        (lambda: storage.levels(9), "storage levels: bits .* from 1 to 8; got 9"),
        (lambda: storage.levels(2, (-1, 0, 1)), "table must be 4 ascending numbers in .* got \\(-1, 0, 1\\)"),
        (lambda: storage.levels(1, (1, -1)), "table must be 2 ascending numbers"),
        (lambda: storage.levels(1, (-1, 2)), "a level must be a number from -1 to 1; got 2"),
        (lambda: storage.levels(1, 3), "table must be .* got 3"),
        (lambda: storage.normal_levels(0), "normal_levels: bits .* got 0"),
        (lambda: storage.turboquant(5), "storage turboquant: bits=5 is not valid; use 2, 3 or 4"),
        (lambda: storage.turboquant(4.0), "storage turboquant: bits must be a whole number .* got 4.0"),
        (lambda: storage.turboquant(seed=-1), "storage turboquant: seed .* from 0 to 4294967295; got -1"),
        (lambda: storage.sparse(Integer(4), 0), "sparse: outliers, unless a share, .* at least 1; got 0"),
        (lambda: storage.sparse(Integer(4), 1.5), "sparse: outliers must be a number from 0 to 1; got 1.5"),
        (lambda: storage.sparse(4, 1), "sparse: 4 must be a codec or a storage"),
        (lambda: storage.sparse(storage.sparse(Integer(4), 1), 1), "already has outliers"),
        (lambda: storage.sparse(Integer(4), 4).parts(8, jnp.float32), "the 4 smallest and the 4 largest of 8 channels"),
        (lambda: storage.permuted(Integer(4), (0, 2)), "order must be a permutation .* got \\(0, 2\\)"),
        (lambda: storage.permuted(Integer(4), 3), "order must be a permutation .* got 3"),
        (lambda: storage.permuted(Integer(4), (1, 0)).bytes(8, jnp.float32), "order has 2 channels, and a head has 8"),
        (lambda: storage.rotated(Integer(4), -1), "rotated: seed .* from 0 to 4294967295; got -1"),
        (lambda: storage.rotated(Integer(4), 0.5), "rotated: seed .* got 0.5"),
        (lambda: storage.rotated(storage.dense()), "rotated: storage dense stores keys and values exactly"),
        (lambda: storage.rotated(Exact()), "rotated: codec=Exact.. stores vectors exactly"),
        (lambda: storage.rotated(storage.kivi()), "rotated: storage kivi2 holds blocks of tokens"),
        (lambda: storage.rotated(storage.mikv()), "rotated: codec=.* has parameters for each channel, which a"),
        (lambda: storage.rotated(storage.kvquant()), "rotated: codec=.* has parameters for each channel"),
        (lambda: storage.rotated(storage.rotated(storage.int4())), "rotated: codec=Rotated.* already rotates vectors"),
        (lambda: storage.rotated(storage.sparse(storage.turboquant(), 1)), "codec=TurboQuant.* already rotates"),
        (lambda: storage.rotated(storage.low_rank(3, 4)), "rotated: codec=.* and all its channels"),
        (lambda: storage.rotated(4), "rotated: 4 must be a codec or a storage"),
        (lambda: storage.rotated(Integer(4)).bytes(67, "float32"), "which for 67 is 1, so that a rotation changes"),
        (lambda: storage.Sparse(storage.int4(), 1), "sparse: codec=.* must be a codec"),
        *(
            (functools.partial(wrap, made.key), f"{name}: codec={type(made.key).__name__}.* holds the vectors of {of}")
            for name, wrap in WRAPPERS.items()
            for made, of in ((storage.kv_heads(2), "several KV heads"), (storage.minicache(), "two layers"))
        ),
        (lambda: storage.Permuted(storage.think().key, (1, 0)), "permuted: codec=.* and all its channels"),
        (lambda: storage.sparse(storage.kivi(), 1), "sparse: storage kivi.* holds blocks of tokens"),
        (lambda: storage.int4(bits=4), "int4\\(\\).* it accepts group, residual"),
        (lambda: storage.dense(residual=3), "residual=3 is for memory='host'"),
        (
            lambda: storage.by_name("int3"),
            r"'int3'; did you mean 'int.'\? known storages: bfp, .*dense, fp16, fp8, .*int2",
        ),
        (lambda: storage.accepts("int3"), "known storages: bfp, .*dense"),
        (lambda: storage.by_name("int8", bits=8), "it accepts group"),
        (lambda: Storage(key=storage.int4(), value=Exact()), "must be codecs, such as"),
        (
            lambda: Storage(key=Exact(), value=Exact(), layout="tiers"),
            "storage custom: layout='tiers' is not valid; use 'slots', blocks",
        ),
        (lambda: Storage(key=Exact(), value=Exact(), frame="turned"), "use 'any'"),
        (lambda: Storage(key=Exact(), value=Exact(), memory="disk", name="mine"), "storage mine: memory='disk'"),
        (lambda: storage.int8(memory=("host", "disk")), "use 'device', 'host', or a pair of these"),
        (lambda: Codec(len, len, 3), "decode=3 must be a function"),
        (lambda: pack(jnp.zeros(8, jnp.uint8), 9), "bits .* from 1 to 8; got 9"),
        (lambda: unpack(jnp.zeros((2, 3), jnp.uint8), 4, 8), "8 codes of 4 bits are 4 bytes; got .*\\(2, 3\\)"),
    ],
)
def test_refused_with_what_is_valid(build, match):
    with pytest.raises(StorageError, match=match) as caught:
        build()
    assert isinstance(caught.value, KvjaxError) and "\n" not in str(caught.value)


def test_codecs_of_codecs_differ_by_layer_as_these_do():
    by_layer, own = storage.fp8((1.0, 2.0)).key, storage.Fp8(2.0)
    for wrap in WRAPPERS.values():
        assert wrap(by_layer).of_layer(1, 2) == wrap(own)
        assert wrap(own).of_layer(1, 2) == wrap(own).of_head(0, 2) == wrap(own)
    assert storage.mikv(high=storage.fp8((1.0, 2.0))).of_layer(1, 2).layout.high == storage.fp8(2.0)
