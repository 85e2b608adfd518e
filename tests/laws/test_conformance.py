"""The conformance table on a whole model, of a policy of each kind; how each is built comes from `tests.examples`.

`test_compositions` has it on one layer, of every registered policy, whose list comes from `kvjax.policies.POLICIES`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import CacheSpec
from kvjax.generation import generate as loop
from kvjax.generation import prefill as prompts
from kvjax.generation.options import CacheOptions
from kvjax.policies import POLICIES, Policy
from kvjax.policies.base import Evict
from tests import examples
from tests.tiny import assert_same_state, evolve, random_tokens, tiny

PROMPTS = random_tokens(3, 24)
LENGTHS = np.array([24, 10, 17])
NEW = 12


#: The positions that a policy of `tests.examples` must hold when `newest` has just been stepped.
PROTECTED: dict[str, Callable[[int, int], set[int]]] = {
    "full": lambda newest, budget: set(range(newest + 1)),
    "local_only": lambda newest, budget: last(newest, budget),
    "fifo": lambda newest, budget: last(newest, budget),
    "roco": lambda newest, budget: last(newest, min(2, 3 * budget // 10)),
    "fixed": lambda newest, budget: set(range(newest // 2 * 2, newest + 1)),
    "strided": lambda newest, budget: last(newest, 1),
    "lru": lambda newest, budget: {0, *last(newest, budget // 2)},
    **{name: lambda newest, budget: {0, *last(newest, budget - 1)} for name in ("window", "streaming_llm")},
    **{
        name: lambda newest, budget: last(newest, budget // 2)
        for name in ("h2o", "h2o_decay", "scissorhands", "mean_attention", "counter")
    },
}


def last(newest: int, count: int) -> set[int]:
    return set(range(max(0, newest - count + 1), newest + 1))


def build(name: str, **changes: Any) -> Policy:
    return examples.policy(name, **changes)


def limits(policy: Policy, lengths: np.ndarray = LENGTHS, layer: int = 0) -> list[int]:
    """Slots of a head of each row after the prompt."""
    if policy.budget is None:
        return [10**9] * len(lengths)
    return [policy.budget.slots(int(n), 2)[layer] for n in lengths]  # layers differ in a model of two


def model(name: str) -> kvjax.Model:
    """Runs one layer, unless the policy's layers differ: a second one would do the same."""
    return tiny(layers=2 if name == "pyramidkv" else 1).model


BUDGETED = [name for name in POLICIES if "budget" in policies.accepts(name)]
#: One policy for each kind of state and of what a model gives it: positions and ranks, statistics, memories of queries,
#: merges, budgets of layers, parameters, prompts that are run again, counts of what was fetched.
KINDS = (
    "full", "window", "streaming_llm", "h2o", "scissorhands", "tova", "roco", "lazy", "ems", "snapkv", "pyramidkv",
    "keydiff", "rkv", "triattention", "kvzip", "counter",
)  # fmt: skip


class Run(NamedTuple):
    name: str
    policy: Policy
    generated: kvjax.Generation
    tokens: np.ndarray  # each row's prompt, then what was generated
    scored: kvjax.LogLikelihood  # of all of them but the last, as `generate` feeds them
    prefilled: Any


@pytest.fixture(scope="module", params=KINDS)
def run(request) -> Run:
    own, policy = model(request.param), build(request.param)
    prefilled = prompts.prefill(own, PROMPTS, policy, max_new_tokens=NEW, lengths=LENGTHS)
    generated = kvjax.generate(own, PROMPTS, policy, max_new_tokens=NEW, lengths=LENGTHS)
    tokens = np.zeros((3, PROMPTS.shape[1] + NEW), np.int32)
    for row, n in enumerate(LENGTHS):
        tokens[row, : n + NEW] = [*PROMPTS[row, :n], *generated.tokens[row]]
    return Run(request.param, policy, generated, tokens, score(policy, tokens), prefilled)


