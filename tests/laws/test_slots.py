"""Slot for slot against the independent float64 reference, over 160 decoding steps of a ragged batch."""

import collections
import dataclasses
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.errors import PolicyError
from tests import reference
from tests.laws import set_bits
from tests.tiny import Tiny, kept, random_tokens, tiny

pytestmark = pytest.mark.thorough

PROMPTS = np.array([40, 21, 33])
# One row is as long as the title says; the others end before it, at different steps.
LENGTHS = np.array([200, 90, 103])
TOKENS = random_tokens(3, 340, seed=2)[:, : LENGTHS.max()]
FITTED = 5e-4  # of the logarithms of weights, whose rounding the condition of the least squares multiplies
CLEAR = 1e-6  # no choice of the reference may be closer than this (relative), or a seed must change: no excuses


SECOND_LAYER = ("from_layer", {"first": 1})


class Case(NamedTuple):
    name: str
    arguments: dict[str, Any]
    heads: str
    block: int | None
    seed: int = 0
    within: tuple[str, dict[str, Any]] | None = None  # a combinator, and its arguments

    @property
    def own(self) -> Tiny:
        """The models: of one layer, unless layers differ; what a second one adds costs as much as the first."""
        of_layers = self.name in ("pyramidkv", "kvzip", "kvgrad") or isinstance(self.arguments.get("budget"), tuple)
        of_layers |= self.within is not None and self.within[0] == "from_layer"
        return tiny(self.heads, self.seed, layers=2 if of_layers else 1)

    def of(self, package: Any) -> Any:
        """The policy of the library's package, or of the reference's."""
        policy = package.by_name(self.name, **self.arguments)
        if self.within is None:
            return policy
        name, arguments = self.within
        if name == "after_prefill":
            arguments = {"then": package.by_name(**arguments)}
        if name == "phases":
            arguments = {**arguments}
            combinator, own = arguments.pop("within", (None, {}))
            decode = package.by_name(**arguments)
            arguments = {"decode": decode if combinator is None else package.COMBINATORS[combinator](decode, **own)}
        return package.COMBINATORS[name](policy, **arguments)


