"""Tiny random checkpoints of every family, made by ``transformers``."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

COMMON = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA = COMMON | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
OPT = COMMON | {"ffn_dim": 48, "max_position_embeddings": 64, "word_embed_proj_dim": 32}
NEOX = COMMON | {"intermediate_size": 48, "max_position_embeddings": 64}
GPT2 = {
    "vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
#: Longer than the trained length of every stretched rope and than every window below.
LENGTH = 40


@dataclasses.dataclass(frozen=True)
class Case:
    """A checkpoint: its ``transformers`` family, arguments of the config, and edits of the saved config.json."""

    name: str
    family: str
    arguments: dict[str, Any]
    edit: Callable[[dict[str, Any]], dict[str, Any]] = lambda raw: raw


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **settings}}


def old_keys(**keys: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Replaces today's ``rope_parameters`` by the keys of older releases."""
    return lambda raw: {key: value for key, value in raw.items() if key != "rope_parameters"} | keys


def without(*names: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda raw: {key: value for key, value in raw.items() if key not in names}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}
SHORT = {"max_position_embeddings": 16}
PHI3_LONG = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
GRANITE = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.1, "logits_scaling": 0.3,
}  # fmt: skip
GEMMA = LLAMA | {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 20}
GEMMA3 = {
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
EXPERTS = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN_SLIDES = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CASES = [
    Case("opt", "opt", OPT),
    Case("opt-350m", "opt", OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    Case("opt-post-norm", "opt", OPT | {"do_layer_norm_before": False}),
    Case("opt-projected-pre-norm", "opt", OPT | {"word_embed_proj_dim": 16}),
    Case("opt-no-final-norm", "opt", OPT | {"_remove_final_layer_norm": True}),
    Case("opt-no-bias-gelu", "opt", OPT | {"enable_bias": False, "activation_function": "gelu"}),
    Case("opt-plain-norms-untied", "opt", OPT | {"layer_norm_elementwise_affine": False, "tie_word_embeddings": False}),
    Case("llama-mha", "llama", LLAMA | {"num_key_value_heads": 4}),
    Case("llama-gqa-tied", "llama", LLAMA | {"tie_word_embeddings": True}),
    Case("llama-mqa-biases", "llama", LLAMA | {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    Case("llama-head-dim", "llama", LLAMA | {"head_dim": 16}),
    Case("llama-linear", "llama", LLAMA | SHORT | rope("linear", factor=4.0)),
    Case("llama-dynamic", "llama", LLAMA | SHORT | rope("dynamic", factor=2.0)),
    Case("llama-llama3", "llama", LLAMA | rope("llama3", **LLAMA3)),
    Case("llama-yarn", "llama", LLAMA | rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    Case(
        "llama-yarn-all-settings",
        "llama",
        LLAMA
        | rope("yarn", rope_theta=10.0, factor=4.0, original_max_position_embeddings=16, beta_fast=1.2, beta_slow=0.5,
               truncate=False, mscale=0.7, mscale_all_dim=0.4),
    ),
    Case("llama-longrope", "llama", LLAMA | rope("longrope", **FACTORS, original_max_position_embeddings=16)),
    Case("llama-old-theta", "llama", LLAMA, old_keys(rope_theta=50.0)),
    Case("llama-old-linear", "llama", LLAMA, old_keys(rope_theta=50.0, rope_scaling={"type": "linear", "factor": 2})),
    Case("llama-old-llama3", "llama", LLAMA, old_keys(rope_theta=50.0, rope_scaling={"rope_type": "llama3"} | LLAMA3)),
    Case("mistral", "mistral", LLAMA | {"sliding_window": None}),
    Case("mistral-window", "mistral", LLAMA | {"sliding_window": 7, "head_dim": 12}),
    Case("qwen2", "qwen2", LLAMA | {"tie_word_embeddings": True}),
    Case("qwen2-windows", "qwen2", LLAMA | QWEN_SLIDES),
    Case("qwen2-windows-old-keys", "qwen2", LLAMA | QWEN_SLIDES, without("layer_types")),
    Case("qwen2-yarn", "qwen2", LLAMA | rope("yarn", factor=4.0, original_max_position_embeddings=16)),
    Case("qwen3", "qwen3", LLAMA | {"head_dim": 16}),
    Case("qwen3-windows-bias", "qwen3", LLAMA | QWEN_SLIDES | {"head_dim": 8, "attention_bias": True}),
    Case("gpt_neox", "gpt_neox", NEOX),
    Case("gpt_neox-sequential", "gpt_neox", NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True}),
    Case("gpt_neox-no-bias", "gpt_neox", NEOX | {"attention_bias": False}),
    Case("gpt_neox-old-keys", "gpt_neox", NEOX, old_keys(rotary_emb_base=500, rotary_pct=0.5)),
    Case(
        "gpt_neox-linear", "gpt_neox",
        NEOX | rope("linear", factor=2.0, partial_rotary_factor=0.5),
    ),
    Case("gpt2", "gpt2", GPT2),
    Case("gpt2-inner-untied", "gpt2", GPT2 | {"n_inner": 40, "tie_word_embeddings": False}),
    Case("gemma-mqa", "gemma", LLAMA | {"num_key_value_heads": 1, "head_dim": 16}),
    Case("gemma-legacy-gelu", "gemma", LLAMA | {"head_dim": 16, "hidden_act": "gelu", "attention_bias": True}),
    Case("phi3", "phi3", LLAMA),
    Case("phi3-window", "phi3", LLAMA | {"sliding_window": 7, "num_key_value_heads": 4}),
    Case("phi3-longrope", "phi3", LLAMA | PHI3_LONG | rope("longrope", **FACTORS)),
    Case(
        "phi3-partial-old-keys", "phi3", LLAMA | PHI3_LONG,
        old_keys(
            rope_theta=500.0, partial_rotary_factor=0.5,
            rope_scaling={"type": "longrope", "short_factor": [1.0, 1.2], "long_factor": [2.0, 3.0]},
        ),
    ),
    Case("gemma2", "gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0}),
    Case(
        "gemma2-no-caps-old-keys", "gemma2",
        GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
        without("layer_types"),
    ),
    Case("gemma3", "gemma3_text", GEMMA | GEMMA3),
    Case(
        "gemma3-old-keys", "gemma3_text", GEMMA | {"final_logit_softcapping": 4.0},
        lambda raw: old_keys(
            rope_theta=500.0, rope_local_base_freq=50.0, rope_scaling={"rope_type": "linear", "factor": 2.0},
            sliding_window_pattern=2,
        )(without("layer_types")(raw)),
    ),
    Case("mixtral", "mixtral", LLAMA | {"num_local_experts": 4}),
    Case(
        "mixtral-one-expert-window", "mixtral",
        LLAMA | {"num_local_experts": 3, "num_experts_per_tok": 1, "sliding_window": 7, "num_key_value_heads": 4},
    ),
    Case("qwen3_moe", "qwen3_moe", LLAMA | EXPERTS),
    Case(
        "qwen3_moe-hub-keys", "qwen3_moe",
        LLAMA | EXPERTS | {"norm_topk_prob": True, "use_sliding_window": True, "sliding_window": 7},
        lambda raw: {**without("num_local_experts")(raw), "num_experts": raw["num_local_experts"]},
    ),
    Case("starcoder2-window", "starcoder2", LLAMA | {"sliding_window": 7}),
    Case("starcoder2-no-bias", "starcoder2", LLAMA | {"use_bias": False, "tie_word_embeddings": False}),
    Case("stablelm", "stablelm", LLAMA),
    Case(
        "stablelm-parallel-bias-norms", "stablelm",
        LLAMA | {"use_parallel_residual": True, "use_qkv_bias": True, "qk_layernorm": True},
    ),
    Case("phi", "phi", LLAMA | {"num_key_value_heads": 4}),
    Case(
        "phi-norms-old-keys", "phi", LLAMA | {"qk_layernorm": True},
        old_keys(rope_theta=500.0, partial_rotary_factor=0.25),
    ),
    Case("olmo2", "olmo2", LLAMA),
    Case("olmo2-bias", "olmo2", LLAMA | {"attention_bias": True, "num_key_value_heads": 4}),
    Case("smollm3", "smollm3", LLAMA | {"no_rope_layer_interval": 2}),
    Case("smollm3-windows", "smollm3", LLAMA | QWEN_SLIDES | {"no_rope_layers": [0, 1], "attention_bias": True}),
    Case("granite", "granite", LLAMA | GRANITE),
    Case("cohere", "cohere", LLAMA | {"logit_scale": 0.5}),
    Case("cohere-norms-bias", "cohere", LLAMA | {"use_qk_norm": True, "attention_bias": True, "logit_scale": 0.3}),
    Case(
        "cohere2", "cohere2",
        LLAMA | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5},
    ),
]  # fmt: skip


def make(case: Case, folder: Path, **save: Any) -> Any:
    """Writes the checkpoint, every bias and norm random, and returns the model as ``transformers`` loads it."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(case.family, **case.arguments)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim == 2:
                parameter.copy_(noise * (0.7 if "emb" in name or "wte" in name else 1.5 * parameter.shape[1] ** -0.5))
            else:
                # a norm's weight is near 1, which Gemma adds itself; a bias near 0
                centre = (
                    float("norm" in name or "ln_" in name)
                    * name.endswith("weight")
                    * (not case.family.startswith("gemma"))
                )
                parameter.copy_(centre + 0.3 * noise)
    model.save_pretrained(folder, **save)
    path = Path(folder) / "config.json"
    path.write_text(json.dumps(case.edit(json.loads(path.read_text()))))
    return reload(folder)


def reload(folder: Path) -> Any:
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def tokens(length: int = LENGTH, vocab: int = 96) -> np.ndarray:
    return np.random.default_rng(1).integers(3, vocab, (2, length)).astype(np.int32)


def log_probabilities(model: Any, tokens: np.ndarray) -> np.ndarray:
    """[B, T, V] by ``transformers``."""
    import torch

    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long(), use_cache=False).logits
    return torch.log_softmax(logits.double(), -1).numpy()
