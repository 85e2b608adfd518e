"""MiKV in float64: what a policy evicts is coded into a second tier, from the definition."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.reference import codecs
from tests.reference.base import Array, Observed, Policy
from tests.reference.blocks import channels
from tests.reference.decoder import _blocks
from tests.reference.eviction import full
from tests.reference.replay import Codec, Ended, FromPrompt, Held, Slots, Triple
from tests.reference.step import Head, append, attend, empty_heads, evict, observe, remember, rotate


class Entry(NamedTuple):
    """One token of the low tier; `key` and `value` are as they decode."""

    position: int
    key: Array
    value: Array
    held: tuple[Held, Held]


@dataclass
class Tiered:
    """One KV head: `high` is what the policy ranks; `low` is in order of eviction."""

    high: Head
    low: list[Entry] = field(default_factory=list)
    balancer: Array | None = None
    near: float = math.inf


class Row(NamedTuple):
    output: Array  # [H, steps, D]
    heads: list[Tiered]
    gap: float
    near: float


class Mikv(NamedTuple):
    """`high` is the codec of the high tier, None for exact ones; mistakes change the others."""

    low: Codec
    high: Codec | None = None
    balance: bool = True
    capacity: int | None = None
    rounds_victims: bool = False  # a mistake: own tokens too are coded from what the high tier would decode to
    observes_low: bool = True  # False is a mistake: `above` counts the high tier alone
    attends_low: bool = True  # False is a mistake: eviction


def replay(
    storage: Mikv, prompt: Triple, decode: Triple, lengths: Array, policy: Policy, *,
    theta: float | None = None, block: int | None = None,
) -> list[Row]:  # fmt: skip
    """Arguments as in `tests.reference.replay`."""
    rows = []
    for row, n in enumerate(lengths):
        tokens = [
            np.concatenate([first[row, :, :n], then[row]], axis=1).swapaxes(0, 1).astype(np.float64)
            for first, then in zip(prompt, decode, strict=True)
        ]
        rows.append(_row(storage, tokens, int(n), policy, theta, block))
    return rows


def _row(storage: Mikv, tokens: list[Array], n: int, policy: Policy, theta, block) -> Row:
    total, kv_heads, dim = tokens[1].shape
    layer = [Tiered(head) for head in empty_heads(kv_heads, dim, policy)]
    budget, outputs = policy.slots(0, n), []
    for start, stop in _blocks(n, total, block):
        if start == n and policy.at_prompt_end_only:
            policy = policy.then or full(positions=policy.positions)
            budget = policy.slots(0, n)
            for own in layer:
                own.high.stats = {name: own.high.stats[name] for name in policy.statistics}
        position = np.arange(start, stop)
        query, key, value = (x[start:stop] for x in tokens)
        if theta is not None and policy.positions == "original":
            query, key = rotate(query, position, theta), rotate(key, position, theta)
        query = query.reshape(len(query), kv_heads, -1, dim)
        output = []
        for index, own in enumerate(layer):
            append(own.high, key[:, index], value[:, index], position)
            remember(own.high, query[:, index], position, policy, theta)
            output.append(_attend(storage, own, query[:, index], position, n, policy, theta))
        outputs.append(np.concatenate(output, axis=1))
        if stop == n and storage.balance:
            for index, own in enumerate(layer):
                q, k = np.abs(query[:, index]).max(axis=(0, 1)), np.abs(key[:, index]).max(axis=0)
                own.balancer = np.sqrt(q / k).astype(np.float32).astype(np.float64)
        before = [(own.high.position, own.high.key.copy(), own.high.value.copy()) for own in layer]
        if budget is not None and (stop == n or not policy.at_prompt_end_only):
            evict([own.high for own in layer], policy, budget, n, theta)
        for own, old in zip(layer, before, strict=True):
            _settle(storage, own, old, start)
    gaps = [own.high.evict_gap for own in layer] + [10 * own.high.above_gap for own in layer]
    output = np.concatenate(outputs)[n:].swapaxes(0, 1)
    return Row(output, layer, min(gaps), min(own.near for own in layer))


def _attend(storage: Mikv, own: Tiered, query: Array, position: Array, n: int, policy: Policy, theta) -> Array:
    """Attends to both tiers and observes the high one: the output [n, G, D]."""
    high, low = own.high, own.low if storage.attends_low else []
    at = np.concatenate([[each.position for each in low], high.position]).astype(np.int64)
    order = np.argsort(at)
    ranked = np.concatenate([np.zeros(len(low), bool), np.ones(len(high.position), bool)])[order]

    def both(first: list[Array], then: Array) -> Array:
        return np.concatenate([np.reshape(first, (len(first), *then.shape[1:])), then])[order]

    whole = Head(
        both([each.key for each in low], high.key), both([each.value for each in low], high.value), at[order],
        {name: both([np.zeros(stat.shape[1:])] * len(low), stat) for name, stat in high.stats.items()},
        high.evict_gap, high.above_gap,
    )  # fmt: skip
    probabilities, sees = attend(whole, query, position, policy, theta)
    reduce = np.mean if policy.group_reduce == "mean" else np.max
    m = reduce(probabilities, axis=0)
    if storage.observes_low:
        observe(whole, Observed(m, sees, position, n, whole.position), policy)
        high.stats = {name: stat[ranked] for name, stat in whole.stats.items()}
        high.above_gap = whole.above_gap
    else:
        observe(high, Observed(m[:, ranked], sees[:, ranked], position, n, high.position), policy)
    return np.einsum("gns,sd->ngd", probabilities, whole.value)


def _settle(storage: Mikv, own: Tiered, before: tuple[Array, Array, Array], start: int) -> None:
    high, (position, key, value) = own.high, before
    b = own.balancer if own.balancer is not None else np.ones(key.shape[1])
    for slot in np.flatnonzero(~np.isin(position, high.position)):
        k, v = key[slot], value[slot]
        if storage.rounds_victims and storage.high is not None and position[slot] >= start:
            k, v = storage.high(k).decoded, storage.high(v).decoded
        held = storage.low(k * b), storage.low(v)
        own.low.append(Entry(int(position[slot]), held[0].decoded / b, held[1].decoded, held))
        own.near = min(own.near, *(each.near for each in held))
    if storage.capacity is not None:
        own.low = own.low[-storage.capacity :]
    if storage.high is None:
        return
    for slot in np.flatnonzero(high.position >= start):
        for side in (high.key, high.value):
            held = storage.high(side[slot])
            side[slot] = held.decoded
            own.near = min(own.near, held.near)


# --- ZipCache ---


@dataclass
class Zip:
    """One head: two tiers by mean attention, a segment at a time; a storage of `tests.reference.replay`."""

    roots: Array  # [D]
    high: int
    low: int
    ratio: float
    window: int
    by: str = "mean"  # "mass" is a mistake
    ended: int | None = None  # tokens that are coded
    salient: list[int] = field(default_factory=list)

    def settle(self, slots: Slots, prompt_is_over: bool) -> None:
        head, live = slots.head, len(slots.head.position)
        if self.ended is not None and live - self.ended < self.window:
            return
        start, self.ended = self.ended or 0, live
        score = head.stats["mass"] / (head.stats["count"] if self.by == "mean" else 1)
        inside = list(range(start, live))
        count = math.ceil(self.ratio * len(inside) - 1e-9)
        order = sorted(inside, key=lambda i: (score[i], head.position[i]), reverse=True)
        if 0 < count < len(order):
            one, other = score[order[count - 1]], score[order[count]]
            head.evict_gap = min(head.evict_gap, (one - other) / max(one, other))
        self.salient += sorted(int(head.position[i]) for i in order[:count])
        for bits, tier in ((self.high, sorted(order[:count])), (self.low, sorted(order[count:]))):
            if not tier:
                continue
            _, _, _, decoded, near = channels(head.key[tier], bits, "float32")
            dim = len(self.roots)
            values = codecs.encode_integer(head.value[tier] / self.roots, bits, dim, "float32")
            head.key[tier] = decoded
            head.value[tier] = codecs.decode_integer(values.parts, bits, dim) * self.roots
            slots.near = min(slots.near, near, values.near)


def zipped(made: list[Zip], high: int, low: int, ratio: float, window: int, **mistake: str) -> FromPrompt:
    """ZipCache; what each head makes of its prompt is added to `made`, row by row."""

    def of_head(prompt: Ended) -> Zip:
        most = np.abs(prompt.value).max(axis=0)
        roots = np.where(most > 0, np.sqrt(most), 1.0).astype(np.float32).astype(np.float64)
        made.append(Zip(roots, high, low, ratio, window, **mistake))
        return made[-1]

    return FromPrompt(of_head)
