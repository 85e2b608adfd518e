"""Published decoders by name, for use without a checkpoint.

They serve runs with random weights, ahead-of-time compilation and memory estimates. A checkpoint has its own
configuration.
"""

from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.rope import Rope


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
    "llama2-7b": _llama(4096, 32, 32, 11_008),
    "llama2-13b": _llama(5120, 40, 40, 13_824),
    "llama2-70b": _llama(8192, 80, 64, 28_672, num_kv_heads=8),
}


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