# Every policy and combinator, with each of its arguments; together they meet every layout of heads in one shot and in
# blocks. What a block changes is the prompt's pass, which is the same code for all; a ranking is of each head, or is
# shared as `group_reduce` and `share_heads` say. Kinds of policies with layouts, blocks and combinators:
# test_compositions, test_properties and test_pairs.
CASES = [
    Case("h2o", {"budget": 0.4}, "gqa", 16),
    Case("h2o", {"budget": (9, 17)}, "mha", None),
    Case("h2o", {"budget": 12, "group_reduce": "max"}, "gqa", None),
    Case("h2o", {"budget": 0.4, "positions": "cache"}, "gqa", None),
    Case("h2o", {"budget": 1, "recent": 0}, "gqa", 8),
    Case("window", {"budget": 0.4}, "gqa", None),
    Case("window", {"budget": (7, 20), "sinks": 3, "positions": "cache"}, "mqa", 16),
    Case("window", {"budget": 5, "sinks": 5}, "mha", 8),
    Case("local_only", {"budget": 0.4}, "mha", 16),
    Case("heavy_only", {"budget": 0.4}, "gqa", None),
    Case("streaming_llm", {"budget": 0.4, "sinks": 2}, "mha", None),
    Case("h2o", {"budget": 13, "variant": "ring"}, "gqa", None),
    Case("h2o", {"budget": 0.4, "variant": "masked"}, "gqa", None),
    Case("h2o", {"budget": 11, "variant": "masked", "recent": 3}, "mha", 1),
    Case("h2o", {"budget": 0.4, "variant": "masked", "positions": "cache"}, "gqa", 8),
    Case("h2o_decay", {"budget": 12, "gamma": 0.8, "recent": 3}, "gqa", 8),
    Case("scissorhands", {"budget": 0.4, "recent": 3}, "mqa", 1, seed=1),
    Case("scissorhands", {"budget": 0.4, "history": 37}, "mqa", 16),
    Case("tova", {"budget": 12, "group_reduce": "max"}, "gqa", 8),
    Case("tova", {"budget": 0.4, "share_heads": False}, "gqa", None),
    Case("tova", {"budget": 0.4, "positions": "cache"}, "mqa", 1),
    Case("mean_attention", {"budget": 12, "recent": 3}, "gqa", 8),
    Case("roco", {"budget": 12, "protect": 8, "guard": 3}, "gqa", 16),
    Case("roco", {"budget": 0.4, "positions": "cache", "group_reduce": "max"}, "mqa", 1),
    Case("lazy", {"budget": 12, "every": 2, "alpha": 0.35, "group_reduce": "max"}, "mqa", 8),
    Case("ems", {"budget": 0.4, "recent": 3, "window": 4, "threshold": 0.2}, "gqa", None),
    Case("ems", {"budget": 12, "window": 40, "threshold": 0.1, "every": 3}, "mqa", 8),
    Case("strided", {"budget": 0.4, "stride": 5, "local": 0}, "mqa", 1),
    Case("fixed", {"budget": 0.4, "block": 6, "columns": 2}, "mha", None),
    Case("fixed", {"budget": 0.4, "block": 4, "columns": 4, "positions": "cache"}, "mqa", 1),
    Case("window", {"budget": 0.4}, "gqa", None, within=("with_heavy_hitters", {})),
    Case("tova", {"budget": 15, "share_heads": False}, "mha", 1, within=("with_heavy_hitters", {"fraction": 0.3})),
    Case("roco", {"budget": 0.4, "guard": 3}, "mqa", 1, within=("value_norm", {})),
    Case("keydiff", {"budget": 0.4}, "mha", None, within=("value_norm", {})),
    Case("snapkv", {"budget": 15, "window": 4, "kernel": 3, "pooling": "max"}, "mha", None),
    Case("snapkv", {"budget": 0.6, "window": 8, "kernel": 7, "positions": "cache"}, "mqa", 8),
    Case("pyramidkv", {"budget": 14, "window": 6, "kernel": 3}, "mha", None),
    Case("knorm", {"budget": 25, "positions": "cache"}, "mha", None),
    Case("keydiff", {"budget": 0.3, "positions": "cache"}, "mqa", 8),
    Case("snapkv", {"budget": 15, "window": 4}, "mha", 8, within=("adakv", {"safeguard": 0.5})),
    Case("pyramidkv", {"budget": 0.5, "window": 4, "beta": 3}, "gqa", None, within=("adakv", {"safeguard": 0.0})),
    Case("snapkv", {"budget": 15, "window": 4}, "mha", None, within=("adakv", {"safeguard": 0.1, "max_share": 1.25})),
    Case("snapkv", {"budget": 15, "window": 4}, "gqa", None, within=("after_prefill", {"name": "h2o", "budget": 12})),
    Case(
        "keydiff",
        {"budget": 0.5},
        "mqa",
        8,
        within=("after_prefill", {"name": "roco", "budget": 20, "guard": 3}),
    ),
    Case("fifo", {"budget": (0.3, 12)}, "mqa", None),
    # Nothing is fetched where everything is read; tests/selection/test_pools.py has selections.
    Case("lru", {"budget": 12, "recent": 3, "sinks": 2}, "mha", None),
    Case("counter", {"budget": 12, "recent": 3, "sinks": 2, "saturate": None}, "gqa", None),
    Case("counter", {"budget": (0.3, 12), "saturate": 7}, "mqa", 8),
    Case("h2o", {"budget": 0.4}, "gqa", None, within=("from_layer", {"first": 1})),
    Case("roco", {"budget": 15, "guard": 3}, "mha", 8, within=("from_layer", {"first": 2})),
    Case("roco", {"budget": 0.6, "guard": 3}, "mqa", 16, within=("by_page", {"page": 5})),
    Case("window", {"budget": 15, "sinks": 2}, "mha", None, within=("by_page", {"page": 3})),
    # A head that evicts several slots at once holds more than its budget in between: rows have their own rounds.
    Case("h2o", {"budget": 9, "every": 5}, "gqa", None),
    Case("h2o", {"budget": 0.4, "every": 4, "positions": "cache"}, "mqa", 8),
    Case("tova", {"budget": 12, "every": 3}, "gqa", 1),
    Case(
        "snapkv",
        {"budget": 15, "window": 4},
        "mha",
        None,
        within=("after_prefill", {"name": "h2o", "budget": 12, "every": 4}),
    ),
    Case("h2o", {"budget": (7, 21), "every": 40}, "gqa", None),
    Case("rkv", {"budget": 16, "every": 6, "window": 4, "kernel": 3}, "gqa", None),
    Case("rkv", {"budget": 0.4, "every": 3, "window": 2, "lam": 0.5, "positions": "cache"}, "mqa", 8),
    Case("morphkv", {"budget": 14, "window": 5}, "gqa", 8),
    Case("triattention", {"budget": 0.4, "every": 5}, "gqa", None),
    Case("triattention", {"budget": 14, "every": 1, "longest": 64, "positions": "cache"}, "mha", 8),
    Case("qfilters", {"budget": 15}, "gqa", 8),
    Case("qfilters", {"budget": 0.4, "every": 3, "recent": 4}, "mha", None),
    Case("learned", {"budget": 0.4, "recent": 4, "sinks": 1}, "gqa", None),
    Case("learned", {"budget": 12, "every": 4, "age": True}, "mha", 8),
    Case("learned", {"budget": 20, "recent": 5, "every": 3, "threshold": 0.5}, "gqa", 8),
    Case("roco", {"budget": 15, "guard": 3}, "mha", 8, within=("critical", {"first_stage": 0.25})),
    Case("morphkv", {"budget": 0.4, "window": 3, "fuse": "max", "every": 4}, "mha", None),
    Case("gkv", {"budget": 16, "every": 6, "window": 4, "lam": 0.5}, "gqa", 8),
    Case("gkv", {"budget": 0.4, "every": 3, "window": 2, "alpha": 0.9, "positions": "cache"}, "mha", None),
    Case("ladder", {"budget": 16, "span": 1, "layers": 3, "sinks": 2, "every": 6}, "gqa", 8),
    Case("ladder", {"budget": (0.4, 14), "span": 3, "layers": 6, "overlap": 1, "sinks": 1, "every": 4}, "mha", None),
    # Values of equal tokens are equal in the first layer but for rounding, which depends on the processor.
    Case("vase", {"budget": 18, "every": 6, "large": 6, "sinks": 2, "kernel": 3}, "gqa", 8, within=SECOND_LAYER),
    Case(
        "vase",
        {"budget": 0.4, "every": 3, "sinks": 1, "seed": 5, "positions": "cache"},
        "mqa",
        None,
        within=SECOND_LAYER,
    ),
    Case("vase_dkv", {"budget": 15, "every": 4, "rank": 5, "seed": 7}, "gqa", 8),
    Case("vase_dkv", {"budget": 0.4, "every": 3, "sinks": 2, "positions": "cache"}, "mha", None),
    Case("expected_attention", {"budget": 0.5, "future": 16, "sinks": 2}, "gqa", None),
    Case("expected_attention", {"budget": 14, "every": 5, "future": 8, "covariance": False}, "mqa", 8),
    Case("expected_attention", {"budget": 14, "future": 9, "epsilon": 0.01, "positions": "cache"}, "mha", 16),
    Case("lagkv", {"budget": 0.5, "lag": 4, "sinks": 2}, "gqa", None),
    Case("lagkv", {"budget": 14, "lag": 3, "sinks": 1, "every": 6, "positions": "cache"}, "mha", 8),
    Case("leverage", {"budget": 14, "every": 5}, "gqa", 8),
    Case("leverage", {"budget": 14, "recent": 5, "positions": "cache"}, "mqa", 8),
    Case("leverage", {"budget": 0.5, "recent": 6}, "gqa", None),
    Case("cur", {"budget": 0.5, "block": 5, "sinks": 2}, "mqa", None),
    Case("cur", {"budget": 13, "block": 4, "sinks": 1, "positions": "cache"}, "gqa", 8),
    Case("kvzip", {"budget": 0.5, "chunk": 9, "instruction": (5, 6, 7), "later": (8,), "sinks": 2}, "gqa", None),
    Case("kvzip", {"budget": 0.4, "chunk": 6, "plus": True, "positions": "cache"}, "gqa", 8),
    Case("kvzip", {"budget": 0.5, "chunk": 12}, "mqa", None, within=("critical", {})),
    Case("kvgrad", {"budget": 0.5, "chunk": 15, "instruction": (9,)}, "gqa", None),
    Case("kvgrad", {"budget": 14, "sinks": 2, "positions": "cache"}, "mqa", 16),
    Case("kvzip", {"budget": 0.5, "chunk": 16, "later": (3, 1)}, "gqa", 8, within=("adakv", {"safeguard": 0.0})),
    Case("kvzip", {"budget": 12}, "mha", 8, within=("adakv", {"safeguard": 0.1, "layers": True, "max_share": 1.3})),
    Case("compactor", {"budget": 0.5, "sinks": 2, "recent": 3, "chunk": 7}, "gqa", None),
    Case("compactor", {"budget": 15, "sinks": 1, "recent": 0, "chunk": 16, "blend": 0.7}, "mha", 8),
    Case("compactor", {"budget": 14, "sinks": 0, "recent": 1, "chunk": 5, "positions": "cache"}, "mqa", 16),
    Case("matched", {"budget": 0.4}, "gqa", None),
    Case("matched", {"budget": 14, "ridge": 0.1}, "mha", 8),
    Case("matched", {"budget": 13, "queries": "replay"}, "gqa", 8),
    Case("matched", {"budget": 13, "queries": "following"}, "gqa", 8),
    Case("matched", {"budget": 15}, "mqa", None, within=("after_prefill", {"name": "h2o", "budget": 12})),
    Case("h2o", {"budget": 0.4, "every": 4}, "gqa", None, within=("caote", {})),
    Case("tova", {"budget": 12, "share_heads": False}, "mha", 8, within=("caote", {"fast": True})),
    Case("h2o", {"budget": 14, "recent": 3}, "gqa", 8, within=("value_aware", {})),
    Case("snapkv", {"budget": 15, "window": 4}, "mha", None, within=("value_aware", {"large": 3, "measure": "l2"})),
    Case("snapkv", {"budget": 17, "window": 4}, "gqa", None, within=("chunkkv", {"chunk": 3})),
    Case("pyramidkv", {"budget": 15, "window": 3}, "mha", 16, within=("chunkkv", {})),
    Case("full", {}, "mha", None, within=("phases", {"name": "h2o", "budget": 7, "every": 3})),
    Case("full", {}, "gqa", 8, within=("phases", {"name": "tova", "budget": 9})),
    Case("full", {}, "mqa", 8, within=("phases", {"name": "roco", "budget": 12, "guard": 3, "every": 4})),
    Case("full", {}, "gqa", None, within=("phases", {"name": "rkv", "budget": 14, "every": 5, "window": 4})),
    Case("full", {}, "mha", 8, within=("phases", {"name": "gkv", "budget": 13, "every": 4, "window": 3, "lam": 0.5})),
    Case(
        "full",
        {},
        "gqa",
        8,
        within=("phases", {"name": "vase", "budget": 12, "every": 4, "large": 2, "sinks": 2, "kernel": 3, "seed": 2}),
    ),
    Case(
        "full",
        {},
        "gqa",
        None,
        within=("phases", {"name": "expected_attention", "budget": 9, "every": 5, "future": 8}),
    ),
    Case("full", {}, "gqa", 8, within=("phases", {"name": "triattention", "budget": 11, "every": 5, "longest": 64})),
    Case("full", {}, "gqa", 8, within=("phases", {"name": "random", "budget": 10, "every": 4, "recent": 3})),
    Case("full", {}, "mqa", 8, within=("phases", {"name": "h2o", "budget": 12, "within": ("value_aware", {})})),
    Case("full", {}, "gqa", 8, within=("phases", {"name": "h2o", "budget": 9, "within": ("caote", {})})),
    Case("full", {}, "mha", 8, within=("phases", {"name": "h2o", "budget": 11, "within": ("critical", {})})),
    Case("snapkv", {"budget": 12, "window": 4}, "mqa", 8, within=("phases", {"name": "window", "budget": 8})),
    Case("random", {"budget": 0.4, "seed": 3, "recent": 4, "every": 3}, "gqa", 8),
    Case("full", {}, "mqa", 16),
    Case("full", {"positions": "cache"}, "gqa", None),
]


