"""Families with RMS norms and a gated MLP, as LLaMA."""

from kvjax.errors import ConfigError, shown
from kvjax.models import values
from kvjax.models.family import FULL, SLIDING, Family, Names, setting
from kvjax.models.rope_config import RopeKeys
from kvjax.models.tables.common import (
    BIAS_KEYS,
    FUSED_QKV,
    LLAMA_ATTENTION,
    LLAMA_KEYS,
    LLAMA_MLP,
    LLAMA_NAMES,
    LLAMA_TOP,
    OUTPUT_NORMS,
    QWEN_KEYS,
    qwen_layer_types,
    write_qwen,
)
from kvjax.models.values import Json

SMOLLM3_INTERVAL = 4  # SmolLM3's layers from one without a rotary embedding to the next, if config.json has no list


def _rotating(raw: Json, layers: int) -> list[bool]:
    """Returns which layers of SmolLM3 have a rotary embedding."""
    flags = raw.get("no_rope_layers")
    if flags is None:
        every = setting("smollm3", raw, "no_rope_layer_interval", SMOLLM3_INTERVAL, int)
        return [(index + 1) % every != 0 for index in range(layers)]
    if not isinstance(flags, list) or len(flags) < layers or not all(values.is_whole(flag, 0, 1) for flag in flags):
        raise ConfigError(
            f"config.json of smollm3: no_rope_layers must list 1 or 0 for each of the {layers} layers (1 for a layer "
            f"with a rotary embedding), but is {shown(flags)}."
        )
    return [bool(flag) for flag in flags[:layers]]


FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        keys=LLAMA_KEYS | BIAS_KEYS | {"mlp_bias": ("mlp_bias", False)},
        fixed={},
        names=LLAMA_NAMES,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        keys=LLAMA_KEYS
        | {
            "num_kv_heads": ("num_key_value_heads", 8),
            "mlp_size": ("intermediate_size", 14336),
            "max_positions": ("max_position_embeddings", 131072),
        },
        fixed={},
        names=LLAMA_NAMES,
        windows="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        keys=QWEN_KEYS,
        fixed={"qkv_bias": True},
        names=LLAMA_NAMES,
        windows="listed",
        window_switch=True,
        layer_types=qwen_layer_types,
        unfinish=write_qwen,
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        keys=QWEN_KEYS | BIAS_KEYS | {"head_dim": ("head_dim", 128)},
        fixed={"qk_norm": True},
        names=LLAMA_NAMES,
        windows="listed",
        window_switch=True,
        layer_types=qwen_layer_types,
        unfinish=write_qwen,
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        keys=LLAMA_KEYS
        | {
            "vocab_size": ("vocab_size", 32064),
            "hidden_size": ("hidden_size", 3072),
            "mlp_size": ("intermediate_size", 8192),
            "max_positions": ("max_position_embeddings", 4096),
            "norm_eps": ("rms_norm_eps", 1e-5),
            "eos_token_ids": ("eos_token_id", 32000),
            "pad_token_id": ("pad_token_id", 32000),
        },
        fixed={},
        names=Names(
            prefix="model.",
            top=LLAMA_TOP,
            layer={
                "input_layernorm": "attention_norm",
                "self_attn.qkv_proj": FUSED_QKV,
                "self_attn.o_proj": "attention.out",
                "post_attention_layernorm": "mlp_norm",
                "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
                "mlp.down_proj": "mlp.down",
            },
        ),
        rope=RopeKeys(partial="partial_rotary_factor", partial_default=1.0, original_default=4096),
        windows="all",
        window_default=None,
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        keys=LLAMA_KEYS
        | BIAS_KEYS
        | {
            "vocab_size": ("vocab_size", 50304),
            "norm_eps": ("rms_norm_eps", 1e-5),
            "bos_token_id": ("bos_token_id", None),
            "eos_token_ids": ("eos_token_id", 50279),
            "pad_token_id": ("pad_token_id", 1),
        },
        fixed={"norm_position": "output", "qk_norm": True, "qk_norm_form": "joint"},
        names=Names("model.", LLAMA_TOP, LLAMA_ATTENTION | LLAMA_MLP | OUTPUT_NORMS),
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        keys=LLAMA_KEYS
        | BIAS_KEYS
        | {
            "vocab_size": ("vocab_size", 128256),
            "hidden_size": ("hidden_size", 2048),
            "num_layers": ("num_hidden_layers", 36),
            "num_heads": ("num_attention_heads", 16),
            "num_kv_heads": ("num_key_value_heads", 4),
            "max_positions": ("max_position_embeddings", 32768),
            "mlp_bias": ("mlp_bias", False),
            "tie_embeddings": ("tie_word_embeddings", True),
            "bos_token_id": ("bos_token_id", 128000),
            "eos_token_ids": ("eos_token_id", 128001),
            "pad_token_id": ("pad_token_id", 128004),
        },
        fixed={},
        names=LLAMA_NAMES,
        rope=RopeKeys(theta_default=2_000_000.0),
        windows="listed",
        window_default=None,
        window_switch=True,
        layer_types=lambda name, raw, layers: [FULL if rotates else SLIDING for rotates in _rotating(raw, layers)],
        ropes=lambda raw, fields: tuple(
            fields["rope"] if rotates else None for rotates in _rotating(raw, fields["num_layers"])
        ),
        unfinish=lambda config: {
            "no_rope_layers": [int(config.kind(index).rope is not None) for index in range(config.num_layers)]
        },
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        keys=LLAMA_KEYS
        | BIAS_KEYS
        | {
            "mlp_bias": ("mlp_bias", False),
            "embed_scale": ("embedding_multiplier", 1.0),
            "residual_scale": ("residual_multiplier", 1.0),
            "attention_scale": ("attention_multiplier", 1.0),
        },
        fixed={},
        names=LLAMA_NAMES,
        finish=lambda raw, fields: {"logit_scale": 1 / setting("granite", raw, "logits_scaling", 1.0, float)},
        unfinish=lambda config: {"logits_scaling": 1 / config.logit_scale},
    ),
}
