"""Plans are the closed forms of the worked cases, and simulations are these forms where there is one request."""

import dataclasses
import json

import jax
import numpy as np
import pytest

import kvjax
from kvjax import contexts, devices, policies, reuse, storage
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.errors import InputError
from kvjax.models import shapes
from kvjax.planning import attention_traffic as traffic
from kvjax.planning import cache_phases, memory_pool, offload_shares, preemption
from kvjax.planning import memory_layouts as layouts
from kvjax.planning.preemption import Turn
from kvjax.planning.served_model import ServedModel, layer_budgets
from kvjax.planning.serving_costs import serving_costs
from tests import examples
from tests.tiny import tiny

LARGE = ServedModel(params=34_000_000_000, layers=60, heads=56, kv_heads=8, dim=128)
SMALL = ServedModel(params=1_000_000, layers=2, heads=4, kv_heads=2, dim=8)
ON_HOST = dataclasses.replace(SMALL, layer_host_bytes=(64, 64))
HALF = dataclasses.replace(SMALL, layer_host_bytes=(32, 32))
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


def test_bytes_by_layer_are_those_of_arrays():
    """Layers with slots of their own, and bytes of their own: each layer's arrays have what the plan has."""
    model = tiny().model
    policy = policies.split_layers(policies.full(), policies.h2o(7))
    plan = ServedModel.of(model.config, width=4, storage=storage.int8())
    budgets = layer_budgets(policy, model.config, 16)
    assert budgets == (None, 7)
    limits = kvjax.Limits(prompt=16, new_tokens=4, shortest=16)
    options = {"storage": storage.int8(), "limits": limits}
    made = arranged_state(kvjax.generate(model, [np.arange(5, 21)], policy, max_new_tokens=4, **options).state, ())
    layers = [sum(store.nbytes for own in layer for store in jax.tree.leaves(own.stores)) for layer in made.layers]
    slots = [layer[0].position.shape[2] for layer in made.layers]
    # The last of the new tokens is not fed.
    assert slots == [19, 7] and plan.by_layer == (2 * 2 * (8 + 2 * 4),) * 2
    assert layers == [plan.by_layer[0] * 19, plan.by_layer[1] * 7]
    assert sum(layers) == plan.cache_bytes(19, budgets)
    # Plans of slots have one more for the newest token of a layer that evicts, and room for the longest text in others.
    row = layouts.row_bytes(plan, 19, longest=19, budget=budgets)
    assert row.slots == sum(layers) + plan.by_layer[1]
    lowered = layer_budgets(policies.h2o(0.25), model.config, 64)
    assert lowered == (16, 16)
    with pytest.raises(InputError, match="compresses prompts"):
        layer_budgets(policies.snapkv(8, window=4), model.config, 64)
    with pytest.raises(InputError, match="the heads of layer 0 have different numbers"):
        layer_budgets(policies.split_heads([[1, 0], [1, 0]], policies.full(), policies.window(4)), model.config, 64)


TEXT = 200  # tokens of the law's prompt
POLICIES = {
    **{name: examples.policy(name) for name in policies.POLICIES}, **examples.combined(), **examples.planned(),
    "h2o in rounds": policies.h2o(40, every=64), "by_page of 16": policies.by_page(policies.h2o(50), page=16),
    "kept prompt": policies.phases(policies.full(), policies.random(16, every=8)),
    "layers in rounds": policies.split_layers(policies.full(), policies.h2o(24, every=4), shares=(1, 1)),
    "compressed to more": policies.after_prefill(policies.snapkv(90), then=policies.roco(20)),
    "share of a text": policies.h2o(policies.TextFraction(0.5)),
}  # fmt: skip
#: Those that plans do not take: compressors of prompts alone, and heads with slots of their own.
NOT_PLANNED = {
    "snapkv", "pyramidkv", "knorm", "keydiff", "expected_attention", "lagkv", "leverage", "cur", "kvzip", "kvgrad",
    "compactor", "matched", "qfilters", "adakv", "value_aware", "chunkkv", "duo_attention", "razor_attention",
}  # fmt: skip


def lowered_bytes(spec, config, following, dtype="float32"):
    """The bytes of keys and values that are allocated for a prompt of `TEXT` tokens."""
    lengths = np.array([TEXT], np.int32)
    limits = kvjax.Limits(TEXT, following + 1, shortest=TEXT)
    sizes = sizes_for(lengths, following, width=TEXT, block=None, limits=limits, last_fed=False)
    return lower(spec, config, sizes, lengths, implementation="xla", dtype=dtype, totals=lengths).layout.bytes()


