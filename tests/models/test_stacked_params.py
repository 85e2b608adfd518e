"""Parameters of layers in stacks: the same parameters, read from checkpoints and changed as those of layers apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import kvjax
from kvjax import policies
from kvjax.models import layer_loop, offload, quantize
from kvjax.models.digest import model_digest
from kvjax.models.stacked_params import StackBuilder, StackedParams, stacked, unstacked, with_attention, with_rest
from kvjax.parallel import sharding
from tests.tiny import in_stacks, random_tokens, tiny

LAYERS = 3


def model() -> kvjax.Model:
    return tiny(layers=LAYERS).model


def assert_same(one, other):
    assert jax.tree.structure(dict(one)) == jax.tree.structure(dict(other))
    jax.tree.map(np.testing.assert_array_equal, dict(one), dict(other))


def test_they_are_the_same_mapping():
    params, own = model().params, in_stacks(model()).params
    assert isinstance(own, StackedParams) and own.num_layers == LAYERS and len(own) == len(params)
    assert set(own) == set(params) and "layer_2" in own and "embed" in own
    for name in ("layer_3", "layer_", "layer_x", "layers", 3):
        assert name not in own
    with pytest.raises(KeyError, match="layer_3"):
        own["layer_3"]
    assert_same(own, params)
    assert_same(unstacked(own), params)
    assert unstacked(params) is params
    assert model_digest(own) == model_digest(params)
    # A tree: stacks, and everything else by its name.
    (stack,) = {leaf.shape[0] for leaf in jax.tree.leaves(own.layers)}
    assert stack == LAYERS
    doubled = jax.tree.map(lambda x: 2 * x, own)
    assert_same(doubled, jax.tree.map(lambda x: 2 * x, params))


def test_layers_are_slices_where_arrays_are_traced():
    own = in_stacks(model()).params
    found = jax.jit(lambda params: params["layer_1"])(own)
    assert_same(found, model().params["layer_1"])


def test_what_changes_layers_keeps_them_in_stacks():
    own = in_stacks(model()).params
    more = with_rest(own, {"other": jnp.ones(2)})
    assert isinstance(more, StackedParams) and more.layers is own.layers and "other" in more and "other" not in own
    assert isinstance(with_rest(model().params, {"other": jnp.ones(2)}), dict)
    alike, differ = [{"x": jnp.ones(2)}] * LAYERS, [{"x": jnp.ones(1 + index)} for index in range(LAYERS)]
    added = with_attention(own, alike)
    assert isinstance(added, StackedParams) and added.layers["mlp"] is own.layers["mlp"]
    assert_same(added, with_attention(model().params, alike))
    # Layers that are no longer alike are apart.
    assert isinstance(with_attention(own, differ), dict)
    assert_same(with_attention(own, differ), with_attention(model().params, differ))
    # Codes, and weights in host memory, are of layers apart.
    coded = kvjax.quantize_weights(in_stacks(model()), bits=8)
    assert quantize.is_quantized(coded.params["layer_2"]["mlp"]["up"]["kernel"])
    assert_same(coded.params, kvjax.quantize_weights(model(), bits=8).params)
    assert not isinstance(offload.offload(in_stacks(model()), 0.5).params, StackedParams)


def test_a_builder_holds_one_array_twice():
    builder = StackBuilder(LAYERS)
    held = []
    for index in range(LAYERS):
        builder.add((f"layer_{index}", "mlp", "kernel"), jnp.full((4, 8), index, jnp.bfloat16))
        held.append(builder.build({}).layers["mlp"]["kernel"])
    # Each write takes the memory of the stack before.
    assert [x.is_deleted() for x in held] == [True] * (LAYERS - 1) + [False]
    assert held[-1].shape == (LAYERS, 4, 8) and held[-1].dtype == jnp.bfloat16
    np.testing.assert_array_equal(held[-1][:, 0, 0].astype(np.float32), np.arange(LAYERS))


def test_a_checkpoint_is_read_into_stacks(tmp_path, monkeypatch):
    kvjax.save(model(), tmp_path / "m")
    plain = kvjax.load(tmp_path / "m", mesh="model:1")
    monkeypatch.setenv(layer_loop.VARIABLE, layer_loop.STACKED)
    own = kvjax.load(tmp_path / "m", mesh="model:1")
    assert isinstance(own.params, StackedParams) and not isinstance(plain.params, StackedParams)
    assert_same(own.params, plain.params)
    kernel = own.params.layers["mlp"]["up"]["kernel"]
    unstacked_kernel = plain.params["layer_0"]["mlp"]["up"]["kernel"]
    place = sharding.parameter_shardings(own.params, own.mesh).layers["mlp"]["up"]["kernel"]
    assert place.spec == PartitionSpec(None, *unstacked_kernel.sharding.spec)
    assert place.is_equivalent_to(kernel.sharding, 3)
    kvjax.save(own, tmp_path / "again")
    # Codes and weights in host memory are of layers apart.
    assert not isinstance(kvjax.load(tmp_path / "m", weights="int8").params, StackedParams)
    assert not isinstance(kvjax.load(tmp_path / "m", host_weights=0.5).params, StackedParams)
    monkeypatch.delenv(layer_loop.VARIABLE)
    assert_same(kvjax.load(tmp_path / "again").params, kvjax.load(tmp_path / "m").params)


def test_rows_may_follow_a_prefix():
    tokens, own = random_tokens(1, 12), in_stacks(model())
    reader = kvjax.contexts.with_prefix(own, kvjax.contexts.prefill(own, tokens, policies.full()))
    assert isinstance(reader.params, StackedParams)
    found = kvjax.generate(reader, random_tokens(2, 5), policies.full(), max_new_tokens=4)
    assert [each.start for each in found.layout.runs] == [0]
    unrolled = kvjax.contexts.with_prefix(model(), kvjax.contexts.prefill(model(), tokens, policies.full()))
    expected = kvjax.generate(unrolled, random_tokens(2, 5), policies.full(), max_new_tokens=4)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=2e-5)


def test_shapes_are_stacked_with_their_shardings():
    place = NamedSharding(sharding.abstract_mesh("data:2,model:4", 8, 4), PartitionSpec(None, "model"))
    shape = jax.ShapeDtypeStruct((4, 8), jnp.float32, sharding=place)
    own = stacked({"layer_0": {"x": shape}, "layer_1": {"x": shape}, "embed": shape})
    assert own.layers["x"].shape == (2, 4, 8) and own.layers["x"].sharding.spec == PartitionSpec(None, None, "model")
    assert own["layer_1"]["x"] == shape
