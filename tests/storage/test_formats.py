"""Codecs of block formats and of levels, and codecs of codecs: worked examples, the reference, bounds, mistakes."""

import json
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax import storage
from kvjax.storage import (
    Bfp,
    Codec,
    Exact,
    Fp8,
    Fp16,
    Integer,
    Levels,
    Mxfp4,
    Nvfp4,
    Permuted,
    Rotated,
    Sparse,
    TurboQuant,
    normal_levels,
    pack,
)  # fmt: skip
from kvjax.storage.exponents import shifted
from kvjax.storage.tables import lookup, nearest_level
from kvjax.storage.turboquant import turn, turn_back
from tests.reference import formats as reference
from tests.reference.codecs import FORMATS
from tests.storage.against import DTYPES, compare, compiled, draw, encoded, expect
from tests.storage.test_codecs import bits_of, search, vectors

UNEVEN = (-1.0, -0.2, 0.3, 0.9)
ORDER = (3, 0, 7, 5, 1, 2, 6, 4, 11, 10, 9, 8)
NORMAL_FLOAT = Sparse(Levels(4), 1)

#: Codecs, sizes of vectors (primes, groups that do not divide, one channel), and dtypes of parameters.
CASES = [
    (Fp16(), 17, "float32"), (Fp16(), 24, "bfloat16"), (Sparse(Fp16(), 1), 16, "float32"),
    (Rotated(Fp16(), 2), 24, "bfloat16"),
    (Bfp(8, 32), 24, "float32"), (Bfp(5, 4), 20, "bfloat16"), (Bfp(2, 8), 13, "float16"), (Bfp(4, 3), 1, "float32"),
    (Mxfp4(32), 17, "float32"), (Mxfp4(8), 64, "bfloat16"), (Mxfp4(), 1, "float16"),
    (Nvfp4(), 64, "bfloat16"), (Nvfp4(8), 24, "float16"), (Nvfp4(), 17, "float32"), (Nvfp4(), 1, "float32"),
    (Nvfp4(scale=0.5), 48, "bfloat16"), (Sparse(Nvfp4(), 1), 32, "float32"),
    (Rotated(Integer(4), 0), 64, "float32"), (Rotated(Integer(2, 8), 3), 80, "bfloat16"),
    (Rotated(Fp8()), 12, "float16"), (Rotated(Nvfp4(), 1), 96, "float32"), (Rotated(Levels(3)), 14, "bfloat16"),
    (Rotated(Sparse(Integer(3), 1)), 16, "float32"), (Sparse(Rotated(Integer(4)), 1), 32, "float32"),
    (Levels(4), 24, "float32"), (Levels(3), 13, "bfloat16"), (Levels(2, UNEVEN), 16, "float16"),
    (Levels(6), 12, "float32"),
    (TurboQuant(4), 64, "float32"), (TurboQuant(3, 7), 32, "bfloat16"), (TurboQuant(2), 16, "float16"),
    (TurboQuant(4, 1), 13, "float32"), (TurboQuant(2), 1, "float32"), (TurboQuant(3), 12, "float16"),
    (Permuted(Bfp(6, 4), ORDER), 12, "float32"), (Permuted(Sparse(Integer(3, 4), 1), ORDER), 12, "float32"),
    (NORMAL_FLOAT, 24, "bfloat16"), (Sparse(Levels(3), 2), 13, "float32"), (Sparse(Integer(2, 4), 2), 16, "float16"),
    (Sparse(Bfp(4, 8), 1), 16, "float32"), (Sparse(Fp8(), 3), 7, "float32"), (Sparse(Mxfp4(8), 1), 16, "bfloat16"),
]  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("codec", "dim", "dtype"), CASES, ids=str)
def test_is_the_reference(codec, dim, dtype):
    x = draw(codec, dtype, dim)
    made, decoded = expect(codec, dtype, x)
    compare(codec, dtype, x, made.parts, decoded)


