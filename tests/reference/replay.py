"""One layer in float64 NumPy whose slots hold rounded keys and values: a prompt, then single tokens.

One row is computed at a time, and in it one KV head. A head is the list of its live tokens; what a token decodes to
takes the place of its exact key and value once, after the step in which it is due. Policies are those of
`tests.reference.policies`, selections those of `tests.reference.selection`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from tests.reference import codecs
from tests.reference.base import Array, Observed, Policy
from tests.reference.decoder import _blocks
from tests.reference.eviction import full
from tests.reference.selection import Choice, Look
from tests.reference.step import Head, allow, append, attend, empty_heads, evict, hide, observe, remember, rotate

ROUNDING = 1e-9  # an average with weight 0 may change a number by less
Triple = tuple[Array, Array, Array]  # queries [B, H, n, D], keys and values [B, K, n, D]


class Held(NamedTuple):
    """One vector in its slot; `near` is how near its nearest rounding was to a tie, in steps."""

    parts: dict[str, Array]
    decoded: Array  # [D]
    near: float


Codec = Callable[[Array], Held]  # [D] -> what is held of it


class Settles(Protocol):
    """A storage of another layout, which changes a head's keys and values itself."""

    def settle(self, slots: Slots, prompt_is_over: bool) -> None:
        """Encodes what is due after a step; a prompt is not over while a compressor has yet to choose from it."""


class Storage(NamedTuple):
    """Codecs of keys and values, and the numbers of newest (None: all) and of first positions that stay exact.

    With a base of RoPE's frequencies, `turned_back`, keys are coded as they were before rotation.
    """

    key: Codec
    value: Codec
    residual: int | None = 0
    sinks: int = 0
    turned_back: float | None = None


class PerHead(NamedTuple):
    """A storage that differs from head to head, as a calibration makes it."""

    heads: Callable[[int], Storage]


class Ended(NamedTuple):
    """One head's prompt."""

    query: Array  # [n, G, D], rotated as the key
    key: Array  # [n, D]
    live: Array  # [m] positions that are still held
    value: Array  # [n, D]


class FromPrompt(NamedTuple):
    """A storage that each head makes when its prompt, which goes in in one shot, has ended."""

    made: Callable[[Ended], Storage | Settles]


Given = Storage | Settles | PerHead | FromPrompt


@dataclass
class Tokens:
    """Tokens of a head, as a merge sees them; it changes those that stay in place."""

    key: Array  # [S, D]
    value: Array  # [S, D]
    position: Array  # [S]
    mass: Array | None  # [S]
    count: Array | None  # [S]
    threshold: float | None
    stands_for: dict[int, list]  # position -> as many entries as tokens that its slot stands for

    def of(self, these: Array) -> Tokens:
        arrays = (self.key, self.value, self.position, self.mass, self.count)
        return Tokens(*(x if x is None else x[these] for x in arrays), self.threshold, self.stands_for)


Fold = Callable[[Tokens, Tokens], None]  # (those that stay, those that go)


@dataclass
class Slots:
    """One KV head: `head` has keys and values as attention sees them, `coded` what is held of coded tokens."""

    head: Head
    coded: dict[int, tuple[Held, Held]] = field(default_factory=dict)  # position -> key and value
    exact: dict[int, Array] = field(default_factory=dict)  # position -> key before it was coded
    threshold: float | None = None
    near: float = math.inf  # of all codes so far
    merged: list[set[int]] = field(default_factory=list)  # positions that took something, step by step


class Row(NamedTuple):
    """The results of a row.

    Of every choice made `gap` is the narrowest, relative; of everything that was rounded `near` was nearest to a tie.
    """

    output: Array  # [H, steps, D] of the decoding steps
    heads: list[Slots]  # after the last step
    gap: float
    near: float


def integer(bits: int, group: int = 64, dtype: str = "float32") -> Codec:
    def held(x: Array) -> Held:
        made = codecs.encode_integer(x[None], bits, group, dtype)
        return Held(_first(made.parts), codecs.decode_integer(made.parts, bits, len(x))[0], made.near)

    return _once_each(held)


def fp8(scale: float | None = None, dtype: str = "float32") -> Codec:
    def held(x: Array) -> Held:
        made = codecs.encode_fp8(x[None], scale, dtype)
        return Held(_first(made.parts), codecs.decode_fp8(made.parts, scale)[0], made.near)

    return _once_each(held)


def exact(x: Array) -> Held:
    return Held({"exact": x}, x, math.inf)


def _first(parts: dict[str, Array]) -> dict[str, Array]:
    return {name: part[0] for name, part in parts.items()}


