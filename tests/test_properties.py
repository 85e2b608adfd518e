"""Whatever the policy, its parameters, budget, heads, blocks and lengths: one layer, slot for slot as the reference.

Hypothesis draws them; a fixed seed keeps the suite the same from run to run. For another search:
HYPOTHESIS_EXAMPLES=1000 python -m pytest tests/test_properties.py -n 0
"""

import itertools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, reject, settings
from hypothesis import strategies as st

from kvjax import cache, policies
from kvjax.allocation import allocate
from kvjax.cache import Block
from kvjax.errors import PolicyError
from kvjax.policies import Policy
from kvjax.rope import Rope
from tests import reference
from tests.reference.decoder import _blocks
from tests.reference.step import empty_heads, step

pytestmark = pytest.mark.thorough

SEARCH = "HYPOTHESIS_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "30"))
DIM, THETA = 4, 10_000.0
WIDTH, LAST = 20, 26  # longest prompt, and text

few = st.integers(0, 4)
#: What a policy takes beside the budget.
PARAMETERS: dict[str, dict[str, st.SearchStrategy]] = {
    "window": {"sinks": few},
    "local_only": {},
    "streaming_llm": {"sinks": few},
    "h2o": {"recent": st.none() | few},
    "heavy_only": {},
    "h2o_decay": {"recent": st.none() | few, "gamma": st.floats(0.5, 0.99)},
    "scissorhands": {"recent": st.none() | few, "history": st.none() | st.integers(1, 40)},
    "tova": {"share_heads": st.booleans()},
    "mean_attention": {"recent": st.none() | few},
    "roco": {"protect": st.none() | few, "guard": few},
    "strided": {"stride": st.integers(1, 5), "local": st.none() | few},
    "fixed": {"block": st.integers(2, 4), "columns": st.integers(0, 2)},
    "snapkv": {
        "window": st.integers(1, 4),
        "kernel": st.sampled_from([1, 3, 5]),
        "pooling": st.sampled_from(["avg", "max"]),
    },
    "knorm": {},
    "keydiff": {},
}


class Drawn(NamedTuple):
    name: str
    arguments: dict[str, Any]
    combinator: str | None
    heads: tuple[int, int]
    prompts: tuple[int, int]
    block: int | None
    seed: int

    def of(self, package: Any) -> Any:
        policy = package.by_name(self.name, **self.arguments)
        return policy if self.combinator is None else package.COMBINATORS[self.combinator](policy)


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    name = draw(st.sampled_from(sorted(PARAMETERS)))
    arguments = {key: draw(strategy) for key, strategy in PARAMETERS[name].items()}
    arguments["budget"] = draw(st.integers(1, 16) | st.floats(0.05, 1.0))
    taken = policies.accepts(name)
    if "group_reduce" in taken:
        arguments["group_reduce"] = draw(st.sampled_from(["mean", "max"]))
    if "positions" in taken:
        arguments["positions"] = draw(st.sampled_from(["original", "cache"]))
    return Drawn(
        name,
        arguments,
        draw(st.sampled_from([None, None, "value_norm", "with_heavy_hitters"])),
        draw(st.sampled_from([(4, 4), (4, 2), (4, 1)])),
        draw(st.tuples(st.just(WIDTH), st.integers(1, WIDTH))),
        draw(st.sampled_from([None, 1, 3, 8])),
        draw(st.integers(0, 1000)),
    )


def stream(case: Drawn) -> list[np.ndarray]:
    """Queries, keys and values, [2, heads, LAST, D]."""
    rng = np.random.default_rng(case.seed)
    heads = (case.heads[0], case.heads[1], case.heads[1])
    return [rng.normal(size=(2, count, LAST, DIM)).astype(np.float32) for count in heads]


