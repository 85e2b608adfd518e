"""Parts of the tables of several families: keys of ``config.json`` and names of tensors."""

from kvjax.errors import ConfigError, shown
from kvjax.models import values
from kvjax.models.config import DecoderConfig
from kvjax.models.family import FULL, SLIDING, Keys, Names
from kvjax.models.values import Json

LLAMA_KEYS: Keys = {
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
BIAS_KEYS: Keys = {
    "qkv_bias": ("attention_bias", False),
    "out_bias": ("attention_bias", False),
}
QWEN_KEYS: Keys = LLAMA_KEYS | {
    "vocab_size": ("vocab_size", 151936),
    "num_kv_heads": ("num_key_value_heads", 32),
    "mlp_size": ("intermediate_size", 22016),
    "max_positions": ("max_position_embeddings", 32768),
    "bos_token_id": ("bos_token_id", None),
    "eos_token_ids": ("eos_token_id", None),
}
QWEN_FULL_LAYERS = 28  # default of Qwen's max_window_layers: the number of first layers without a sliding window
LAYER_NORM = {"norm": "layer", "norm_bias": True, "gated_mlp": False}

LLAMA_TOP = {"embed_tokens": "embed", "norm": "final_norm"}
PLAIN_ATTENTION: dict[str, str | tuple[str, ...]] = {
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.query",
    "self_attn.k_proj": "attention.key",
    "self_attn.v_proj": "attention.value",
    "self_attn.o_proj": "attention.out",
    "post_attention_layernorm": "mlp_norm",
}
LLAMA_ATTENTION = PLAIN_ATTENTION | {
    "self_attn.q_norm": "attention.query_norm",
    "self_attn.k_norm": "attention.key_norm",
}
LLAMA_MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
LLAMA_NAMES = Names("model.", LLAMA_TOP, LLAMA_ATTENTION | LLAMA_MLP)
#: The norms of outputs, and of the MLP's input where both are normalised.
OUTPUT_NORMS = {
    "post_attention_layernorm": "attention_out_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}
FUSED_QKV = ("attention.query", "attention.key", "attention.value")


def qwen_layer_types(name: str, raw: Json, layers: int) -> list[str]:
    """Returns which layers of Qwen slide; see `Family.layer_types`."""
    first = raw.get("max_window_layers", QWEN_FULL_LAYERS)
    if not values.is_whole(first, 0, values.MAX_LAYERS):
        raise ConfigError(
            f"config.json of {name}: max_window_layers must be a whole number from 0 to {values.MAX_LAYERS}, but is "
            f"{shown(first)}."
        )
    return [FULL if i < first else SLIDING for i in range(layers)]


def write_qwen(config: DecoderConfig) -> Json:
    """Returns what older releases of ``transformers`` read instead of ``layer_types``."""
    sliding = [window is not None for window in config.windows]
    return {"max_window_layers": sliding.index(True) if any(sliding) else config.num_layers}
