"""Blocks in float64, from the definitions: KIVI, GEAR and KVarN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.reference import codecs, formats
from tests.reference.replay import Array, Codec, Slots


@dataclass
class Coded:
    """The codes of a head's tokens, by position."""

    key: dict[int, Array] = field(default_factory=dict)  # packed codes of a token
    value: dict[int, Array] = field(default_factory=dict)
    scale: list[Array] = field(default_factory=list)  # [D] of each group of keys
    zero: list[Array] = field(default_factory=list)


def channels(x: Array, bits: int, dtype: str) -> tuple[Array, Array, Array, Array, float]:
    """One group of tokens [g, D]: packed codes [g, bytes], scale and zero [D], decoded [g, D], how near a tie."""
    made = codecs.encode_integer(x.T, bits, x.shape[0], dtype)
    columns = [codecs.unpack(row.tolist(), bits, x.shape[0]) for row in made.parts["codes"]]
    packed = np.array([codecs.pack(list(row), bits) for row in np.array(columns).T], np.uint8)
    decoded = codecs.decode_integer(made.parts, bits, x.shape[0]).T
    return packed, made.parts["scale"][:, 0], made.parts["zero"][:, 0], decoded, made.near


@dataclass
class Kivi:
    """Keys in blocks of `residual` tokens, values by their age."""

    bits: int
    group: int
    residual: int
    value: Codec
    dtype: str = "float32"
    #: Of each head: by the identity of its `Slots`, which live as long as the rows that are returned.
    coded: dict[int, Coded] = field(default_factory=dict)
    whole: Callable[[int], int] | None = None  # tokens -> how many are in full blocks, for mistakes

    def settle(self, slots: Slots, prompt_is_over: bool) -> None:
        if not prompt_is_over:
            return
        own, head = self.coded.setdefault(id(slots), Coded()), slots.head
        live = head.position.tolist()
        full = len(live) // self.residual * self.residual if self.whole is None else self.whole(len(live))
        for start in range(len(own.key), full, self.group):
            packed, scale, zero, decoded, near = channels(
                head.key[start : start + self.group], self.bits, self.dtype
            )  # fmt: skip
            own.key |= dict(zip(live[start : start + self.group], packed, strict=True))
            own.scale.append(scale)
            own.zero.append(zero)
            head.key[start : start + self.group] = decoded
            slots.near = min(slots.near, near)
        newest = max(slots.exact)  # even if it was evicted
        for slot, position in enumerate(live):
            if newest - position >= self.residual and position not in own.value:
                held = self.value(head.value[slot])
                own.value[position] = held.parts["codes"]
                head.value[slot] = held.decoded
                slots.near = min(slots.near, held.near)