def describe(case: Case) -> str:
    arguments = ",".join(f"{k}={v}" for k, v in case.arguments.items())
    described = f"{case.name}({arguments})-{case.heads}".replace(" ", "")
    if case.within is None:
        return described
    name, arguments = case.within
    # The arguments of `phases` name the policy after the prompt, and the combinator that it is in.
    inner = [arguments["name"], arguments.get("within", ("",))[0]] if "name" in arguments else []
    return "-".join(filter(None, [name, *inner, described]))


def run_reference(case: Case, block: int | None) -> reference.ReferenceRun:
    own = case.own
    return reference.reference_run(own.params, own.config, TOKENS, case.of(reference.policies), PROMPTS, LENGTHS, block)


def run_library(case: Case, block: int | None, policy: kvjax.policies.Policy | None = None) -> kvjax.LogLikelihood:
    return kvjax.log_likelihood(
        case.own.model,
        TOKENS,
        policy or case.of(policies),
        prompt_length=PROMPTS,
        lengths=LENGTHS,
        prefill_block=block,
    )


def statistic(stats: dict[str, Any], name: str) -> np.ndarray:
    """[B, K, S] or [B, K, S, 2] float: the library's statistic of that name, whose parameters are part of its own."""
    (found,) = (stat for own, stat in stats.items() if re.split(r"[(\[]", own)[0] == name)
    return set_bits(found) if found.dtype == np.uint16 else np.asarray(found)


