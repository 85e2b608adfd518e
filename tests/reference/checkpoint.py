"""Reads a Hugging Face LLaMA checkpoint into the params tree, without the library's own loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.reference.decoder import ReferenceConfig


def load_llama(folder: str | Path) -> tuple[dict[str, Any], ReferenceConfig]:
    """The numpy params tree (projections transposed to [in, out]) and configuration of one checkpoint."""
    from safetensors.numpy import load_file

    raw = json.loads((Path(folder) / "config.json").read_text())
    weights: dict[str, np.ndarray] = load_file(Path(folder) / "model.safetensors")
    config = ReferenceConfig(
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        vocab_size=raw["vocab_size"],
        norm_eps=raw["rms_norm_eps"],
        rope_theta=raw["rope_parameters"]["rope_theta"],
    )
    params: dict[str, Any] = {
        "embed": {"tokens": weights["model.embed_tokens.weight"]},
        "final_norm": {"scale": weights["model.norm.weight"]},
    }
    if "lm_head.weight" in weights:
        params["head"] = {"kernel": weights["lm_head.weight"].T}
    for index in range(config.num_layers):
        here = f"model.layers.{index}"
        attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "o_proj"}
        mlp = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
        params[f"layer_{index}"] = {
            "attention_norm": {"scale": weights[f"{here}.input_layernorm.weight"]},
            "attention": {
                ours: {"kernel": weights[f"{here}.self_attn.{theirs}.weight"].T} for ours, theirs in attention.items()
            },
            "mlp_norm": {"scale": weights[f"{here}.post_attention_layernorm.weight"]},
            "mlp": {ours: {"kernel": weights[f"{here}.mlp.{theirs}.weight"].T} for ours, theirs in mlp.items()},
        }
    return params, config
