"""Merging: what stays holds what the definitions say, against a float64 reference of one head at a time."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies
from kvjax.cache import Block
from kvjax.cache.empty import empty
from kvjax.cache.step.step import step
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from kvjax.policies import MERGES
from tests import layers
from tests.parameters import of_head
from tests.reference.step import rotate

SINKS = 1  # of a window: who goes follows from positions, whatever was merged
ROOM = 7  # slots, as many as three tenths of the longest prompt: one program for both
#: Row 3 never has more tokens than that.
CASE = layers.Case(
    layers.random_streams(range(4), 36), prompts=np.array([24, 10, 17, 4]), ends=np.array([36, 22, 29, 7]),
    rope=Rope(dim=8),
)  # fmt: skip
HEADS, KV_HEADS = CASE.heads
GROUP = HEADS // KV_HEADS


def window(budget: Any, merge: policies.Merge | None = None) -> policies.Policy:
    return policies.window(budget, sinks=SINKS, merge=merge)


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


def lococo(kept: Slots, gone: Slots) -> None:
    """The oldest three slots that stay and are no sinks receive; a kernel of five neighbours."""
    dim = kept.key.shape[1]
    shapes = {"kernel": (3, 5, 2 * dim), "bias": (3,), "blend": ()}
    weights = {part: of_head("lococo", part, 0, 0, shape).astype(float) for part, shape in shapes.items()}
    to = np.flatnonzero(kept.position > gone.position.min())[:3]
    position = np.concatenate([kept.position[to], gone.position])
    pairs = np.concatenate([np.c_[kept.key[to], kept.value[to]], np.c_[gone.key, gone.value]])[np.argsort(position)]
    wide = np.pad(pairs, ((2, 2), (0, 0)))
    for row, slot in enumerate(to):
        logits = [np.sum(weights["kernel"][row] * wide[r : r + 5]) + weights["bias"][row] for r in range(len(pairs))]
        share = np.exp(np.array(logits) - max(logits))
        mixed = weights["blend"] * share / share.sum() @ pairs
        own = (1 - weights["blend"]) * np.r_[kept.key[slot], kept.value[slot]]
        kept.key[slot], kept.value[slot] = np.split(mixed + own, 2)


REFERENCES: dict[str, tuple[dict, Callable[[Slots, Slots], None]]] = {
    "cam": ({"recent": 3}, cam),
    "d2o": ({}, d2o),
    "kvmerger": ({"similarity": 0.1}, kvmerger),
    "anchors": ({}, anchors),
    "lococo": ({"slots": 3, "kernel": 5}, lococo),
}


def simulate(row: int, head: int, budget: int, fold: Callable[[Slots, Slots], None]) -> np.ndarray:
    """Output [G, end, D] of every token of a row, in one KV head."""
    q, k, v = (np.asarray(x[row], np.float64) for x in CASE.streams)
    q, k, v = q[head * GROUP : (head + 1) * GROUP], k[head], v[head]
    dim = k.shape[1]
    held = Slots(np.zeros((0, dim)), np.zeros((0, dim)), np.zeros(0, int), np.zeros(0), np.zeros(0))
    n, outputs = int(CASE.prompts[row]), []
    for start, stop in [(0, n), *((t, t + 1) for t in range(n, CASE.ends[row]))]:
        position = np.arange(start, stop)
        held = Slots(
            np.concatenate([held.key, rotate(k[start:stop], position, 10_000.0)]),
            np.concatenate([held.value, v[start:stop]]),
            np.concatenate([held.position, position]),
            np.concatenate([held.mass, np.zeros(stop - start)]),
            np.concatenate([held.count, np.zeros(stop - start)]),
            held.threshold,
        )
        queries = np.stack([rotate(q[g, start:stop], position, 10_000.0) for g in range(GROUP)])
        sees = held.position[None] <= position[:, None]
        logits = np.where(sees, np.einsum("gnd,sd->gns", queries, held.key) / math.sqrt(dim), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        outputs.append(weights @ held.value)
        held.mass += weights.mean(0).sum(0)
        held.count += sees.sum(0)
        excess = len(held.position) - budget
        if excess > 0:
            goes = np.zeros(len(held.position), bool)
            goes[np.flatnonzero(held.position >= SINKS)[:excess]] = True
            kept, gone = held.of(~goes), held.of(goes)
            fold(kept, gone)
            held = kept
    return np.concatenate(outputs, axis=1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MERGES)
def test_what_stays_holds_what_the_definition_says(name):
    arguments, fold = REFERENCES[name]
    for budget in (ROOM, 0.3):
        policy = window(budget, MERGES[name](**arguments))
        got, plain = layers.run(policy, CASE), layers.run(window(budget), CASE)
        for row, end in enumerate(CASE.ends):
            (slots,) = policy.budget.slots(int(CASE.prompts[row]), 1)
            for head in range(KV_HEADS):
                expected = simulate(row, head, slots, fold)
                np.testing.assert_allclose(got.output[row, head * GROUP :][:GROUP, :end], expected, atol=2e-5)
        # Who is held is the policy's choice alone; what they hold is not.
        np.testing.assert_array_equal(np.sort(got.position), np.sort(plain.position))
        assert np.abs(got.output - plain.output)[:3].max() > 1e-3
        # Where there is room for everything, nothing is merged.
        if budget == ROOM:
            np.testing.assert_array_equal(got.output[3], plain.output[3])
        # A row is merged by itself, whatever the others are.
        order = [3, 1, 1, 0]
        np.testing.assert_array_equal(layers.run(policy, CASE.rows(*order)).output, got.output[order])


def test_more_room_than_tokens_merges_nothing():
    plain, merged = (layers.run(policies.h2o(100, merge=merge), CASE).output for merge in (None, policies.d2o()))
    np.testing.assert_array_equal(merged, plain)


@pytest.mark.sampled(0)
def test_a_row_alone():
    """In arrays of another size, under a policy that follows attention."""
    policy = policies.h2o(0.5, merge=policies.d2o())
    got, alone = layers.run(policy, CASE), layers.run(policy, CASE.alone(1))
    np.testing.assert_allclose(alone.output[0], got.output[1], atol=1e-5)
    for number, head in itertools.product(range(CASE.room[1] + 1), range(KV_HEADS)):
        assert alone.live(number, 0, head) == got.live(number, 1, head)


def test_many_pairs_go_in_tiles(monkeypatch):
    policy = window(ROOM, policies.d2o())
    whole = layers.run(policy, CASE)
    monkeypatch.setattr("kvjax.policies.nearest.TILE", 4)
    layers.program.clear_cache()  # it was traced with another constant
    tiled = layers.run(policy, CASE)
    np.testing.assert_allclose(tiled.output, whole.output, atol=1e-6)
    layers.program.clear_cache()


@pytest.mark.parametrize("name", [name for name in policies.POLICIES if "merge" in policies.accepts(name)])
def test_every_eviction_policy_takes_one(name):
    needed = {"strided": {"stride": 3}, "fixed": {"block": 3, "columns": 1}, "lazy": {"every": 2}}.get(name, {})
    policy = policies.by_name(name, budget=8, merge=policies.anchors(), **needed)
    assert policy.merge == policies.anchors()
    assert policy != policies.by_name(name, budget=8, **needed)
    ((group,),) = layers.lowered(policy, CASE).layout.decode
    assert group.policy.merge == policies.anchors()


def test_they_are_the_eviction_policies():
    takes = {name for name in policies.POLICIES if "merge" in policies.accepts(name)}
    policies_of_prompts = {"snapkv", "pyramidkv", "knorm", "keydiff", "lagkv", "leverage", "cur", "expected_attention"}
    policies_of_prompts |= {"matched", "kvzip", "kvgrad", "compactor", "qfilters"}
    by_turns = {"ladder"}  # which counts slots, not what they hold
    # whose scores are of keys, which a merge would change
    of_queries = {"rkv", "morphkv", "gkv", "vase", "vase_dkv", "triattention", "learned"}
    pools = {"fifo", "lru", "counter"}  # for selections, which need keys that no merge has changed
    own = {"ems"}  # merges by itself
    assert set(policies.POLICIES) - takes - own == {*policies_of_prompts, *of_queries, *by_turns, "full"} | pools


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: policies.h2o(budget=8, merge="d2o"), "merge='d2o' is not a merge; give one such as"),
        (lambda: policies.h2o(budget=8, merge=policies.d2o(), variant="masked"), "which evicts nothing; leave it out"),
        (lambda: policies.lococo(kernel=4), "kernel=4 must be odd"),
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
    case = layers.Case(layers.random_streams([0], 14, heads=(1, 1), dim=4), np.array([13]), np.array([14]))
    ((group,),) = layers.lowered(policy, case).layout.decode
    assert group.capacity == 13
    rng = np.random.default_rng(0)
    # Twelve live slots in any order, and an empty one for the new token.
    where = rng.permutation(13).astype(np.int32)
    free = 5
    where[free] = -1
    held = rng.normal(size=(13, 4)).astype(np.float32)
    layer = empty(group, 1, 1, 4, "float32").replace(position=jnp.asarray(where)[None, None])
    layer = layer.with_exact(jnp.asarray(rng.normal(size=held.shape), jnp.float32)[None, None], held[None, None])
    layer = layer.replace(stats={"mass": jnp.asarray((where >= 0) * rng.random(13), jnp.float32)[None, None]})
    one, token = jnp.ones(1, jnp.int32), jnp.ones((1, 1, 1, 4), jnp.float32)
    block = Block(position=13 * one[:, None], prompt=13 * one, total=14 * one, budget=None)
    compiled = jax.jit(step, static_argnames="group")
    _, after, _ = compiled(layer, token, token, 5 * token, block=block, group=group, budget=4 * one)
    where[free], held[free] = 13, 5.0
    kept = np.asarray(after.position)[0, 0] >= 0
    assert kept.sum() == 4
    assert kept[free]
    expected, count = held.copy(), np.ones(13)
    for slot in np.flatnonzero(~kept):
        near = min(np.flatnonzero(kept), key=lambda k: (abs(where[k] - where[slot]), -where[k]))
        expected[near] += held[slot]
        count[near] += 1
    np.testing.assert_allclose(after.value[0, 0][kept], (expected / count[:, None])[kept], atol=1e-6)
    assert count.sum() == 13 + 9


def test_a_merge_costs_no_slots():
    plain, merged = (
        layers.lowered(policies.h2o(budget=4, merge=merge), CASE).layout for merge in (None, policies.d2o())
    )
    assert plain.bytes(4) == merged.bytes(4)
    positions = math.prod((4, KV_HEADS, plain.groups[0].capacity))
    assert merged.bytes(4, statistics=True) - plain.bytes(4, statistics=True) == 4 * positions  # the threshold
    assert plain.groups[0].slots == merged.groups[0].slots
