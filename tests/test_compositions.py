"""What combinators make of every policy: the conformance table on one layer, and what is refused.

A layer on random queries, keys and values instead of a model: what a policy does is the layer's business, and a model
takes ten times as long to compile. `test_conformance` has the policies themselves on a whole model.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import cache, policies
from kvjax.allocation import allocate
from kvjax.cache import Block
from kvjax.errors import PolicyError
from kvjax.policies import COMBINATORS, POLICIES, Policy
from kvjax.policies.base import budgets_of
from kvjax.rope import Rope

pytestmark = pytest.mark.thorough

HEADS, KV_HEADS, DIM = 4, 2, 8
PROMPT = np.array([24, 10, 17])
NEW = 12
ROPE = Rope(dim=DIM)

#: How each policy is built under a budget.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "strided": {"stride": 3, "local": 1},
    "fixed": {"block": 2, "columns": 1},
    "window": {"sinks": 1},
    "streaming_llm": {"sinks": 1},
    "h2o": {"recent": 1},
    "h2o_decay": {"recent": 1},
    "scissorhands": {"recent": 1},
    "mean_attention": {"recent": 1},
    "roco": {"guard": 2},
    "tova": {"share_heads": False},
    "snapkv": {"window": 2, "kernel": 3},
    "pyramidkv": {"window": 2, "kernel": 3},
}
COMPRESSORS = ("snapkv", "pyramidkv", "knorm", "keydiff")
EVICTION = [name for name in POLICIES if name not in COMPRESSORS and name != "full"]
ORDERS = ("strided", "fixed")  # say who goes first, and not by how much


def build(name: str, budget: Any = 0.5, **more: Any) -> Policy:
    return policies.by_name(name, budget=budget, **(ARGUMENTS.get(name, {}) | more))


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
            places = {"positions": "cache"} if then == "streaming_llm" else {}
            found[f"after_prefill({first}, {then})"] = policies.after_prefill(
                build(first, budget, **places), then=build(then, budget)
            )
    return found


#: Each combinator on each policy once; pairs of a compressor and what follows it: every one of either.
NAMES = [
    name
    for name in compositions()
    if not name.startswith("after_prefill") or name.startswith("after_prefill(knorm") or name.endswith(", roco)")
]


class Steps(NamedTuple):
    """Of every decoding step: output [steps, B, H, D] and positions [steps, B, K, S]; the first is after the prompt."""

    prompt: np.ndarray  # [B, H, n, D]
    output: np.ndarray
    position: np.ndarray


def stream(seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values of one row, [., PROMPT.max() + NEW, D]."""
    keys = jax.random.split(jax.random.key(seed), 3)
    heads = (HEADS, KV_HEADS, KV_HEADS)
    return tuple(jax.random.normal(k, (h, int(PROMPT.max()) + NEW, DIM)) for k, h in zip(keys, heads, strict=True))


def run(policy: Policy, rows: tuple[int, ...] = (0, 1, 2)) -> Steps:
    """A layer of a ragged batch: each row's prompt in one shot, then its own next tokens."""
    lengths = PROMPT[list(rows)]
    slots = allocate(policy, lengths, lengths + NEW, 1, KV_HEADS)
    q, k, v = (jnp.stack(parts) for parts in zip(*(stream(row) for row in rows), strict=True))
    width = int(lengths.max())
    position = jnp.where(jnp.arange(width) < lengths[:, None], jnp.arange(width, dtype=jnp.int32), -1)

    @jax.jit
    def all_steps(q, k, v):
        block = Block(
            position=position, budget=jax.tree.map(jnp.asarray, slots.budget), policy=policy, capacity=slots.capacity,
            prompt=jnp.asarray(lengths, jnp.int32),
        )  # fmt: skip
        first, layer = cache.step(
            None, q[:, :, :width], k[:, :, :width], v[:, :, :width], block=block, index=0, rope=ROPE
        )
        decoding = policy
        if policy.then is not None:
            decoding, layer = policy.then, layer.replace(stats=policy.hand_over(layer.stats))
        budget = jax.tree.map(jnp.asarray, slots.decode_budget)

        def body(layer, i):
            at = jnp.asarray(lengths, jnp.int32) + i
            block = Block(position=at[:, None], budget=budget, policy=decoding, decoding=True)
            one = [jnp.take_along_axis(x, at[:, None, None, None], axis=2) for x in (q, k, v)]
            output, layer = cache.step(layer, *one, block=block, index=0, rope=ROPE)
            return layer, (output[:, :, 0], layer.position)

        _, (output, positions) = jax.lax.scan(body, layer, jnp.arange(NEW, dtype=jnp.int32))
        return first, output, jnp.concatenate([layer.position[None], positions])

    return Steps(*map(np.asarray, all_steps(q, k, v)))


