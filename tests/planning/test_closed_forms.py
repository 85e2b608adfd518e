"""Plans are the closed forms of the worked cases, and simulations are these forms where there is one request."""

import json

import jax
import numpy as np
import pytest

from kvjax import contexts, devices, policies, reuse
from kvjax.errors import InputError
from kvjax.models import shapes
from kvjax.planning import attention_traffic as traffic
from kvjax.planning import memory_layouts as layouts
from kvjax.planning import offload_shares, preemption
from kvjax.planning.preemption import Turn
from kvjax.planning.serving_costs import ServedModel, serving_costs
from tests.tiny import tiny

LARGE = ServedModel(params=34_000_000_000, layers=60, heads=56, kv_heads=8, dim=128)
SMALL = ServedModel(params=1_000_000, layers=2, heads=4, kv_heads=2, dim=8)
FAST = devices.Device("fast", 80e9, 2e12, 312e12, "given", link=2e10)


@pytest.fixture
def plans(shared_data):
    cases = json.loads(bytes(np.load(shared_data / "examples" / "reuse_cases.npz")["cases"]))

    def of(what):
        found = [(case["arguments"], case["expect"]) for case in cases
                 if case["kind"] == "plan" and case["arguments"]["what"] == what]  # fmt: skip
        assert found
        return found

    return of


def model_of(about):
    given = {"params": 1, "heads": about["kv_heads"]} | about
    return ServedModel(**{name: given[name] for name in ("params", "layers", "heads", "kv_heads", "dim", "width")})


def test_bytes_of_plans_are_those_of_arrays():
    """Those of a chunk, of a context and of its forks agree with the plan."""
    model = tiny().model
    plan = ServedModel.of(model.config, width=4)
    chunk = reuse.compute(model, np.arange(5, 17))
    assert chunk.nbytes == plan.cache_bytes(12)
    context = contexts.prefill(model, np.arange(5, 17), policies.full(), room=256)
    held = [store.nbytes for layer in context.state.layers for own in layer for store in jax.tree.leaves(own.stores)]
    assert sum(held) == plan.cache_bytes(held_slots(context)) >= plan.cache_bytes(12)
    forked = contexts.rows(context, [0, 0, 0])
    held = [store.nbytes for layer in forked.state.layers for own in layer for store in jax.tree.leaves(own.stores)]
    assert sum(held) == 3 * plan.cache_bytes(held_slots(context))


def held_slots(context):
    return context.state.layers[0].position.shape[2]


def test_serving(plans):
    for about, expected in plans("peak"):
        device = devices.Device(
            "given", about["memory"], about["memory_rate"], about["flops"], "given", link=about["host_rate"]
        )
        found = serving_costs(model_of(about), device, about["n"], statistics=about["statistics"])
        assert {name: getattr(found, name) for name in expected} == pytest.approx(expected, rel=1e-12)


def test_figures_of_the_34b():
    """Fu's are 0.89, 8.5 and 9.8 s, and for 50,000 tokens 14.1, with half of our attention."""

    def prefill(tokens):
        return LARGE.prefill_flops(tokens) / FAST.flops

    assert prefill(4096) == pytest.approx(0.94, abs=0.005)
    assert 2 * LARGE.params * 4096 / FAST.flops == pytest.approx(0.89, abs=0.005)
    assert prefill(50_000) == pytest.approx(17.8, abs=0.05)
    for tokens, seconds in ((4096, 8.6), (50_000, 10.0)):
        steps = (LARGE.weight_bytes + LARGE.cache_bytes(tokens)) / FAST.bandwidth
        assert 250 * steps == pytest.approx(seconds, abs=0.05)


def test_layouts(plans):
    for about, expected in plans("layouts"):
        options = {"longest": about["n_max"], "budget": about["budget"], "granule": about["granule"]}
        found = layouts.row_bytes(model_of(about), about["n"], **options)
        assert found == tuple(expected.values())


