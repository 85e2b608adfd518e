"""Orbax keeps parameters and caches bit for bit, and puts them where a mesh wants them."""

import dataclasses
import gc
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.checkpoint import orbax
from kvjax.errors import CheckpointError
from kvjax.generation.generate import generate
from kvjax.generation.prefill import prefill
from kvjax.models import families
from kvjax.models.model import Model
from tests.checkpoint.folders import raw_config
from tests.tiny import random_tokens, random_weights, tiny


@pytest.fixture(scope="module")
def model():
    config = families.read(raw_config("llama"))
    return Model(config, random_weights(config))


def same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_params(model, tmp_path):
    orbax.save_params(tmp_path / "params", model.params)
    same(orbax.restore_params(tmp_path / "params", model.config), model.params)
    narrow = orbax.restore_params(tmp_path / "params", model.config, dtype=jnp.bfloat16)
    same(narrow, jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params))
    with pytest.raises(CheckpointError, match="exists"):
        orbax.save_params(tmp_path / "params", model.params)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(policies.full()), CacheSpec(policies.h2o(budget=6)), CacheSpec(policies.morphkv(budget=6, window=2)),
        CacheSpec(policies.h2o(budget=6), storage.int8(residual=2)),
        CacheSpec(policies.full(), selection=selection.quest(page=4, budget=12, first_layer=0)),
    ],
    ids=lambda spec: spec.name,
)  # fmt: skip
def test_state(spec, model, tmp_path):
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    state = generate(model, tokens, spec, max_new_tokens=3).state
    orbax.save_state(tmp_path / "state", state)
    same(orbax.restore_state(tmp_path / "state", state), state)
    same(orbax.restore_state(tmp_path / "state"), state)
    shapes = jax.eval_shape(lambda: state)
    same(orbax.restore_state(tmp_path / "state", shapes), state)
    with pytest.raises(CheckpointError, match=r"layers/0/0/position"):
        orbax.restore_state(tmp_path / "state", jax.eval_shape(lambda: jax.tree.map(lambda x: x[:1], state)))


def test_a_state_of_codes_alone_needs_a_target(model, tmp_path):
    spec = CacheSpec(policies.h2o(budget=6), storage.int8())
    state = generate(model, np.arange(12, dtype=np.int32)[None], spec, max_new_tokens=3).state
    orbax.save_state(tmp_path / "state", state)
    same(orbax.restore_state(tmp_path / "state", state), state)
    with pytest.raises(CheckpointError, match="give a target"):
        orbax.restore_state(tmp_path / "state")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_errors(model, tmp_path):
    with pytest.raises(CheckpointError, match="no folder"):
        orbax.restore_params(tmp_path / "absent", model.config)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        orbax.restore_params(tmp_path / "empty", model.config)
    orbax.save_params(tmp_path / "params", model.params)
    deeper = families.read(raw_config("llama", num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=r"layer_2.*missing"):
        orbax.restore_params(tmp_path / "params", deeper)
    wider = dataclasses.replace(model.config, mlp_size=32)
    with pytest.raises(CheckpointError, match=r"mlp"):
        orbax.restore_params(tmp_path / "params", wider)
    with pytest.raises(CheckpointError, match="KVState"):
        orbax.restore_state(tmp_path / "params")
    data = next(path for path in (tmp_path / "params").iterdir() if path.is_dir())
    shutil.rmtree(data)
    with pytest.raises(CheckpointError) as caught:
        orbax.restore_params(tmp_path / "params", model.config)
    assert "\n" not in str(caught.value)
    gc.collect()  # Orbax leaves futures of what it could not read, whose collection warns


@pytest.mark.sampled(0)
def test_sharded(tmp_path):
    """Eight simulated devices: `load` and Orbax put parameters and caches where the mesh wants them, unchanged."""
    script = Path(__file__).with_name("sharded.py")
    result = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_arrays_without_entries_come_back(tmp_path):
    """Orbax saves none; a storage has some where nothing is encoded yet that follows the prompt."""
    model, spec = tiny(layers=1).model, CacheSpec(policies.full(), storage.zipcache(window=8))
    limits = Limits(prompt=16, new_tokens=4)
    state = prefill(model, random_tokens(2, 12), spec, max_new_tokens=4, limits=limits).state
    assert any(leaf.size == 0 for leaf in jax.tree.leaves(state))
    orbax.save_state(tmp_path / "state", state)
    for target in (state, jax.eval_shape(lambda: state), None):
        found = orbax.restore_state(tmp_path / "state", target)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), found.layers[0][0].stores) == jax.tree.map(
            lambda x: (x.shape, x.dtype), state.layers[0][0].stores
        )
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            np.testing.assert_array_equal(one, other)
