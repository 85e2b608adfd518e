"""The largest batch that fits: what three and four layers need, extrapolated, is what the whole model needs."""

import dataclasses
import functools
import importlib.util
import json
from types import SimpleNamespace

import pytest

from kvjax import devices, policies
from kvjax.errors import ConfigError
from kvjax.planning import capacity as capacities
from kvjax.planning import plan
from kvjax.planning.capacity import capacity
from kvjax.planning.hlo_collectives import Collectives, collectives
from kvjax.planning.memory_estimate import Need, Run, without_merges
from tests.planning.test_make_plan import GROUPED, TINY

pytestmark = pytest.mark.thorough

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'kvjax[tpu]'"
)
DEEP = dataclasses.replace(TINY, num_layers=6, windows=())


@pytest.mark.sampled(0)
@needs_libtpu
def test_few_layers_tell_what_all_need():
    options = {"policy": policies.h2o(budget=63), "prompt_length": 256, "new_tokens": 64, "topology": "v5e:2x2"}
    run, mesh = functools.partial(plan, **options), "data:2,model:2"
    found = Run(DEEP, run, mesh, run(DEEP, batch=1, mesh_axes=mesh, compiles=False)).need(8)
    whole = run(DEEP, batch=8, mesh_axes=mesh, prefill=True)
    assert found.held == whole.weights + whole.cache
    assert found.held + found.decode == pytest.approx(whole.total, rel=0.02)
    assert found.held + found.prefill == pytest.approx(whole.prefill_total, rel=0.02)
    assert found.collectives == pytest.approx(tuple(whole.collectives)) and whole.collectives.number > 0


def test_another_batch_compiles_what_may_bind():
    """Layers of 1,000 bytes; a step takes 600 a row and layer, prompts 20 a row; 2 collectives a layer and another."""
    asked = []

    def few(config, *, batch, mesh_axes, by_layer, decode, prefill):
        assert mesh_axes == "model:2" and by_layer is True
        asked.append((config.num_layers, batch, decode, prefill))
        layers = config.num_layers
        return SimpleNamespace(
            weights=1000 * layers, cache=batch * layers, total=1001 * layers + batch * (601 * layers if decode else 0),
            prefill_total=1000 * layers + batch * (layers + 20) if prefill else None, problem="", compile_seconds=1.0,
            collectives=Collectives(2 * layers + 1, batch * layers) if decode else None,
        )  # fmt: skip

    one = SimpleNamespace(weights=6000, cache=6, rows=1, by_layer=True, device=SimpleNamespace(memory=1e9))
    run = Run(DEEP, few, "model:2", one)
    found = run.need(4)
    assert asked == [(3, 4, True, True), (4, 4, True, True)]
    assert found == Need(4, 6000 + 24, 6 + 600 * 4 * 6, 20 * 4, Collectives(13, 24), 4, 2.0)
    asked.clear()
    found = run.need(8, found)
    assert asked == [(3, 8, True, False), (4, 8, True, False)]
    # The prompts' bytes are in proportion to the rows.
    assert found == Need(8, 6000 + 48, 6 + 600 * 8 * 6, 20 * 8, Collectives(13, 48), 6, 4.0)
    assert run.collectives(2) == Collectives(13, 12)


def test_few_layers_that_need_less_with_each_do_not_shrink():
    run = Run(DEEP, None, "", SimpleNamespace(device=SimpleNamespace(memory=1e9)))

    def few(layers, beyond):
        return SimpleNamespace(weights=10 * layers, cache=2 * layers, problem="", prefill_total=12 * layers + beyond)

    assert run._beyond("prefill", [few(3, 100), few(4, 60)]) == 100
    assert run._beyond("prefill", [few(3, 60), few(4, 70)]) == 90
    assert run._beyond("prefill", [few(3, 60), SimpleNamespace(problem="too little memory")]) == 2e9


@pytest.mark.parametrize("first", [1, 50, 400])
@pytest.mark.parametrize("verify", [False, True])
def test_programs_of_all_layers_correct_few(first, verify):
    """100 bytes of weights, 4 a row and 20 for the prompts: of 1,000 bytes, 220 rows. Few layers need 3 a row."""
    asked = []

    def programs(config, *, batch, mesh_axes, decode, prefill, by_layer=None):
        layers = config.num_layers
        if layers < DEEP.num_layers:
            return SimpleNamespace(
                weights=0, cache=0, total=batch, prefill_total=batch, problem="", compile_seconds=1.0,
                collectives=Collectives(layers, batch),
            )  # fmt: skip
        assert prefill and not decode
        asked.append(batch)
        used = 120 + 4 * batch
        problem = f"the memory required for HLO temporaries ({used / 1024:.4f}K) exceeds available HBM (0.98K)."
        return SimpleNamespace(problem=problem if used > 1_000 else "", prefill_total=used)

    run = Run(DEEP, programs, "", SimpleNamespace(weights=100, cache=2, rows=1, by_layer=False))
    found, rows, sure = capacities._refined(run, first, 1_000, verify)
    assert rows <= 220 <= rows * (1 + capacities.PRECISION)
    assert found.peak == pytest.approx(120 + 4 * rows, rel=0.001) and found.rows == rows
    assert sure == (rows in asked) and sure >= verify and len(asked) <= 4
    assert found.programs == 4 + len(asked) and found.collectives == pytest.approx((6, rows))