def test_a_trace_of_layouts():
    one = [layouts.TracedRow(0, 100, 28)]
    options = {"memory": 1 << 30, "longest": 512, "budget": 32, "granule": 1 << 12}
    for name, use in layouts.simulate_layouts(SMALL, one, **options).items():
        most = layouts.row_bytes(SMALL, 128, longest=512, budget=32, granule=1 << 12)
        assert (use.peak, use.most_rows, use.steps) == (getattr(most, name), 1, 28)
    many = [layouts.TracedRow(step % 7, 150 + step, 40) for step in range(24)]
    options["memory"] = 6 * SMALL.layers * SMALL.slot_bytes * 512
    found = layouts.simulate_layouts(SMALL, many, **options)
    assert found["reserved"].most_rows == 6 < found["pages"].most_rows < found["slots"].most_rows == 24
    assert found["slots"].waste == 0 < found["pages"].waste < 0.1 < found["reserved"].waste
    assert all(use.peak <= options["memory"] for use in found.values())
    with pytest.raises(InputError, match="does not fit"):
        layouts.simulate_layouts(SMALL, [layouts.TracedRow(0, 600, 1)], **options)


def test_traffic(plans):
    for about, expected in plans("traffic"):
        found = traffic.attention_traffic(
            about["n"], about["dim"], tile=about["tile"], memory=about["memory"], slots=about["slots"]
        )
        assert found._asdict() == pytest.approx(expected, rel=1e-12)
    for about, expected in plans("dist_attention"):
        assert traffic.part_bytes(**{name: about[name] for name in ("heads", "kv_heads", "dim", "width")}) == tuple(
            expected.values()
        )
    assert [traffic.passes_over_keys(each) for each in (policies.window(8), policies.keydiff(8), policies.h2o(8))] == [
        1, 1, 2,
    ]  # fmt: skip


def test_shares(plans):
    for about, expected in plans("blend"):
        found = offload_shares.plan_blend(
            about["layers"], load=about["load"], prefill=about["prefill"], check=about["check"]
        )
        assert found == pytest.approx((expected["ratio"], expected["ttft"]), rel=1e-12)
    for about, expected in plans("memo"):
        found = offload_shares.host_share(
            link_rate=about["link_rate"], layer_time=about["layer_time"], bytes_per_token=about["bytes_a_token"],
            tokens=about["n"], layers=about["layers"], host_memory=about["host_memory"],
        )  # fmt: skip
        assert found == pytest.approx(expected["share"], rel=1e-12)


def test_percentiles_and_fairness(plans):
    for about, expected in plans("percentiles"):
        for percent in preemption.PERCENTILES:
            assert preemption.percentile(about["values"], percent) == expected[f"p{percent}"]
        assert preemption.jain_index(about["users"]) == pytest.approx(expected["jain"], rel=1e-12)


def test_one_turn_is_the_closed_form():
    made = preemption.simulate_preemption(LARGE, FAST, [Turn(0, 0, 3.0, 4096, 3)], prompt_tokens=4096)
    assert made.ttft[50] == pytest.approx(LARGE.prefill_flops(4096) / FAST.flops)
    steps = [(LARGE.weight_bytes + LARGE.cache_bytes(tokens)) / FAST.bandwidth for tokens in (4097, 4098)]
    assert [made.tbt[50], made.tbt[99]] == pytest.approx(steps)
    assert made.seconds == pytest.approx(made.ttft[50] + sum(steps))
    assert (made.moved, made.swaps, made.jain) == (0, 0, 1.0)


def test_under_a_budget_a_prompt_in_one_piece_is_the_closed_form_with_statistics():
    made = preemption.simulate_preemption(LARGE, FAST, [Turn(0, 0, 0.0, 4096, 2)], budget=64, prompt_tokens=4096)
    assert made.ttft[50] == pytest.approx(LARGE.prefill_flops(4096, statistics=True) / FAST.flops)
    assert made.tbt[50] == pytest.approx((LARGE.weight_bytes + LARGE.cache_bytes(64)) / FAST.bandwidth)
    in_pieces = preemption.simulate_preemption(LARGE, FAST, [Turn(0, 0, 0.0, 4096, 2)], budget=64, prompt_tokens=512)
    assert in_pieces.ttft[50] < made.ttft[50]  # later pieces attend to 64 slots and themselves


def test_a_context_is_moved_to_the_host_and_back_once():
    """One user of two turns, with memory for all: the host has the text between them."""
    trace = [Turn(0, 0, 0.0, 100, 10), Turn(0, 1, 0.0, 50, 5)]
    bytes_of_text = SMALL.cache_bytes(109)  # the last token is chosen, and not fed
    device = devices.Device("large", 1e9, 1e9, 1e10, "given", link=1e8)
    for options in ({}, {"keep_host": True}):
        made = preemption.simulate_preemption(SMALL, device, trace, **options)
        assert (made.moved, made.swaps) == (2 * bytes_of_text, 2)
    three = [*trace, Turn(0, 2, 0.0, 20, 3)]
    made = preemption.simulate_preemption(SMALL, device, three)
    kept = preemption.simulate_preemption(SMALL, device, three, keep_host=True)
    # The second move to the host has only the tokens that are not there yet.
    assert made.moved == 2 * bytes_of_text + 2 * SMALL.cache_bytes(164)
    assert kept.moved == made.moved - bytes_of_text


