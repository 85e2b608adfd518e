"""Codecs of one vector: the worked examples, the float64 reference, bounds that hold for any numbers."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from kvjax import storage
from kvjax.storage import Exact, Fp8, Integer, pack
from kvjax.storage.rounding import as_stored, divide, nearest
from tests.reference import codecs as reference
from tests.storage.against import DTYPES, compare, compiled, draw, encoded, expect

SEARCH = "HYPOTHESIS_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "40"))
search = settings(
    max_examples=EXAMPLES, derandomize=not SEARCH, deadline=None, database=None,
    phases=list(Phase) if SEARCH else [Phase.generate],
)  # fmt: skip


def bits_of(x: jax.Array) -> np.ndarray:
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", range(6))
def test_worked_examples(shared_data, case):
    cases = np.load(shared_data / "examples" / "storage_cases.npz")
    about = json.loads(bytes(cases["cases"]))[case]
    codec = Integer(about["bits"], about["group"]) if about["name"] == "int" else Fp8(about["scale"])
    parts = {name: cases[f"{case}_{name}"] for name in codec.parts(about["dim"], about["dtype"])}
    compare(codec, about["dtype"], cases[f"{case}_x"], parts, cases[f"{case}_decoded"])
    assert codec.bytes(about["dim"], about["dtype"]) == about["bytes_per_vector"]


#: bits, group, dim: groups that do not divide, prime dims, codes that straddle bytes, one group, groups of one.
INTEGERS = [
    (1, 64, 16), (1, 4, 12), (2, 32, 64), (2, 64, 13), (3, 8, 24), (3, 5, 17), (4, 64, 80), (4, 7, 21), (4, 1, 6),
    (5, 16, 48), (5, 64, 11), (6, 4, 20), (6, 3, 9), (7, 64, 10), (8, 64, 64), (8, 16, 36), (8, 64, 67), (8, 64, 1),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("bits", "group", "dim", "dtype"),
    [(*case, DTYPES[i % 3]) for i, case in enumerate(INTEGERS)] + [(4, 16, 32, dtype) for dtype in DTYPES],
)
def test_integer_is_the_reference(bits, group, dim, dtype):
    codec = Integer(bits, group)
    x = draw(codec, dtype, dim, seed=bits)
    made, decoded = expect(codec, dtype, x)
    compare(codec, dtype, x, made.parts, decoded)


@pytest.mark.parametrize(
    ("scale", "dim", "dtype"),
    [(None, 13, "float32"), (None, 64, "bfloat16"), (None, 13, "float16"), (None, 1, "float32"),
     (1.0, 13, "float32"), (0.013, 64, "bfloat16")],
)  # fmt: skip
def test_fp8_is_the_reference(scale, dim, dtype):
    codec = Fp8(scale)
    x = draw(codec, dtype, dim)
    made, decoded = expect(codec, dtype, x)
    compare(codec, dtype, x, made.parts, decoded)


def integer_ties() -> np.ndarray:
    """[1, 32]: a scale of 1 with 4 bits, every other number in the middle."""
    return np.concatenate([np.arange(0, 15.5, 0.5), [15]]).astype(np.float32)[None]


def ties_of_scales() -> np.ndarray:
    """[64, 32]: as `integer_ties`, of scales whose reciprocals are no float32 numbers."""
    return (np.arange(65, 129)[:, None] / 128 * integer_ties() - 3.90625).astype(np.float32)


def fp8_ties() -> np.ndarray:
    """[2, 130]: the middle of any two neighbours, subnormal ones too, and numbers beyond the largest."""
    magnitudes = np.array(reference.MAGNITUDES)
    x = np.concatenate([(magnitudes[1:] + magnitudes[:-1]) / 2, [448, 449, 464, 1e6]]).astype(np.float32)
    return np.stack([x, -x])


@pytest.mark.parametrize(
    ("codec", "x"),
    [(Integer(4), integer_ties()), (Integer(4), ties_of_scales()), (Fp8(1.0), fp8_ties())],
    ids=["integer", "scales", "fp8"],
)
def test_exact_ties_go_to_the_even_code(codec, x):
    made, decoded = expect(codec, "float32", x)
    assert made.near == 0
    compare(codec, "float32", x, made.parts, decoded)


class Unrounded:
    """A stored number whose cast to float32 is the number before rounding."""

    def __init__(self, x, dtype):
        self.x, self.held = x, as_stored(x, dtype)

    def astype(self, dtype):
        return self.x

    def __getitem__(self, index):
        return self.held[index]


def cut_off(x, dtype):
    """Rounds towards zero."""
    down = x.astype(dtype)
    return jnp.where(jnp.abs(down.astype(jnp.float32)) > jnp.abs(x), jnp.nextafter(down, jnp.zeros((), dtype)), down)


def highest_bit_first(codes, bits):
    """The even channel in the high half byte."""
    return pack(codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape), bits)


#: Which codec, which name of its module, and what takes its place there.
MUTANTS = {
    "encodes with unrounded parameters": (Integer(4, 8), "as_stored", Unrounded),
    "cuts parameters off": (Integer(4, 8), "as_stored", cut_off),
    "one level too many": (Integer(4, 8), "divide", lambda x, by: divide(x, by + 1 if isinstance(by, int) else by)),
    "multiplies by the reciprocal of a scale": (Integer(4), "divide", lambda x, by: x * (1 / jnp.float32(by))),
    "highest bit first": (Integer(4, 8), "pack", highest_bit_first),
    "one group a vector": (Integer(4, 8), "group_size", lambda dim, group: dim),
    "cuts the scale off": (Fp8(), "as_stored", cut_off),
    "no subnormal codes": (Fp8(1.0), "nearest", lambda x, dtype: nearest(jnp.where(abs(x) < 2.0**-6, 0.0, x), dtype)),
    "ties away from zero": (Fp8(1.0), "nearest", lambda x, dtype: nearest(x * (1 + 2.0**-20), dtype)),
    "saturates early": (Fp8(1.0), "LARGEST", 240.0),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", MUTANTS)
def test_mutations_are_noticed(monkeypatch, name):
    codec, attribute, mutant = MUTANTS[name]
    ties = {Fp8(1.0): fp8_ties, Integer(4): ties_of_scales}
    x = ties[codec]() if codec in ties else draw(codec, "bfloat16", 32)
    made, decoded = expect(codec, "bfloat16", x)
    compare(codec, "bfloat16", x, made.parts, decoded)
    monkeypatch.setattr(sys.modules[type(codec).__module__], attribute, mutant)
    compiled.cache_clear()
    with pytest.raises(AssertionError):
        compare(codec, "bfloat16", x, made.parts, decoded)
    compiled.cache_clear()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [(Integer(2), "bfloat16"), (Integer(8, 32), "float32"), (Fp8(), "float16"), (Fp8(0.013), "float32")],
    ids=repr,
)
def test_bytes_do_not_depend_on_the_program(codec, dtype):
    """Compiled as a whole, operation by operation, or a vector by itself: the same bytes."""
    x = np.random.default_rng(0).normal(size=(500, 64)).astype(np.float32)
    whole, _ = encoded(codec, dtype, x)
    single = codec.encode(jnp.asarray(x), None, jnp.dtype(dtype))
    alone, _ = encoded(codec, dtype, x[7])
    for name, part in whole.items():
        np.testing.assert_array_equal(bits_of(part), bits_of(single[name]))
        np.testing.assert_array_equal(bits_of(part[7]), bits_of(alone[name]))


#: Codecs and sizes of vectors; 7 is prime.
BOUNDED = [(Integer(1, 4), 7), (Integer(4), 12), (Integer(8, 4), 12), (Fp8(), 12), (Fp8(1.0), 7)]


@st.composite
def vectors(draw: st.DrawFn, dtype: str, dim: int) -> np.ndarray:
    """[2, dim] float32 of one magnitude, from subnormal to a third of the largest, zeros and constants among them."""
    largest = 2e4 if dtype == "float16" else 1e38
    most = draw(st.sampled_from([0.0, 1e-42, 1e-30, 1e-7, 1e-3, 1.0, 300.0, largest])) * draw(st.floats(0.1, 1))
    unit = draw(arrays.arrays(np.float64, (2, dim), elements=st.floats(-1, 1), fill=st.floats(-1, 1)))
    return (unit * most).astype(np.float32)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@search
@given(data=st.data())
def test_error_is_within_half_a_step(dtype, data):
    codec, dim = data.draw(st.sampled_from(BOUNDED))
    x = data.draw(vectors(dtype, dim))
    parts, decoded = encoded(codec, dtype, x)
    assert np.all(np.isfinite(decoded))
    mantissa, least, _ = reference.FORMATS[dtype]
    x, decoded = x.astype(np.float64), decoded.astype(np.float64)
    error, flushed = np.abs(x - decoded), 2.0**-125  # XLA takes subnormal float32 numbers as 0
    largest = np.abs(x).max(axis=-1, keepdims=True)
    if isinstance(codec, Integer):
        size = dim // parts["scale"].shape[-1]
        scale, zero = (parts[name].astype(np.float64).repeat(size, -1) for name in ("scale", "zero"))
        levels = 2**codec.bits - 1
        # Arithmetic in float32; then what rounding the parameters moves zero and the top of a group by.
        slack = 2.0**-22 * largest + levels * flushed
        if dtype != "float32":
            slack = slack + 2.0**-mantissa * (np.abs(zero) + levels * scale) + levels * 2.0 ** (least - mantissa)
        assert np.all(error <= scale / 2 + slack)
    else:
        scale = parts["scale"].astype(np.float64)[:, None] if codec.scale is None else codec.scale
        inside = np.abs(x) <= 448 * scale
        # Three bits of mantissa, or half the spacing of subnormal numbers.
        bound = np.maximum(np.abs(x) * 2.0**-4, scale * 2.0**-10) * (1 + 2.0**-20) + flushed
        assert np.all(error[inside] <= bound[inside])
        np.testing.assert_allclose(np.abs(decoded[~inside]), (448 * scale + 0 * x)[~inside], rtol=1e-6, atol=flushed)
    assert np.all(decoded[(x == 0) & (largest == 0)] == 0)


@search
@given(
    number=st.floats(-(2.0**126), 2.0**126, width=32, allow_subnormal=False),
    codec=st.sampled_from([Integer(4), Integer(8, 4)]),
)
def test_a_constant_group_is_itself_in_float32(number, codec):
    parts, decoded = encoded(codec, "float32", np.full((1, 12), number, np.float32))
    assert np.all(parts["scale"] == 0) and np.all(parts["codes"] == 0)
    np.testing.assert_array_equal(decoded, np.float32(number))


def test_parameters_saturate_at_the_largest_finite_number():
    x = np.array([[-65504.0, 65504.0, 0.0, 1.0]], np.float32)
    parts, decoded = encoded(Integer(1), "float16", x)  # the range is 131008
    assert parts["scale"] == np.float16(65504) and np.all(np.isfinite(decoded))
    made, expected = expect(Integer(1), "float16", x)
    np.testing.assert_array_equal(parts["codes"], made.parts["codes"])
    np.testing.assert_array_equal(decoded, expected)
    assert not np.isinf(np.asarray(Exact().encode(jnp.float32([1e30, -1e30]), None, jnp.float16)["exact"])).any()


def test_error_falls_with_bits():
    x = np.random.default_rng(1).normal(size=(64, 32)).astype(np.float32)
    trips = jax.jit(lambda x: [storage.round_trip(Integer(bits), x, None, jnp.float32) for bits in range(1, 9)])(x)
    errors = np.array([np.square(trip - x).mean() for trip in trips])
    assert np.all(errors[1:] < errors[:-1] / 3) and errors[-1] < 1e-4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codec", [Integer(2), Fp8(), Exact()], ids=repr)
def test_gradients_pass_straight_through(codec):
    x, weight = np.random.default_rng(6).normal(size=(2, 3, 8)).astype(np.float32)

    def loss(x, weight):
        back = storage.round_trip(codec, x, None, jnp.bfloat16)
        return jnp.sum(weight * back), back

    gradient, back = jax.jit(jax.vmap(jax.grad(loss, has_aux=True)))(x, weight)
    np.testing.assert_array_equal(gradient, weight)
    np.testing.assert_allclose(back, encoded(codec, "bfloat16", x)[1], rtol=1e-6)