def assert_same(got: kvjax.LogLikelihood, expected: reference.ReferenceRun, rtol: float = 0.0) -> None:
    """Kept slots exactly, their statistics and the log-probabilities to float32's rounding; rtol: of the latter."""
    gap = min(expected.evict_gap.min(), 10 * expected.above_gap.min())  # a share of attention, not a relative gap
    assert gap > CLEAR, f"a choice of the reference is a near-tie ({gap:.1e}): use another seed"
    for index, layer in enumerate(got.state.layers):
        for row in range(len(got.logprobs)):
            for head, live in enumerate(kept(got.state, row)[index]):
                np.testing.assert_array_equal(live, expected.kept[index][row][head], f"layer {index} {row=} {head=}")
                slot = np.argsort(np.asarray(layer.position)[row, head])[-len(live) :]
                # A layer that keeps every token needs none.
                for name, stat in expected.stats[index][row][head].items() if layer.stats or layer.index else ():
                    # What a variant that hides slots remembers is the selection's.
                    ours = statistic(layer.stats | layer.index, name)[row, head, slot]
                    # A history: the library counts bits, the reference keeps a column for each query.
                    stat = stat.sum(axis=1) if stat.ndim > ours.ndim else stat
                    atol = FITTED if name == "log_weight" else 1e-5
                    np.testing.assert_allclose(ours, stat, rtol=1e-4, atol=atol, err_msg=name)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=rtol, atol=5e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES, ids=describe)
