"""More codecs of one vector in float64, one number at a time, as in `tests.reference.codecs`.

Block formats are compared with exact arithmetic: a power of two times a float32 number is exact in float64, so that
nothing is near a tie but what is one.
"""

import itertools
import math
import statistics
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.reference.codecs import MAGNITUDES, Array, Encoded, group_size, pack, stored, unpack

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: Positive levels of TurboQuant, and the relative squared error in many dimensions.
LLOYD_MAX = {
    2: ((0.4527800, 1.5104176), 0.1174818),
    3: ((0.2450942, 0.7560053, 1.3439093, 2.1519457), 0.0345478),
    4: (
        (0.1283950, 0.3880483, 0.6567591, 0.9423405, 1.2562312, 1.6180464, 2.0690172, 2.7325896),
        0.0095010,
    ),
}  # fmt: skip


def log2(x: float) -> int:
    """⌊log2 x⌋, -127 for 0 and for subnormal numbers of float32."""
    return max(math.frexp(x)[1] - 1, -127) if x > 0 else -127


def _blocks(x: Array, group: int, encode: Callable[[list[float]], tuple[list[int], int]], bits: int) -> Encoded:
    """Encodes each group of each vector to codes and an exponent."""
    size = group_size(x.shape[-1], group)
    rows: dict[str, list] = {"codes": [], "exponent": []}
    for vector in x.astype(np.float64).tolist():
        made = [encode(vector[start : start + size]) for start in range(0, len(vector), size)]
        rows["codes"].append(pack([code for codes, _ in made for code in codes], bits))
        rows["exponent"].append([exponent + 127 for _, exponent in made])
    return Encoded({name: np.array(row, np.uint8) for name, row in rows.items()}, math.inf)


