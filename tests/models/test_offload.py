"""Weights in host memory: which layers, the same results, loaded there, planned."""

import dataclasses
import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies, selection, storage
from kvjax.checkpoint.huggingface import save
from kvjax.errors import ConfigError
from kvjax.models import shapes, skew
from kvjax.models.offload import host_layers, offload
from kvjax.parallel import host_memory
from kvjax.planning import plan
from tests.parameters import without_parameters
from tests.planning.test_make_plan import needs_libtpu
from tests.tiny import random_tokens, random_weights, tiny


@pytest.mark.parametrize(
    ("layers", "share", "expected"),
    [(4, 0.0, []), (4, 1.0, [0, 1, 2, 3]), (4, 0.5, [1, 3]), (10, 0.1, [9]), (10, 0.3, [3, 6, 9]), (3, 0.01, [2])],
)
def test_layers_on_the_host_are_spread_evenly(layers, share, expected):
    assert sorted(host_layers(layers, share)) == expected


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", float("nan")])
def test_other_shares_are_refused(share):
    with pytest.raises(ConfigError, match="host_weights must be a number from 0 to 1"):
        host_layers(4, share)


def on_host(model: kvjax.Model) -> list[bool]:
    """Per layer, whether its weights are in host memory, which all of them are or none."""
    found = []
    for index in range(model.config.num_layers):
        (place,) = {host_memory.on_host(leaf) for leaf in jax.tree.leaves(model.params[f"layer_{index}"])}
        found.append(place)
    assert not any(
        map(host_memory.on_host, jax.tree.leaves({k: v for k, v in model.params.items() if "layer_" not in k}))
    )
    return found


@pytest.mark.sampled(0)
@pytest.mark.parametrize(("block", "share"), [(None, 1.0), (6, 0.5)])
def test_results_do_not_depend_on_where_weights_are(block, share):
    model, tokens = tiny().model, random_tokens(2, 20)
    arguments = {"max_new_tokens": 8, "prefill_block": block, "storage": storage.dense(memory="host")}
    look = selection.infinigen(2.0, first_layer=1)
    expected = kvjax.generate(model, tokens, policies.full(), selection=look, **arguments)
    moved = offload(model, share)
    assert on_host(moved) == [share == 1.0, True]
    got = kvjax.generate(moved, tokens, policies.full(), selection=look, **arguments)
    np.testing.assert_array_equal(expected.tokens, got.tokens)
    np.testing.assert_allclose(expected.logprobs, got.logprobs, atol=1e-5)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("rope", [True, False], ids=["run time", "folded"])
def test_weights_in_host_memory_can_be_skewed(rope):
    config = (
        tiny().model.config if rope else dataclasses.replace(tiny().model.config, rope=None, learned_positions=True)
    )
    model = tiny().model if rope else kvjax.Model(config, random_weights(config))
    tokens, look = random_tokens(2, 20), selection.infinigen(2.0, first_layer=1)
    matrices = skew.find_skew(model, tokens)
    arguments = {"max_new_tokens": 5, "selection": look, "storage": storage.dense(memory="host")}
    expected = kvjax.generate(skew.skewed(model, matrices), tokens, policies.full(), **arguments)
    moved = skew.skewed(offload(model), matrices)
    assert host_memory.on_host(moved.params["layer_1"]["attention"]["query"]["kernel"])
    np.testing.assert_array_equal(expected.tokens, kvjax.generate(moved, tokens, policies.full(), **arguments).tokens)


def test_a_checkpoint_is_read_into_host_memory(tmp_path):
    own = without_parameters(tiny().model)
    save(own, tmp_path)
    model = kvjax.load(tmp_path, host_weights=0.5)
    assert on_host(model) == [False, True]
    assert model.platform == "cpu"
    for x, y in zip(jax.tree.leaves(model.params), jax.tree.leaves(own.params), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.sampled(0)
def test_a_plan_counts_what_crosses_the_link():
    own = without_parameters(tiny().model)
    config = own.config
    arguments = {"batch": 2, "prompt_length": 20, "new_tokens": 5}
    held = storage.dense(memory="host")
    full = plan(config, policies.full(), storage=held, host_weights=1.0, **arguments)
    slot = 2 * config.head_dim * 4
    cache = 2 * config.num_layers * config.num_kv_heads * 24 * slot
    layers = sum(x.nbytes for name, node in own.params.items() if "layer_" in name for x in jax.tree.leaves(node))
    assert full.host == cache + layers == full.step.link_moved
    assert "in host memory" in full.table() and "over the host link per step" in full.table()
    # Layer 0 moves as a whole; in layer 1, 3 slots are gathered besides the new one.
    chosen = plan(
        config, policies.full(), storage=held, selection=selection.infinigen(cap=3, first_layer=1), **arguments
    )
    assert chosen.host == cache and chosen.step.link_moved == cache // 2 + 2 * config.num_kv_heads * 3 * slot
    values = plan(config, policies.full(), storage=storage.dense(memory=("device", "host")), **arguments)
    assert values.host == cache // 2 == values.step.link_moved
    assert "host" not in plan(config, policies.full(), **arguments).table()


WIDE = dataclasses.replace(
    shapes.by_name("opt-6.7b"), num_layers=4, windows=(), hidden_size=1024, num_heads=8, num_kv_heads=8,
    mlp_size=4096, vocab_size=1024,
)  # fmt: skip


@pytest.mark.sampled(0)
@needs_libtpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1"])
def test_a_tpu_holds_two_layers_at_most_and_no_pool(topology):
    """The TPU compiler takes weights and pools as arguments in host memory, and starts a layer's moves in its turn."""
    look = selection.infinigen(cap=16, first_layer=1)
    arguments = {"batch": 4, "prompt_length": 2000, "new_tokens": 40, "topology": topology}
    planned = plan(
        WIDE, policies.full(), storage=storage.dense(memory="host"), selection=look, host_weights=1.0, **arguments
    )
    analysis = planned.compiled.memory_analysis()
    pool = 4 * 8 * planned.slots[0] * 128 * 2
    assert planned.host <= analysis.host_argument_size_in_bytes < 1.01 * planned.host
    assert analysis.host_temp_size_in_bytes < pool / 10, "the host copies no pool"
    text = planned.compiled.as_text()
    # In the device's memory, which has no S(5), only layer 0, which is read whole, has arrays of a pool's shape.
    on_device = r"\{3,2,1,0:T\(8,128\)\(2,1\)\}"
    whole = rf"= bf16\[4,8,{planned.slots[0]},128\]{on_device} (?:copy-done|copy|scatter|fusion)\("
    assert len(re.findall(whole, text)) == 2
    layer = (planned.host - 2 * 4 * pool) / 4
    print(f"{topology}: temporaries {planned.temporaries:,}, a layer {layer:,.0f}, a pool {pool:,}, {planned.cache:,}")
    assert planned.temporaries < 3 * layer + 2 * pool + 4 * planned.cache