@pytest.mark.parametrize("name", POLICIES)
def test_planned_slots_are_those_of_the_layout(name):
    """When a prompt ends and 70 tokens later, each layer that evicts has one slot more, for the newest token."""
    config, policy = tiny().model.config, POLICIES[name]
    if name in NOT_PLANNED:
        with pytest.raises(InputError, match=r"compresses prompts|have different numbers of slots"):
            layer_budgets(policy, config, TEXT)
        return
    plan, budgets = ServedModel.of(config, width=4), layer_budgets(policy, config, TEXT)
    for following in (0, 70):
        total = TEXT + following
        # A share of a text is of the text that is planned for.
        own = budgets if following == 0 or name != "share of a text" else layer_budgets(policy, config, total)
        newest = [None if each is None else each + 1 for each in own]
        assert plan.cache_bytes(total, newest) == lowered_bytes(as_spec(policy), config, following)


@pytest.mark.parametrize("name", storage.STORAGES)
def test_planned_bytes_are_those_of_the_layout(name):
    """Plans take storages whose bytes are those of a slot times the number of tokens; the others are refused."""
    config, held = tiny().model.config, examples.held(name)
    refused = {
        "think": "its newest 4 are exact", "kivi": "its newest 8 are exact", "kvquant": "its first 1 are exact",
        "gear": "until 8 are encoded", "kvarn": "until 8 are encoded", "zipcache": "until 8 are encoded",
        "cskv": "until 8 are encoded", "mikv": "lie in tiers", "minicache": "lie in pairs",
    }  # fmt: skip
    if name in refused:
        with pytest.raises(InputError, match=f"bytes of {held.name} depend on the number of tokens: .*{refused[name]}"):
            ServedModel.of(config, storage=held)
        return
    for width, dtype in ((2, "bfloat16"), (4, "float32")):
        plan = ServedModel.of(config, width=width, storage=held)
        assert plan.cache_bytes(TEXT) == lowered_bytes(as_spec(policies.full(), held), config, 0, dtype)


def test_equal_budgets_of_layers_are_one_budget():
    trace = preemption.random_trace(6, 2, rate=50.0, prompt=60, output=20, seed=1)
    device = devices.Device("small", 2.1e6, 1e9, 1e10, "given", link=1e8, interconnect=1e8)
    requests = memory_pool.random_requests(12, rate=50.0, prompt=60, output=20, long=300, long_share=0.2, seed=1)
    traced = [layouts.TracedRow(0, 60, 20)] * 4
    for one, by_layer in ((16, (16, 16)), (None, (None, None))):
        assert SMALL.cache_bytes(100, one) == SMALL.cache_bytes(100, by_layer)
        assert serving_costs(SMALL, FAST, 100, budget=one) == serving_costs(SMALL, FAST, 100, budget=by_layer)
        pre = [preemption.simulate_preemption(SMALL, device, trace, budget=each) for each in (one, by_layer)]
        assert pre[0] == pre[1]
        pool = [
            memory_pool.simulate_pool(SMALL, device, requests, instances=2, budget=each) for each in (one, by_layer)
        ]
        assert pool[0] == pool[1]
        rows = [layouts.row_bytes(SMALL, 100, longest=512, budget=each) for each in (one or 16, (16, 16))]
        assert rows[0] == rows[1]
        options = {"memory": 1 << 30, "longest": 512}
        assert layouts.simulate_layouts(SMALL, traced, budget=one, **options) == layouts.simulate_layouts(
            SMALL, traced, budget=by_layer, **options
        )


