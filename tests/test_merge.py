"""Merging: what stays holds what the definitions say, against a float64 reference of one head at a time."""

import dataclasses
import math
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache, policies
from kvjax.errors import PolicyError
from kvjax.policies import MERGES
from kvjax.policies.base import View
from tests.reference.step import rotate
from tests.test_compositions import DIM, HEADS, KV_HEADS, NEW, PROMPT, run, stream

BUDGET, SINKS = 7, 1  # a window: who goes follows from positions, whatever was merged


@dataclasses.dataclass
class Slots:
    """One head's live slots, in ascending order of position."""

    key: np.ndarray
    value: np.ndarray
    position: np.ndarray
    mass: np.ndarray
    count: np.ndarray
    threshold: float | None = None

    def of(self, index) -> "Slots":
        parts = (self.key[index], self.value[index], self.position[index], self.mass[index], self.count[index])
        return Slots(*parts, self.threshold)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def average(x, own, target, weights, others):
    """(own·x + Σ w·other) / (own + Σ w) in every slot that is a target."""
    out = x.copy()
    for slot in set(target):
        mine = [i for i, t in enumerate(target) if t == slot]
        total = own + sum(weights[i] for i in mine)
        out[slot] = (own * x[slot] + sum(weights[i] * others[i] for i in mine)) / total
    return out


def best(scores, position):
    """The slot of the highest score, of equals the newer."""
    return max(range(len(scores)), key=lambda j: (scores[j], position[j]))


def cam(kept: Slots, gone: Slots) -> None:
    attention, most = gone.mass / gone.count, (kept.mass / kept.count).max()
    added = sum(min(1.0, a / most) * v / 3 for a, v in zip(attention, gone.value, strict=True))
    kept.value[-3:] += added


def d2o(kept: Slots, gone: Slots) -> None:
    similar = unit(gone.key) @ unit(kept.key).T
    target = [best(row, kept.position) for row in similar]
    highest = np.array([row[t] for row, t in zip(similar, target, strict=True)])
    kept.threshold = highest.mean() if kept.threshold is None else 0.7 * highest.mean() + 0.3 * kept.threshold
    weights = np.where(highest >= kept.threshold, np.exp(highest), 0.0)
    kept.key = average(kept.key, math.e, target, weights, gone.key)
    kept.value = average(kept.value, math.e, target, weights, gone.value)


def next_to(kept: Slots, gone: Slots) -> list[int]:
    return [best(-np.abs(kept.position - p), kept.position) for p in gone.position]


def kvmerger(kept: Slots, gone: Slots) -> None:
    target = next_to(kept, gone)
    alike = [unit(k) @ unit(kept.key[t]) >= 0.1 for k, t in zip(gone.key, target, strict=True)]
    far = [np.linalg.norm(k - kept.key[t]) for k, t in zip(gone.key, target, strict=True)]
    weights = []
    for i, t in enumerate(target):
        others = [far[j] for j, u in enumerate(target) if u == t and alike[j]]
        sigma = np.mean(others) / math.sqrt(2) if others else 1.0
        weights.append(math.exp(-(far[i] ** 2) / (2 * sigma**2)) if alike[i] else 0.0)
    kept.key = average(kept.key, 1.0, target, weights, gone.key)
    kept.value = average(kept.value, 1.0, target, weights, gone.value)


def anchors(kept: Slots, gone: Slots) -> None:
    target = next_to(kept, gone)
    weights = [1.0] * len(target)
    kept.key = average(kept.key, 1.0, target, weights, gone.key)
    kept.value = average(kept.value, 1.0, target, weights, gone.value)


REFERENCES: dict[str, tuple[dict, Callable[[Slots, Slots], None]]] = {
    "cam": ({"recent": 3}, cam),
    "d2o": ({}, d2o),
    "kvmerger": ({"similarity": 0.1}, kvmerger),
    "anchors": ({}, anchors),
}


