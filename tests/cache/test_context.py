"""A cache whose slots are divided over devices equals one on a single device, and moves little between them.

Eight simulated devices exist only if XLA is told before jax starts, so one subprocess (`python -m
tests.cache.context_checks`) runs every case and prints a line of JSON each; the tests here read them.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys

import jax
import pytest

from kvjax import devices, policies, selection, storage
from kvjax.cache import CacheSpec
from kvjax.cache.context_parallel import refusals
from kvjax.cache.groups import Group
from kvjax.policies import Importance
from kvjax.policies.components import Merge
from tests.cache import context_checks
from tests.cache.context_checks import BY_XLA, CASES, DIM, OF_LAYERS
from tests.conftest import ROOT, XLA_FLAGS

#: Cases that run here; every other one runs by its name, and is like one of these.
RUN = (
    "tova", "one KV head", "roco, few candidates", "int8", "parts of heads", "residual", "kivi", "lserve",
    "retrieval", "infinigen, ends", "infinigen, few candidates", "infinigen, residual", "tokenselect", "think h2o",
    "low_rank codes less", "kvquant in blocks", "kv_heads", "cskv in blocks", "optimal of latents", "cam",
    "kvmerger in blocks", "merge of roco", "merge by ranks", "merge after a prompt", "razor in blocks",
    "smaller, in codes", "by rank in blocks", "by rank, residual", "by rank, merged", "by rank, compressed in blocks",
    *BY_XLA,
)  # fmt: skip
#: Collectives of a step of all heads, without those of a search that runs where it is needed; 2 where it is not said.
COLLECTIVES = {
    "roco, few candidates": 4, "kivi": 1, "infinigen, ends": 4, "infinigen, few candidates": 5,
    "infinigen, residual": 4, "tokenselect": 3, "cskv in blocks": 1, "optimal of latents": 4,
    "low_rank codes less": 3, "cam": 3, "kvmerger in blocks": 3, "merge by ranks": 2, "merge after a prompt": 3,
    "merge of roco": 5, "razor in blocks": 2, "parts of heads": 3, "smaller, in codes": 4,
    "by rank, compressed in blocks": 1, "by rank, merged": 3,
}  # fmt: skip


@pytest.fixture(scope="session")
def results(request) -> dict[str, dict]:
    """The findings of each case that a test of this run asks for."""
    here = [item for item in request.session.items if item.path.name == "test_context.py"]
    asked = {item.callspec.params["name"] for item in here if "results" in item.fixturenames}
    flags = XLA_FLAGS + " --xla_force_host_platform_device_count=8"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.cache.context_checks", *(name for name in RUN if name in asked)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line.pop("name"): line for line in lines}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", RUN)
def test_slots_on_several_devices(results, name):
    """All that is to be seen of a case, in one test: a sample of cases then runs few of them."""
    assert_equals_one_device(results[name], name)
    (assert_xla_gathers_no_keys_and_values if name in BY_XLA else assert_few_collectives)(results[name], name)


def assert_equals_one_device(result, name):
    """Outputs, and which positions every head holds after every step, of ragged rows that end at different times."""
    assert result["output"] < 1e-5, result
    assert result["positions_equal"] and result["read_equal"], result
    assert result["divided"] == [list(CASES[name].divided)] * len(result["divided"]), result


def assert_xla_gathers_no_keys_and_values(result, name):
    """It gathers positions in blocks of a prompt, fewer numbers than a device's keys and values."""
    assert len(result["collectives"]) <= 9, result
    most = max(result["collectives"] + result["in branches"])
    assert most < result["local_rows"] * result["local_slots"] * 2 * DIM, result
    assert not result["copied"] and result["uneven"] < 1.05, result


def assert_few_collectives(result, name):
    """A compiled step has few, none of one number per slot, and updates the cache in place."""
    assert len(result["collectives"]) <= COLLECTIVES.get(name, 2), result
    assert max(result["collectives"], default=0) < result["local_rows"] * result["local_slots"], result
    assert not result["copied"]
    assert max(result["in branches"], default=0) < result["local_rows"] * result["local_slots"], result
    # What each device holds, as a multiple of the even split.
    assert result["uneven"] < 1.05, result


