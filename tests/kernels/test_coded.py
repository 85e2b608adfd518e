"""Products with coded slots: by kvjax's own code and chunk by chunk, against the decoded numbers of the references."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import products
from kvjax.kernels import forms
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import coded
from kvjax.products import native
from kvjax.storage import Bfp, Fp8, Fp16, Integer, Levels, Mxfp4, Nvfp4, Permuted, Rotated, Sparse, TurboQuant
from kvjax.storage.hadamard import block_size
from kvjax.storage.scaled import Scaled
from kvjax.storage.side import Side
from tests.storage import against

B, K = 2, 3
ORDER = tuple(np.random.default_rng(0).permutation(48).tolist())
#: Codec and features of a head: one group, several, groups that end within a register, an odd number of features.
CASES = {
    "fp16": (Fp16(), 64),
    "fp16, an odd head": (Fp16(), 67),
    "int8": (Integer(8), 64),
    "int8, an odd head": (Integer(8), 33),
    "int8, groups of 40": (Integer(8), 80),
    "int4": (Integer(4), 64),
    "int4, an odd head": (Integer(4), 33),
    "int4, groups of 16": (Integer(4, 16), 64),
    "int2": (Integer(2), 96),
    "fp8": (Fp8(), 64),
    "fp8 of a fixed scale, an odd head": (Fp8(0.25), 67),
    "levels": (Levels(4), 48),
    "bfp8": (Bfp(8), 64),
    "bfp4": (Bfp(4, 16), 48),
    "mxfp4": (Mxfp4(), 64),
    "nvfp4": (Nvfp4(), 80),
    "turboquant": (TurboQuant(4), 64),
    "turboquant of 2 bits, turned by a matrix": (TurboQuant(2, 3), 48),
    "rotated": (Rotated(Integer(4)), 64),
    "rotated in blocks": (Rotated(Nvfp4(), 2), 48),
    "permuted": (Permuted(Integer(4), ORDER), 48),
}


def operands(codec, dim, slots, seed=0):
    """Coded vectors, and the numbers [B, K, slots, dim] float64 that the reference decodes them to."""
    x = np.random.default_rng(seed).normal(size=(B * K * slots, dim)).astype(np.float32)
    parts = jax.tree.map(np.asarray, jax.jit(lambda x: codec.encode(x, None, jnp.dtype("float32")))(x))
    numbers = against._numbers(codec, parts, dim)
    held = {name: jnp.asarray(part.reshape(B, K, slots, *part.shape[1:])) for name, part in parts.items()}
    return Coded(parts=held, codec=codec, dim=dim, dtype=jnp.dtype("float32")), numbers.reshape(B, K, slots, dim)


def rows_of(shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def assert_products(run, operand, numbers, rows):
    slots, dim = numbers.shape[2:]
    query, weight = rows_of((B, K, rows, dim)), np.abs(rows_of((B, K, rows, slots)))
    largest = np.abs(numbers).max()
    logits = query.astype(np.float64) @ np.swapaxes(numbers, 2, 3)
    np.testing.assert_allclose(run(query, operand, transposed=True), logits, atol=2e-6 * dim * largest)
    output = weight.astype(np.float64) @ numbers
    # The error of a sum of zeros is that of all channels of a group, which a rotation adds up in one channel.
    spread = np.sqrt(block_size(dim)) if isinstance(operand.codec, Rotated) else 1
    np.testing.assert_allclose(run(weight, operand), output, atol=1e-6 * slots * largest * spread)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_codes_are_multiplied_as_what_they_decode_to(name, native_products):
    codec, dim = CASES[name]
    assert coded.refuses(codec, dim, jnp.dtype("float32")) is None
    run = jax.jit(coded.product, static_argnames="transposed")
    for slots, rows in ((1, 1), (70, 3), (2100, 7)):
        assert_products(run, *operands(codec, dim, slots), rows)
    text = run.lower(jnp.ones((B, K, 7, dim)), operand := operands(codec, dim, 70)[0], transposed=True).as_text()
    called = native.SLOTS if isinstance(codec, Fp16) else native.CODED_VECTORS
    assert called in text and operand.shape == (B, K, 70, dim)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["int8", "int4, an odd head", "fp8", "turboquant", "rotated"])
@pytest.mark.parametrize("slots", [32, 33, 47])
def test_chunks_are_multiplied_as_a_whole(name, slots, monkeypatch):
    monkeypatch.setattr(products, "runs_native", lambda: False)
    monkeypatch.setitem(coded.CHUNKS, "cpu", 15)
    assert_products(jax.jit(coded.product, static_argnames="transposed"), *operands(*CASES[name], slots), 3)


def test_sums_of_chunks_are_float32_whatever_the_dtype(monkeypatch):
    """In bfloat16, 64 sums that are rounded after each chunk would be off by a few percent."""
    monkeypatch.setattr(products, "runs_native", lambda: False)
    monkeypatch.setitem(coded.CHUNKS, "cpu", 4)
    operand, _ = operands(Integer(8), 64, 256)
    operand = operand.replace(dtype=jnp.dtype("bfloat16"))
    weight = jnp.abs(jnp.asarray(rows_of((B, K, 2, 256)), jnp.bfloat16))
    got = jax.jit(coded.product)(weight, operand)
    assert got.dtype == jnp.bfloat16
    numbers = np.asarray(operand.decode(), np.float64)
    exact = np.asarray(weight, np.float64) @ numbers
    scale = np.asarray(weight, np.float64) @ np.abs(numbers)
    # One rounding of the result, and sums in float32.
    assert (np.abs(np.asarray(got, np.float64) - exact) <= 2.0**-8 * np.abs(exact) + 1e-6 * scale).all()


def test_a_side_is_applied_to_rows(native_products):
    codec = Scaled(Integer(8), Side(prepare=lambda view, dim: {}, parts=lambda dim, dtype: {}, when="prompt"))
    side = {"scale": jnp.asarray(np.random.default_rng(2).uniform(0.5, 2, (B, K, 1, 64)), jnp.float32)}
    x = jnp.asarray(rows_of((B, K, 40, 64)))
    operand = Coded(
        parts=codec.encode(x, side, jnp.float32), side=side, codec=codec, dim=64, dtype=jnp.dtype("float32")
    )
    assert_products(coded.product, operand, np.asarray(operand.decode(), np.float64), 2)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_row_depends_on_no_other(name, native_products):
    operand, _ = operands(*CASES[name], 2100)
    one = operand.replace(parts={part: x[1:, 2:] for part, x in operand.parts.items()})
    for transposed, shape in ((True, (B, K, 7, 64)), (False, (B, K, 7, 2100))):
        x = jnp.asarray(rows_of(shape))
        whole = coded.product(x, operand, transposed=transposed)
        np.testing.assert_array_equal(coded.product(x[1:, 2:, 4:6], one, transposed=transposed), whole[1:, 2:, 4:6])


def test_gradients_are_those_of_the_decoded_numbers(native_products):
    operand, _ = operands(Integer(8), 64, 9)
    x = jnp.asarray(rows_of((B, K, 2, 64)))

    def score(x, scale, by_codes):
        own = operand.replace(parts=operand.parts | {"scale": scale})
        y = coded.product(x, own, transposed=True) if by_codes else x @ jnp.swapaxes(own.decode(), 2, 3)
        return jnp.sum(jnp.sin(y))

    got, expected = (jax.grad(score, (0, 1))(x, operand.parts["scale"], each) for each in (True, False))
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * float(jnp.abs(other).max()))


@dataclasses.dataclass(frozen=True)
class InFloat8(Fp16):
    """Holds floating-point numbers that kvjax's own code does not read."""

    def floats(self, parts):
        return parts["numbers"].astype(jnp.float8_e4m3fn)


