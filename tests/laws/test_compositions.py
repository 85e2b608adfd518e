"""The conformance table on one layer: of every policy, and of every combinator; and what is refused.

A layer on random queries, keys and values instead of a model: what a policy does is the layer's business, and a model
takes ten times as long to compile. `test_conformance` has a policy of each kind on a whole model.
"""

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from kvjax import policies
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from kvjax.policies import COMBINATORS, POLICIES, Phases, Policy, Shared
from tests import examples, layers
from tests.laws.test_conformance import PROTECTED

pytestmark = pytest.mark.thorough

#: Leaves room for what a combinator protects.
OWN_ARGUMENTS: dict[str, dict[str, Any]] = {
    **{name: {"recent": 1} for name in ("h2o", "h2o_decay", "scissorhands", "mean_attention", "lru", "counter")},
    "tova": {"share_heads": False},
}
COMPRESSORS = (
    "snapkv", "pyramidkv", "knorm", "keydiff", "expected_attention", "lagkv", "leverage", "cur", "matched", "compactor",
    "kvzip", "kvgrad", "qfilters",
)  # fmt: skip
EVICTION = [name for name in POLICIES if name not in COMPRESSORS and name != "full"]
ORDERS = ("strided", "fixed", "lru", "lagkv", "vase", "ladder")  # their importances only order the slots


def build(name: str, budget: Any = 0.5, **more: Any) -> Policy:
    return examples.policy(name, budget, **(OWN_ARGUMENTS.get(name, {}) | more))


@functools.cache
def compositions(budget: Any = 0.5) -> dict[str, Policy]:
    """Every pair that is allowed."""
    found = {f"with_heavy_hitters({name})": policies.with_heavy_hitters(build(name, budget)) for name in EVICTION}
    found |= {
        f"value_norm({name})": policies.value_norm(build(name, budget))
        for name in (*EVICTION, *COMPRESSORS)
        if name not in ORDERS
    }
    found |= {f"adakv({name})": policies.adakv(build(name, budget)) for name in COMPRESSORS}
    for first in COMPRESSORS:
        for then in EVICTION:
            if (first, then) == ("matched", "ems"):
                continue  # a merge would average slots of different weights
            places = {"positions": "cache"} if then == "streaming_llm" else {}
            found[f"after_prefill({first}, {then})"] = policies.after_prefill(
                build(first, budget, **places), then=build(then, budget)
            )
    return found


#: For each kind of state that a policy keeps, one policy.
KINDS = (
    "h2o", "scissorhands", "tova", "roco", "lazy", "ems", "strided", "rkv", "triattention", "learned", "counter",
    "snapkv", "pyramidkv", "knorm", "expected_attention", "matched",
)  # fmt: skip
#: Every policy, and each combinator on each kind of policies, for it changes nothing but what they rank by or how many
#: stay; pairs of a compressor and what follows it: every kind of either. Not those that need a whole model; see
#: tests/generation/test_prompt_replay.py.
NAMES = [name for name in POLICIES if name != "full" and name not in examples.REPLAYED] + [
    name
    for name in compositions()
    if set(re.split(r"[(, )]+", name)[1:-1]) <= set(KINDS)
    and (not name.startswith("after_prefill") or "(knorm," in name or name.endswith(", roco)"))
]


def policy_of(name: str, budget: Any) -> Policy:
    """A policy with its example's arguments, or a composition."""
    return examples.policy(name, budget) if name in POLICIES else compositions(budget)[name]


#: Row 3 never has more than twelve tokens.
CASE = layers.Case(
    layers.random_streams(range(4), 36), prompts=np.array([24, 10, 17, 7]), ends=np.array([36, 22, 29, 12]),
    rope=Rope(dim=8),
)  # fmt: skip
ROWS, KV_HEADS = range(4), 2
ROOM = 12  # slots, as many as half of the longest prompt: the same program as with a budget of 0.5


@functools.cache
def full(positions: str) -> np.ndarray:
    """[B, H, T, D]"""
    return layers.run(policies.full(positions=positions), CASE).output