def _group(policy=None, **given) -> Group:
    spec = CacheSpec(policy or policies.h2o(8))
    return Group(policy=spec.policy.traced(), needs=spec.policy.needs, slots=(8,), decoding=True, **given)


@dataclasses.dataclass(frozen=True)
class OfTheFirst(Merge):
    """A merge that does not say that it runs over devices."""


def _by_slot(stats, view):
    return jax.lax.broadcasted_iota("float32", view.position.shape, 2)


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        (_group(), None),
        (_group(policies.full()), None),
        (_group(policies.roco(8)), None),
        (_group(policies.streaming_llm(8)), None),
        (_group(policies.h2o(8, positions="cache")), None),
        (_group(policies.h2o(8, positions="cache"), evicts_one=False), "more than it has tokens"),
        (_group(policies.h2o(8, merge=policies.d2o())), None),
        (_group(policies.h2o(8, merge=OfTheFirst())), "compares what is evicted with all slots"),
        (_group(policies.h2o(8, merge=policies.d2o()), evicts_one=False), "more pairs in a step than it has tokens"),
        (_group(policies.h2o(8, merge=policies.d2o()), storage=storage.kvquant()), "held as they are before rotation"),
        (_group(policies.h2o(8, merge=policies.d2o()), storage=storage.int8(residual=4)), "leaves the residual"),
        (_group(policies.by_page(policies.h2o(8), page=2), storage=storage.int8()), "whole pages"),
        (_group(selection=selection.quest(4, 8)), None),
        (_group(selection=selection.infinigen(cap=4)), None),
        (_group(selection=selection.tokenselect(4)), None),
        (_group(selection=selection.tokenselect(4), storage=storage.int8(residual=4)), "tokenselect keeps numbers"),
        (_group(selection=selection.shadowkv(2, 2, 4)), "shadowkv"),
        (_group(storage=storage.int4(memory="host")), "host"),
        (_group(storage=storage.kivi(2, 2, 4)), "in a block"),
        (_group(policies.full(), storage=storage.minicache(0)), "two layers"),
        (_group(policies.full(), storage=storage.zipcache()), "tokens of a segment to two tiers"),
        (_group(storage=storage.mikv()), "to a second tier"),
        (_group(policies.full(), storage=storage.gear()), "blocks of a prompt in another form"),
        (_group(policies.evict(importance=policies.key_difference, budget=8)), "compares slots with each other"),
        (_group(policies.leverage(8)), "keys can be rotated only where a device has all slots"),
        (_group(policies.h2o(8, every=2)), "evicts 2 slots at once"),
        (_group(policies.phases(policies.full(), policies.h2o(8)).decode), "counts the slots of the prompt"),
        # The order of slots has no meaning, so that no rank may depend on it.
        (_group(policies.evict(importance=Importance(needs=set(), score=_by_slot), budget=8)), "by iota"),
    ],
    ids=lambda value: value.policy.name if isinstance(value, Group) else None,
)  # fmt: skip
def test_what_is_not_divided_is_said(group, reason):
    found = refusals.refuses(group, 2, 8)
    assert found is None if reason is None else reason in found


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs the TPU compiler")
@pytest.mark.parametrize("name", ["h2o", "int8"])
def test_two_collectives_on_tpu(name):
    """The TPU compiler splits none of the two, and adds none."""
    case = CASES[name]
    found = context_checks.moved(case, devices.topology_devices("v5e:2x4"))
    assert len(found["collectives"]) == 2, found
    assert max(found["collectives"]) < found["local_rows"] * found["local_slots"]
    assert not found["copied"]


@pytest.mark.parametrize("name", OF_LAYERS)
def test_which_policies_are_divided(name):
    spec = CASES[name].spec()
    decode = spec.policy if spec.policy.when == "step" else policies.full()
    found = refusals.refuses(_group(decode), 2, 8)
    if decode.every > 1:
        assert found == f"policy {name} evicts {decode.every} slots at once"
    elif name == "ems":
        assert "compares slots with each other (by reduce_max)" in found
    else:
        reasons = {
            "remembers queries": decode.memory, "reads scores that are written once per token": decode.writes,
            "reads parameters": decode.params,
        }  # fmt: skip
        assert found is None or any(own and found == f"policy {name} {reason}" for reason, own in reasons.items())