def test_layers_add_up():
    """The plan of two layers that differ is the sum of the plans of each alone."""
    both = dataclasses.replace(SMALL, layer_slot_bytes=(24, 40))
    alone = [dataclasses.replace(SMALL, layers=1, layer_slot_bytes=(each,)) for each in (24, 40)]
    assert (both.token_bytes, both.by_layer) == (64, (24, 40))
    budgets = (None, 16)
    assert both.cache_bytes(100, budgets) == 24 * 100 + 40 * 16
    row = layouts.row_bytes(both, 100, longest=512, budget=budgets, granule=1 << 6)
    own = [layouts.row_bytes(each, 100, longest=512, budget=budget, granule=1 << 6)
           for each, budget in zip(alone, budgets, strict=True)]  # fmt: skip
    assert row.slots == 24 * 512 + 40 * 17
    for name in ("reserved", "pages", "vattention", "slots"):
        assert getattr(row, name) == sum(getattr(each, name) for each in own)
    assert both.prefill_flops(50, statistics_layers=1) == pytest.approx(
        2 * both.params * 50 + 5 * both.heads * both.dim * 50**2
    )
    # One turn, whose steps read what each layer holds.
    made = preemption.simulate_preemption(both, FAST, [Turn(0, 0, 0.0, 64, 3)], budget=budgets, prompt_tokens=64)
    assert made.ttft[50] == pytest.approx(
        max(both.prefill_flops(64, statistics_layers=1) / FAST.flops,
            (both.weight_bytes + both.cache_bytes(64, budgets)) / FAST.bandwidth)
    )  # fmt: skip
    steps = [(both.weight_bytes + both.cache_bytes(tokens, budgets)) / FAST.bandwidth for tokens in (65, 66)]
    assert made.seconds == pytest.approx(made.ttft[50] + sum(steps))
    # A conversation of two turns is moved to the host between them, and back: the bytes that its layers hold.
    trace = [Turn(0, 0, 0.0, 100, 10), Turn(0, 1, 0.0, 50, 5)]
    assert preemption.simulate_preemption(both, FAST, trace, budget=budgets).moved == 2 * both.cache_bytes(109, budgets)
    phases = cache_phases.CachePhases(
        model=both, device_bytes=6400, host_bytes=1e9, bandwidth=1e9, link=1e8, compute=1e10
    )
    assert phases.split(150).device == 100


def held_slots(context):
    return context.state.layers[0].position.shape[2]


def test_serving(plans):
    for about, expected in plans("peak"):
        device = devices.Device(
            "given", about["memory"], about["memory_rate"], about["flops"], "given", link=about["host_rate"]
        )
        model = model_of(about)
        found = serving_costs(model, device, about["n"], statistics_layers=model.layers * about["statistics"])
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
    assert made.ttft[50] == pytest.approx(LARGE.prefill_flops(4096, statistics_layers=LARGE.layers) / FAST.flops)
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


@pytest.mark.parametrize("name", ["params", "layers", "heads", "kv_heads", "dim", "width"])
@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2", True])
def test_counts_of_a_model_are_checked(name, wrong):
    with pytest.raises(InputError, match=f"{name} must be a whole number"):
        dataclasses.replace(SMALL, **{name: wrong})


def test_slots_in_host_memory():
    """They take no memory of the device and are not exchanged; a step moves them over the link."""
    config = tiny().model.config
    for memory, share in (("host", 1.0), (("device", "host"), 0.5)):
        plan = ServedModel.of(config, 4, storage.dense(memory=memory))
        own = ServedModel.of(config, 4)
        assert plan.by_layer == own.by_layer and sum(plan.host_by_layer) == share * own.token_bytes
        cache, host = own.cache_bytes(100), int(share * own.cache_bytes(100))
        room = 7 * cache
        device = devices.Device("small", own.weight_bytes + room, 1e9, 1e10, "given", link=1e8)
        found = serving_costs(plan, device, 100, host_memory=9.5 * host)
        assert (found.cache, found.host, found.rows) == (cache, host, 9)
        assert found.decode_step_all_rows == pytest.approx(max((own.weight_bytes + 9 * cache) / 1e9, 9 * host / 1e8))
        assert found.switch == pytest.approx(2 * (cache - host) / 1e8)
        few = serving_costs(plan, device, 100, host_memory=2 * host)
        assert few.rows == 2
    # As many rows as fit in the device's memory, if it has half of each.
    assert serving_costs(plan, device, 100).rows == 14
    trace = [Turn(0, 0, 0.0, 100, 10), Turn(0, 1, 0.0, 50, 5)]
    for each in (SMALL, HALF, ON_HOST):
        made = preemption.simulate_preemption(each, FAST, trace)
        on_device = 1 - sum(each.host_by_layer) / each.token_bytes
        assert made.moved == 2 * on_device * each.cache_bytes(109) and made.swaps == (2 if on_device else 0)
    # A step of one turn: over a slow link, its slots.
    slow = dataclasses.replace(FAST, link=1e6)
    made = preemption.simulate_preemption(HALF, slow, [Turn(0, 0, 0.0, 64, 3)], prompt_tokens=64)
    assert made.seconds == pytest.approx(sum(HALF.cache_bytes(tokens) / 2 / 1e6 for tokens in (64, 65, 66)))


