"""Families with layer norms."""

from kvjax.models.config import DecoderConfig
from kvjax.models.family import Family, Fields, Names, setting
from kvjax.models.rope_config import RopeKeys
from kvjax.models.tables.common import FUSED_QKV, LAYER_NORM, LLAMA_MLP, LLAMA_TOP, PLAIN_ATTENTION
from kvjax.models.values import Json


def _opt(raw: Json, fields: Fields) -> Fields:
    """Reads where OPT normalises: OPT-350M does so after the residual connections and has no final norm."""
    before = setting("opt", raw, "do_layer_norm_before", True, bool)
    removed = setting("opt", raw, "_remove_final_layer_norm", False, bool)
    return {"norm_position": "pre" if before else "post", "final_norm": before and not removed}


def _write_opt(config: DecoderConfig) -> Json:
    """Inverts `_opt`."""
    before = config.norm_position == "pre"
    return {"do_layer_norm_before": before, "_remove_final_layer_norm": before and not config.final_norm}


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
        fixed=LAYER_NORM | {"norm_eps": 1e-5, "learned_positions": True, "position_offset": 2},
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
        fixed=LAYER_NORM | {"mlp_bias": True},
        names=Names(
            prefix="gpt_neox.",
            top={"embed_in": "embed", "final_layer_norm": "final_norm"},
            layer={
                "input_layernorm": "attention_norm",
                "attention.query_key_value": FUSED_QKV,
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
        fixed=LAYER_NORM | {"qkv_bias": True, "out_bias": True, "mlp_bias": True, "learned_positions": True},
        names=Names(
            prefix="transformer.",
            top={"wte": "embed", "wpe": "position_embed", "ln_f": "final_norm"},
            layers="h",
            layer={
                "ln_1": "attention_norm",
                "attn.c_attn": FUSED_QKV,
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
    "starcoder2": Family(
        architecture="Starcoder2ForCausalLM",
        keys={
            "vocab_size": ("vocab_size", 49152),
            "hidden_size": ("hidden_size", 3072),
            "num_layers": ("num_hidden_layers", 30),
            "num_heads": ("num_attention_heads", 24),
            "num_kv_heads": ("num_key_value_heads", 2),
            "head_dim": ("head_dim", None),
            "mlp_size": ("intermediate_size", 12288),
            "max_positions": ("max_position_embeddings", 4096),
            "norm_eps": ("norm_epsilon", 1e-5),
            "activation": ("hidden_act", "gelu_pytorch_tanh"),
            "qkv_bias": ("use_bias", True),
            "out_bias": ("use_bias", True),
            "mlp_bias": ("use_bias", True),
            "tie_embeddings": ("tie_word_embeddings", True),
            "bos_token_id": ("bos_token_id", 50256),
            "eos_token_ids": ("eos_token_id", 50256),
            "pad_token_id": ("pad_token_id", None),
        },
        fixed=LAYER_NORM,
        names=Names(
            "model.",
            LLAMA_TOP,
            PLAIN_ATTENTION | {"mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
        ),
        windows="all",
        window_default=None,
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        keys={
            "vocab_size": ("vocab_size", 50304),
            "hidden_size": ("hidden_size", 2560),
            "num_layers": ("num_hidden_layers", 32),
            "num_heads": ("num_attention_heads", 32),
            "num_kv_heads": ("num_key_value_heads", 32),
            "mlp_size": ("intermediate_size", 6912),
            "max_positions": ("max_position_embeddings", 4096),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "activation": ("hidden_act", "silu"),
            "qkv_bias": ("use_qkv_bias", False),
            "qk_norm": ("qk_layernorm", False),
            "parallel_residual": ("use_parallel_residual", False),
            # A parallel layer has one norm.
            "shared_norm": ("use_parallel_residual", False),
            "tie_embeddings": ("tie_word_embeddings", False),
            "bos_token_id": ("bos_token_id", 0),
            "eos_token_ids": ("eos_token_id", 0),
            "pad_token_id": ("pad_token_id", None),
        },
        fixed=LAYER_NORM | {"gated_mlp": True, "qk_norm_form": "per_head"},
        names=Names(
            "model.",
            LLAMA_TOP,
            PLAIN_ATTENTION
            | LLAMA_MLP
            | {
                "self_attn.q_layernorm.norms.*": "attention.query_norm",
                "self_attn.k_layernorm.norms.*": "attention.key_norm",
            },
        ),
        rope=RopeKeys(partial="partial_rotary_factor", partial_default=0.25),
    ),
    "phi": Family(
        architecture="PhiForCausalLM",
        keys={
            "vocab_size": ("vocab_size", 51200),
            "hidden_size": ("hidden_size", 2048),
            "num_layers": ("num_hidden_layers", 24),
            "num_heads": ("num_attention_heads", 32),
            "num_kv_heads": ("num_key_value_heads", None),
            "head_dim": ("head_dim", None),
            "mlp_size": ("intermediate_size", 8192),
            "max_positions": ("max_position_embeddings", 2048),
            "norm_eps": ("layer_norm_eps", 1e-5),
            "activation": ("hidden_act", "gelu_new"),
            "qk_norm": ("qk_layernorm", False),
            "tie_embeddings": ("tie_word_embeddings", False),
            "bos_token_id": ("bos_token_id", 1),
            "eos_token_ids": ("eos_token_id", 2),
            "pad_token_id": ("pad_token_id", None),
        },
        fixed=LAYER_NORM
        | {
            "qkv_bias": True,
            "out_bias": True,
            "mlp_bias": True,
            "head_bias": True,
            "parallel_residual": True,
            "shared_norm": True,
        },
        names=Names(
            prefix="model.",
            top={"embed_tokens": "embed", "final_layernorm": "final_norm"},
            layer={
                "input_layernorm": "attention_norm",
                "self_attn.q_proj": "attention.query",
                "self_attn.k_proj": "attention.key",
                "self_attn.v_proj": "attention.value",
                "self_attn.dense": "attention.out",
                "self_attn.q_layernorm": "attention.query_norm",
                "self_attn.k_layernorm": "attention.key_norm",
                "mlp.fc1": "mlp.up",
                "mlp.fc2": "mlp.down",
            },
        ),
        rope=RopeKeys(partial="partial_rotary_factor", partial_default=0.5),
        # The output head has a bias; a tied one has no parameters of its own here.
        only={"tie_word_embeddings": False},
    ),
}