def expected_slots(policy: Policy, prompt: int) -> tuple[int, int | None]:
    """Slots of the average head after a prompt, and those that bound each head while decoding."""
    (kept,) = policy.budget.slots(prompt, 1)
    if isinstance(policy, Phases):
        return kept, policy.decode.budget.slots(prompt, 1)[0]
    return kept, kept if policy.when == "step" else None


def check_limits(run: layers.Run, policy: Policy, protected: Callable[[int, int], set[int]]) -> None:
    for row, (n, end) in enumerate(zip(CASE.prompts, CASE.ends, strict=True)):
        kept, limit = expected_slots(policy, int(n))
        for step in range(CASE.room[1] + 1):
            tokens = min(n + step, end)
            heads = [run.live(step, row, head) for head in range(KV_HEADS)]
            sizes = [len(positions) for positions in heads]
            assert all(len(set(positions)) == len(positions) for positions in heads)
            assert all(positions[-1] < tokens for positions in heads)
            assert all(protected(tokens - 1, kept) <= set(positions) for positions in heads)
            if step > 0:
                before = [{*run.live(step - 1, row, head), tokens - 1} for head in range(KV_HEADS)]
                assert all(set(now) <= then for now, then in zip(heads, before, strict=True)), "nothing comes back"
            if step == 0:
                # Heads that share a budget do so exactly.
                assert sum(sizes) == KV_HEADS * min(kept, n)
                assert isinstance(policy.budget, Shared) or len(set(sizes)) == 1
            elif limit is not None:
                assert set(sizes) == {min(limit, min(kept, n) + tokens - n)}
            else:
                assert all(set(range(n, tokens)) < set(positions) for positions in heads)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_limits_rows_by_themselves_and_room_for_everything(name):
    for budget in (0.5, ROOM):
        policy = policy_of(name, budget)
        got = layers.run(policy, CASE)
        check_limits(got, policy, PROTECTED.get(name, lambda newest, budget: set()))
        # A row is the same to the last bit in another place, beside others.
        order = (3, 1, 1, 0)
        moved = layers.run(policy, CASE.rows(*order))
        np.testing.assert_array_equal(moved.output, got.output[list(order)])
        for step, head in itertools.product(range(CASE.room[1] + 1), range(KV_HEADS)):
            assert [moved.live(step, row, head) for row in ROWS] == [got.live(step, row, head) for row in order]
    # What a policy with room for everything does is full attention.
    np.testing.assert_allclose(got.output[3], full(policy.positions)[3], atol=1e-5)
    assert all(got.live(-1, 3, head) == list(range(CASE.ends[3])) for head in range(KV_HEADS))


#: Of heads that share a budget, and of two policies; `test_conformance` has policies by themselves.
SOME = ("adakv(snapkv)", "after_prefill(pyramidkv, roco)")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", SOME)
def test_a_row_alone_and_more_room_than_tokens(name):
    """In arrays of another size."""
    got = layers.run(compositions()[name], CASE)
    alone = layers.run(compositions()[name], CASE.alone(1))
    np.testing.assert_allclose(alone.output[0], got.output[1], atol=1e-5)
    for step, head in itertools.product(range(CASE.room[1] + 1), range(KV_HEADS)):
        assert alone.live(step, 0, head) == got.live(step, 1, head)
    np.testing.assert_allclose(layers.run(compositions(budget=100)[name], CASE).output, full("original"), atol=1e-5)


def test_every_pair_is_allowed_or_refused_when_it_is_built():
    # What the others take is in test_values and test_scores.
    alone = {"from_layer", "by_page", "caote", "value_aware", "chunkkv", "critical", "phases"}
    assert set(COMBINATORS) == {"with_heavy_hitters", "value_norm", "adakv", "after_prefill"} | alone
    built = set(compositions())
    for name in POLICIES:
        policy = policies.full() if name == "full" else build(name)
        for combinator in ("with_heavy_hitters", "value_norm", "adakv"):
            if f"{combinator}({name})" not in built:
                with pytest.raises(PolicyError, match=rf"{combinator}\("):
                    COMBINATORS[combinator](policy)
        for other in POLICIES:
            then = policies.full() if other == "full" else build(other)
            if f"after_prefill({name}, {other})" not in built and (name, other) not in [
                (c, "full") for c in COMPRESSORS
            ]:
                with pytest.raises(PolicyError, match=r"after_prefill\("):
                    policies.after_prefill(policy, then=then)