def test_budgets_of_each_prompt():
    """A share of the prompt is one of each request's own."""
    trace = [Turn(0, 0, 0.0, 100, 10), Turn(0, 1, 0.0, 50, 5), Turn(1, 0, 0.0, 20, 3)]
    device = devices.Device("large", 1e9, 1e9, 1e10, "given", link=1e8)
    made = preemption.simulate_preemption(SMALL, device, trace, budget=lambda prompt: prompt // 2)
    # Between its turns, the first user's text has half of the first message.
    assert made.moved == 2 * SMALL.cache_bytes(109, 50)
    assert made != preemption.simulate_preemption(SMALL, device, trace, budget=50)
    requests = [memory_pool.Request(0.0, 100, 3), memory_pool.Request(1e6, 40, 3)]
    one = dataclasses.replace(device, interconnect=1e8)
    pool = [
        memory_pool.simulate_pool(SMALL, one, [each], instances=1, budget=lambda prompt: prompt // 2).peak
        for each in requests
    ]
    assert pool == [(SMALL.cache_bytes(100, 50),), (SMALL.cache_bytes(100, 20),)]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, float("nan"), 5, 5)]), "must arrive"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, 0.0, 5, 10.5)]), "whole numbers"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, 0.0, 5, 5)], budget=-5), "budget"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, [Turn(0, 0, 0.0, 5, 5)], copy_seconds=-1), "copy_seconds"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, []), "no turns"),
        (lambda: SMALL.cache_bytes(5, (4,)), "for each of 2 layers; got 1"),
        (lambda: SMALL.cache_bytes(-1), "tokens must be a whole number of at least 0; got -1"),
        (lambda: serving_costs(SMALL, "h100", 5), "device must be a kvjax.devices.Device, .*; got 'h100'"),
        (lambda: serving_costs("llama", FAST, 5), "model must be a ServedModel"),
        (lambda: serving_costs(SMALL, dataclasses.replace(FAST, link=None), 5), "to know of fast: link to the host"),
        (lambda: devices.Device("odd", -1, None, None, ""), "memory of a device must be a number above 0, or None"),
        (lambda: preemption.simulate_preemption(SMALL, FAST, ["turn"]), "each turn of a trace must be"),
        (lambda: preemption.random_trace(0, 1, rate=1.0, prompt=1, output=1), "users must be"),
        (lambda: layouts.row_bytes(SMALL, 5, longest=-1, budget=None), "longest must be"),
        (lambda: dataclasses.replace(SMALL, active_params=0), "active_params must be"),
        (lambda: dataclasses.replace(SMALL, kv_heads=3), "kv_heads must divide heads=4; got 3"),
        (lambda: SMALL.runs(True), "budget must be a whole number of at least 1; got True"),
        (lambda: dataclasses.replace(SMALL, layer_host_bytes=(0, 65)), r"layer_host_bytes\[1\] must .* 0 to 64; got"),
        (lambda: serving_costs(ON_HOST, FAST, 5), "give host_memory"),
        (lambda: layouts.row_bytes(ON_HOST, 5, longest=9, budget=None), "layouts: slots are in the device's memory"),
        (lambda: cache_phases.CachePhases(model=ON_HOST, device_bytes=1, host_bytes=1, bandwidth=1, link=1, compute=1),
         "phases: slots are in the device's memory"),
        (lambda: memory_pool.simulate_pool(ON_HOST, FAST, [memory_pool.Request(0.0, 1, 1)], instances=1), "a pool:"),
        (lambda: ServedModel.of(tiny().model.config, storage=storage.dense(memory="host", residual=4)), "its newest 4"),
        (lambda: SMALL.cache_bytes(5, (4, 0)), "budget"),
        (lambda: SMALL.cache_bytes(5, "4"), "one per layer"),
        (lambda: dataclasses.replace(SMALL, layer_slot_bytes=(8,)), "each of 2 layers"),
        (lambda: dataclasses.replace(SMALL, layer_slot_bytes=8), "one number for each of 2 layers; got 8"),
        (lambda: dataclasses.replace(SMALL, layer_slot_bytes=(8, 0.5)), r"layer_slot_bytes\[1\] must be a whole"),
        (lambda: ServedModel.of(tiny().model.config, 1, storage.int8()), "width must be 2 or 4 bytes; got 1"),
        (lambda: ServedModel.of(tiny().model.config, storage=storage.think(recent=0)), "what its prompt's vectors"),
        (lambda: layer_budgets(CacheSpec(policies.h2o(8), storage.kivi()), tiny().model.config, 64), "are exact"),
        (lambda: SMALL.prefill_flops(5, statistics_layers=True), "from 0 to 2; got True"),
        (lambda: SMALL.prefill_flops(5, statistics_layers=3), "from 0 to 2; got 3"),
        (lambda: dataclasses.replace(SMALL, layer_slot_bytes=(8, 16)).slot_bytes, "different bytes"),
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
