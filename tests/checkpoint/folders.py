"""Checkpoints made without torch: tiny configs of every family, random parameters, and the files that hold them."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.checkpoint import names
from kvjax.models import families
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_shapes

SMALL = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 4, "intermediate_size": 24, "ffn_dim": 24, "max_position_embeddings": 32, "word_embed_proj_dim": 8,
    "n_embd": 16, "n_layer": 2, "n_head": 4, "n_inner": 24, "n_positions": 32,
    "rotary_pct": 0.5, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip

#: What single families need at these sizes.
OWN: dict[str, dict[str, Any]] = {
    "stablelm": {"partial_rotary_factor": 0.5},
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


def raw_config(family: str, **changes: Any) -> dict[str, Any]:
    """A ``config.json``; keys of other families in it are ignored."""
    return {"model_type": family, **SMALL, **OWN.get(family, {}), **changes}


def random_params(config: DecoderConfig, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), parameter_shapes(config))


def get(params: Any, path: names.Path) -> Any:
    for key in path:
        params = params[key]
    return params


def tensors(config: DecoderConfig, params: Any) -> dict[str, np.ndarray]:
    """Returns the tensors that a checkpoint of these parameters holds."""
    return {
        t.name: t.merge([get(params, path)[t.index] if t.stack else get(params, path) for path in t.paths])
        for t in names.tensors(config)
    }


def flax_tree(found: dict[str, np.ndarray]) -> dict[str, Any]:
    """The same, as Flax models nest and name it."""
    tree: dict[str, Any] = {}
    for name, array in found.items():
        *module, leaf = name.split(".")
        if leaf == "weight" and any(word in module[-1] for word in ("embed", "wte", "wpe")):
            leaf = "embedding"
        elif leaf == "weight":
            leaf, array = ("kernel", array.T) if array.ndim == 2 else ("scale", array)
        node = tree
        for key in module:
            node = node.setdefault(key, {})
        node[leaf] = array
    return tree


def folder_with(path: Path, raw: dict[str, Any], seed: int = 0) -> tuple[DecoderConfig, Any, dict[str, np.ndarray]]:
    """A folder with this config.json and no weights yet; its config, random parameters, and their tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    config = families.read(raw)
    params = random_params(config, seed)
    return config, params, tensors(config, params)


def assert_same(actual: Any, expected: Any, dtype: Any = np.float32) -> None:
    """Equal trees; `dtype`: that the expected one is converted to, None = each leaf has its own."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert dtype is not None or one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other).astype(dtype or other.dtype))
