"""The table of Hugging Face model families: the keys of their ``config.json`` and the names of their tensors.

To support another family, add an entry to `FAMILIES`. `read` converts a ``config.json`` to a `DecoderConfig`, `write`
converts it back, and `kvjax.checkpoint.names` derives the tensors of a checkpoint from `Names`.
"""

from kvjax.errors import ConfigError
from kvjax.models import family
from kvjax.models.config import DecoderConfig
from kvjax.models.family import Family, Fields, Json, Keys, Names, setting
from kvjax.models.rope_keys import RopeKeys


def _opt(raw: Json, fields: Fields) -> Fields:
    """Reads where OPT normalises: OPT-350M does so after the residual connections and has no final norm."""
    before = setting("opt", raw, "do_layer_norm_before", True, bool)
    removed = setting("opt", raw, "_remove_final_layer_norm", False, bool)
    return {"norm_position": "pre" if before else "post", "final_norm": before and not removed}


def _write_opt(config: DecoderConfig) -> Json:
    """Inverts `_opt`."""
    before = config.norm_position == "pre"
    return {"do_layer_norm_before": before, "_remove_final_layer_norm": before and not config.final_norm}


def _gemma(raw: Json, fields: Fields) -> Fields:
    """Reads Gemma's activation function and the scale of its embedding."""
    # Gemma 1 was trained with the tanh approximation but published with hidden_act "gelu"; later releases added the
    # key hidden_activation, which takes precedence.
    activation = raw.get("hidden_activation") or fields["activation"]
    if raw.get("hidden_activation") is None and activation == "gelu":
        activation = "gelu_pytorch_tanh"
    return {"activation": activation, "embed_scale": fields["hidden_size"] ** 0.5}


_LLAMA_KEYS: Keys = {
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 4096),
    "num_layers": ("num_hidden_layers", 32),
    "num_heads": ("num_attention_heads", 32),
    "num_kv_heads": ("num_key_value_heads", None),
    "head_dim": ("head_dim", None),
    "mlp_size": ("intermediate_size", 11008),
    "max_positions": ("max_position_embeddings", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "activation": ("hidden_act", "silu"),
    "tie_embeddings": ("tie_word_embeddings", False),
    "bos_token_id": ("bos_token_id", 1),
    "eos_token_ids": ("eos_token_id", 2),
    "pad_token_id": ("pad_token_id", None),
}
_BIAS_KEYS: Keys = {
    "qkv_bias": ("attention_bias", False),
    "out_bias": ("attention_bias", False),
}
_QWEN_KEYS: Keys = _LLAMA_KEYS | {
    "vocab_size": ("vocab_size", 151936),
    "num_kv_heads": ("num_key_value_heads", 32),
    "mlp_size": ("intermediate_size", 22016),
    "max_positions": ("max_position_embeddings", 32768),
    "bos_token_id": ("bos_token_id", None),
    "eos_token_ids": ("eos_token_id", None),
}
_LAYER_NORM = {"norm": "layer", "norm_bias": True, "gated_mlp": False}

_LLAMA_TOP = {"embed_tokens": "embed", "norm": "final_norm"}
_LLAMA_LAYER: dict[str, str | tuple[str, ...]] = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
_LLAMA_NAMES = Names("model.", _LLAMA_TOP, _LLAMA_LAYER)
_FUSED_QKV = ("attention.query", "attention.key", "attention.value")