def _exponents(parts: dict[str, Array], dim: int) -> Array:
    """[n, D]: the exponent of each number."""
    exponent = parts["exponent"].astype(np.int64) - 127
    return exponent.repeat(dim // exponent.shape[-1], axis=-1)


def encode_bfp(x: Array, bits: int, group: int) -> Encoded:
    """x: [n, D]."""
    most = 2 ** (bits - 1) - 1

    def encode(numbers: list[float]) -> tuple[list[int], int]:
        exponent = log2(max(map(abs, numbers)))
        mantissas = [round(math.ldexp(number, bits - 2 - exponent)) for number in numbers]
        return [max(-most, min(m, most)) % 2**bits for m in mantissas], exponent

    return _blocks(x, group, encode, bits)


def decode_bfp(parts: dict[str, Array], bits: int, dim: int) -> Array:
    codes = np.array([unpack(row.tolist(), bits, dim) for row in parts["codes"]])
    return np.ldexp(np.where(codes < 2 ** (bits - 1), codes, codes - 2.0**bits), _exponents(parts, dim) - bits + 2)


def encode_mxfp4(x: Array, group: int) -> Encoded:
    """x: [n, D]."""

    def encode(numbers: list[float]) -> tuple[list[int], int]:
        exponent = max(log2(max(map(abs, numbers))) - 2, -127)
        codes = []
        for number in numbers:
            y = min(math.ldexp(abs(number), -exponent), 6.0)
            # The nearest magnitude; of two the one with the even code.
            code = min(range(8), key=lambda code: (abs(E2M1[code] - y), code % 2))
            codes.append(code + 8 * (math.copysign(1, number) < 0))
        return codes, exponent

    return _blocks(x, group, encode, 4)


def decode_mxfp4(parts: dict[str, Array], dim: int) -> Array:
    codes = np.array([unpack(row.tolist(), 4, dim) for row in parts["codes"]])
    return np.ldexp(np.array([*E2M1, *(-y for y in E2M1)])[codes], _exponents(parts, dim))


def _rounded(x: Array, dtype: type, magnitudes: tuple[float, ...]) -> tuple[Array, float]:
    """Numbers of a small floating-point type, and how near the nearest of them came to a tie, in steps."""
    size, steps = np.abs(x)[..., None], np.diff(magnitudes)
    ties = np.abs(size - (np.array(magnitudes[:-1]) + steps / 2)) / steps
    return np.minimum(np.abs(x), magnitudes[-1]).astype(dtype), float(ties.min())


def encode_nvfp4(x: Array, group: int, scale: float | None, dtype: str) -> Encoded:
    """x: [n, D]. Types of NumPy's extension round to nearest, ties to even."""
    size, near = group_size(x.shape[-1], group), math.inf
    rows: dict[str, list] = {"codes": [], "group_scale": [], "scale": []}
    for vector in x.astype(np.float64):
        own, tie = (scale, math.inf) if scale is not None else stored(np.abs(vector).max() / (448 * 6), dtype)
        near = near if dtype == "float32" or not vector.any() else min(near, tie)
        own = own or 1.0
        groups = vector.reshape(-1, size)
        of_group, tie = _rounded(np.abs(groups).max(axis=-1) / 6 / own, ml_dtypes.float8_e4m3fn, tuple(MAGNITUDES))
        near = min(near, tie)
        step = own * of_group.astype(np.float64)[:, None]
        numbers, tie = _rounded(groups / np.where(step > 0, step, np.inf), ml_dtypes.float4_e2m1fn, E2M1)
        near = min(near, tie)
        codes = numbers.view(np.uint8).reshape(-1) + 8 * (vector < 0)
        rows["codes"].append(pack(codes.tolist(), 4))
        rows["group_scale"].append(of_group.view(np.uint8))
        rows["scale"].append(own)
    parts = {"codes": np.array(rows["codes"], np.uint8), "group_scale": np.array(rows["group_scale"])}
    return Encoded(parts if scale is not None else parts | {"scale": np.array(rows["scale"], np.float64)}, near)


def decode_nvfp4(parts: dict[str, Array], scale: float | None, dim: int) -> Array:
    codes = np.array([unpack(row.tolist(), 4, dim) for row in parts["codes"]])
    of_group = parts["group_scale"].view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    own = scale if scale is not None else parts["scale"][:, None]
    return (own * of_group).repeat(dim // of_group.shape[-1], axis=-1) * np.array([*E2M1, *(-y for y in E2M1)])[codes]


def rotation(dim: int, seed: int | None) -> Array:
    """M [D, D]: blocks of Hadamard's matrix over the root of their size, columns times the signs of channels."""
    size = max(2**power for power in range(dim.bit_length()) if dim % 2**power == 0)
    signs = [1.0] * dim
    if seed is not None:
        signs = [-1.0 if each < 0.5 else 1.0 for each in np.random.RandomState(seed).random_sample(dim)]
    made = np.zeros((dim, dim))
    for i, j in itertools.product(range(dim), repeat=2):
        if i // size == j // size:
            made[i, j] = signs[j] * (-1.0) ** (i % size & j % size).bit_count() / math.sqrt(size)
    return made


def normal_levels(bits: int) -> list[float]:
    z, tail, half = statistics.NormalDist().inv_cdf, 0.5 * (1 / 32 + 1 / 30), 2 ** (bits - 1)
    low = [z(tail + (0.5 - tail) * i / (half - 1)) / -z(tail) for i in range(half)]
    return low + [z(0.5 + (0.5 - tail) * i / half) / z(1 - tail) for i in range(1, half + 1)]


def nearest(table: list[float], y: float) -> tuple[int, float]:
    """The nearest entry, of two the lower; and how near y was to a tie, in steps."""
    code = min(range(len(table)), key=lambda code: (abs(table[code] - y), code))
    ties = [abs(y - (low + high) / 2) / (high - low) for low, high in itertools.pairwise(table)]
    return code, min(ties)


def encode_levels(x: Array, table: list[float], dtype: str, kept: Array | None = None) -> Encoded:
    """x: [n, D]; kept: [n, D], what is coded, or None for everything."""
    bits, near = len(table).bit_length() - 1, math.inf
    rows: dict[str, list] = {"codes": [], "offset": [], "range": []}
    for vector, coded in zip(x.astype(np.float64), np.ones(x.shape, bool) if kept is None else kept, strict=True):
        low, high = vector[coded].min(), vector[coded].max()
        (offset, tie), (width, other) = stored((low + high) / 2, dtype), stored((high - low) / 2, dtype)
        near = near if dtype == "float32" else min(near, tie, other)
        codes = []
        for number, own in zip(vector, coded, strict=True):
            code, tie = nearest(table, (number - offset) / (width or 1.0))
            near = min(near, tie if own else math.inf)
            codes.append(code if own else 0)
        rows["codes"].append(pack(codes, bits))
        rows["offset"].append(offset)
        rows["range"].append(width)
    kinds = {"codes": np.uint8, "offset": np.float64, "range": np.float64}
    return Encoded({name: np.array(row, kinds[name]) for name, row in rows.items()}, near)


def decode_levels(parts: dict[str, Array], table: list[float], dim: int) -> Array:
    bits = len(table).bit_length() - 1
    codes = np.array([unpack(row.tolist(), bits, dim) for row in parts["codes"]])
    return parts["offset"][:, None] + parts["range"][:, None] * np.array(table)[codes]


def orthogonal(dim: int, seed: int) -> Array:
    """√D·M [D, D]."""
    random = np.random.RandomState(seed)
    if dim & (dim - 1) == 0:
        signs = [-1.0 if each < 0.5 else 1.0 for each in random.random_sample(dim)]
        return np.array([[signs[j] * (-1.0) ** (i & j).bit_count() for j in range(dim)] for i in range(dim)])
    q, r = np.linalg.qr(random.randn(dim, dim))
    return math.sqrt(dim) * q * np.sign(np.diag(r))


def encode_turboquant(x: Array, bits: int, seed: int, dtype: str) -> Encoded:
    """x: [n, D]. Of a constant vector many coordinates are exactly 0, which is a tie that rounding must not move."""
    levels = lloyd_max(bits)
    turned, near = orthogonal(x.shape[-1], seed), math.inf
    rows: dict[str, list] = {"codes": [], "scale": []}
    for vector in x.astype(np.float64):
        scale, tie = stored(math.sqrt(math.fsum(vector**2)), dtype)
        near = near if dtype == "float32" or scale == 0 else min(near, tie)
        codes = []
        for row in turned:
            y = math.fsum(row * vector) / (scale or 1.0)
            code, tie = nearest(levels, y)
            near = near if y == 0 and np.ptp(vector) == 0 else min(near, tie)
            codes.append(code)
        rows["codes"].append(pack(codes, bits))
        rows["scale"].append(scale)
    return Encoded({"codes": np.array(rows["codes"], np.uint8), "scale": np.array(rows["scale"])}, near)


def decode_turboquant(parts: dict[str, Array], bits: int, seed: int, dim: int) -> Array:
    codes = np.array([unpack(row.tolist(), bits, dim) for row in parts["codes"]])
    return parts["scale"][:, None] * (np.array(lloyd_max(bits))[codes] @ orthogonal(dim, seed)) / dim


def lloyd_max(bits: int) -> list[float]:
    positive = LLOYD_MAX[bits][0]
    return [*(-level for level in reversed(positive)), *positive]


def encode_sparse(x: Array, count: int, dtype: str, encode: Callable[[Array, Array], Encoded]) -> Encoded:
    """x: [n, D]; encode: what is coded of vectors [n, D], given a mask of it."""
    kept, index = np.ones(x.shape, bool), []
    for row, vector in enumerate(x.tolist()):
        order = sorted(range(len(vector)), key=lambda channel: (vector[channel], channel))
        index.append(sorted(order[:count] + order[-count:]))
        kept[row, index[-1]] = False
    made = encode(x, kept)
    value = np.take_along_axis(x.astype(np.float64), np.array(index), axis=-1)
    held = np.array([[stored(number, dtype)[0] for number in row] for row in value.tolist()])
    return Encoded(made.parts | {"index": np.array(index), "value": held}, made.near)


def decode_sparse(parts: dict[str, Array], decoded: Array) -> Array:
    decoded = decoded.copy()
    np.put_along_axis(decoded, parts["index"], parts["value"], axis=-1)
    return decoded
