"""Run by test_orbax.py in a process with eight simulated devices; takes an empty folder."""

import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from safetensors.numpy import save_file

from kvjax import policies, storage
from kvjax.checkpoint import orbax
from kvjax.checkpoint.huggingface import load, save
from kvjax.generation.generate import generate
from kvjax.models.quantize import WeightCodes
from kvjax.parallel import sharding
from tests.checkpoint.folders import assert_same, folder_with, raw_config


def main(folder: Path) -> None:
    mesh = sharding.make_mesh("data:2,model:4")
    sizes = {"num_key_value_heads": 4, "intermediate_size": 32}
    config, params, found = folder_with(folder / "hf", raw_config("phi3", **sizes))
    save_file(found, folder / "hf/model.safetensors")
    model = load(folder / "hf", mesh=mesh)
    assert model.mesh is mesh
    places = sharding.parameter_shardings(params, mesh)

    def check(tree):
        assert_same(tree, params)
        assert jax.tree.all(jax.tree.map(lambda leaf, place: leaf.sharding == place, tree, places))
        up = tree["layer_0"]["mlp"]["up"]["kernel"]
        assert {shard.data.shape for shard in up.addressable_shards} == {(16, 8)}

    check(model.params)
    save(model, folder / "saved")
    check(load(folder / "saved", mesh=mesh).params)
    assert_same(load(folder / "saved").params, params)
    orbax.save_params(folder / "params", model.params)
    check(orbax.restore_params(folder / "params", config, mesh=mesh))
    assert_same(orbax.restore_params(folder / "params", config), params)

    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    codes = WeightCodes(4, group=4)
    coded, alone = load(folder / "hf", mesh=mesh, weights=codes), load(folder / "hf", weights=codes)
    assert_same(coded.params, alone.params, None)
    places = sharding.parameter_shardings(coded.params, mesh)
    assert jax.tree.all(jax.tree.map(lambda leaf, place: leaf.sharding == place, coded.params, places))
    # [G, bytes, out] of [16, 32] and of [32, 16]: divided by outputs, and by groups of inputs.
    for name, shape in (("up", (4, 2, 8)), ("down", (2, 2, 16))):
        kernel = coded.params["layer_0"]["mlp"][name]["kernel"]
        assert {shard.data.shape for shard in kernel.codes.addressable_shards} == {shape}
    results = [generate(each, tokens, policies.h2o(budget=6), max_new_tokens=4) for each in (coded, alone)]
    np.testing.assert_array_equal(results[0].tokens, results[1].tokens)
    np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=1e-4)

    # Slots are divided too, and are again where the state is restored, also on another mesh.
    slots = sharding.make_mesh("data:2,model:2,context:2")
    held = storage.int8(residual=2)
    state = generate(
        load(folder / "saved", mesh=slots), tokens, policies.h2o(budget=6), storage=held, max_new_tokens=2
    ).state
    position = state.layers[0].position
    assert position.sharding.shard_shape(position.shape) == (1, 2, position.shape[2] // 2)
    orbax.save_state(folder / "state", state)
    on_host = jax.device_get(state)
    for target, where in ((None, slots), (state, slots), (jax.eval_shape(lambda: state), slots), (state, mesh)):
        again = orbax.restore_state(folder / "state", target, mesh=where)
        assert jax.tree.structure(again) == jax.tree.structure(state)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), on_host)
        for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
            assert where is mesh or one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other)
    # Four KV heads on four devices: each has all slots of one.
    assert {x.data.shape for x in again.layers[0].position.addressable_shards} == {(1, 1, position.shape[2])}
    alone = orbax.restore_state(folder / "state")
    assert len(alone.length.devices()) == 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))
