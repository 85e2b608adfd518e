"""The families of Gemma."""

import math

from kvjax.models import rope_config
from kvjax.models.config import DecoderConfig
from kvjax.models.family import Family, Fields, Keys, Names, periodic, setting
from kvjax.models.rope_config import RopeKeys
from kvjax.models.tables.common import (
    BIAS_KEYS,
    LLAMA_ATTENTION,
    LLAMA_KEYS,
    LLAMA_MLP,
    LLAMA_NAMES,
    LLAMA_TOP,
    OUTPUT_NORMS,
)
from kvjax.models.values import Json
from kvjax.numerics.rope import Rope


def _gemma(raw: Json, fields: Fields) -> Fields:
    """Reads Gemma's activation function and the scale of its embedding."""
    # Gemma 1 was trained with the tanh approximation but published with hidden_act "gelu"; later releases added the
    # key hidden_activation, which takes precedence.
    chosen = setting("gemma", raw, "hidden_activation", None, str | None)
    activation = chosen or fields["activation"]
    if chosen is None and activation == "gelu":
        activation = "gelu_pytorch_tanh"
    return {"activation": activation, "embed_scale": fields["hidden_size"] ** 0.5}


def _scales(raw: Json, fields: Fields) -> Fields:
    """Reads the scales of the embedding and of the logits of attention (Gemma 2 and 3)."""
    scalar = setting(fields["family"], raw, "query_pre_attn_scalar", 256.0, float)
    return {"embed_scale": fields["hidden_size"] ** 0.5, "attention_scale": scalar**-0.5}


def _write_scales(config: DecoderConfig) -> Json:
    """Inverts `_scales`."""
    scalar = (config.attention_scale or config.head_dim**-0.5) ** -2
    # transformers takes whole numbers only, which two roundings may have moved.
    return {"query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar)) else scalar}


_KEYS: Keys = (
    LLAMA_KEYS
    | BIAS_KEYS
    | {
        "vocab_size": ("vocab_size", 256000),
        "hidden_size": ("hidden_size", 2304),
        "num_layers": ("num_hidden_layers", 26),
        "num_heads": ("num_attention_heads", 8),
        "num_kv_heads": ("num_key_value_heads", 4),
        "head_dim": ("head_dim", 256),
        "mlp_size": ("intermediate_size", 9216),
        "max_positions": ("max_position_embeddings", 8192),
        "activation": ("hidden_activation", "gelu_pytorch_tanh"),
        "tie_embeddings": ("tie_word_embeddings", True),
        "bos_token_id": ("bos_token_id", 2),
        "eos_token_ids": ("eos_token_id", 1),
        "pad_token_id": ("pad_token_id", 0),
    }
)
_FIXED = {"norm_offset": 1.0, "norm_position": "both"}
_NAMES = Names("model.", LLAMA_TOP, LLAMA_ATTENTION | LLAMA_MLP | OUTPUT_NORMS)
_GEMMA3_ROPE = RopeKeys(theta_default=1_000_000.0, local_theta="rope_local_base_freq")


def _gemma3_ropes(raw: Json, fields: Fields) -> tuple[Rope | None, ...]:
    """Reads the rotary embedding of each layer: layers with a sliding window have their own."""
    local = rope_config.read_local("gemma3_text", raw, _GEMMA3_ROPE, fields["head_dim"], fields["max_positions"])
    return tuple(local if window else fields["rope"] for window in fields["windows"])


def _local_theta(config: DecoderConfig) -> float:
    """Returns the base of the frequencies of layers with a sliding window."""
    kinds = [config.kind(index) for index in range(config.num_layers)]
    return next((kind.rope.theta for kind in kinds if kind.window and kind.rope), rope_config.THETA)


FAMILIES: dict[str, Family] = {
    "gemma": Family(
        architecture="GemmaForCausalLM",
        keys=LLAMA_KEYS
        | BIAS_KEYS
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
        names=LLAMA_NAMES,
        only={"use_bidirectional_attention": False},
        finish=_gemma,
        unfinish=lambda config: {"hidden_activation": config.activation},
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        keys=_KEYS
        | {
            "attention_soft_cap": ("attn_logit_softcapping", 50.0),
            "logit_soft_cap": ("final_logit_softcapping", 30.0),
        },
        fixed=_FIXED,
        names=_NAMES,
        windows="listed",
        layer_types=periodic(2),
        only={"use_bidirectional_attention": False},
        finish=_scales,
        unfinish=_write_scales,
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        keys=_KEYS
        | {
            "vocab_size": ("vocab_size", 262208),
            "max_positions": ("max_position_embeddings", 131072),
            "logit_soft_cap": ("final_logit_softcapping", None),
        },
        fixed=_FIXED | {"qk_norm": True},
        names=_NAMES,
        rope=_GEMMA3_ROPE,
        windows="listed",
        layer_types=periodic(6),
        ropes=_gemma3_ropes,
        # transformers reads the first of these keys and ignores it.
        only={"attn_logit_softcapping": None, "use_bidirectional_attention": False},
        finish=_scales,
        unfinish=lambda config: _write_scales(config) | {"rope_local_base_freq": _local_theta(config)},
    ),
}
