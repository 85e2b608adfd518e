"""Holds codecs of the library against the float64 references."""

import functools
import itertools
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.storage import Bfp, Codec, Fp8, Fp16, Integer, Levels, Mxfp4, Nvfp4, Permuted, Rotated, Sparse, TurboQuant
from tests.reference import codecs, formats
from tests.reference import replay as law
from tests.reference.codecs import Encoded

DTYPES = ("float32", "bfloat16", "float16")
MARGIN = 1e-4  # of a step: float32 and float64 round the same way from here on
EQUAL = ("codes", "exponent", "group_scale", "index", "numbers")  # parts that are equal, not merely near


@functools.lru_cache
def compiled(codec: Codec, dtype: str, dim: int):
    """x -> parts and what they decode to."""

    @jax.jit
    def run(x):
        parts = codec.encode(x, None, jnp.dtype(dtype))
        return parts, codec.decode(parts, None, dim)

    return run


def encoded(codec: Codec, dtype: str, x: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    parts, decoded = compiled(codec, dtype, x.shape[-1])(x)
    assert decoded.dtype == jnp.float32
    return {name: np.asarray(part) for name, part in parts.items()}, np.asarray(decoded)


def expect(codec: Codec, dtype: str, x: np.ndarray) -> tuple[Encoded, np.ndarray]:
    """Parts and decoded numbers of vectors [n, D] by the reference."""
    made = _parts(codec, dtype, x, None)
    return made, _numbers(codec, made.parts, x.shape[-1])


def _parts(codec: Codec, dtype: str, x: np.ndarray, kept: np.ndarray | None) -> Encoded:
    """Encodes vectors [n, D] by the reference, of which only the entries that `kept` marks count."""
    whole = x if kept is None else np.where(kept, x, 0)
    match codec:
        case Integer(bits, group):
            return codecs.encode_integer(x, bits, group, dtype, kept)
        case Fp16():
            return codecs.encode_fp16(whole)
        case Fp8(scale):
            return codecs.encode_fp8(whole, scale, dtype)
        case Bfp(bits, group):
            return formats.encode_bfp(whole, bits, group)
        case Mxfp4(group):
            return formats.encode_mxfp4(whole, group)
        case Nvfp4(group, scale):
            return formats.encode_nvfp4(whole, group, scale, dtype)
        case Levels():
            return formats.encode_levels(x, _table(codec), dtype, kept)
        case TurboQuant(bits, seed):
            return formats.encode_turboquant(whole, bits, seed, dtype)
        case Rotated(inner, seed):
            return _parts(inner, dtype, whole.astype(np.float64) @ formats.rotation(x.shape[-1], seed).T, None)
        case Permuted(inner, order):
            return _parts(inner, dtype, x[:, order], None if kept is None else kept[:, order])
        case Sparse(inner, int(count)):
            return formats.encode_sparse(x, count, dtype, lambda x, kept: _parts(inner, dtype, x, kept))
    raise AssertionError(f"{codec!r} has no reference here")


def _numbers(codec: Codec, parts: Mapping[str, np.ndarray], dim: int) -> np.ndarray:
    match codec:
        case Integer(bits):
            return codecs.decode_integer(parts, bits, dim)
        case Fp16():
            return parts["numbers"].astype(np.float64)
        case Fp8(scale):
            return codecs.decode_fp8(parts, scale)
        case Bfp(bits):
            return formats.decode_bfp(parts, bits, dim)
        case Mxfp4():
            return formats.decode_mxfp4(parts, dim)
        case Nvfp4(_, scale):
            return formats.decode_nvfp4(parts, scale, dim)
        case Levels():
            return formats.decode_levels(parts, _table(codec), dim)
        case TurboQuant(bits, seed):
            return formats.decode_turboquant(parts, bits, seed, dim)
        case Rotated(inner, seed):
            return _numbers(inner, parts, dim) @ formats.rotation(dim, seed)
        case Permuted(inner, order):
            return _numbers(inner, parts, dim)[:, np.argsort(order)]
        case Sparse(inner):
            return formats.decode_sparse(parts, _numbers(inner, parts, dim))
    raise AssertionError(f"{codec!r} has no reference here")


def _table(codec: Levels) -> list[float]:
    return formats.normal_levels(codec.bits) if codec.table is None else list(codec.table)


def compare(codec: Codec, dtype: str, x: np.ndarray, parts: dict[str, np.ndarray], decoded: np.ndarray) -> None:
    """Codes are equal, parameters within 2 units in the last place, decoded numbers within 1e-5."""
    own, dim = {name: np.asarray(part) for name, part in parts.items()}, x.shape[-1]
    got, back = encoded(codec, dtype, x)
    assert got.keys() == own.keys() == codec.parts(dim, dtype).keys()
    for name, part in got.items():
        shape, kind = codec.parts(dim, dtype)[name]
        assert part.shape == (*x.shape[:-1], *shape) and part.dtype == kind
        if name in EQUAL:
            np.testing.assert_array_equal(part.astype(np.float64), own[name])
        else:
            unit = 2.0 ** -codecs.FORMATS[dtype][0]
            # Large numbers of a vector may cancel each other when they are added up.
            cancelled = 1e-6 * np.abs(x).max() if _rotates(codec) else 1e-37
            np.testing.assert_allclose(part.astype(np.float64), own[name], rtol=2 * unit, atol=cancelled)
    largest = np.abs(decoded).max(axis=-1, keepdims=True)
    assert np.all(np.abs(back - decoded) <= 1e-5 * largest + 1e-37)
    held = sum(part.nbytes for part in got.values())
    assert held == math.prod(x.shape[:-1]) * codec.bytes(dim, dtype)


def _rotates(codec: Codec) -> bool:
    return isinstance(codec, Rotated) or (isinstance(codec, Sparse | Permuted) and _rotates(codec.codec))


def draw(codec: Codec, dtype: str, dim: int, seed: int = 0) -> np.ndarray:
    """[8, dim] of many magnitudes, no number near a tie; one vector is constant, one zero, one far from zero."""
    for each in itertools.count(1000 * seed):
        rng = np.random.default_rng(each)
        x = rng.normal(size=(8, dim)) * 10.0 ** rng.uniform(-2, 2, (8, 1))
        x[1], x[2], x[3] = rng.normal(), 0, x[3] + 50
        if _rotates(codec):
            # Rotated, a constant has few numbers, at multiples of one, and ties between them.
            x[1] += rng.normal(size=dim)
        x = x.astype(np.float32)
        if expect(codec, dtype, x)[0].near > MARGIN:
            return x
        assert each % 1000 < 999, "no such numbers"
    raise AssertionError


def of_reference(codec: Codec, dtype: str = "float32") -> Callable[[np.ndarray], law.Held]:
    """A codec of `tests.reference.replay` that is the reference of one of the library."""
    known: dict[bytes, law.Held] = {}

    def held(x: np.ndarray) -> law.Held:
        # References are slow: the same vector is encoded once.
        if (bits := x.tobytes()) not in known:
            made, decoded = expect(codec, dtype, x[None])
            known[bits] = law.Held({name: part[0] for name, part in made.parts.items()}, decoded[0], made.near)
        return known[bits]

    return held