def live(positions: np.ndarray) -> list[int]:
    return sorted(int(p) for p in positions if p >= 0)


@pytest.mark.parametrize("name", NAMES)
def test_limits_distinct_positions_and_rows_alone(name):
    policy = compositions()[name]
    got = run(policy)
    for row, n in enumerate(PROMPT):
        (kept,) = budgets_of(policy, int(n), 1)
        after = policy if policy.then is None else policy.then
        limit = None if after.budget is None else budgets_of(after, int(n), 1)[0]
        for step in range(NEW + 1):
            heads = [live(got.position[step, row, head]) for head in range(KV_HEADS)]
            sizes = [len(positions) for positions in heads]
            assert all(len(set(positions)) == len(positions) for positions in heads)
            assert all(positions[-1] <= n - 1 + step for positions in heads)
            if step == 0:
                # Heads that share a budget do so exactly.
                assert sum(sizes) == KV_HEADS * min(kept, n) if policy.limits else set(sizes) == {min(kept, n)}
            elif limit is not None:
                assert set(sizes) == {min(limit, min(kept, n) + step)}
            else:
                assert all(n - 1 + step in positions for positions in heads)
    alone = run(policy, (1,))
    np.testing.assert_allclose(alone.output[:, 0], got.output[:, 1], atol=1e-5)
    for step in range(NEW + 1):
        for head in range(KV_HEADS):
            assert live(alone.position[step, 0, head]) == live(got.position[step, 1, head])


@pytest.mark.parametrize("name", [name for name in NAMES if "after_prefill" not in name or "roco" in name])
def test_room_for_everything_is_full_attention(name):
    policy = compositions(budget=100)[name]
    full = run(policies.full(positions=policy.positions))
    some = run(policy)
    np.testing.assert_allclose(some.output, full.output, atol=1e-5)
    np.testing.assert_allclose(some.prompt, full.prompt, atol=1e-5)


