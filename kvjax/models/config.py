"""What a decoder is made of: the one description that all Hugging Face families are read into."""

import dataclasses
from typing import Literal

from kvjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static, hashable description of a decoder; `kvjax.models.families` reads it from a ``config.json``.

    Attributes:
      family: Hugging Face ``model_type`` that it came from; names the entry of the families table.
      vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, head_dim, mlp_size: shapes; `num_heads` is a
        multiple of `num_kv_heads` (grouped queries; 1 = multi-query).
      max_positions: trained length; the end of the table for learned positions, advice for RoPE.
      rope: rotary embedding, or None.
      learned_positions: a position table of `max_positions` + `position_offset` rows is added to the embedding.
      position_offset: rows of that table before position 0 (OPT: 2).
      norm: ``rms`` or ``layer``; `norm_eps`: inside its square root; `norm_offset`: added to the stored scale
        (Gemma: 1).
      norm_affine: whether norms have parameters at all (some OPT do not).
      norm_position: ``pre`` normalises a block's input, ``post`` its output after the residual (OPT-350M).
      final_norm: whether a norm precedes the output head.
      parallel_residual: attention and MLP read the same input (GPT-NeoX).
      activation: Hugging Face name of the MLP's nonlinearity; gated_mlp: activation(gate) * up.
      qkv_bias, out_bias, mlp_bias, head_bias, norm_bias: which linear layers and norms carry a bias.
      qk_norm: an RMS norm over each head's query and key (Qwen3).
      embed_size: width of the token embedding; other than hidden_size it is projected in and out (OPT-350M).
      embed_scale: multiplies the embedding (Gemma: sqrt(hidden_size)).
      tie_embeddings: the output head is the token embedding.
      windows: per layer, how many newest positions a query may see, itself included; None = all of them.
      bos_token_id, eos_token_ids, pad_token_id: for tokenizing and stopping; may be absent.
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_positions: int
    rope: Rope | None = None
    learned_positions: bool = False
    position_offset: int = 0
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norm_bias: bool = False
    norm_affine: bool = True
    norm_position: Literal["pre", "post"] = "pre"
    final_norm: bool = True
    parallel_residual: bool = False
    activation: str = "silu"
    gated_mlp: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    embed_size: int = 0
    embed_scale: float = 1.0
    tie_embeddings: bool = True
    windows: tuple[int | None, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    def __post_init__(self):
        if not self.embed_size:
            object.__setattr__(self, "embed_size", self.hidden_size)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
