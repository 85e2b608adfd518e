"""The largest batch that fits: what three and four layers need, extrapolated, is what the whole model needs."""

import dataclasses
import functools
import importlib.util

import pytest

from kvjax import capacity as capacities
from kvjax import devices, policies
from kvjax.capacity import Collectives, Need, Run, capacity, collectives
from kvjax.errors import ConfigError
from kvjax.plan import plan
from tests.test_plan import TINY

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler: pip install 'kvjax[tpu]'"
)
DEEP = dataclasses.replace(TINY, num_layers=6, windows=())


@needs_libtpu
def test_few_layers_tell_what_all_need():
    options = {"policy": policies.h2o(budget=63), "prompt_length": 256, "new_tokens": 64, "topology": "v5e:2x2"}
    mesh = "data:2,model:2"
    found = Run(DEEP, functools.partial(plan, **options)).need(8, mesh)
    whole = plan(DEEP, batch=8, mesh_axes=mesh, prefill=True, **options)
    assert (found.whole.weights, found.whole.cache) == (whole.weights, whole.cache)
    assert found.decode == pytest.approx(whole.total, rel=0.02)
    assert found.prefill == pytest.approx(whole.prefill_total, rel=0.02)
    counted = collectives(whole.compiled.as_text())
    assert found.collectives == pytest.approx(counted) and counted.number > 0


@functools.cache
def planned():
    return plan(TINY, policies.full(), batch=6, prompt_length=8, new_tokens=8, compiles=False)


def need(rows):
    """Of a run with 100 bytes of weights, whose prompts take more than decoding."""
    whole = dataclasses.replace(planned(), weights=100)
    return Need(100 + 3 * rows, 120 + 4 * rows, Collectives(0, 0), whole, 1.0)


def test_speed_and_price():
    found = capacities._result(need(6), 6, None, 2.0)
    assert (found.batch, found.binds) == (6, "prefill")
    assert found.tokens_per_second == pytest.approx(6 / found.step_seconds)
    assert found.dollars_per_million == pytest.approx(2.0 / 3600 / found.tokens_per_second * 1e6)
    # 2 bytes a row over an interconnect of 1 byte a second take longer than all else.
    device = dataclasses.replace(need(6).whole.device, interconnect=1.0)
    slow = need(6)._replace(collectives=Collectives(1, 12.0), whole=dataclasses.replace(need(6).whole, device=device))
    found = capacities._result(slow, 6, None, None)
    assert (found.step_seconds, found.limit, found.dollars_per_million) == (12.0, "collectives", None)


def test_a_search_ends_at_the_largest_number_of_rows():
    for memory, unit, expected in ((1_000, 1, 220), (1_000, 8, 27), (123, 1, 0), (124, 1, 1)):
        found, units = capacities._largest(need, unit, int((memory - 100) // (3 * unit)), memory)
        assert units <= expected <= max(units * (1 + capacities.PRECISION), units + 1), (memory, unit)
        assert units == 0 or found.most <= memory


def test_collectives_are_counted():
    text = """
      %a = bf16[8,128]{1,0} all-reduce(bf16[8,128] %x), replica_groups={}
      %b = (f32[4]{0}, f32[16]{0}) all-gather-start(f32[4] %y), dimensions={0}
      %c = f32[16]{0} all-gather-done((f32[4], f32[16]) %b)
    """
    assert collectives(text) == Collectives(2, 2 * 8 * 128 * 2 + 16 * 4)


def test_a_device_of_unknown_memory_is_refused(monkeypatch):
    monkeypatch.setattr(devices, "host_memory", lambda: None)
    with pytest.raises(ConfigError, match=r"the memory of .* is unknown; name a topology"):
        capacity(TINY, policies.full(), prompt_length=8, new_tokens=8)