@pytest.mark.parametrize("case", range(6, 10))
def test_worked_examples(shared_data, case):
    cases = np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(cases["cases"]))[case]
    codec = {
        "bfp": lambda: Bfp(about["bits"], about["group"]),
        "mxfp4": lambda: Mxfp4(about["group"]),
        "kvquant": lambda: Sparse(Levels(about["bits"]), about["value_outliers"]),
    }[about["name"]]()
    parts = {name: cases[f"{case}_{name}"] for name in codec.parts(about["dim"], "float32")}
    compare(codec, "float32", cases[f"{case}_x"], parts, cases[f"{case}_decoded"])
    assert codec.bytes(about["dim"], "float32") == about.get("bytes_per_vector", 12 + 8 + 2 * 5)


def test_exact_ties():
    """Halves of a unit, midpoints of magnitudes, the middle of levels; and signs of zeros."""
    halves = np.arange(-64, 64)[None] / 2.0  # mantissas of 7 bits: E = 5
    compare(Bfp(7, 128), "float32", halves.astype(np.float32), *_reference(Bfp(7, 128), halves))
    magnitudes = np.array(reference.E2M1)
    middle = np.concatenate([(magnitudes[1:] + magnitudes[:-1]) / 2, magnitudes, [7.9]])
    ties = np.concatenate([middle, -middle])[None].astype(np.float32)
    compare(Mxfp4(64), "float32", ties, *_reference(Mxfp4(64), ties))
    table = (-1.0, -0.5, 0.5, 1.0)
    levels = np.array([[-1, -0.75, 0, 0.75, 1, np.nextafter(np.float32(0), np.float32(1))]], np.float32)
    levels[0, -1] = 1e-30
    codes = encoded(Levels(2, table), "float32", levels)[0]["codes"]
    np.testing.assert_array_equal(codes, [reference.pack([0, 0, 1, 2, 3, 2], 2)])


def _reference(codec: Codec, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    made, decoded = expect(codec, "float32", x.astype(np.float32))
    return made.parts, decoded


def test_rounding_in_integers():
    mantissa, shift = np.meshgrid([0, 1, 2, 3, 5, 6, 7, 8, 12, 2**24 - 1, 2**23 + 2**22], np.arange(1, 40))
    expected = [[round(m / 2.0**s) for m, s in zip(*row, strict=True)] for row in zip(mantissa, shift, strict=True)]
    np.testing.assert_array_equal(jax.jit(shifted)(mantissa.astype(np.int32), shift.astype(np.int32)), expected)


@pytest.mark.parametrize("codec", [Bfp(8, 4), Bfp(3, 4), Mxfp4(4)], ids=str)
def test_exponents_of_extremes(codec):
    """Codes and exponents are exact for subnormal numbers and for the largest."""
    largest, smallest = np.finfo(np.float32).max, np.float32(1e-45)
    x = np.array([
        [largest, -largest, largest / 2, 1], [smallest, 0, -smallest, 3 * smallest], [2e-39, 5e-39, 9e-39, -1e-38],
        [1.2e-38, 2.0**-126, 2.0**-125, -(2.0**-124)], [-0.0, 0.0, -0.0, 0.0], [2.0**-127, 2.0**-128, 0, 1e-30],
    ], np.float32)  # fmt: skip
    parts, decoded = encoded(codec, "float32", x)
    made, expected = expect(codec, "float32", x)
    for name, part in parts.items():
        np.testing.assert_array_equal(part, made.parts[name], name)
    # Arithmetic may take subnormal numbers as 0.
    np.testing.assert_allclose(decoded, expected, atol=2.0**-126)
    assert np.all(np.isfinite(decoded)) and np.all(decoded[4] == 0)


def test_lengths_of_extremes():
    """A length is exact where no square of a coordinate is a normal number."""
    for size in (1e-30, 1.0, 1e30, 1.2e38):
        x = (np.array([[3, -4, 0, 0], [1, 1, 1, 1]]) * size / 4).astype(np.float32)
        parts, decoded = encoded(TurboQuant(4), "float32", x)
        made, expected = expect(TurboQuant(4), "float32", x)
        np.testing.assert_allclose(parts["scale"], made.parts["scale"], rtol=1e-6)
        np.testing.assert_array_equal(parts["codes"], made.parts["codes"])
        np.testing.assert_allclose(decoded, expected, atol=1e-6 * size)
    parts, decoded = encoded(TurboQuant(4), "float16", np.full((1, 16), 60000, np.float32))
    assert parts["scale"] == np.float16(65504) and np.all(np.isfinite(decoded))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codec", "dim"),
    [
        (Levels(4), 24),
        (Levels(6), 24),
        (TurboQuant(4), 128),
        (TurboQuant(3, 5), 24),
        (Sparse(Integer(2, 8), 1), 24),
        (Nvfp4(), 48),
        (Rotated(Integer(4)), 128),
        (Rotated(Levels(3), 2), 96),
    ],
    ids=str,
)
def test_bytes_do_not_depend_on_the_program(codec, dim):
    """Many vectors at once, one by itself, and without the optimisations of a compiler: the same bytes."""
    x = np.random.default_rng(0).normal(size=(500, dim)).astype(np.float32)
    whole, _ = encoded(codec, "float32", x)
    plain = jax.jit(
        lambda x: codec.encode(x, None, jnp.float32), compiler_options={"xla_backend_optimization_level": 0}
    )(x)
    alone, _ = encoded(codec, "float32", x[7])
    for name, part in whole.items():
        np.testing.assert_array_equal(bits_of(part), bits_of(plain[name]))
        np.testing.assert_array_equal(bits_of(part[7]), bits_of(alone[name]))