def run_library(case: Drawn, policy: Policy) -> tuple[np.ndarray, np.ndarray]:
    """Outputs [2, H, LAST, D], zeros past a row's end, and positions [2, K, S] at the end."""
    prompts = np.array(case.prompts)
    ends = prompts + LAST - WIDTH
    slots = allocate(policy, prompts, ends, 1, case.heads[1], case.block or 1)

    @jax.jit
    def steps(*stream):
        outputs = jnp.zeros(stream[0].shape, jnp.float32)
        layer = None
        budget, prompt = jax.tree.map(jnp.asarray, slots.budget), jnp.asarray(prompts, jnp.int32)
        if case.block is not None:
            layer = cache.empty(policy, 2, case.heads[1], slots.block_capacity[0], DIM, jnp.float32)

        def one(layer, outputs, at, policy, **options):
            # [2, n]; padding reads and writes past the end
            where = jnp.where(at >= 0, at, LAST)
            row = jnp.arange(2)[:, None]
            block = Block(position=at, policy=policy, **options)
            q, k, v = (
                jnp.swapaxes(jnp.swapaxes(x, 1, 2).at[row, where].get(mode="fill", fill_value=7.0), 1, 2)
                for x in stream
            )
            output, layer = cache.step(layer, q, k, v, block=block, index=0, rope=Rope(dim=DIM, theta=THETA))
            placed = jnp.swapaxes(outputs, 1, 2).at[row, where].set(jnp.swapaxes(output, 1, 2), mode="drop")
            return layer, jnp.swapaxes(placed, 1, 2)

        size = case.block or WIDTH
        for start in range(0, WIDTH, size):
            at = start + jnp.arange(size, dtype=jnp.int32)
            at = jnp.where(at < prompt[:, None], at, -1)
            capacity = slots.capacity if case.block is None else None
            layer, outputs = one(layer, outputs, at, policy, budget=budget, prompt=prompt, capacity=capacity)
        layer = cache.resize(layer, slots.capacity[0])
        decoding = policy
        if policy.then is not None:
            decoding, layer = policy.then, layer.replace(stats=policy.hand_over(layer.stats))
        budget = jax.tree.map(jnp.asarray, slots.decode_budget)

        def body(carry, i):
            return one(*carry, (prompt + i)[:, None], decoding, budget=budget, decoding=True), None

        (layer, outputs), _ = jax.lax.scan(body, (layer, outputs), jnp.arange(LAST - WIDTH, dtype=jnp.int32))
        return outputs, layer.position

    return tuple(map(np.asarray, steps(*map(jnp.asarray, stream(case)))))


def run_reference(case: Drawn, row: int) -> tuple[np.ndarray, list[Any]]:
    """The same of one row: output [H, end, D] and its heads."""
    policy, prompt = case.of(reference.policies), case.prompts[row]
    q, k, v = (np.swapaxes(x[row].astype(np.float64), 0, 1) for x in stream(case))
    heads = empty_heads(case.heads[1], DIM, policy)
    budget, outputs = policy.slots(0, prompt), []
    for start, stop in _blocks(prompt, prompt + LAST - WIDTH, case.block):
        if start == prompt and policy.at_prompt_end_only:
            policy, budget = reference.policies.full(positions=policy.positions), None
            for head in heads:
                head.stats = {}
        may = stop == prompt or not policy.at_prompt_end_only
        outputs.append(
            step(
                heads, q[start:stop], k[start:stop], v[start:stop], np.arange(start, stop), policy=policy,
                budget=budget if may else None, prompt_length=prompt, theta=THETA,
            )
        )  # fmt: skip
    return np.swapaxes(np.concatenate(outputs), 0, 1), heads


@settings(
    max_examples=EXAMPLES, derandomize=not SEARCH, deadline=None, database=None,
    phases=list(Phase) if SEARCH else [Phase.generate],  # finding the smallest example takes minutes
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)  # fmt: skip
@given(drawn())
def test_one_layer_slot_for_slot(case):
    try:
        policy = case.of(policies)
        allocate(policy, np.array(case.prompts), np.array(case.prompts) + 1, 1, case.heads[1])
    except PolicyError:
        reject()
    expected = [run_reference(case, row) for row in range(2)]
    gaps = [(head.evict_gap, 10 * head.above_gap) for _, heads in expected for head in heads]
    assume(min(itertools.chain(*gaps)) > 1e-5)
    event(case.name if case.combinator is None else f"{case.combinator}({case.name})")
    output, position = run_library(case, policy)
    for row, (own, heads) in enumerate(expected):
        end = case.prompts[row] + LAST - WIDTH
        np.testing.assert_allclose(output[row, :, :end], own, atol=2e-5)
        for head, kept in enumerate(heads):
            live = np.sort(position[row, head][position[row, head] >= 0])
            np.testing.assert_array_equal(live, kept.position)