def test_every_pair_is_allowed_or_refused_when_it_is_built():
    assert set(COMBINATORS) == {"with_heavy_hitters", "value_norm", "adakv", "after_prefill"}
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
        (lambda: policies.value_norm(policies.strided(budget=8, stride=2)), "who goes first and not by how much"),
        (lambda: policies.value_norm(policies.full()), "has nothing to choose"),
        (lambda: policies.with_heavy_hitters(policies.h2o(budget=8, recent=5)), "protects 5 slots, but keeps 4 of a"),
        (lambda: policies.with_heavy_hitters(policies.h2o(budget=8), fraction=1.5), "number from 0 to 1; got 1.5"),
        (lambda: policies.with_heavy_hitters("h2o"), "'h2o' is not a policy"),
        (lambda: policies.adakv(policies.h2o(budget=8)), "h2o' is no compressor; give one such as snapkv"),
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
        (lambda: policies.snapkv(budget=8, window=8), "a window of 8 needs a larger budget than 8"),
        (lambda: policies.snapkv(budget=8, window=2, kernel=4), "kernel=4 has no centre; give an odd number"),
        (lambda: policies.snapkv(budget=8, window=2, pooling="sum"), "pooling='sum' is not valid; use 'avg' or 'max'"),
        (lambda: policies.pyramidkv(budget=(8, 8)), "is not one number"),
        (lambda: policies.knorm(budget=None), "a compressor needs a budget"),
        (lambda: policies.h2o(budget=8, variant="ring"), "a budget of 8 is even, give 7 or 9"),
        (lambda: policies.h2o(budget=7, variant="ring", recent=2), "has no place in it"),
        (
            lambda: policies.h2o(budget=8, variant="wheel"),
            "variant='wheel' is not valid; use 'drop', 'ring', 'masked', 'global'",
        ),
        (lambda: policies.random(budget=8, seed=2**32), "has no key of its own"),
        (lambda: policies.tova(budget=8, share_heads="false"), "is not True or False"),
        (lambda: policies.evict(importance=min, budget=8), "must be an Importance and a Scope"),
        (lambda: policies.evict(importance=policies.mass, scope=4, budget=8), "must be an Importance and a Scope"),
        (lambda: policies.evict(importance=policies.mass._replace(needs="mass"), budget=8), "'mass' is a text"),
        (
            lambda: policies.adakv(policies.after_prefill(policies.knorm(budget=8), then=policies.h2o(budget=8))),
            "it is combined already",
        ),
        (lambda: policies.value_norm(policies.h2o(budget=8, variant="masked")), "hides slots and evicts none"),
        (lambda: policies.with_heavy_hitters(policies.h2o(budget=8, variant="global")), "hides slots and evicts none"),
        (lambda: policies.fixed(budget=8, block=9, columns=1), "protects 9 slots, more than its budget of 8"),
        (lambda: policies.fixed(budget=8, block=4, columns=5), "columns=5 of a block of 4 positions"),
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


@pytest.mark.parametrize("base", ["pyramidkv", "snapkv", "knorm"])
def test_heads_that_share_leave_a_short_prompt_alone(base):
    """However short: of a window of 32, too, which a pyramid's flat budget does not bound."""
    policy = policies.adakv(policies.by_name(base, budget=40, **({} if base == "knorm" else {"window": 32})))
    got = run(policy)
    for row, n in enumerate(PROMPT):
        for head in range(KV_HEADS):
            assert live(got.position[-1, row, head]) == list(range(n + NEW))
    np.testing.assert_allclose(got.output, run(policies.full()).output, atol=1e-5)


def test_a_policy_by_hand_is_combined_like_any_other():
    """`needs` as names, as one would write them."""
    made = policies.h2o(budget=6, recent=1)
    by_hand = made._replace(needs=frozenset({"mass"}), importance=None)
    for one, two in (
        (policies.after_prefill(build("knorm"), then=by_hand), policies.after_prefill(build("knorm"), then=made)),
        (policies.split_heads(((1, 0),), by_hand, by_hand), policies.split_heads(((1, 0),), made, made)),
    ):
        after, expected = (made.then or made.parts[0].policy for made in (one, two))
        assert after.needs == expected.needs
        hash(one)  # a static argument of what is jitted
    with pytest.raises(PolicyError, match="its statistics are its own"):
        policies.with_heavy_hitters(by_hand)


def test_chance_is_drawn_once_a_token_from_layer_head_and_position():
    """Who is left is who drew the most, whatever the row, the batch and the step."""
    got = run(policies.random(budget=6, seed=5))

    def drawn(head: int, position: int) -> float:
        key = jax.random.key(5)
        for part in (0, head, position):  # layer, head, position
            key = jax.random.fold_in(key, part)
        return float(jax.random.uniform(key))

    draws = np.array([[drawn(head, p) for p in range(int(PROMPT.max()) + NEW)] for head in range(KV_HEADS)])
    for row, n in enumerate(PROMPT):
        for head in range(KV_HEADS):
            held = sorted(range(n), key=lambda p: draws[head, p])[-6:]
            for step in range(NEW + 1):
                if step:
                    held = sorted([*held, n - 1 + step], key=lambda p: draws[head, p])[-6:]
                assert live(got.position[step, row, head]) == sorted(held)
