"""Families with routed experts."""

from kvjax.models.config import DecoderConfig
from kvjax.models.family import Family, Fields, Names, setting
from kvjax.models.rope_config import RopeKeys
from kvjax.models.tables.common import BIAS_KEYS, LLAMA_ATTENTION, LLAMA_KEYS, LLAMA_TOP, QWEN_KEYS
from kvjax.models.values import Json

QWEN3_EXPERTS = 128  # of a layer of Qwen3-MoE, if config.json has no number


def _qwen3_moe(raw: Json, fields: Fields) -> Fields:
    """Reads the number of experts, for which releases of ``transformers`` have two keys."""
    key = "num_experts" if "num_experts" in raw else "num_local_experts"
    return {"num_experts": setting("qwen3_moe", raw, key, QWEN3_EXPERTS, int)}


def _write_qwen3_moe(config: DecoderConfig) -> Json:
    """Inverts `_qwen3_moe`."""
    return {"num_experts": config.num_experts}


FAMILIES: dict[str, Family] = {
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        keys=LLAMA_KEYS
        | {
            "num_kv_heads": ("num_key_value_heads", 8),
            "mlp_size": ("intermediate_size", 14336),
            "max_positions": ("max_position_embeddings", 131072),
            "norm_eps": ("rms_norm_eps", 1e-5),
            "num_experts": ("num_local_experts", 8),
            "experts_per_token": ("num_experts_per_tok", 2),
        },
        fixed={"normalised_experts": True},
        names=Names(
            "model.",
            LLAMA_TOP,
            LLAMA_ATTENTION
            | {
                "block_sparse_moe.gate": "mlp.router",
                "block_sparse_moe.experts.*.w1": "mlp.gate",
                "block_sparse_moe.experts.*.w3": "mlp.up",
                "block_sparse_moe.experts.*.w2": "mlp.down",
            },
        ),
        rope=RopeKeys(theta_default=1_000_000.0),
        windows="all",
        window_default=None,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        keys=QWEN_KEYS
        | BIAS_KEYS
        | {
            "hidden_size": ("hidden_size", 2048),
            "num_layers": ("num_hidden_layers", 24),
            "num_kv_heads": ("num_key_value_heads", 4),
            "mlp_size": ("moe_intermediate_size", 768),
            "experts_per_token": ("num_experts_per_tok", 8),
            "normalised_experts": ("norm_topk_prob", False),
        },
        fixed={"qk_norm": True},
        names=Names(
            "model.",
            LLAMA_TOP,
            LLAMA_ATTENTION
            | {
                "mlp.gate": "mlp.router",
                "mlp.experts.*.gate_proj": "mlp.gate",
                "mlp.experts.*.up_proj": "mlp.up",
                "mlp.experts.*.down_proj": "mlp.down",
            },
        ),
        windows="all",
        window_switch=True,
        # Layers with a dense MLP have parameters of other shapes.
        only={"decoder_sparse_step": 1, "mlp_only_layers": []},
        finish=_qwen3_moe,
        unfinish=_write_qwen3_moe,
    ),
}
