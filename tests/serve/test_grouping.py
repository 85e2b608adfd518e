"""Groups of prompts that begin alike: the worked cases, and every set of beginnings that could be shared."""

import json

import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.serve.grouping import PrefixGroup, prefix_groups


def test_the_worked_cases(shared_data):
    arrays, count = np.load(shared_data / "examples" / "reuse_cases.npz"), 0
    for number, case in enumerate(json.loads(bytes(arrays["cases"]))):
        if case["kind"] != "prefix_groups":
            continue
        sizes = case["arguments"]["lengths"]
        tokens, new_tokens, prefix, place = (
            arrays[f"{number}_{name}"] for name in ("in_tokens", "in_new_tokens", "prefix", "place")
        )
        made = prefix_groups(np.split(tokens, np.cumsum(sizes)[:-1]), new_tokens.tolist())
        by_request = {each: (group.prefix, turn) for turn, group in enumerate(made.groups) for each in group.requests}
        found = np.array([by_request[each] for each in range(len(sizes))])
        np.testing.assert_array_equal(found, np.stack([prefix, place], axis=1))
        assert {"saved": made.saved, "bound": made.bound} == case["expect"]
        count += 1
    assert count >= 3


def test_no_other_choice_of_beginnings_saves_more():
    rng = np.random.default_rng(0)
    for _ in range(60):
        prompts = [rng.integers(0, 2, rng.integers(1, 7)) for _ in range(rng.integers(1, 8))]
        made = prefix_groups(prompts, [1] * len(prompts))
        assert (made.saved, made.bound) == by_enumeration([tuple(map(int, prompt)) for prompt in prompts])
        assert sorted(made.order()) == [*range(len(prompts))]
        assert made.saved == sum((len(group.requests) - 1) * group.prefix for group in made.groups)


def by_enumeration(prompts):
    """The most tokens that beginnings save of which none begins another, and the tokens beyond the tree's."""
    beginnings = [prompt[:count] for prompt in prompts for count in range(1, len(prompt) + 1)]
    shared = sorted({each for each in beginnings if beginnings.count(each) > 1})

    def most(start, chosen):
        best = sum((sum(prompt[: len(each)] == each for prompt in prompts) - 1) * len(each) for each in chosen)
        for number in range(start, len(shared)):
            # In this order a beginning stands right before what continues it.
            if not any(shared[number][: len(each)] == each for each in chosen):
                best = max(best, most(number + 1, [*chosen, shared[number]]))
        return best

    return most(0, []), len(beginnings) - len({*beginnings})


def test_order_and_ties():
    # Nothing of its own: first. Then 4 / 2 before 1 / 1; equal quotients as they came.
    prompts = [[7], [1, 2, 3], [1, 2, 4], [5, 6], [5, 6], [9]]
    made = prefix_groups(prompts, [1, 2, 2, 1, 1, 1])
    assert made.groups == (
        PrefixGroup((3, 4), 2), PrefixGroup((1, 2), 2), PrefixGroup((0,), 0), PrefixGroup((5,), 0)
    )  # fmt: skip
    # Three tokens of two prompts or one of four: the node itself.
    assert prefix_groups([[1, 2, 3], [1, 2, 3], [1, 4], [1, 5]], [1] * 4).groups == (PrefixGroup((0, 1, 2, 3), 1),)
    assert prefix_groups([], []).groups == () and prefix_groups([[]], [1]).groups == (PrefixGroup((0,), 0),)
    with pytest.raises(InputError, match="a number for each of 1 prompts; got 2"):
        prefix_groups([[1]], [1, 2])