def score(
    policy: Policy, tokens: np.ndarray, lengths: np.ndarray = LENGTHS, own: kvjax.Model | None = None, **options: Any
) -> kvjax.LogLikelihood:
    own, fed = own or model(policy.name), lengths + NEW - 1
    return kvjax.log_likelihood(own, tokens, policy, prompt_length=lengths, lengths=fed, **options)


@pytest.mark.sampled(1)
def test_limits_protection_and_distinct_positions_at_every_step(run):
    evicts = run.policy.when == "step"
    trace = evolve(model(run.name), run.prefilled, run.tokens, LENGTHS + NEW - 1)
    protects = PROTECTED.get(run.name, lambda newest, budget: set())
    pairs = zip(trace.positions, run.prefilled.state.layers, strict=True)
    for index, (layer, after_prompt) in enumerate(pairs):
        steps = np.concatenate([np.asarray(after_prompt.position)[None], layer])
        for row, (n, budget) in enumerate(zip(LENGTHS, limits(run.policy, layer=index), strict=True)):
            for head in range(steps.shape[2]):
                before = set(range(n))
                for step in range(NEW):
                    newest = n - 1 + step
                    positions = [int(p) for p in steps[step, row, head] if p >= 0]
                    live = set(positions)
                    # What is decoded joins what a compressor kept.
                    fit = min(newest + 1, budget if evicts else budget + step)
                    assert len(live) == len(positions) == fit, "as many as fit, and no more"
                    assert live <= before | {newest}, "what is gone does not come back"
                    assert protects(newest, budget) <= live
                    before = live
                assert (steps[NEW:, row, head] == steps[NEW - 1, row, head]).all(), "a row at its end is unchanged"


@pytest.mark.sampled(2)
def test_generation_evolves_as_log_likelihood_and_is_greedy(run):
    trace = evolve(model(run.name), run.prefilled, run.tokens, LENGTHS + NEW - 1)
    for row, n in enumerate(LENGTHS):
        assert_same_state(run.generated.state, run.scored.state, row, atol=2e-5)
        logits = np.concatenate([np.asarray(run.prefilled.logits)[None], trace.logits])[:NEW, row]
        np.testing.assert_array_equal(run.generated.tokens[row], logits.argmax(axis=-1))
        expected = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[range(NEW), run.generated.tokens[row]]
        np.testing.assert_allclose(run.generated.logprobs[row], expected, atol=2e-5)
        np.testing.assert_allclose(
            run.generated.logprobs[row, :-1], np.asarray(run.scored.logprobs)[row, n - 1 : n + NEW - 2], atol=2e-5
        )


@pytest.mark.sampled(0)
# Of each step and of the prompt: without a program for all, each operation is compiled by itself.
@pytest.mark.parametrize("run", ["scissorhands", "pyramidkv"], indirect=True)
def test_jit_changes_nothing(run):
    with jax.disable_jit():
        plain = kvjax.generate(model(run.name), PROMPTS, run.policy, max_new_tokens=3, lengths=LENGTHS)
    jitted = kvjax.generate(model(run.name), PROMPTS, run.policy, max_new_tokens=3, lengths=LENGTHS)
    np.testing.assert_array_equal(plain.tokens, jitted.tokens)
    np.testing.assert_allclose(plain.logprobs, jitted.logprobs, atol=2e-5)
    for row in range(3):
        assert_same_state(plain.state, jitted.state, row, atol=2e-5)


#: Each in arrays of its own, for one row: one policy for each kind of statistics, and the mistakes below.
ALONE = ("full", "window", "h2o", "tova", "roco", "scissorhands", "snapkv", "keydiff", "evict")