def simulate(row: int, head: int, fold: Callable[[Slots, Slots], None]) -> tuple[np.ndarray, np.ndarray]:
    """Outputs of the prompt [G, n, D] and of every decoding step [NEW, G, D] of one head."""
    group = HEADS // KV_HEADS
    q, k, v = (np.asarray(x, np.float64) for x in stream(row))
    q, k, v = q[head * group : (head + 1) * group], k[head], v[head]
    held = Slots(np.zeros((0, DIM)), np.zeros((0, DIM)), np.zeros(0, int), np.zeros(0), np.zeros(0))
    n, outputs = int(PROMPT[row]), []
    for start, stop in [(0, n), *((t, t + 1) for t in range(n, n + NEW))]:
        position = np.arange(start, stop)
        held = Slots(
            np.concatenate([held.key, rotate(k[start:stop], position, 10_000.0)]),
            np.concatenate([held.value, v[start:stop]]),
            np.concatenate([held.position, position]),
            np.concatenate([held.mass, np.zeros(stop - start)]),
            np.concatenate([held.count, np.zeros(stop - start)]),
            held.threshold,
        )
        queries = np.stack([rotate(q[g, start:stop], position, 10_000.0) for g in range(group)])
        sees = held.position[None] <= position[:, None]
        logits = np.where(sees, np.einsum("gnd,sd->gns", queries, held.key) / math.sqrt(DIM), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        outputs.append(weights @ held.value)
        held.mass += weights.mean(0).sum(0)
        held.count += sees.sum(0)
        excess = len(held.position) - BUDGET
        if excess > 0:
            goes = np.zeros(len(held.position), bool)
            goes[np.flatnonzero(held.position >= SINKS)[:excess]] = True
            kept, gone = held.of(~goes), held.of(goes)
            fold(kept, gone)
            held = kept
    return outputs[0], np.stack([output[:, 0] for output in outputs[1:]])


@pytest.mark.parametrize("name", MERGES)
def test_what_stays_holds_what_the_definition_says(name):
    arguments, fold = REFERENCES[name]
    got = run(policies.window(budget=BUDGET, sinks=SINKS, merge=MERGES[name](**arguments)))
    plain = run(policies.window(budget=BUDGET, sinks=SINKS))
    group = HEADS // KV_HEADS
    for row, n in enumerate(PROMPT):
        for head in range(KV_HEADS):
            prompt, decoded = simulate(row, head, fold)
            here = slice(head * group, (head + 1) * group)
            np.testing.assert_allclose(got.prompt[row, here, :n], prompt, atol=1e-5)
            np.testing.assert_allclose(got.output[:, row, here], decoded, atol=2e-5)
    # Who is held is the policy's choice alone; what they hold is not.
    np.testing.assert_array_equal(np.sort(got.position), np.sort(plain.position))
    assert np.abs(got.output - plain.output).max() > 1e-3


@pytest.mark.parametrize("name", MERGES)
def test_a_row_is_merged_alone_and_room_for_everything_merges_nothing(name):
    merge = MERGES[name]()
    got, alone = (run(policies.h2o(budget=0.5, merge=merge), rows) for rows in ((0, 1, 2), (1,)))
    np.testing.assert_allclose(alone.output[:, 0], got.output[:, 1], atol=1e-5)
    np.testing.assert_array_equal(
        run(policies.h2o(budget=100, merge=merge)).output, run(policies.h2o(budget=100)).output
    )


def test_many_pairs_go_in_tiles(monkeypatch):
    whole = run(policies.h2o(budget=6, merge=policies.d2o()))
    monkeypatch.setattr("kvjax.policies.merge.TILE", 4)
    tiled = run(policies.h2o(budget=6, merge=policies.d2o(beta=0.7)))
    np.testing.assert_allclose(tiled.output, whole.output, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in policies.POLICIES if "merge" in policies.accepts(name)])
def test_every_eviction_policy_takes_one(name):
    needed = {"strided": {"stride": 3}, "fixed": {"block": 3, "columns": 1}}.get(name, {})
    policy = policies.by_name(name, budget=8, merge=policies.anchors(), **needed)
    assert policy.merge == policies.anchors()
    once = policy.init((1, 1, 4))
    assert all(jnp.shape(leaf)[:3] == (1, 1, 4) for leaf in once.values())


def test_they_are_the_eviction_policies():
    takes = {name for name in policies.POLICIES if "merge" in policies.accepts(name)}
    assert set(policies.POLICIES) - takes == {"full", "snapkv", "pyramidkv", "knorm", "keydiff"}


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: policies.h2o(budget=8, merge="d2o"), "merge='d2o' is no merge; give one such as"),
        (lambda: policies.h2o(budget=8, merge=policies.d2o(), variant="masked"), "evicts nothing that could be merged"),
        (lambda: policies.d2o(beta=2), "beta must be a number from 0 to 1"),
        (lambda: policies.cam(recent=0), "recent must be a whole number of at least 1"),
        (lambda: policies.kvmerger(similarity=3), "similarity must be a number from -1 to 1"),
    ],
)
def test_refused_with_the_reason(made, match):
    with pytest.raises(PolicyError, match=match):
        made()


def test_all_that_a_smaller_budget_drops_is_merged():
    """After a compressor, the first new token finds more than one slot too many."""
    policy = policies.after_prefill(policies.knorm(budget=12), then=policies.h2o(4, recent=1, merge=policies.anchors()))
    rng = np.random.default_rng(0)
    key, value = (jnp.asarray(rng.normal(size=(1, 1, 14, 4)), jnp.float32) for _ in range(2))
    position = jnp.asarray(rng.permutation(14)[None, None] - 1, jnp.int32)
    layer = cache.LayerKV(key, value, position, {"mass": jnp.asarray(rng.random((1, 1, 14)), jnp.float32)})
    one = jnp.ones(1, jnp.int32)
    view = View(position, key, value, one * 12, one * 4, one * 12, 0, True)
    after = cache.evict(layer, policy.then, view, tokens=1)
    where, kept = np.asarray(position)[0, 0], np.asarray(after.position)[0, 0] >= 0
    assert kept.sum() == 4
    expected, count = np.array(value[0, 0]), np.ones(14)
    for slot in np.flatnonzero(~kept & (where >= 0)):
        near = min(np.flatnonzero(kept), key=lambda k: (abs(where[k] - where[slot]), -where[k]))
        expected[near] += np.asarray(value[0, 0])[slot]
        count[near] += 1
    np.testing.assert_allclose(after.value[0, 0][kept], (expected / count[:, None])[kept], atol=1e-6)
    assert count.sum() == 14 + 9


def test_a_merge_costs_no_slots():
    plain, merged = (
        cache.empty(policies.h2o(budget=4, merge=m), 1, 1, 5, 8, jnp.float32) for m in (None, policies.d2o())
    )
    assert set(merged.stats) - set(plain.stats) == {"threshold"}