def _once_each(codec: Codec) -> Codec:
    """Codecs are slow: the same vector is encoded once."""
    known: dict[bytes, Held] = {}

    def held(x: Array) -> Held:
        if (bits := x.tobytes()) not in known:
            known[bits] = codec(x)
        return known[bits]

    return held


def replay(
    storage: Given,
    prompt: Triple,
    decode: Triple,
    lengths: Array,
    policy: Policy,
    *,
    theta: float | None = None,
    look: Callable[[], Look] | None = None,
    block: int | None = None,
    fold: Fold | None = None,
) -> list[Row]:
    """Each row's prompt, at once or in blocks, and then its decoding steps.

    Args:
        prompt: queries [B, H, n, D], keys and values [B, K, n, D], padded at the end.
        decode: the same of the decoding steps.
        lengths: [B] tokens of each row's prompt.
        theta: base of RoPE's frequencies; None = queries and keys are given as attention takes them.
        look: makes what reads some of the slots of a row while decoding; None = all.
        block: tokens of a block of the prompt; None = in one shot.
        fold: what evicted tokens do to those that stay.
    """
    rows = []
    for row, n in enumerate(lengths):
        # [T, heads, D]
        tokens = [
            np.concatenate([first[row, :, :n], then[row]], axis=1).swapaxes(0, 1).astype(np.float64)
            for first, then in zip(prompt, decode, strict=True)
        ]
        rows.append(_row(storage, tokens, int(n), policy, theta, look and look(), block, fold))
    return rows


def _row(storage: Given, tokens: list[Array], n: int, policy: Policy, theta, look, block, fold) -> Row:
    total, kv_heads, dim = tokens[1].shape
    layer = [Slots(head) for head in empty_heads(kv_heads, dim, policy)]
    stores = [storage.heads(i) if isinstance(storage, PerHead) else storage for i in range(kv_heads)]
    budget, gaps, outputs = policy.slots(0, n), [math.inf], []
    for start, stop in _blocks(n, total, block):
        if start == n and policy.at_prompt_end_only:
            policy = policy.then or full(positions=policy.positions)
            budget = policy.slots(0, n)
            for slots in layer:
                held = {*policy.statistics, "log_weight"}
                slots.head.stats = {name: stat for name, stat in slots.head.stats.items() if name in held}
        query, key, value = (x[start:stop] for x in tokens)
        position = np.arange(start, stop)
        if theta is not None and policy.positions == "original":
            query, key = rotate(query, position, theta), rotate(key, position, theta)
        heads = [slots.head for slots in layer]
        # [n, K, G, D]
        query = query.reshape(len(query), kv_heads, -1, dim)
        for index, slots in enumerate(layer):
            append(slots.head, key[:, index], value[:, index], position)
            remember(slots.head, query[:, index], position, policy, theta)
            slots.exact |= dict(zip(position.tolist(), key[:, index], strict=True))
        if look is not None and stop == n:
            seen, written = (x[:n] if theta is None else rotate(x[:n], np.arange(n), theta) for x in tokens[:2])
            look.begin(seen.reshape(n, kv_heads, -1, dim), written, tokens[1][:n])
        choices: list[Choice | None] = [None] * kv_heads
        if look is not None and start >= n:
            choices = _choices(look, layer, query[0], policy, theta)
            gaps += [choice.gap for choice in choices]
        output = []
        for index, (slots, choice) in enumerate(zip(layer, choices, strict=True)):
            restored = None
            if choice is not None and look is not None and len(choice.chosen):
                restored = look.restored(index, choice.chosen)
            watch = None if look is None else functools.partial(look.observe, index)
            own = _attend(slots.head, query[:, index], position, n, policy, theta, budget, choice, restored, watch)
            if look is not None and choice is not None:
                # Values as they were before they were coded.
                own = look.mixed(index, own[0], tokens[2][slots.head.position, index])[None]
            output.append(own)
        outputs.append(np.concatenate(output, axis=1))
        before = [_tokens(slots) for slots in layer]
        if budget is not None and (stop == n or not policy.at_prompt_end_only):
            evict(heads, policy, budget, n, theta)
        for index, (slots, all_of_them) in enumerate(zip(layer, before, strict=True)):
            own = stores[index]
            if isinstance(own, FromPrompt):
                assert stop == n and start == 0, "a prompt in one shot"
                ended = Ended(query[:, index], key[:, index], slots.head.position, value[:, index])
                own = stores[index] = own.made(ended)
            if isinstance(own, Storage):
                _merge(own, slots, all_of_them, _refitted if policy.fits or policy.folds else fold)
                _settle(own, slots)
            else:
                own.settle(slots, stop >= n or not policy.at_prompt_end_only)
    gaps += [head.evict_gap for head in heads] + [10 * head.above_gap for head in heads]
    output = np.concatenate(outputs)[n:].swapaxes(0, 1)
    return Row(output, layer, min(gaps), min(slots.near for slots in layer))