@pytest.mark.parametrize(
    ("made", "match"),
    [
        (lambda: policies.with_heavy_hitters(policies.tova(budget=8)), "must all hold the same positions"),
        (lambda: policies.value_norm(policies.tova(budget=8)), "must all hold the same positions"),
        (
            lambda: policies.value_norm(policies.strided(budget=8, stride=2)),
            "only orders the slots",
        ),
        (lambda: policies.value_norm(policies.full()), "keeps every token; give a policy with a budget"),
        (lambda: policies.with_heavy_hitters(policies.h2o(budget=8, recent=5)), "protects 5 slots, but keeps 4 of a"),
        (lambda: policies.with_heavy_hitters(policies.h2o(budget=8), fraction=1.5), "number from 0 to 1; got 1.5"),
        (lambda: policies.with_heavy_hitters("h2o"), "'h2o' is not a policy"),
        (lambda: policies.adakv(policies.h2o(budget=8)), "h2o' is not a compressor; give one such as snapkv"),
        (
            lambda: policies.after_prefill(policies.h2o(budget=8), then=policies.h2o(budget=8)),
            "evicts at every step; give a compressor",
        ),
        (
            lambda: policies.after_prefill(policies.knorm(budget=8), then=policies.knorm(budget=8)),
            "is for prompts only; give an eviction policy",
        ),
        (
            lambda: policies.after_prefill(policies.knorm(budget=8), then=policies.streaming_llm(budget=8)),
            "positions 'original' and 'cache' differ",
        ),
        (
            lambda: policies.after_prefill(policies.knorm(budget=8), then=policies.tova(budget=8)),
            "a compressor leaves each its own",
        ),
        (lambda: policies.snapkv(budget=8, window=8), "^policy snapkv: window=8 needs a larger budget than 8"),
        (lambda: policies.snapkv(budget=8, window=2, kernel=4), "kernel=4 has no centre; give an odd number"),
        (lambda: policies.snapkv(budget=8, window=2, pooling="sum"), "pooling='sum' is not valid; use 'avg' or 'max'"),
        (lambda: policies.pyramidkv(budget=(8, 8)), r"^policy pyramidkv: budget \(8, 8\) is not one number"),
        (lambda: policies.knorm(budget=None), "a compressor needs a budget"),
        (lambda: policies.h2o(budget=8, variant="ring"), "a budget of 8 is even, give 7 or 9"),
        (
            lambda: policies.h2o(budget=7, variant="ring", recent=2),
            "^policy h2o: recent=2 is not valid with variant='ring'",
        ),
        (
            lambda: policies.h2o(budget=8, variant="wheel"),
            "variant='wheel' is not valid; use 'drop', 'ring', 'masked', 'global'",
        ),
        (lambda: policies.random(budget=8, seed=2**32), "seed must be a whole number from 0 to 4294967295"),
        (
            lambda: policies.tova(budget=8, share_heads="false"),
            "^policy tova: share_heads=.false. is not",
        ),
        (lambda: policies.evict(importance=min, budget=8), "must be an Importance and a Scope"),
        (lambda: policies.evict(importance=policies.mass, scope=4, budget=8), "must be an Importance and a Scope"),
        (
            lambda: policies.Importance(needs="mass", score=policies.mass.score),
            "needs='mass' is not a set",
        ),
        (
            lambda: policies.adakv(policies.after_prefill(policies.knorm(budget=8), then=policies.h2o(budget=8))),
            "it is combined already",
        ),
        (lambda: policies.value_norm(policies.h2o(budget=8, variant="masked")), "hides slots and evicts none"),
        (lambda: policies.with_heavy_hitters(policies.h2o(budget=8, variant="global")), "hides slots and evicts none"),
        (lambda: policies.fixed(budget=8, block=9, columns=1), "protects 9 slots, more than its budget of 8"),
        (
            lambda: policies.fixed(budget=8, block=4, columns=5),
            "columns=5 is more than a block of 4",
        ),
        (lambda: policies.strided(budget=8, stride=0), "stride must be a whole number of at least 1"),
        (lambda: policies.h2o_decay(budget=8, gamma=1.1), "gamma must be a number from 0 to 1"),
        (lambda: policies.scissorhands(budget=8, history=0), "history must be a whole number of at least 1"),
        (
            lambda: policies.evict(
                importance=policies.shared_last, scope=policies.protect_varying(2, 0), budget=8, name="mixed"
            ),
            "its scope looks at each head's attention",
        ),
    ],
)
def test_refused_with_the_reason(made, match):
    with pytest.raises(PolicyError, match=match) as caught:
        made()
    assert "\n" not in str(caught.value)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("base", ["pyramidkv", "snapkv", "knorm"])
