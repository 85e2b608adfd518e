"""The common part of the conformance tests: which combinations run, and how a layer compares with the reference."""

import functools
import heapq
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np

from kvjax import storage
from kvjax.cache import LayerKV
from kvjax.storage import Calibration, Storage
from tests.reference.replay import Codec, Row
from tests.reference.step import rotate

T = TypeVar("T")
Pair = frozenset[Hashable]
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]  # queries, keys and values, [B, heads, n, D]

CLEAR = 1e-6  # no choice of the reference may be closer than this (relative), or a seed must change: no excuses
TIE = 1e-4  # nor may anything that it rounds be closer to a tie, in steps
RUBBISH = 7.0  # what padding holds


def pairs(values: Iterable[Hashable]) -> set[Pair]:
    """Every two of the values."""
    return {frozenset(two) for two in itertools.combinations(values, 2)}


def covering(candidates: Sequence[T], covers: Callable[[T], set[Pair]]) -> list[T]:
    """A few candidates that together cover what all do: always the first that covers most of what is missing."""
    covered = [covers(each) for each in candidates]
    missing = set().union(*covered)
    # Numbers that may be too large, since less is missing by now: only the largest one is counted again.
    most = [(-len(own), i) for i, own in enumerate(covered)]
    heapq.heapify(most)
    chosen = []
    while missing:
        claimed, best = most[0]
        count = len(covered[best] & missing)
        if count == -claimed:
            chosen.append(candidates[best])
            missing -= covered[best]
            count = 0
        heapq.heapreplace(most, (-count, best))
    return chosen


def streams(
    seed: int, heads: tuple[int, int], dim: int, lengths: np.ndarray, steps: int, codecs: Iterable[Codec],
    theta: float | None = None, dtype: Any = np.float32,
) -> tuple[Triple, Triple]:  # fmt: skip
    """Normal numbers, of prompts and of decoding steps; no codec rounds a key or a value of them near a tie.

    Args:
      seed: of the numbers.
      heads: query heads and KV heads.
      dim: D.
      lengths: [B] tokens of each row's prompt.
      steps: decoding steps.
      codecs: of the storages that they are for.
      theta: base of RoPE's frequencies, for keys that are coded rotated; None = they are not rotated.
      dtype: of the numbers.
    """
    rng, codecs = np.random.default_rng(seed), tuple(codecs)

    def vector(position: int | None) -> np.ndarray:
        while True:
            x = rng.normal(size=dim).astype(dtype)
            forms = [x.astype(np.float64)]
            if theta is not None and position is not None:
                forms.append(rotate(forms[0][None], np.array([position]), theta)[0])
            if all(codec(form).near > 2 * TIE for codec in codecs for form in forms):
                return x

    width = max(lengths)
    prompt, decode = [], []
    for kind, count in (("query", heads[0]), ("key", heads[1]), ("value", heads[1])):
        first = np.full((len(lengths), count, width, dim), RUBBISH, dtype)
        then = np.zeros((len(lengths), count, steps, dim), dtype)
        for row, head in itertools.product(range(len(lengths)), range(count)):
            n = lengths[row]
            if kind == "query":
                tokens = rng.normal(size=(n + steps, dim))
            else:
                tokens = np.stack([vector(p if kind == "key" else None) for p in range(n + steps)])
            first[row, head, :n], then[row, head] = tokens[:n], tokens[n:]
        prompt.append(first)
        decode.append(then)
    return tuple(prompt), tuple(decode)


@functools.cache
def _quick() -> dict[str, Any]:
    """Options with which XLA compiles for CPUs in half the time, where it has them."""
    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x + 1, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:
        return {}
    return options


def replay(held: Storage, prompt: Any, decode: Any, *arguments: Any, **options: Any) -> tuple[jax.Array, LayerKV]:
    """`storage.replay`, compiled quickly."""
    run = jax.jit(lambda *given: storage.replay(held, *given, *arguments, **options), compiler_options=_quick())
    return run(prompt, decode)


def read(held: Storage, layer: LayerKV, calibration: Calibration | None = None) -> list[np.ndarray]:
    """`storage.read` in one program: each of its operations would be compiled by itself."""
    found = jax.jit(lambda layer: storage.read(held, layer, calibration), compiler_options=_quick())(layer)
    return [np.asarray(x) for x in found]