#: ``model_type`` -> family.
FAMILIES: dict[str, Family] = {
    "opt": Family(
        architecture="OPTForCausalLM",
        keys={
            "vocab_size": ("vocab_size", 50272),
            "hidden_size": ("hidden_size", 768),
            "num_layers": ("num_hidden_layers", 12),
            "num_heads": ("num_attention_heads", 12),
            "mlp_size": ("ffn_dim", 3072),
            "max_positions": ("max_position_embeddings", 2048),
            "embed_size": ("word_embed_proj_dim", None),
            "activation": ("activation_function", "relu"),
            "qkv_bias": ("enable_bias", True),
            "out_bias": ("enable_bias", True),
            "mlp_bias": ("enable_bias", True),
            "norm_affine": ("layer_norm_elementwise_affine", True),
            "tie_embeddings": ("tie_word_embeddings", True),
            "bos_token_id": ("bos_token_id", 2),
            "eos_token_ids": ("eos_token_id", 2),
            "pad_token_id": ("pad_token_id", 1),
        },
        fixed=_LAYER_NORM | {"norm_eps": 1e-5, "learned_positions": True, "position_offset": 2},
        names=Names(
            prefix="model.decoder.",
            top={
                "embed_tokens": "embed",
                "embed_positions": "position_embed",
                "project_in": "embed_in",
                "project_out": "embed_out",
                "final_layer_norm": "final_norm",
            },
            layer={
                "self_attn_layer_norm": "attention_norm",
                "self_attn.q_proj": "attention.query",
                "self_attn.k_proj": "attention.key",
                "self_attn.v_proj": "attention.value",
                "self_attn.out_proj": "attention.out",
                "final_layer_norm": "mlp_norm",
                "fc1": "mlp.up",
                "fc2": "mlp.down",
            },
        ),
        rope=None,
        finish=_opt,
        unfinish=_write_opt,
    ),
    "llama": Family(
        architecture="LlamaForCausalLM",
        keys=_LLAMA_KEYS | _BIAS_KEYS | {"mlp_bias": ("mlp_bias", False)},
        fixed={},
        names=_LLAMA_NAMES,
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        keys=_LLAMA_KEYS
        | {
            "num_kv_heads": ("num_key_value_heads", 8),
            "mlp_size": ("intermediate_size", 14336),
            "max_positions": ("max_position_embeddings", 131072),
        },
        fixed={},
        names=_LLAMA_NAMES,
        windows="all",
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        keys=_QWEN_KEYS,
        fixed={"qkv_bias": True},
        names=_LLAMA_NAMES,
        windows="some",
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        keys=_QWEN_KEYS | _BIAS_KEYS | {"head_dim": ("head_dim", 128)},
        fixed={"qk_norm": True},
        names=_LLAMA_NAMES,
        windows="some",
    ),
    "gemma": Family(
        architecture="GemmaForCausalLM",
        keys=_LLAMA_KEYS
        | _BIAS_KEYS
        | {
            "vocab_size": ("vocab_size", 256000),
            "hidden_size": ("hidden_size", 3072),
            "num_layers": ("num_hidden_layers", 28),
            "num_heads": ("num_attention_heads", 16),
            "num_kv_heads": ("num_key_value_heads", 16),
            "head_dim": ("head_dim", 256),
            "mlp_size": ("intermediate_size", 24576),
            "max_positions": ("max_position_embeddings", 8192),
            "activation": ("hidden_act", "gelu_pytorch_tanh"),
            "tie_embeddings": ("tie_word_embeddings", True),
            "bos_token_id": ("bos_token_id", 2),
            "eos_token_ids": ("eos_token_id", 1),
            "pad_token_id": ("pad_token_id", 0),
        },
        fixed={"norm_offset": 1.0},
        names=_LLAMA_NAMES,
        only={"use_bidirectional_attention": False},
        finish=_gemma,
        unfinish=lambda config: {"hidden_activation": config.activation},
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        keys=_LLAMA_KEYS
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
            top=_LLAMA_TOP,
            layer={
                "input_layernorm": "attention_norm",
                "self_attn.qkv_proj": _FUSED_QKV,
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
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        keys={
            "vocab_size": ("vocab_size", 50432),
            "hidden_size": ("hidden_size", 6144),
            "num_layers": ("num_hidden_layers", 44),
            "num_heads": ("num_attention_heads", 64),
            "mlp_size": ("intermediate_size", 24576),
            "max_positions": ("max_position_embeddings", 2048),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "activation": ("hidden_act", "gelu"),
            "parallel_residual": ("use_parallel_residual", True),
            "qkv_bias": ("attention_bias", True),
            "out_bias": ("attention_bias", True),
            "tie_embeddings": ("tie_word_embeddings", False),
            "bos_token_id": ("bos_token_id", 0),
            "eos_token_ids": ("eos_token_id", 2),
            "pad_token_id": ("pad_token_id", None),
        },
        fixed=_LAYER_NORM | {"mlp_bias": True},
        names=Names(
            prefix="gpt_neox.",
            top={"embed_in": "embed", "final_layer_norm": "final_norm"},
            layer={
                "input_layernorm": "attention_norm",
                "attention.query_key_value": _FUSED_QKV,
                "attention.dense": "attention.out",
                "post_attention_layernorm": "mlp_norm",
                "mlp.dense_h_to_4h": "mlp.up",
                "mlp.dense_4h_to_h": "mlp.down",
            },
            head="embed_out",
            interleaved=True,
            buffers=(".rotary_emb.inv_freq", ".attention.bias", ".attention.masked_bias"),
        ),
        rope=RopeKeys(theta="rotary_emb_base", partial="rotary_pct", partial_default=0.25),
    ),
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        keys={
            "vocab_size": ("vocab_size", 50257),
            "hidden_size": ("n_embd", 768),
            "num_layers": ("n_layer", 12),
            "num_heads": ("n_head", 12),
            "mlp_size": ("n_inner", None),
            "max_positions": ("n_positions", 1024),
            "norm_eps": ("layer_norm_epsilon", 1e-5),
            "activation": ("activation_function", "gelu_new"),
            "tie_embeddings": ("tie_word_embeddings", True),
            "bos_token_id": ("bos_token_id", 50256),
            "eos_token_ids": ("eos_token_id", 50256),
            "pad_token_id": ("pad_token_id", None),
        },
        fixed=_LAYER_NORM | {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "learned_positions": True},
        names=Names(
            prefix="transformer.",
            top={"wte": "embed", "wpe": "position_embed", "ln_f": "final_norm"},
            layers="h",
            layer={
                "ln_1": "attention_norm",
                "attn.c_attn": _FUSED_QKV,
                "attn.c_proj": "attention.out",
                "ln_2": "mlp_norm",
                "mlp.c_fc": "mlp.up",
                "mlp.c_proj": "mlp.down",
            },
            in_first=True,
            buffers=(".attn.bias", ".attn.masked_bias"),
        ),
        rope=None,
        only={
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "reorder_and_upcast_attn": False,
            "add_cross_attention": False,
        },
    ),
}