def test_a_row_that_computes_nothing_reads_nothing():
    """User 0 arrives when user 1's prompt has been read in part, and goes before it (by the seed)."""
    slow = devices.Device("slow memory", 1e9, 1e6, 1e18, "given", link=1e12)
    options = {"prompt_tokens": 500, "frequency": 1e-6, "seed": 1}
    alone = preemption.simulate_preemption(SMALL, slow, [Turn(0, 0, 0.0, 5000, 1)], **options)
    step = SMALL.weight_bytes / slow.bandwidth
    crowd = [Turn(0, 0, 30 * step, 5000, 1), Turn(1, 0, 0.0, 100_000, 1)]
    both = preemption.simulate_preemption(SMALL, slow, crowd, **options)
    waits = (SMALL.weight_bytes + SMALL.cache_bytes(20_000)) / slow.bandwidth  # for the step that runs
    assert both.ttft[50] <= alone.ttft[50] + waits


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, float("nan"), 5, 5)]), "must arrive"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, 0.0, 5, 10.5)]), "whole numbers"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, 0.0, 5, 5)], budget=-5), "budget"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, 0.0, 5, 5)], copy_seconds=-1), "copy_seconds"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, []), "no turns"),
        (lambda: layouts.simulate_layouts(SMALL, [], memory=1, longest=1, budget=1), "no requests"),
        (lambda: layouts.simulate_layouts(SMALL, [layouts.TracedRow(float("nan"), 1, 1)], memory=1 << 20, longest=9,
                                          budget=1), "whole numbers"),
        (lambda: offload_shares.plan_blend(1, load=1.0, prefill=1.0), "check must be"),
    ],
)  # fmt: skip
def test_what_is_refused(function, match):
    with pytest.raises(InputError, match=match):
        function()


def test_a_trace_that_begins_late():
    options = {"memory": 1 << 30, "longest": 512, "budget": 32, "granule": 1 << 12}
    late = layouts.simulate_layouts(SMALL, [layouts.TracedRow(10**9, 100, 28)], **options)
    assert all(use.steps == 10**9 + 28 for use in late.values())


def test_experts_that_a_token_does_not_choose_are_not_multiplied():
    config = shapes.by_name("mixtral-8x7b")
    model = ServedModel.of(config)
    assert model.params > 46e9 and 12e9 < model.active < 14e9
    assert ServedModel.of(shapes.by_name("llama2-7b")).active == ServedModel.of(shapes.by_name("llama2-7b")).params


def test_a_crowd_is_moved_and_ends():
    device = devices.Device("small", 2.1e6, 1e9, 1e10, "given", link=1e8)
    trace = preemption.random_trace(12, 2, rate=50.0, prompt=60, output=40, seed=1)
    options = {"frequency": 0.25, "copy_seconds": 1e-5, "seed": 3}
    plain = preemption.simulate_preemption(SMALL, device, trace, **options)
    assert plain == preemption.simulate_preemption(SMALL, device, trace, **options)
    assert plain != preemption.simulate_preemption(SMALL, device, trace, **{**options, "seed": 4})
    assert plain.swaps > 0 and 0 < plain.jain < 1 and plain.ttft[50] < plain.ttft[99]
    kept = preemption.simulate_preemption(SMALL, device, trace, keep_host=True, **options)
    over = preemption.simulate_preemption(SMALL, device, trace, overlap=True, **options)
    slots = preemption.simulate_preemption(SMALL, device, trace, budget=16, **options)
    assert kept.moved < plain.moved and kept.seconds < plain.seconds
    assert over.seconds < plain.seconds
    assert slots.moved < plain.moved
    calm = preemption.simulate_preemption(SMALL, device, trace, priorities="markov", stay=0.95, **options)
    assert calm.swaps < plain.swaps
    with pytest.raises(InputError, match="does not fit"):
        preemption.simulate_preemption(SMALL, devices.Device("tiny", 2.01e6, 1e9, 1e10, "given", link=1e8), [
            Turn(0, 0, 0.0, 5000, 1)
        ], prompt_tokens=5000)  # fmt: skip