def test_slot_for_slot(case):
    assert_same(run_library(case, case.block), run_reference(case, case.block))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("variant", ["global", "local"])
@pytest.mark.parametrize(("heads", "budget", "recent"), [("gqa", 0.4, None), ("mha", 12, 3), ("mqa", 9, 0)])
def test_the_whole_text_at_once(heads, budget, recent, variant):
    """H2O's first release and its code for lm-eval look at whole texts, so that the text is all prompt."""
    case = Case("h2o", {"budget": budget, "variant": variant, "recent": recent}, heads, None)
    own = case.own
    policy = case.of(policies)
    ends = np.array([60, 35, 51])
    got = kvjax.log_likelihood(own.model, TOKENS[:, :60], policy, prompt_length=ends, lengths=ends)
    expected = reference.reference_run(
        own.params, own.config, TOKENS[:, :60], case.of(reference.policies), ends, ends, None
    )
    assert expected.evict_gap.min() > CLEAR
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=5e-5)
    with pytest.raises(PolicyError, match="score whole texts, with prompt_length equal to their length"):
        kvjax.log_likelihood(own.model, TOKENS[:, :60], policy, prompt_length=30)
    with pytest.raises(PolicyError, match="leave out prefill_block"):
        kvjax.log_likelihood(own.model, TOKENS[:, :60], policy, prompt_length=60, prefill_block=8)


def test_the_cases_cover_what_they_must():
    assert {case.name for case in CASES} == set(policies.POLICIES)
    assert {case.within[0] for case in CASES if case.within} == set(policies.COMBINATORS)
    # Layouts of heads in one shot and in blocks.
    met = collections.Counter((case.heads, case.block is None) for case in CASES)
    assert len(met) == 6 and min(met.values()) >= 5, met
    # The policies that are made of others, and those whose ranking is not of each head, in both.
    blocks = collections.defaultdict(set)
    for case in CASES:
        blocks[case.within[0] if case.within else case.name].add(case.block is None)
    both = ("h2o", "tova", "window", "snapkv", "adakv", "after_prefill", "by_page", "phases", "value_aware", "full")
    for name in both:
        assert len(blocks[name]) == 2, name
    # Those of docs/evidence.md, with the prompt kept.
    control = {case.within[1]["name"] for case in CASES if case.within and case.within[0] == "phases"}
    assert control >= {"h2o", "tova", "window", "roco", "rkv", "gkv", "vase", "expected_attention", "triattention"}
    assert {case.block for case in CASES} == {None, 1, 8, 16}


def test_a_step_whose_scores_are_lost_is_noticed():
    """The comparison can fail: forgetting a hundredth of the attention changes what is kept."""
    fading = dataclasses.replace(policies.h2o(budget=0.4), importance=Fading())
    with pytest.raises(AssertionError):
        assert_same(run_library(CASES[0], 8, fading), run_reference(CASES[0], 8))


@dataclasses.dataclass(frozen=True)
class Fading(policies.Importance):
    """Accumulated attention, a hundredth of which is lost for every token that a slot is older."""

    needs = frozenset({"mass"})

    def score(self, stats, view):
        age = (view.newest[:, None, None] - view.position).astype(jnp.float32)
        return stats["mass"] * 0.99**age