def large(kind: jnp.dtype) -> float:
    """A large number of a dtype of floats."""
    return min(1e30, float(jnp.finfo(kind).max))


def test_bytes_of_255_decode_to_finite_numbers():
    """The content of an empty slot must not make a sum NaN, even with a weight of 0."""
    codecs = [*(codec for codec, dim, _ in CASES if dim != 1), Integer(4), Fp8(), Fp8(0.5)]
    codecs += [Rotated(Bfp()), Rotated(Mxfp4(4))]

    def decode(codec: Codec) -> jax.Array:
        dim = len(codec.order) if isinstance(codec, Permuted) else 16
        parts = {
            name: jnp.full((2, *shape), 255 if np.issubdtype(kind, np.integer) else large(kind), kind)
            for name, (shape, kind) in codec.parts(dim, "float32").items()
        }
        return codec.decode(parts, None, dim)

    for codec, decoded in zip(codecs, jax.jit(lambda: [decode(each) for each in codecs])(), strict=True):
        assert np.all(np.isfinite(decoded)), codec


#: Codecs and sizes of vectors.
BOUNDED = [(Bfp(8, 4), 12), (Bfp(3), 7), (Mxfp4(4), 12), (Levels(4), 12), (NORMAL_FLOAT, 7), (TurboQuant(2), 8),
           (TurboQuant(4), 7), (Nvfp4(4), 12), (Nvfp4(scale=0.25), 7)]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@search
