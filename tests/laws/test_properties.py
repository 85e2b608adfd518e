"""Whatever the policy, its parameters, budget, heads, blocks and lengths: one layer, slot for slot as the reference.

Hypothesis draws them; a fixed seed keeps the suite the same from run to run. For another search:
HYPOTHESIS_EXAMPLES=1000 python -m pytest tests/laws/test_properties.py -n 0
"""

import itertools
import os
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, event, given, reject, settings
from hypothesis import strategies as st

from kvjax import policies
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from tests import layers, reference
from tests.reference.decoder import _blocks
from tests.reference.step import empty_heads, step

pytestmark = pytest.mark.thorough

SEARCH = "HYPOTHESIS_EXAMPLES" in os.environ
EXAMPLES = int(os.environ.get("HYPOTHESIS_EXAMPLES", "20"))
DIM, THETA = 4, 10_000.0
WIDTH, NEW = 20, 6  # tokens of the longest prompt, and after a prompt
FACTOR, TRAINED = 4.0, 12  # of frequencies that depend on a row's length (dynamic NTK)

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
    vocabulary: int | None
    dynamic: bool
    seed: int

    def of(self, package: Any) -> Any:
        """The policy of the library's package, or of the reference's."""
        policy = package.by_name(self.name, **self.arguments)
        return policy if self.combinator is None else package.COMBINATORS[self.combinator](policy)

    @property
    def layer(self) -> layers.Case:
        prompts = np.array(self.prompts)
        streams = layers.random_streams(
            [self.seed, self.seed + 1], WIDTH + NEW, heads=self.heads, dim=DIM, vocabulary=self.vocabulary
        )
        rope = Rope(dim=DIM, theta=THETA)
        if self.dynamic:
            rope = Rope(dim=DIM, theta=THETA, scaling="dynamic", factor=FACTOR, original_max_positions=TRAINED)
        return layers.Case(streams, prompts, prompts + NEW, self.block, rope)

    def theta(self, length: int) -> float:
        """The base of a row's frequencies, which follow all tokens that it will have."""
        stretch = FACTOR * max(length, TRAINED) / TRAINED - (FACTOR - 1)
        return THETA * stretch ** (DIM / (DIM - 2)) if self.dynamic else THETA


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
    by_rank = name == "streaming_llm" or arguments.get("positions") == "cache"
    return Drawn(
        name,
        arguments,
        draw(st.sampled_from([None, None, "value_norm", "with_heavy_hitters"])),
        draw(st.sampled_from([(4, 4), (4, 2), (4, 1)])),
        draw(st.tuples(st.just(WIDTH), st.integers(1, WIDTH))),
        draw(st.sampled_from([None, 1, 3, 8])),
        draw(st.sampled_from([None, 9])),
        not by_rank and draw(st.booleans()),
        draw(st.integers(0, 1000)),
    )


def run_reference(case: Drawn, row: int) -> tuple[np.ndarray, list[Any]]:
    """Runs the reference on one row of a layer: returns output [H, end, D], and its heads at the end."""
    policy, prompt = case.of(reference.policies), case.prompts[row]
    q, k, v = (np.swapaxes(x[row].astype(np.float64), 0, 1) for x in case.layer.streams)
    heads = empty_heads(case.heads[1], DIM, policy)
    budget, outputs = policy.slots(0, prompt), []
    for start, stop in _blocks(prompt, prompt + NEW, case.block):
        if start == prompt and policy.at_prompt_end_only:
            policy, budget = reference.policies.full(positions=policy.positions), None
            for head in heads:
                head.stats = {}
        may = stop == prompt or not policy.at_prompt_end_only
        outputs.append(
            step(
                heads, q[start:stop], k[start:stop], v[start:stop], np.arange(start, stop), policy=policy,
                budget=budget if may else None, prompt_length=prompt, theta=case.theta(prompt + NEW),
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
        layers.lowered(policy, case.layer)
    except PolicyError:
        reject()
    expected = [run_reference(case, row) for row in range(2)]
    gaps = [(head.evict_gap, 10 * head.above_gap) for _, heads in expected for head in heads]
    assume(min(itertools.chain(*gaps)) > 1e-5)
    event(case.name if case.combinator is None else f"{case.combinator}({case.name})")
    got = layers.run(policy, case.layer)
    for row, (output, heads) in enumerate(expected):
        np.testing.assert_allclose(got.output[row, :, : case.prompts[row] + NEW], output, atol=2e-5)
        for head, kept in enumerate(heads):
            assert got.live(-1, row, head) == kept.position.tolist()
