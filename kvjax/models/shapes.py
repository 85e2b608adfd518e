"""Published decoders by name, for use without a checkpoint.

They serve runs with random weights, ahead-of-time compilation and memory estimates. A checkpoint has its own
configuration.
"""

from typing import Any

from kvjax.errors import ConfigError
from kvjax.models import families
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope


def _opt(hidden_size: int, num_layers: int, num_heads: int) -> DecoderConfig:
    """Returns an OPT decoder (arXiv:2205.01068, Table 1) of any size except 350M, which is a post-norm model."""
    return DecoderConfig(
        family="opt",
        vocab_size=50_272,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        mlp_size=4 * hidden_size,
        max_positions=2048,
        learned_positions=True,
        position_offset=2,
        norm="layer",
        norm_bias=True,
        activation="relu",
        gated_mlp=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        bos_token_id=2,
        eos_token_ids=(2,),
        pad_token_id=1,
    )


def _llama(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    mlp_size: int,
    *,
    num_kv_heads: int | None = None,
    vocab_size: int = 32_000,
    max_positions: int = 4096,
    tie_embeddings: bool = False,
    bos_token_id: int | None = 1,
    eos_token_ids: tuple[int, ...] = (2,),
) -> DecoderConfig:
    """Returns a LLaMA 2 decoder (arXiv:2307.09288)."""
    return DecoderConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=hidden_size // num_heads,
        mlp_size=mlp_size,
        max_positions=max_positions,
        rope=Rope(dim=hidden_size // num_heads),
        tie_embeddings=tie_embeddings,
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )


def _shape(family: str, **settings: Any) -> DecoderConfig:
    """Returns the decoder that a published ``config.json`` describes.

    Args:
      family: its ``model_type``.
      settings: the keys in which it differs from the defaults of its family.
    """
    return families.read({"model_type": family, **settings})


#: A byte-level decoder of four layers with grouped queries; the default of experiments without a checkpoint.
_TINY = _llama(
    128, 4, 8, 352, num_kv_heads=4, vocab_size=256, max_positions=2048, tie_embeddings=True, bos_token_id=None,
    eos_token_ids=(),
)  # fmt: skip

#: Name -> decoder.
SHAPES: dict[str, DecoderConfig] = {
    "tiny": _TINY,
    "opt-125m": _opt(768, 12, 12),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "opt-66b": _opt(9216, 64, 72),
    "opt-175b": _opt(12_288, 96, 96),
    "llama2-7b": _llama(4096, 32, 32, 11_008),
    "llama2-13b": _llama(5120, 40, 40, 13_824),
    "llama2-70b": _llama(8192, 80, 64, 28_672, num_kv_heads=8),
    "gemma2-2b": _shape("gemma2"),
    "gemma2-9b": _shape(
        "gemma2", hidden_size=3584, intermediate_size=14_336, num_hidden_layers=42, num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "gemma2-27b": _shape(
        "gemma2", hidden_size=4608, intermediate_size=36_864, num_hidden_layers=46, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=144,
    ),
    "gemma3-1b": _shape(
        "gemma3_text", vocab_size=262_144, hidden_size=1152, intermediate_size=6912, num_attention_heads=4,
        num_key_value_heads=1, sliding_window=512, max_position_embeddings=32_768,
    ),
    "qwen2-72b": _shape(
        "qwen2", vocab_size=152_064, hidden_size=8192, intermediate_size=29_568, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, max_position_embeddings=131_072, rope_theta=1_000_000.0,
        rms_norm_eps=1e-5, bos_token_id=151_643, eos_token_id=151_643,
    ),
    "mixtral-8x7b": _shape("mixtral", max_position_embeddings=32_768),
    "qwen3-30b-a3b": _shape(
        "qwen3_moe", num_hidden_layers=48, head_dim=128, max_position_embeddings=40_960, rope_theta=1_000_000.0,
        norm_topk_prob=True, bos_token_id=151_643, eos_token_id=151_645,
    ),
    "olmo2-7b": _shape(
        "olmo2", vocab_size=100_352, max_position_embeddings=4096, rope_theta=500_000.0, rms_norm_eps=1e-6,
        eos_token_id=100_257, pad_token_id=100_277,
    ),
    "smollm3-3b": _shape("smollm3", max_position_embeddings=65_536, rope_theta=5_000_000.0),
    "granite3-8b": _shape(
        "granite", vocab_size=49_155, intermediate_size=12_800, num_hidden_layers=40, num_key_value_heads=8,
        max_position_embeddings=4096, rms_norm_eps=1e-5, tie_word_embeddings=True, embedding_multiplier=12.0,
        residual_multiplier=0.22, attention_multiplier=0.0078125, logits_scaling=16.0, bos_token_id=0, eos_token_id=0,
        pad_token_id=0,
    ),
    "starcoder2-3b": _shape(
        "starcoder2", sliding_window=4096, max_position_embeddings=16_384, rope_theta=999_999.4420358813,
        bos_token_id=0, eos_token_id=0,
    ),
    "stablelm-3b": _shape("stablelm"),
    "phi-2": _shape(
        "phi", hidden_size=2560, intermediate_size=10_240, num_hidden_layers=32, partial_rotary_factor=0.4,
        bos_token_id=50_256, eos_token_id=50_256,
    ),
    "command-r": _shape("cohere", rope_theta=8_000_000.0),
    "command-r7b": _shape(
        "cohere2", hidden_size=4096, intermediate_size=14_336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, rope_theta=50_000.0, logit_scale=0.25,
    ),
}  # fmt: skip


def by_name(name: str) -> DecoderConfig:
    """Returns a published decoder.

    Args:
      name: a key of `SHAPES`.

    Raises:
      ConfigError: if the name is unknown. The message lists the known names.
    """
    if name not in SHAPES:
        raise ConfigError(f"unknown model shape {name!r}; known shapes: {', '.join(SHAPES)}.")
    return SHAPES[name]