@given(data=st.data())
def test_error_is_bounded(dtype, data):
    codec, dim = data.draw(st.sampled_from(BOUNDED))
    x = data.draw(vectors(dtype, dim))
    parts, decoded = encoded(codec, dtype, x)
    assert np.all(np.isfinite(decoded))
    x, decoded, flushed = x.astype(np.float64), decoded.astype(np.float64), 2.0**-125
    error, largest = np.abs(x - decoded), np.abs(x).max(axis=-1, keepdims=True)
    mantissa, least, _ = FORMATS[dtype]
    # What rounding a parameter moves a number by.
    rounded = largest * 2.0**-22 + (0 if dtype == "float32" else largest * 2.0**-mantissa + 2.0 ** (least - mantissa))
    if isinstance(codec, Bfp | Mxfp4):
        groups = np.abs(x).reshape(2, parts["exponent"].shape[-1], -1).max(axis=-1)
        np.testing.assert_array_equal(
            parts["exponent"] == 0, groups < 2.0 ** (-126 if isinstance(codec, Bfp) else -124)
        )
        unit = np.exp2(parts["exponent"].astype(np.float64) - 127).repeat(dim // parts["exponent"].shape[-1], axis=-1)
        if isinstance(codec, Bfp):
            # Half a unit of the mantissa; a unit where it saturates just below a power of two.
            clipped = np.abs(x) > (2 ** (codec.bits - 1) - 1.5) * unit * 2.0 ** (2 - codec.bits)
            bound = unit * 2.0 ** (2 - codec.bits) * np.where(clipped, 1, 0.5)
        else:
            # Half a gap between magnitudes; beyond 6 it is cut off, of less than 8.
            y = np.abs(x) / unit
            bound = unit * np.select([y <= 2, y <= 4, y <= 6], [0.25, 0.5, 1], 2)
        assert np.all(error <= bound * (1 + 2.0**-20) + flushed)
    elif isinstance(codec, Nvfp4):
        step = parts["group_scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        step = step * (codec.scale or parts["scale"].astype(np.float64)[:, None])
        unit = step.repeat(dim // step.shape[-1], axis=-1)
        y = np.abs(x) / np.maximum(unit, 1e-300)
        # Half a gap between magnitudes; what is beyond 6 is cut off.
        bound = np.select([y <= 2, y <= 4, y <= 6], [0.25 * unit, 0.5 * unit, unit], np.abs(x) - 6 * unit)
        assert np.all(error <= bound + 2.0**-20 * largest + flushed)
        if codec.scale is None:
            # An e4m3 number is within 1/16; float16 holds small scales less exactly.
            cut = np.maximum(np.abs(x) - 6 * unit, 0).max(axis=-1, keepdims=True)
            assert np.all(cut <= largest / 16 + 448 * 6 * 2.0 ** (least - mantissa))
    elif isinstance(codec, TurboQuant):
        # Levels are orthogonal coordinates: the length of the error is that of the errors of coordinates.
        levels = np.array(reference.lloyd_max(codec.bits))
        turned = (x @ reference.orthogonal(dim, codec.seed).T) / np.maximum(
            parts["scale"].astype(np.float64)[:, None], 1e-300
        )
        gap = np.abs(turned[..., None] - levels).min(axis=-1)
        length = np.sqrt(np.square(gap).sum(axis=-1) / dim) * parts["scale"].astype(np.float64)
        norm = np.linalg.norm(x, axis=-1)
        kept = parts["scale"] > 0
        assert np.all(np.linalg.norm(x - decoded, axis=-1)[kept] <= (length + 1e-5 * norm + flushed * dim)[kept])
        assert np.all(decoded[~kept] == 0)
    else:
        table = np.array((codec if isinstance(codec, Levels) else codec.codec).fit.given)
        width = parts["range"].astype(np.float64)[:, None]
        assert np.all(error <= width * np.diff(table).max() / 2 * (1 + 2.0**-20) + 3 * rounded + flushed)
        if isinstance(codec, Sparse):
            # XLA may take subnormal numbers as 0.
            x = np.where(np.abs(x) < 2.0**-126, 0, x)
            exact = np.sort(np.stack([x.argmin(axis=-1), dim - 1 - x[:, ::-1].argmax(axis=-1)], axis=-1), axis=-1)
            np.testing.assert_array_equal(parts["index"], exact)
            own = np.take_along_axis(error, exact, axis=-1)
            assert np.all(own <= rounded)
    assert np.all(decoded[np.broadcast_to(largest == 0, x.shape)] == 0)


@pytest.mark.sampled(0)
def test_turboquants_error_tends_to_the_normal_distributions():
    """‖x - x̂‖² / ‖x‖², whatever the vectors are."""
    found = {}
    for dim, count in ((16, 1024), (128, 256), (2048, 16)):
        rng = np.random.default_rng(dim)
        x = np.stack([rng.normal(size=(count, dim)), rng.uniform(-1, 1, (count, dim))]).astype(np.float32)
        trips = jax.jit(lambda x: [storage.round_trip(TurboQuant(bits), x, None, jnp.float32) for bits in (2, 3, 4)])(x)
        error = [np.square(trip - x).sum(axis=-1) / np.square(x).sum(axis=-1) for trip in trips]
        found[dim] = np.mean(error, axis=(1, 2))
    expected = np.array([reference.LLOYD_MAX[bits][1] for bits in (2, 3, 4)])
    gaps = {dim: np.abs(error / expected - 1) for dim, error in found.items()}
    assert np.all(gaps[16] < 0.15) and np.all(gaps[128] < 0.04) and np.all(gaps[2048] < 0.012), gaps


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dim", [1, 8, 12, 128])
def test_turning_is_orthogonal(dim):
    matrix = np.asarray(jax.jit(lambda x: turn(x, 3))(jnp.eye(dim))).T
    np.testing.assert_allclose(matrix, reference.orthogonal(dim, 3), atol=1e-5)
    back = jax.jit(lambda x: turn_back(turn(x, 3), 3))(jnp.eye(dim))
    np.testing.assert_allclose(back, np.eye(dim), atol=1e-6)
    signs = np.asarray(turn(jnp.eye(8), 0)).sum(axis=1)
    np.testing.assert_array_equal(np.sign(np.asarray(turn(jnp.eye(8), 0))[:, 0])[:6], [1, 1, 1, 1, -1, 1])
    assert signs.shape == (8,)


def test_no_matrix_of_a_constant_is_repeated():
    """Layers share one matrix, and its transpose; a fast transform needs none."""
    codec = TurboQuant(4)

    def layers(x):
        for _ in range(3):
            x = codec.decode(codec.encode(x, None, jnp.float32), None, x.shape[-1]) + 1
        return x

    for dim, most in ((64, 0), (48, 2)):
        text = jax.jit(layers).lower(jnp.ones((4, dim))).compile().as_text()
        constants = [line for line in text.splitlines() if f"f32[{dim},{dim}]" in line and " constant(" in line]
        assert len(constants) <= most, constants


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dim", "seed"), [(2, 0), (8, 3), (12, None), (80, 1), (128, 0)])
def test_a_rotation_is_orthonormal(dim, seed):
    basis = Rotated(Integer(4), seed).basis
    matrix = np.asarray(jax.jit(basis.rotate)(jnp.eye(dim))).T
    np.testing.assert_allclose(matrix, reference.rotation(dim, seed), atol=1e-6)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    back = jax.jit(lambda x: basis.rotate_back(basis.rotate(x)))(jnp.eye(dim))
    np.testing.assert_allclose(back, np.eye(dim), atol=1e-6)


def test_a_rotation_spreads_what_is_large():
    """One large channel, in which the others are lost without it; the mean of all channels is one without signs."""
    x = np.random.default_rng(0).normal(size=(200, 128)).astype(np.float32)
    outlier, mean = x.copy(), x + 10
    outlier[:, 5] = 40

    def error(codec, x):
        trip = jax.jit(lambda x: storage.round_trip(codec, x, None, jnp.float32))(x)
        return float(np.sqrt(np.square(trip - x).mean()))

    for codec in (Integer(4), Levels(4)):
        # The error of a channel of the rotated vector is that of the vector's: rotations keep lengths.
        assert error(Rotated(codec), outlier) < 0.55 * error(codec, outlier), codec
    assert error(Rotated(Integer(4), 0), mean) < 0.7 * error(Rotated(Integer(4)), mean)


def test_levels_of_a_table():
    np.testing.assert_allclose(normal_levels(4), reference.normal_levels(4), rtol=1e-12)
    assert normal_levels(1) == (-1, 1) and len(normal_levels(8)) == 256
    assert all(table[0] == -1 and table[-1] == 1 and 0.0 in table for table in map(normal_levels, range(2, 9)))
    for bits in (1, 2, 4, 5, 8):
        table, codes = normal_levels(bits), np.arange(2**bits, dtype=np.uint8)
        levels, nearest = jax.jit(lambda c, y: (lookup(table, c), nearest_level(table, y)))(codes, np.float32(table))  # noqa: B023
        np.testing.assert_array_equal(levels, np.float32(table))
        np.testing.assert_array_equal(nearest, codes)
    assert Levels(4, normal_levels(4)) == Levels(4) != Levels(2, UNEVEN) == Levels(2, np.array(UNEVEN))


def test_constants_are_themselves():
    """In float32: a range of 0 decodes to the offset, a power of two to itself."""
    for codec, number in ((Levels(4), 0.3), (NORMAL_FLOAT, -1e30), (Bfp(8), -0.25), (Mxfp4(), 2.0**-60)):
        _, decoded = encoded(codec, "float32", np.full((1, 12), number, np.float32))
        np.testing.assert_array_equal(decoded, np.float32(number))


#: Which codec, which name of which module, and what takes its place there.
def _away(mantissa, shift):
    """Ties go up."""
    return jnp.right_shift(mantissa + jnp.left_shift(1, jnp.minimum(shift, 25) - 1), jnp.minimum(shift, 25))


MUTANTS = {
    "ties up": (Bfp(7, 128), "bfp", "shifted", _away),
    "a sign beside the magnitude": (Bfp(7, 128), "bfp", "pack", lambda codes, bits: pack(abs(codes), bits)),
    "no room beyond the exponent": (Mxfp4(64), "mxfp4", "SPREAD", 1),
    "other magnitudes": (Mxfp4(64), "e2m1", "MAGNITUDES", (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0)),
    "ties to the higher level": (Levels(4), "tables", "midpoints", lambda table: _lower(table)),
    "another seed": (TurboQuant(4), "turboquant", "random_signs", lambda dim, seed: np.ones(dim, np.float32)),
    "no signs": (Rotated(Integer(4), 0), "hadamard", "random_signs", lambda dim, seed: np.ones(dim, np.float32)),
    "a smaller block": (Rotated(Integer(4)), "hadamard", "block_size", lambda dim: 16),
    "scales of groups without a second scale": (Nvfp4(), "nvfp4", "LARGEST", 448.0),
    "scales of groups are powers of two": (Nvfp4(), "nvfp4", "FLOAT8", jnp.float8_e5m2),
    "levels of a uniform distribution": (
        TurboQuant(4), "turboquant", "normal_centroids", lambda bits: tuple(np.linspace(-2.7, 2.7, 16)),
    ),
}  # fmt: skip


def _lower(table):
    return np.nextafter(np.float32(np.add(table[1:], table[:-1]) / 2), np.float32(-2)) - 0.05


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutations_are_noticed(monkeypatch, name):
    codec, module, attribute, mutant = MUTANTS[name]
    x = draw(codec, "float32", 32)
    if isinstance(codec, Bfp):
        x = (np.arange(-64, 64)[None] / 2.0).astype(np.float32)
    made, decoded = expect(codec, "float32", x)
    compare(codec, "float32", x, made.parts, decoded)
    monkeypatch.setattr(sys.modules[f"kvjax.storage.{module}"], attribute, mutant)
    compiled.cache_clear()
    with pytest.raises(AssertionError):
        compare(codec, "float32", x, made.parts, decoded)
    compiled.cache_clear()


def test_outliers_that_widen_the_range_are_noticed(monkeypatch):
    codec = Sparse(Integer(4, 8), 1)
    x = draw(codec, "float32", 16)
    made, decoded = expect(codec, "float32", x)
    monkeypatch.setattr(Integer, "encode_without", lambda self, x, left_out, *others: self.encode(x, *others))
    compiled.cache_clear()
    with pytest.raises(AssertionError):
        compare(codec, "float32", x, made.parts, decoded)
    compiled.cache_clear()


def test_wrappers_of_storages():
    held = storage.sparse(storage.integer(4, residual=3, memory="host"), 1)
    assert held == storage.Storage(key=Sparse(Integer(4), 1), value=Sparse(Integer(4), 1), residual=3, memory="host")
    assert held.name == "sparse(int4)" and storage.sparse(Levels(4), 0.01) == Sparse(Levels(4), 0.01)
    assert storage.permuted(Bfp(8), [1, 0]) == Permuted(Bfp(8), (1, 0)) == storage.permuted(Bfp(8), np.array([1, 0]))
    assert [Sparse(Exact(), 0.01).count(dim) for dim in (16, 100, 300, 500)] == [1, 1, 2, 2]
    assert Sparse(Exact(), 1).parts(255, "float16")["index"] == ((2,), jnp.uint8)
    assert Sparse(Exact(), 1).parts(256, "float16")["index"] == ((2,), jnp.uint16)