def formula(lengths: Array, dim: int, bits: int, group: int, residual: int, width: int = 4) -> list[int]:
    """Bytes of a row and head that will hold `lengths` tokens."""
    sizes = []
    for tokens in lengths:
        keys, values, exact = tokens // residual * residual, max(tokens - residual, 0), min(tokens, residual)
        codes = math.ceil(dim * bits / 8)
        own = codecs.group_size(dim, group)
        sizes.append(
            keys * codes + 2 * width * dim * keys // group + exact * dim * width
            + values * (codes + 2 * width * dim // own) + exact * dim * width
        )  # fmt: skip
    return sizes


def backbone(line: Array, size: int, bits: int, outliers: int, dtype: str = "float32") -> tuple[Array, float]:
    """One channel's tokens, or one token's channels in groups of `size`, as decoded without a correction; how near."""
    order = sorted(range(len(line)), key=lambda i: (line[i], i))
    exact, near = {*order[:outliers], *order[-outliers:]}, math.inf
    sizes = np.sort(line)
    for at in (outliers, len(line) - outliers):
        near = min(near, (sizes[at] - sizes[at - 1]) / max(abs(sizes).max(), 1e-9))
    back = np.array(line, np.float64)
    for start in range(0, len(line), size):
        inside = [i for i in range(start, start + size) if i not in exact]
        if inside:
            made = codecs.encode_integer(line[None, inside], bits, len(inside), dtype)
            back[inside] = codecs.decode_integer(made.parts, bits, len(inside))[0]
            near = min(near, made.near)
    for i in exact:
        back[i] = codecs.stored(float(line[i]), dtype)[0]
    return back, near


def corrected(error: Array, rank: int) -> Array:
    """The best approximation of an error [n, D]."""
    left, size, right = np.linalg.svd(error, full_matrices=False)
    return (left[:, :rank] * size[:rank]) @ right[:rank]


@dataclass
class Gear:
    """Blocks of keys per channel and of values per token, with outliers and corrections of low rank."""

    bits: int
    block: int
    group: int
    outliers: int
    rank: int
    decode_rank: int
    together: bool = True  # False is a mistake: the prompt's blocks are corrected one by one
    coded: dict[int, int] = field(default_factory=dict)  # by the identity of `Slots`: tokens in blocks

    def settle(self, slots: Slots, prompt_is_over: bool) -> None:
        head, of_prompt = slots.head, id(slots) not in self.coded
        start, full = self.coded.get(id(slots), 0), len(slots.head.position) // self.block * self.block
        step = full - start if of_prompt and self.together else self.block
        for begin in range(start, full, max(step, 1)):
            for side, size in ((head.key, None), (head.value, codecs.group_size(head.value.shape[1], self.group))):
                x = side[begin : begin + step]
                back = np.zeros_like(x)
                for first in range(0, len(x), self.block):
                    part = x[first : first + self.block]
                    lines = part.T if size is None else part
                    made = [backbone(line, size or self.block, self.bits, self.outliers) for line in lines]
                    slots.near = min(slots.near, *(near for _, near in made))
                    rows = np.array([row for row, _ in made])
                    back[first : first + self.block] = rows.T if size is None else rows
                side[begin : begin + step] = back + corrected(x - back, self.rank if of_prompt else self.decode_rank)
        self.coded[id(slots)] = full

    def bytes(self, prompt: int, total: int, dim: int, width: int = 4) -> int:
        """Returns the bytes of a row and head."""
        blocks, first = total // self.block, prompt // self.block
        codes, index = math.ceil(dim * self.bits / 8), 2 * self.outliers * (width + 1)
        key = self.block * codes + dim * (2 * width + index)
        groups = dim // codecs.group_size(dim, self.group)
        value = self.block * (codes + 2 * width * groups + index)
        tokens = first * self.rank + (blocks - first) * self.decode_rank
        segments = self.rank + (blocks - first) * self.decode_rank
        factors = 2 * width * (tokens * self.block + segments * dim)
        return blocks * (key + value) + factors + 2 * min(self.block, total) * dim * width


def imbalance(lines: Array) -> float:
    return sum(size.max() / max(size.min(), 1e-8) for size in (lines.std(axis=axis, ddof=1) for axis in (0, 1)))


def balanced(lines: Array, iterations: int) -> tuple[Array, float]:
    """KVarN's factors of the entries of lines [lines, L], and how near the choice of an iteration was, relatively."""
    across, along = np.zeros((1, lines.shape[1])), np.zeros((lines.shape[0], 1))
    tried = [(imbalance(lines), across)]
    for _ in range(iterations):
        for log, axis in ((across, 0), (along, 1)):
            size = (lines / np.exp(across) / np.exp(along)).std(axis=axis, ddof=1, keepdims=True)
            log[:] = np.clip(log + np.log(np.clip(size, 1e-3, 1e3)), -0.3, 10)
        tried.append((imbalance(lines / np.exp(across) / np.exp(along)), across.copy()))
    least = min(found for found, _ in tried)
    best = [log for found, log in tried if found == least][-1]
    others = [found for found, log in tried if np.abs(log - best).max() > 1e-5]
    return np.exp(best[0]), min(others, default=math.inf) / max(least, 1e-9) - 1


def normalized(x: Array, bits: int, by_channel: bool, iterations: int, dtype: str) -> tuple[dict, Array, float]:
    """One block [n, D]: its parts, [n, D] as decoded, and how near a rounding or the choice was."""
    basis = formats.rotation(x.shape[1], None)
    lines = x @ basis.T
    lines = lines.T if by_channel else lines
    found, gap = balanced(lines, iterations)
    factor = np.array([codecs.stored(float(each), dtype)[0] for each in found])
    made = codecs.encode_integer(lines / factor, bits, lines.shape[1], dtype)
    codes = np.array([codecs.unpack(row.tolist(), bits, lines.shape[1]) for row in made.parts["codes"]])
    codes = codes.T if by_channel else codes
    parts = {
        "codes": np.array([codecs.pack(row.tolist(), bits) for row in codes], np.uint8),
        "scale": made.parts["scale"][:, 0], "zero": made.parts["zero"][:, 0], "factor": factor,
    }  # fmt: skip
    back = codecs.decode_integer(made.parts, bits, lines.shape[1]) * factor
    # Float32 finds imbalances to some 1e-6, relatively, and roundings to 1e-4 of a step.
    return parts, (back.T if by_channel else back) @ basis, min(made.near, 100 * gap)


@dataclass
class Kvarn:
    """Blocks of keys per channel and of values per token, of tokens and channels with equal deviations."""

    key_bits: int
    value_bits: int
    block: int
    iterations: int = 16
    swapped: bool = False  # True is a mistake: keys per token and values per channel
    coded: dict[int, int] = field(default_factory=dict)  # by the identity of `Slots`: tokens in blocks

    def settle(self, slots: Slots, prompt_is_over: bool) -> None:
        if not prompt_is_over:
            return
        head, start = slots.head, self.coded.get(id(slots), 0)
        full = len(head.position) // self.block * self.block
        for begin in range(start, full, self.block):
            for side, bits, by_channel in ((head.key, self.key_bits, True), (head.value, self.value_bits, False)):
                block = side[begin : begin + self.block]
                given = bits, by_channel != self.swapped, self.iterations, "float32"
                _, side[begin : begin + self.block], near = normalized(block, *given)
                slots.near = min(slots.near, near)
        self.coded[id(slots)] = full
