"""The families of Cohere: parallel layers of one norm, and rotary pairs of neighbouring features."""

from kvjax.models.family import Family, Keys, Names, periodic
from kvjax.models.rope_config import RopeKeys
from kvjax.models.tables.common import LLAMA_ATTENTION, LLAMA_MLP, LLAMA_TOP

_KEYS: Keys = {
    "vocab_size": ("vocab_size", 256000),
    "hidden_size": ("hidden_size", 8192),
    "num_layers": ("num_hidden_layers", 40),
    "num_heads": ("num_attention_heads", 64),
    "num_kv_heads": ("num_key_value_heads", None),
    "mlp_size": ("intermediate_size", 22528),
    "max_positions": ("max_position_embeddings", 8192),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "activation": ("hidden_act", "silu"),
    "qkv_bias": ("attention_bias", False),
    "out_bias": ("attention_bias", False),
    "logit_scale": ("logit_scale", 0.0625),
    "tie_embeddings": ("tie_word_embeddings", True),
    "bos_token_id": ("bos_token_id", 5),
    "eos_token_ids": ("eos_token_id", 255001),
    "pad_token_id": ("pad_token_id", 0),
}
_FIXED = {"norm": "layer", "parallel_residual": True, "shared_norm": True, "qk_norm_form": "per_head"}
_NAMES = Names("model.", LLAMA_TOP, LLAMA_ATTENTION | LLAMA_MLP, neighbours=True)

FAMILIES: dict[str, Family] = {
    "cohere": Family(
        architecture="CohereForCausalLM",
        keys=_KEYS | {"qk_norm": ("use_qk_norm", False)},
        fixed=_FIXED,
        names=_NAMES,
        rope=RopeKeys(theta_default=500_000.0),
    ),
    # Layers with full attention have no rotary embedding.
    "cohere2": Family(
        architecture="Cohere2ForCausalLM",
        keys=_KEYS,
        fixed=_FIXED,
        names=_NAMES,
        windows="listed",
        layer_types=periodic(4),
        ropes=lambda raw, fields: tuple(fields["rope"] if window else None for window in fields["windows"]),
    ),
}