def live(layer: LayerKV, row: int, head: int) -> dict[int, int]:
    """Position -> slot, by position."""
    position = np.asarray(layer.position)[row, head]
    return {int(position[slot]): int(slot) for slot in np.argsort(position) if position[slot] >= 0}


def held_in(layer: LayerKV, row: int, head: int, slot: int) -> dict[str, dict[str, np.ndarray]]:
    """All parts of a slot's key and value, in whichever store it is."""
    for store in layer.stores:
        size = jax.tree.leaves(store)[0].shape[2]
        if slot < size:
            return jax.tree.map(lambda leaf: np.asarray(leaf)[row, head, slot], store)  # noqa: B023
        slot -= size
    raise IndexError(f"{row=} {head=}: no such slot")


def assert_same(
    output: np.ndarray, layer: LayerKV, rows: list[Row], held: Storage, *, atol: float = 1e-4,
    calibration: Calibration | None = None, theta: float | None = None,
) -> None:  # fmt: skip
    """Outputs of the decoding steps, kept positions, statistics, codes and what they decode to.

    Args:
      output: [B, H, steps, D] of `storage.replay`.
      layer: of `storage.replay`.
      rows: of the reference.
      held: how the layer's slots are held.
      atol: of outputs.
      calibration: of the storage, if it needs one.
      theta: base of RoPE's frequencies, for keys that are held as they are before rotation; None = they are not.
    """
    gap, near = (min(getattr(row, name) for row in rows) for name in ("gap", "near"))
    assert gap > CLEAR, f"a choice of the reference is a near-tie ({gap:.1e}): use another seed"
    assert near > TIE, f"a code of the reference is near a tie ({near:.1e} of a step): use another seed"
    key, value, at = read(held, layer, calibration)
    if theta is not None:
        key = rotate(key.reshape(-1, key.shape[-1]), at.ravel(), theta).reshape(key.shape)
    for row, expected in enumerate(rows):
        np.testing.assert_allclose(np.asarray(output, np.float64)[row], expected.output, atol=atol, err_msg=f"{row=}")
        for index, slots in enumerate(expected.heads):
            about, found = f"{row=} head={index}", live(layer, row, index)
            assert list(found) == slots.head.position.tolist(), about
            for number, (position, slot) in enumerate(found.items()):
                for got, own in ((key, slots.head.key), (value, slots.head.value)):
                    tolerance = 1e-5 * max(1.0, np.abs(own[number]).max())
                    np.testing.assert_allclose(got[row, index, slot], own[number], atol=tolerance, err_msg=about)
                parts = held_in(layer, row, index, slot)
                coded = {*parts["key"], *parts["value"]} != {"exact"}
                assert coded == (position in slots.coded), f"{about} {position=}"
                for name, made in zip(("key", "value"), slots.coded.get(position, ()), strict=False):
                    for part, number_of in made.parts.items():
                        if part == "codes":
                            np.testing.assert_array_equal(parts[name][part], number_of, f"{about} {position=} {name}")
                        else:
                            np.testing.assert_allclose(parts[name][part], number_of, rtol=1e-5, atol=1e-6)
            order = list(found.values())
            for name, own in slots.head.stats.items():
                if name == "allowed":
                    continue  # of the selection's index
                got = _statistic(layer, name)[row, index, order]
                own = own.sum(axis=1) if own.ndim > got.ndim else own
                np.testing.assert_allclose(got, own, rtol=1e-4, atol=1e-5, err_msg=f"{about} {name}")


def set_bits(words: Any) -> np.ndarray:
    """[..., words] uint16 -> [...]: the number of bits that are set."""
    return np.unpackbits(np.asarray(words).view(np.uint8), axis=-1).sum(axis=-1)


def _statistic(layer: LayerKV, name: str) -> np.ndarray:
    """[B, K, S] or [B, K, S, 2]: the library's statistic of that name, whose parameters are part of its own."""
    of = layer.stats | layer.index if name == "mass" else layer.stats  # a selection may keep its own
    (found,) = (leaf for own, leaf in of.items() if re.split(r"[(\[]", own)[0] == name)
    return set_bits(found) if found.dtype == np.uint16 else np.asarray(found)