# Upper bounds that no real decoder comes near. Larger numbers, from a damaged file, would exhaust memory while the
# parameters are only being described.
MAX_SIZE = 1 << 26
MAX_LAYERS = 1000


def read(raw: Json) -> DecoderConfig:
    """Converts a ``config.json`` to a `DecoderConfig`. Absent keys have the defaults of ``transformers``.

    Args:
      raw: the parsed ``config.json``.

    Raises:
      ConfigError: if the family is unknown, an option is not supported or a value is not valid.
    """
    name = raw.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(f"model_type {name!r} in config.json is not supported; supported: {', '.join(FAMILIES)}.")
    config = family.read(name, FAMILIES[name], raw)
    sizes = (config.vocab_size, config.hidden_size, config.mlp_size, config.num_heads, config.head_dim)
    if config.num_layers > MAX_LAYERS or max(*sizes, config.max_positions) > MAX_SIZE:
        raise ConfigError(
            f"config.json of {name} cannot be true: it describes {config.num_layers} layers, a vocabulary of "
            f"{config.vocab_size}, hidden size {config.hidden_size}, MLP size {config.mlp_size}, {config.num_heads} "
            f"heads of {config.head_dim} and {config.max_positions} positions."
        )
    return config


def write(config: DecoderConfig) -> Json:
    """Converts a `DecoderConfig` to a ``config.json``; inverts `read`.

    Args:
      config: the decoder.

    Returns:
      The JSON object, with keys that old and new releases of ``transformers`` read.

    Raises:
      ConfigError: if the family is not in the table.
    """
    if config.family not in FAMILIES:
        raise ConfigError(f"family {config.family!r} is not one that kvjax can write: {', '.join(FAMILIES)}.")
    return family.write(FAMILIES[config.family], config)
