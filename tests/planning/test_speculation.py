"""The length from which drafts pay: worked cases, and devices."""

import json

import numpy as np
import pytest

from kvjax import devices
from kvjax.errors import InputError
from kvjax.planning import DraftCosts, plan_speculation
from kvjax.speculation.rules import mean_tokens_per_round
from tests.planning.test_make_plan import GROUPED


def test_worked_cases(shared_data):
    cases = json.loads(bytes(np.load(shared_data / "examples" / "reuse_cases.npz")["cases"]))
    plans = [case for case in cases if case["kind"] == "plan"]
    of = {
        what: [(case["arguments"], case["expect"]) for case in plans if case["arguments"]["what"] == what]
        for what in ("tokens_a_round", "speed_up")
    }
    for about, expected in of["tokens_a_round"]:
        assert mean_tokens_per_round(about["alpha"], about["gamma"]) == pytest.approx(expected["tokens"], rel=1e-12)
    for about, expected in of["speed_up"]:
        costs = DraftCosts(**{
            name: about[name] for name in ("gamma", "weights", "draft_weights", "slot_bytes", "budget")
        })  # fmt: skip
        assert costs.speed_up(about["n"], about["alpha"]) == pytest.approx(expected["speed_up"], rel=1e-12)
        least = costs.break_even(about["alpha"])
        assert least == expected["break_even"]
        assert costs.speed_up(least - 1, about["alpha"]) <= 1 < costs.speed_up(least, about["alpha"])
        # Without an accepted draft, no length pays.
        assert costs.break_even(0.0) is None


def test_devices():
    fast = devices.Device("fast", None, 1e12, 1e15, "given", link=2e10)
    options = {"budget": 512, "alpha": 0.8, "length": 100_000}
    near = plan_speculation(GROUPED, device=fast, **options)
    far = plan_speculation(GROUPED, device=fast, on_host=True, **options)
    # Over the link, slots cost more than weights, which stay on the device.
    assert far.break_even < near.break_even and f"from {near.break_even:,} tokens on" in str(near)
    assert near.costs.slot_bytes == 2 * 4 * 2 * 128 * 2 and "host memory" in str(far)
    rows = plan_speculation(GROUPED, device=fast, batch=8, **options)
    assert rows.break_even < near.break_even
    # Where a product of a few tokens takes as long as that of each, a block saves nothing.
    slow = devices.Device("slow", None, 1e12, 1e11, "given")
    never = plan_speculation(GROUPED, device=slow, **{**options, "length": 100})
    assert never.speed_up < 1
    with pytest.raises(InputError, match="link"):
        plan_speculation(GROUPED, device=slow, on_host=True, **options)


def test_attention_computes_too():
    """A step reads for 10 + n / 8 s, and a block of 3 tokens computes for 3 + n / 4 s: longer where n > 56."""
    costs = DraftCosts(
        gamma=2, weights=80, draft_weights=8, slot_bytes=1, draft_slot_bytes=0, budget=1, flops=1.0, slot_flops=1 / 12,
        bandwidth=8.0, compute=1.0,
    )  # fmt: skip
    assert [costs.step(n, 3) for n in (0, 56, 100)] == pytest.approx([10, 17, 28])
    assert [costs.step(n) for n in (0, 56, 100)] == pytest.approx([10, 17, 22.5])
    assert costs.speed_up(56, 0.5) == pytest.approx(1.75 * 17 / (2 * 1 + 17))
    # 1 + α + α² = 1.12 tokens are faster between 53.3, from 1.12 (10 + n / 8) > 12 + n / 8, and a little above 56.
    alpha = (1.48**0.5 - 1) / 2
    assert costs.break_even(alpha) == 54 and costs.speed_up(1000, alpha) < 1
    assert costs.break_even(0.1) is None
    machine = devices.Device("slow", None, 1e12, 1e12, "given")
    plan = plan_speculation(GROUPED, device=machine, budget=64, alpha=0.8, length=1000)
    assert plan.costs.slot_flops == 4 * GROUPED.num_layers * GROUPED.num_heads * GROUPED.head_dim