def assert_rows_are_computed_alone(policy: Policy, tokens: np.ndarray, scored: kvjax.LogLikelihood) -> None:
    """Other neighbours, other places, other padding: bitwise the same. Alone, in smaller arrays: to rounding."""
    shuffled, lengths = tokens[[0, 2, 1]].copy(), LENGTHS[[0, 2, 1]]
    fed = lengths + NEW - 1
    shuffled[0] = (shuffled[0] * 7 + 3) % 64
    shuffled[np.arange(tokens.shape[1]) >= fed[:, None]] = -77  # padding is never looked at
    other = score(policy, shuffled, lengths)
    for row, place in ((1, 2), (2, 1)):
        assert_same_state(scored.state, other.state, row, place)
        np.testing.assert_array_equal(scored.logprobs[row], other.logprobs[place])
    if policy.name not in ALONE:
        return
    n = int(fed[2])
    alone = kvjax.log_likelihood(model(policy.name), tokens[1, :n], policy, prompt_length=int(LENGTHS[1]))
    assert_same_state(scored.state, alone.state, 1, 0, atol=1e-5)
    np.testing.assert_allclose(scored.logprobs[1, : n - 1], alone.logprobs[0], atol=1e-5)


@pytest.mark.sampled(2)
def test_a_row_is_computed_alone(run):
    assert_rows_are_computed_alone(run.policy, run.tokens, run.scored)


class Leaky(Evict):
    """A policy that looks at other rows."""

    leak = "score"

    def priority(self, stats, view):
        if self.leak == "newest":
            return super().priority(stats, view._replace(newest=jnp.full_like(view.newest, jnp.max(view.newest))))
        return super().priority({"mass": stats["mass"] - jnp.roll(stats["mass"], 1, axis=0)}, view)


class LeakyNewest(Leaky):
    leak = "newest"


@pytest.mark.parametrize("kind", [Leaky, LeakyNewest])
def test_a_policy_that_looks_at_its_neighbours_is_noticed(kind):
    h2o = build("h2o")
    leaky = kind(importance=h2o.importance, scope=h2o.scope, budget=h2o.budget)
    tokens = random_tokens(3, PROMPTS.shape[1] + NEW)
    with pytest.raises(AssertionError):
        assert_rows_are_computed_alone(leaky, tokens, score(leaky, tokens))


#: Batches that one program serves: another number of tokens, other lengths, another fraction of these.
BATCHES = [
    *((LENGTHS, 24, new_tokens, {}) for new_tokens in (NEW, 2, loop.CHUNK)),
    (np.array([20, 9, 19]), 20, 5, {"budget": 0.52}),
]


@pytest.mark.parametrize("name", [name for name in BUDGETED if build(name).when == "step"])
def test_one_layout_however_many_tokens(name):
    """A program depends on the layout, the width of the prompts and the shapes of the budgets."""
    found = set()
    for lengths, width, new_tokens, changes in BATCHES:
        made = prompts.prepare(
            model(name), CacheSpec(build(name, **changes)), lengths, lengths + new_tokens - 1, width=width,
            options=CacheOptions(), last_fed=False,
        )  # fmt: skip
        leaves, tree = jax.tree.flatten(made.budgets)
        found.add((made.layout, made.width, tree, *(leaf.shape for leaf in leaves)))
    assert len(found) == 1


@pytest.mark.parametrize("name", ["roco", "scissorhands"])
def test_one_trace_however_many_tokens(name, monkeypatch):
    """The same, counted."""
    chex.clear_trace_counter()
    for module, function, static in (
        (loop, "decode_steps", ("config", "phase", "sampler", "record")),
        (prompts, "prefill_steps", ("config", "layout", "score")),
    ):
        counted = chex.assert_max_traces(getattr(module, function).__wrapped__, n=1)
        monkeypatch.setattr(module, function, jax.jit(counted, static_argnames=static))
    for lengths, width, new_tokens, changes in BATCHES:
        policy = build(name, **changes)
        kvjax.generate(model(name), PROMPTS[:, :width], policy, max_new_tokens=new_tokens, lengths=lengths)