def _attend(
    head: Head, query: Array, position: Array, n: int, policy: Policy, theta, budget, choice, restored, watch=None
) -> Array:
    """Attends to what is chosen, or to everything, and observes it: the output [n, G, D]."""
    chosen = shown = None
    if choice is not None:
        chosen = np.isin(head.position, choice.chosen)
        shown = (chosen | np.isin(head.position, choice.always))[None]
    key = head.key
    if restored is not None:
        head.key = key.copy()
        head.key[np.searchsorted(head.position, choice.chosen)] = restored
    if policy.hides is not None:
        probabilities, sees = hide(head, query, position, policy, theta, budget)
    else:
        probabilities, sees = attend(head, query, position, policy, theta, shown)
    head.key = key
    reduce = np.mean if policy.group_reduce == "mean" else np.max
    if watch is not None:
        watch(reduce(probabilities, axis=0), head.position, position)
    observe(head, Observed(reduce(probabilities, axis=0), sees, position, n, head.position, chosen), policy)
    if policy.hides is not None:
        allow(head, policy, budget)
    return np.einsum("gns,sd->ngd", probabilities, head.value)


def _choices(look: Look, layer: list[Slots], query: Array, policy: Policy, theta: float | None) -> list[Choice]:
    """Returns the slots that the query [K, G, D] of the newest token reads in each head."""
    held = [slots.head.position for slots in layer]
    keys = [
        np.stack([slots.exact[p] for p in slots.head.position.tolist()]) if look.exact else slots.head.key
        for slots in layer
    ]
    if policy.positions == "cache" and theta is not None:
        ranks = [np.arange(len(key)) for key in keys]
        keys = [rotate(*each, theta) for each in zip(keys, ranks, strict=True)]
        query = np.stack([rotate(own[None], rank[-1:], theta)[0] for own, rank in zip(query, ranks, strict=True)])
    return look.choose(query, keys, held)


def _tokens(slots: Slots) -> Tokens:
    head = slots.head
    arrays = (head.key, head.value, head.position, head.stats.get("mass"), head.stats.get("count"))
    return Tokens(*(x if x is None else x.copy() for x in arrays), slots.threshold, head.stands_for)


def _merge(storage: Storage, slots: Slots, before: Tokens, fold: Fold | None) -> None:
    """Folds what was evicted into what stays; of this, what was coded is encoded anew if it took something."""
    head = slots.head
    slots.merged.append(set())
    stay = np.isin(before.position, head.position)
    if fold is None or stay.all():
        return
    kept, gone = _tokens(slots), before.of(~stay)
    fold(kept, gone)
    moved = np.abs(kept.key - before.key[stay]) + np.abs(kept.value - before.value[stay])
    took = moved.max(axis=1) > ROUNDING
    head.key, head.value, slots.threshold = kept.key, kept.value, kept.threshold
    slots.merged[-1] = set(head.position[took].tolist())
    for slot in np.flatnonzero(took):
        if int(head.position[slot]) in slots.coded:
            _encode(storage, slots, slot)


def _refitted(kept: Tokens, gone: Tokens) -> None:
    """The eviction has changed what stays already."""


def _settle(storage: Storage, slots: Slots) -> None:
    """Encodes what is live and no longer among the newest positions."""
    live = slots.head.position.tolist()
    newest = max(slots.exact)  # even if it was evicted
    slots.coded = {p: slots.coded[p] for p in live if p in slots.coded}
    for slot, position in enumerate(live):
        due = storage.residual is not None and newest - position >= storage.residual and position >= storage.sinks
        if due and position not in slots.coded:
            _encode(storage, slots, slot)


def _encode(storage: Storage, slots: Slots, slot: int) -> None:
    head = slots.head
    at = np.array([int(head.position[slot])])
    own = head.key[slot] if storage.turned_back is None else rotate(head.key[slot][None], -at, storage.turned_back)[0]
    key, value = storage.key(own), storage.value(head.value[slot])
    slots.coded[int(at[0])] = key, value
    head.key[slot], head.value[slot] = key.decoded, value.decoded
    if storage.turned_back is not None:
        head.key[slot] = rotate(key.decoded[None], at, storage.turned_back)[0]
    slots.near = min(slots.near, key.near, value.near)