def test_heads_that_share_leave_a_short_prompt_alone(base):
    """However short: of a window of 32, too, which a pyramid's flat budget does not bound."""
    policy = policies.adakv(policies.by_name(base, budget=40, **({} if base == "knorm" else {"window": 32})))
    got = layers.run(policy, CASE)
    for row, head in itertools.product(ROWS, range(KV_HEADS)):
        assert got.live(-1, row, head) == list(range(CASE.ends[row]))
    np.testing.assert_allclose(got.output, full("original"), atol=1e-5)


def test_a_policy_by_hand_is_combined_like_any_other():
    """`needs` as names, as one would write them."""
    made = policies.h2o(budget=6, recent=1)
    importance = policies.Importance(needs={"mass"}, score=lambda stats, view: stats["mass"])
    by_hand = policies.evict(importance=importance, scope=made.scope, budget=6)
    for combine in (
        lambda policy: policies.after_prefill(build("knorm"), then=policy),
        lambda policy: policies.split_heads(((1, 0),), policy, policies.full()),
        lambda policy: policies.with_heavy_hitters(policy),
        lambda policy: policies.value_norm(policy),
    ):
        assert combine(by_hand).needs == combine(made).needs
        hash(combine(by_hand))  # a static argument of what is jitted
    combined = policies.value_norm(by_hand)
    np.testing.assert_array_equal(layers.run(combined, CASE).output, layers.run(policies.value_norm(made), CASE).output)

    class Own(Policy):
        name = "own"

    with pytest.raises(PolicyError, match="it is not made by `evict`"):
        policies.with_heavy_hitters(Own())


def test_a_union_protects_what_either_scope_protects():
    """Sinks and the newest tokens together are what `Ends` protects."""
    first, newest = policies.protect_first(2), policies.protect_newest(3)
    ends, both = (
        policies.evict(importance=policies.mass, scope=scope, budget=6)
        for scope in (policies.Ends(recent=3, sinks=2), first | newest)
    )
    assert both.protects(6) == 5 and both.keeps_newest(6) == 3
    got, expected = (layers.run(policy, CASE) for policy in (both, ends))
    for row, head in itertools.product(ROWS, range(KV_HEADS)):
        assert got.live(-1, row, head) == expected.live(-1, row, head)
    np.testing.assert_array_equal(got.output, expected.output)


def test_chance_is_drawn_once_a_token_from_layer_head_and_position():
    """Who is left is who drew the most, whatever the row, the batch and the step."""
    got = layers.run(policies.random(budget=6, seed=5), CASE)

    @jax.jit
    def drawn(head, position):
        key = jax.random.key(5)
        for part in (0, head, position):  # layer, head, position
            key = jax.random.fold_in(key, part)
        return jax.random.uniform(key)

    draws = [[float(drawn(head, p)) for p in range(CASE.ends.max())] for head in range(KV_HEADS)]
    for row, head in itertools.product(ROWS, range(KV_HEADS)):
        held: list[int] = []
        for token in range(CASE.ends[row]):
            held = sorted([*held, token], key=lambda p: draws[head][p])[-6:]
            if (step := token + 1 - CASE.prompts[row]) >= 0:
                assert got.live(step, row, head) == sorted(held)
