"""Quantised matrices and their files, one code at a time in float64: the formats' definitions, written out.

Nothing here packs or unpacks whole arrays: a code's place is computed for each code.
"""

from typing import Any, NamedTuple

import numpy as np

AWQ_PLACES = {0: 0, 1: 4, 2: 1, 3: 5, 4: 2, 5: 6, 6: 3, 7: 7}  # output of eight -> which nibble holds it


class Coded(NamedTuple):
    """A matrix [in, out] in codes: W[i, o] = scale[g, o] · (code[i, o] - zero[g, o]) with g the group of input i."""

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    group_of: np.ndarray

    def matrix(self) -> np.ndarray:
        """[in, out] float64."""
        found = np.empty(self.codes.shape)
        for i, group in enumerate(self.group_of):
            for o in range(self.codes.shape[1]):
                distance = int(self.codes[i, o]) - int(self.zero[group, o])
                found[i, o] = float(self.scale[group, o]) * distance
        return found


def rounded(matrix: np.ndarray, bits: int, group: int) -> Coded:
    """Rounds each group of inputs between its smallest and its largest number, and 0."""
    inputs, outputs = matrix.shape
    levels = 2**bits - 1
    codes, group_of = np.empty(matrix.shape, int), np.arange(inputs) // group
    scale, zero = np.empty((inputs // group, outputs)), np.empty((inputs // group, outputs), int)
    for g in range(inputs // group):
        for o in range(outputs):
            numbers = matrix[g * group : (g + 1) * group, o].astype(np.float64)
            low, high = min(numbers.min(), 0.0), max(numbers.max(), 0.0)
            step = scale[g, o] = float(np.float32((high - low) / levels))
            step = step or 1.0
            zero[g, o] = min(max(round(-low / step), 0), levels)
            for i, number in enumerate(numbers):
                codes[g * group + i, o] = min(max(round(number / step) + zero[g, o], 0), levels)
    return Coded(codes, scale, zero, group_of)


def random_codes(
    inputs: int, outputs: int, bits: int, group: int, seed: int, *, zeros: tuple[int, int] | None = None,
    act_order: bool = False, gain: float = 1.0,
) -> Coded:  # fmt: skip
    """Random codes, with scales that float16 holds; `zeros`: from the first to the last, both included."""
    rng = np.random.default_rng(seed)
    groups, (first, last) = inputs // group, zeros or (1, 2**bits - 1)
    group_of = np.arange(inputs) // group
    if act_order:
        group_of = rng.permutation(group_of)
    scale = rng.uniform(0.5, 1.5, (groups, outputs)) * gain / 2**bits / inputs**0.5
    return Coded(
        rng.integers(0, 2**bits, (inputs, outputs)),
        scale.astype(np.float16).astype(np.float64),
        rng.integers(first, last + 1, (groups, outputs)),
        group_of,
    )


def _int32(words: np.ndarray) -> np.ndarray:
    return np.array([(int(word) + 2**31) % 2**32 - 2**31 for word in words.ravel()], np.int32).reshape(words.shape)


def gptq_tensors(coded: Coded, bits: int, *, version: int, index: bool = True) -> dict[str, Any]:
    """The tensors of a matrix in GPTQ's format, of version 1 or 2."""
    per_word = 32 // bits
    inputs, outputs = coded.codes.shape
    # Python's integers: the first version subtracts 1 from every zero of a word, as one number modulo 2^32.
    qweight = np.zeros((inputs // per_word, outputs), object)
    for i in range(inputs):
        for o in range(outputs):
            qweight[i // per_word, o] += int(coded.codes[i, o]) * 2 ** (bits * (i % per_word))
    qzeros = np.zeros((len(coded.zero), outputs // per_word), object)
    for g in range(len(coded.zero)):
        for o in range(outputs):
            less = 1 if version == 1 else 0
            qzeros[g, o // per_word] += (int(coded.zero[g, o]) - less) * 2 ** (bits * (o % per_word))
    found = {"qweight": _int32(qweight), "qzeros": _int32(qzeros), "scales": coded.scale.astype(np.float16)}
    return found | ({"g_idx": coded.group_of.astype(np.int32)} if index else {})


def awq_tensors(coded: Coded) -> dict[str, Any]:
    """The tensors of a matrix in AWQ's format gemm."""

    def packed(codes: np.ndarray) -> np.ndarray:
        words = np.zeros((len(codes), codes.shape[1] // 8), object)
        for i in range(len(codes)):
            for o in range(codes.shape[1]):
                words[i, o // 8] += int(codes[i, o]) * 16 ** AWQ_PLACES[o % 8]
        return _int32(words)

    return {"qweight": packed(coded.codes), "qzeros": packed(coded.zero), "scales": coded.scale.astype(np.float16)}
