"""Names and layouts of tensors."""

import math

import jax
import numpy as np
import pytest

from kvjax.checkpoint import names
from kvjax.models import families
from kvjax.models.parameters import parameter_shapes
from tests.checkpoint.folders import get, random_params, raw_config


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_every_parameter_is_in_one_tensor(family):
    config = families.read(raw_config(family))
    params = random_params(config)
    covered: dict[names.Path, int] = {}
    stacks: dict[names.Path, int] = {}
    for tensor in names.tensors(config):
        parts = [get(params, path)[tensor.index] if tensor.stack else get(params, path) for path in tensor.paths]
        merged = tensor.merge(parts)
        assert merged.shape == tensor.shape
        for part, back in zip(parts, tensor.split(merged), strict=True):
            np.testing.assert_array_equal(part, back)
        covered |= {path: covered.get(path, 0) + 1 for path in tensor.paths}
        stacks |= dict.fromkeys(tensor.paths, tensor.stack or 1)
    paths = [
        tuple(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(parameter_shapes(config))[0]
    ]
    assert sorted(covered) == sorted(paths)
    assert covered == stacks  # once, or once for each expert
    total = sum(math.prod(tensor.shape) for tensor in names.tensors(config))
    assert total == sum(leaf.size for leaf in jax.tree.leaves(params))


def test_gpt_neox_interleaves_by_head():
    """Rows of the fused tensor: query, key, value of head 0, then of head 1 (four heads of four features here)."""
    config = families.read(raw_config("gpt_neox"))
    fused = next(t for t in names.tensors(config) if t.name == "gpt_neox.layers.1.attention.query_key_value.bias")
    query, key, value = fused.split(np.arange(48, dtype=np.float32))
    np.testing.assert_array_equal(query, [0, 1, 2, 3, 12, 13, 14, 15, 24, 25, 26, 27, 36, 37, 38, 39])
    np.testing.assert_array_equal(key, query + 4)
    np.testing.assert_array_equal(value, query + 8)
    assert fused.paths[1] == ("layer_1", "attention", "key", "bias")


def test_gpt2_is_stored_as_ours_are():
    fused = next(
        t for t in names.tensors(families.read(raw_config("gpt2"))) if t.name.endswith("h.0.attn.c_attn.weight")
    )
    array = np.random.default_rng(0).standard_normal((16, 48)).astype(np.float32)
    np.testing.assert_array_equal(fused.split(array)[1], array[:, 16:32])


def test_phi3_splits_in_order():
    tensors = {t.name: t for t in names.tensors(families.read(raw_config("phi3")))}
    parts = tensors["model.layers.0.self_attn.qkv_proj.weight"].split(
        np.arange(32 * 16, dtype=np.float32).reshape(32, 16)
    )
    assert [part.shape for part in parts] == [(16, 16), (16, 8), (16, 8)]
    assert [part[0, 0] for part in parts] == [0, 16 * 16, 24 * 16]
    assert tensors["model.layers.0.mlp.gate_up_proj.weight"].paths[0][-2] == "gate"


@pytest.mark.parametrize(
    ("family", "found", "expected"),
    [
        ("opt", "decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("opt", "model.decoder.layers.0.fc1.weight", "model.decoder.layers.0.fc1.weight"),
        ("gpt2", "h.0.ln_1.weight", "transformer.h.0.ln_1.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", "transformer.h.0.attn.c_attn.bias"),
        ("gpt2", "transformer.h.0.attn.bias", None),
        ("gpt2", "h.11.attn.masked_bias", None),
        ("gpt2", "lm_head.weight", "lm_head.weight"),
        ("llama", "layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("gpt_neox", "gpt_neox.layers.3.attention.bias", None),
        ("gpt_neox", "gpt_neox.layers.3.attention.rotary_emb.inv_freq", None),
        ("gpt_neox", "layers.3.attention.dense.bias", "gpt_neox.layers.3.attention.dense.bias"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gpt_neox", "embed_out.weight", "embed_out.weight"),
    ],
)
def test_names_in_the_wild(family, found, expected):
    assert names.canonical(family, found) == expected
