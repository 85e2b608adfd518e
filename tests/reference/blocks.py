"""KIVI in float64: keys per channel in groups of tokens, values per token, from the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.reference import codecs
from tests.reference.replay import Array, Codec, Slots


@dataclass
class Coded:
    """What became of a head's tokens, by position."""

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