@functools.cache
def planned():
    return plan(TINY, policies.full(), batch=6, prompt_length=8, new_tokens=8, compiles=False)


def need(rows, before=None):
    """The estimate of a run with 100 bytes of weights, whose prompts take more than decoding."""
    programs = before.programs if before else 0
    return Need(rows, 100 + 2 * rows, 1 * rows, 20 + 2 * rows, Collectives(0, 0), programs + 1, 1.0)


def result(found, rows=6, whole=None, price=None):
    return capacities._result(whole or planned(), found, rows, None, None, price)


def test_speed_and_price():
    found = result(need(6), price=2.0)
    assert (found.batch, found.binds) == (6, "prefill")
    assert found.tokens_per_second == pytest.approx(6 / found.step_seconds)
    assert found.dollars_per_million == pytest.approx(2.0 / 3600 / found.tokens_per_second * 1e6)
    # 2 bytes a row over an interconnect of 1 byte a second take longer than all else.
    device = dataclasses.replace(planned().device, interconnect=1.0)
    slow = need(6)._replace(collectives=Collectives(1, 12.0))
    found = result(slow, whole=dataclasses.replace(planned(), device=device))
    assert (found.step_seconds, found.limit, found.dollars_per_million) == (12.0, "collectives", None)
    assert json.loads(json.dumps(found.as_dict()))["collectives"] == {"number": 1, "moved": 12.0}


@pytest.mark.parametrize(("memory", "unit", "expected"), [(1_000, 1, 220), (1_000, 8, 27), (123, 1, 0), (124, 1, 1)])
@pytest.mark.parametrize("first", [1, 5, 10_000])
def test_a_search_ends_at_the_largest_number_of_rows(memory, unit, expected, first):
    most = int((memory - 100) // (2 * unit))
    found, units = capacities._largest(need, unit, most, memory, 100, first)
    assert units <= expected <= max(units * (1 + capacities.PRECISION), units + 1)
    assert units == 0 or found.peak <= memory
    assert found.rows == max(units, 1) * unit


def test_a_search_that_begins_near_the_end_takes_one_batch():
    assert capacities._largest(need, 1, 450, 1_000, 100, 218)[0].programs == 1


def test_collectives_are_counted_by_their_results():
    """Those of a loop over five layers within the loop over steps count five times."""
    text = """
HloModule steps

%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %z = f32[] add(%x, %y)
}

%layer (p: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %a = bf16[8,128]{1,0:T(8,128)(2,1)} all-reduce(bf16[8,128] %x), replica_groups={}, to_apply=%add
  ROOT %t = (s32[], bf16[8,128]) tuple(%i, %a)
}

%more_layers (p: (s32[], bf16[8,128])) -> pred[] {
  %count = s32[]{:T(128)} constant(5)
  ROOT %less = pred[] compare(s32[] %i, s32[] %count), direction=LT
}

%step (p: (s32[], pred[4])) -> (s32[], pred[4]) {
  %loop = (s32[], bf16[8,128]) while((s32[], bf16[8,128]) %t), condition=%more_layers, body=%layer
  %b = (f32[4]{0}, f32[16]{0}) all-gather-start(f32[4] %y), dimensions={0}
  %c = f32[16]{0} all-gather-done((f32[4], f32[16]) %b)
  ROOT %t = (s32[], pred[4]) tuple(%i, %going)
}

%unfinished (p: (s32[], pred[4])) -> pred[] {
  %steps = s32[] constant(64)
  %less = pred[] compare(s32[] %i, s32[] %steps), direction=LT
  ROOT %both = pred[] and(pred[] %less, pred[] %going)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %loop = (s32[], pred[4]) while((s32[], pred[4]) %t), condition=%unfinished, body=%step
  ROOT %y = f32[4] parameter(0)
}
"""
    assert collectives(text) == Collectives(5 + 1, 5 * 2 * 8 * 128 * 2 + 16 * 4)


def test_a_device_of_unknown_memory_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: None)
    with pytest.raises(ConfigError, match=r"the memory of .* is unknown; name a topology"):
        capacity(TINY, policies.full(), prompt_length=8, new_tokens=8)


def test_gpus_are_planned_from_shapes():
    """Weights and cache of an eighth of the heads fill a GPU; one machine of eight costs eight times as much."""
    found = capacity(GROUPED, policies.full(), prompt_length=3000, new_tokens=100, topology="h100:8", price=2.0)
    assert (found.binds, found.collectives, found.programs) == ("shapes", None, 0)
    assert found.mesh["model"] * found.mesh["data"] * found.mesh.get("context", 1) == 8
    each = found.cache / found.batch
    assert found.weights + found.cache <= found.memory < found.weights + each * found.batch * 1.01
    assert found.dollars_per_million == pytest.approx(8 * 2.0 / 3600 / found.tokens_per_second * 1e6)
    with pytest.raises(ConfigError, match="1 to 8 GPUs"):
        plan(TINY, policies.full(), prompt_length=8, new_tokens=8, topology="h200:9")


def test_merges_are_left_out():
    plain = policies.h2o(budget=63)
    merging = policies.h2o(budget=63, merge=policies.d2o())
    assert without_merges(merging) == plain == without_merges(plain)
    compressor = policies.snapkv(budget=64)
    both = policies.after_prefill(compressor, then=merging)
    assert without_merges(both) == policies.after_prefill(compressor, then=plain)
