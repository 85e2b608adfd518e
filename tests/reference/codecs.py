"""Codecs of one vector in float64, one number at a time; only what is stored is rounded.

Parts have the names of the definition, their values are float64 (codes: uint8). `near` says how near the nearest
rounding came to a tie, in steps: float32 arithmetic may round the other way where it is small.
"""

import math
from typing import NamedTuple

import numpy as np

Array = np.ndarray

#: Bits of the mantissa, exponent of the smallest normal number, largest finite number.
FORMATS = {
    "float32": (23, -126, (2 - 2.0**-23) * 2.0**127),
    "bfloat16": (7, -126, (2 - 2.0**-7) * 2.0**127),
    "float16": (10, -14, 65504.0),
}


class Encoded(NamedTuple):
    parts: dict[str, Array]  # [n, ...] each
    near: float


def stored(x: float, dtype: str) -> tuple[float, float]:
    """x as `dtype` holds it, and how near it was to a tie."""
    mantissa, least, largest = FORMATS[dtype]
    exponent = max(math.frexp(x)[1] - 1, least)  # x = fraction * 2**exponent, 1 <= |fraction| < 2
    steps = math.ldexp(x, mantissa - exponent)
    rounded = math.ldexp(float(round(steps)), exponent - mantissa)  # Python rounds ties to even
    return max(-largest, min(rounded, largest)), abs(steps - math.floor(steps) - 0.5)


def encode_fp16(x: Array) -> Encoded:
    """x: [n, D]."""
    rounded = [[stored(number, "float16") for number in vector] for vector in x.astype(np.float64).tolist()]
    # A number that float16 has is half a step from a tie.
    near = min(tie for row in rounded for _, tie in row)
    return Encoded({"numbers": np.array([[number for number, _ in row] for row in rounded])}, near)


def pack(codes: list[int], bits: int) -> list[int]:
    """The bytes of one vector's codes, bit by bit."""
    stream = [code >> bit & 1 for code in codes for bit in range(bits)]
    packed = [0] * math.ceil(len(stream) / 8)
    for j, bit in enumerate(stream):
        packed[j // 8] += bit * 2 ** (j % 8)
    return packed


def unpack(packed: list[int], bits: int, dim: int) -> list[int]:
    stream = [byte // 2**weight % 2 for byte in packed for weight in range(8)]
    return [sum(stream[bits * i + bit] * 2**bit for bit in range(bits)) for i in range(dim)]


def group_size(dim: int, group: int) -> int:
    return max(size for size in range(1, dim + 1) if dim % size == 0 and size <= group)


def encode_integer(x: Array, bits: int, group: int, dtype: str, kept: Array | None = None) -> Encoded:
    """x: [n, D]; kept: [n, D], what is coded, or None for everything."""
    most, size, near = 2**bits - 1, group_size(x.shape[-1], group), math.inf
    rows: dict[str, list] = {"codes": [], "scale": [], "zero": []}
    kept = np.ones(x.shape, bool) if kept is None else kept
    for vector, coded in zip(x.astype(np.float64).tolist(), kept.tolist(), strict=True):
        codes, scales, zeros = [], [], []
        for start in range(0, len(vector), size):
            numbers, these = vector[start : start + size], coded[start : start + size]
            own = [number for number, each in zip(numbers, these, strict=True) if each] or [0.0]
            zero, _ = stored(min(own), dtype)
            scale, tie = stored(max(max(own) - zero, 0.0) / most, dtype)
            if scale > 0:
                steps = [(number - zero) / scale if each else 0.0 for number, each in zip(numbers, these, strict=True)]
                inside = [abs(step % 1 - 0.5) for step in steps if 0 < step < most]
                near = min(near, math.inf if dtype == "float32" else tie, *inside)
                codes += [max(0, min(round(step), most)) for step in steps]
            else:
                codes += [0] * size
            scales.append(scale)
            zeros.append(zero)
        rows["codes"].append(pack(codes, bits))
        rows["scale"].append(scales)
        rows["zero"].append(zeros)
    kinds = {"codes": np.uint8, "scale": np.float64, "zero": np.float64}
    return Encoded({name: np.array(row, kinds[name]) for name, row in rows.items()}, near)


def decode_integer(parts: dict[str, Array], bits: int, dim: int) -> Array:
    codes = np.array([unpack(row.tolist(), bits, dim) for row in parts["codes"]], np.float64)
    size = dim // parts["zero"].shape[-1]
    return parts["zero"].repeat(size, axis=-1) + parts["scale"].repeat(size, axis=-1) * codes


def e4m3(code: int) -> float:
    """The number of a code without its sign; 127 is NaN."""
    exponent, mantissa = divmod(code, 8)
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


MAGNITUDES = [e4m3(code) for code in range(127)]


def encode_fp8(x: Array, scale: float | None, dtype: str) -> Encoded:
    """x: [n, D]."""
    near, codes, scales = math.inf, [], []
    for vector in x.astype(np.float64).tolist():
        step = scale
        if step is None:
            step, tie = stored(max(map(abs, vector)) / 448, dtype)
            near = near if dtype == "float32" or step == 0 else min(near, tie)
            step = step or 1.0
        row = []
        for number in vector:
            y = abs(number) / step
            # The nearest magnitude; of two the one with the even code.
            code = min(range(127), key=lambda code: (abs(MAGNITUDES[code] - y), code % 2))
            if y < 448:
                above = next(code for code in range(127) if MAGNITUDES[code] > y)
                low, high = MAGNITUDES[above - 1], MAGNITUDES[above]
                near = min(near, abs((y - low) / (high - low) - 0.5))
            row.append(code + 128 * (math.copysign(1, number) < 0))
        codes.append(row)
        scales.append(step)
    parts = {"codes": np.array(codes, np.uint8)}
    return Encoded(parts if scale is not None else parts | {"scale": np.array(scales)}, near)


def decode_fp8(parts: dict[str, Array], scale: float | None) -> Array:
    magnitudes = np.array([*MAGNITUDES, math.nan])
    numbers = np.concatenate([magnitudes, -magnitudes])
    step = parts["scale"][:, None] if scale is None else scale
    return step * numbers[parts["codes"]]