@pytest.mark.parametrize(
    ("codec", "dim", "reason"),
    [
        (Integer(3), 64, "its codes have 3 bits, not 2, 4, 8"),
        (Integer(8), 67, "groups of 1 channels have a scale for less than 4 bytes"),
        (Integer(4, 3), 9, "groups of 3 channels do not fill bytes"),
        (Levels(8), 64, "its codes have 256 levels"),
        (Sparse(Integer(8), 1), 64, "it has no codes with a scale"),
        (InFloat8(), 64, "its numbers are float8_e4m3fn, not float32, bfloat16, float16"),
    ],
)
def test_what_cannot_be_read_is_decoded_with_a_reason(codec, dim, reason, native_products):
    assert coded.refuses(codec, dim, jnp.dtype("float32")) == reason
    assert coded.way(codec, dim, "float32", 100, "cpu", grows=True) == f"decoded at once ({reason})"
    assert coded.way(codec, dim, "float32", 5000, "cpu", grows=True) == f"decoded 128 at a time ({reason})"
    ways = [coded.way(Integer(8), 64, "float32", 5000, "cpu", grows=grows) for grows in (False, True)]
    assert ways == [
        "multiplied as they are, by up to 64 rows",
        "multiplied as they are over the slots in use, by up to 64 rows",
    ]
    assert coded.way(Integer(8), 64, "float32", 5000, "gpu", grows=True) == "decoded 1024 at a time"
    assert coded.way(Fp16(), 64, "float32", 64, "cpu", grows=False) == ways[0]
    few = coded.way(Fp16(), 64, "float32", 63, "cpu", grows=False)
    assert few == "decoded at once (63 slots have fewer than 4,096 numbers)"


def test_every_code_is_finite(native_products):
    """Empty slots may hold any bytes, and are multiplied by 0."""
    parts = {"codes": jnp.arange(256, dtype=jnp.uint8).reshape(1, 1, 4, 64), "scale": jnp.ones((1, 1, 4))}
    operand = Coded(parts=parts, codec=Fp8(), dim=64, dtype=jnp.dtype("float32"))
    each = np.asarray(coded.product(jnp.eye(4)[None, None], operand))[0, 0]
    expected = np.asarray(operand.decode())[0, 0]
    known = ~np.isnan(np.asarray(jax.lax.bitcast_convert_type(parts["codes"][0, 0], jnp.float8_e4m3fn), np.float32))
    assert known.sum() == 254 and np.isfinite(each).all()
    np.testing.assert_array_equal(each[known], expected[known])


class Half(Integer):
    """Decodes otherwise than the class that it is made of, of which it inherits the rest."""

    def decode(self, parts, side, dim):
        return super().decode(parts, side, dim) / 2


def test_a_codec_that_decodes_otherwise_is_not_read_as_its_base(native_products):
    whole, _ = operands(Integer(8), 64, 9)
    half = whole.replace(codec=Half(8))
    x = rows_of((B, K, 2, 64))
    both = [np.asarray(coded.product(x, each, transposed=True)) for each in (half, whole)]
    np.testing.assert_allclose(2 * both[0], both[1], rtol=1e-5, atol=1e-5)
    assert forms.form_of(Half(8), 64) is None
    assert Half(8).affine(half.parts, None, 64) is None


def test_no_slots_at_all(native_products):
    empty = operands(Integer(8), 64, 4)[0].of_slots(lambda part: part[:, :, :0])
    assert coded.product(rows_of((B, K, 2, 64)), empty, transposed=True).shape == (B, K, 2, 0)
    np.testing.assert_array_equal(coded.product(rows_of((B, K, 2, 0)), empty), np.zeros((B, K, 2, 64)))
