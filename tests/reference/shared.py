"""Storages whose vectors share something, in float64: KVQuant, low rank and ThinK, one vector at a time."""

import itertools
import math
import statistics

import numpy as np

from tests.reference.base import Array
from tests.reference.codecs import pack, stored
from tests.reference.replay import Codec, Ended, FromPrompt, Held, PerHead, Storage, exact


def normal_levels(bits: int) -> list[float]:
    z, tail, half = statistics.NormalDist().inv_cdf, 0.5 * (1 / 32 + 1 / 30), 2 ** (bits - 1)
    low = [z(tail + (0.5 - tail) * i / (half - 1)) / -z(tail) for i in range(half)]
    return low + [z(0.5 + (0.5 - tail) * i / half) / z(1 - tail) for i in range(1, half + 1)]


def nearest(table: list[float], y: float) -> tuple[int, float]:
    """The nearest level, of two the lower, and how near y was to a tie, in steps."""
    code = min(range(len(table)), key=lambda code: (abs(table[code] - y), code))
    return code, min(abs(y - (low + high) / 2) / (high - low) for low, high in itertools.pairwise(table))


def _held(x: Array, table: list[float], outliers: list[int], offset: Array, scale: Array, parts: dict) -> Held:
    """Outliers as they are (code 0), other entries at the nearest level."""
    found = [nearest(table, y) for y in (x - offset) / scale]
    codes = [0 if channel in outliers else code for channel, (code, _) in enumerate(found)]
    near = min(tie for channel, (_, tie) in enumerate(found) if channel not in outliers)
    decoded = offset + scale * np.array(table)[codes]
    decoded[outliers] = x[outliers]
    bits = len(table).bit_length() - 1
    return Held(parts | {"codes": np.array(pack(codes, bits), np.uint8)}, decoded, near)


def kvquant_key(table: list[float], share: float, lower: Array, upper: Array) -> Codec:
    def held(x: Array) -> Held:
        dim = len(x)
        half = np.where(upper == lower, 1.0, (upper - lower) / 2)
        y = np.abs((x - (lower + upper) / 2) / half)
        most = sorted(range(dim), key=lambda channel: (-y[channel], channel))[: math.ceil(share * dim - 1e-9)]
        own = sorted(channel for channel in most if y[channel] > 1)
        index = own + [dim] * (len(most) - len(own))
        parts = {"index": np.array(index), "value": np.array([*x[own], *[0.0] * (len(most) - len(own))])}
        made = _held(x, table, own, (lower + upper) / 2, half, parts)
        # Whether an entry is an outlier is a choice too.
        return made._replace(near=min(made.near, *np.abs(y - 1), *np.abs(np.diff(np.sort(y)))))

    return held


def kvquant_value(table: list[float], share: float) -> Codec:
    def held(x: Array) -> Held:
        count = max(1, round(share * len(x) / 2))
        order = sorted(range(len(x)), key=lambda channel: (x[channel], channel))
        own = sorted(order[:count] + order[-count:])
        rest = np.delete(x, own)
        offset, width = (stored(each, "float32")[0] for each in ((rest.min() + rest.max()) / 2, np.ptp(rest) / 2))
        parts = {"index": np.array(own), "value": x[own], "offset": np.array(offset), "range": np.array(width)}
        return _held(x, table, own, np.full(len(x), offset), np.full(len(x), width or 1.0), parts)

    return held


def kvquant(bits: int, share: float, lower: Array, upper: Array, sinks: int, residual: int, theta: float) -> PerHead:
    """lower, upper: [K, D]."""
    table = normal_levels(bits)
    value = kvquant_value(table, share)
    return PerHead(
        lambda head: Storage(
            kvquant_key(table, share, lower[head], upper[head]), value, residual, sinks=sinks, turned_back=theta
        )
    )


def low_rank(key: Array, value: Array, ranks: tuple[int, int], residual: int) -> PerHead:
    """key, value: [n, K, D] of a calibration."""

    def codec(x: Array, rank: int) -> Codec:
        mean = x.mean(axis=0)
        basis = np.linalg.svd((x - mean).T)[0][:, :rank]
        basis = basis * np.where(basis[np.abs(basis).argmax(axis=0), np.arange(rank)] < 0, -1.0, 1.0)
        mean, basis = (each.astype(np.float32).astype(np.float64) for each in (mean, basis))

        def held(x: Array) -> Held:
            latent = basis.T @ (x - mean)
            return Held({"latent": latent}, basis @ latent + mean, math.inf)

        return held

    return PerHead(
        lambda head: Storage(
            *(codec(x[:, head].astype(np.float64), rank) for x, rank in zip((key, value), ranks, strict=True)), residual
        )
    )


def think(ratio: float, window: int, recent: int) -> FromPrompt:
    def made(prompt: Ended) -> Storage:
        queries, keys = prompt.query[-window:], prompt.key[prompt.live]
        score = (queries**2).mean(axis=(0, 1)) * (keys**2).mean(axis=0)
        dim = len(score)
        kept = sorted(sorted(range(dim), key=lambda c: (-score[c], c))[: dim - math.floor(ratio * dim + 1e-9)])

        def held(x: Array) -> Held:
            decoded = np.zeros(dim)
            decoded[kept] = x[kept]
            return Held({"latent": x[kept]}, decoded, math.inf)

        return Storage(held, exact, recent)

    return FromPrompt(made)
