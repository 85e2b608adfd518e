"""`DecoderConfig`: the description of a decoder that all Hugging Face model families are converted to."""

import dataclasses
from typing import Literal

from kvjax.errors import ConfigError
from kvjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Static, hashable description of a decoder; `kvjax.models.families` reads it from a ``config.json``.

    Attributes:
      family: Hugging Face ``model_type``; a key of `kvjax.models.families.FAMILIES`.
      vocab_size: the number of tokens in the vocabulary.
      hidden_size: the number of features of the residual stream.
      num_layers: the number of layers.
      num_heads: the number of query heads, a multiple of `num_kv_heads`.
      num_kv_heads: the number of KV heads: `num_heads` for multi-head attention, 1 for multi-query attention.
      head_dim: the number of features of a head.
      mlp_size: the number of hidden features of the MLP.
      max_positions: the trained context length in tokens. A learned position table ends there; RoPE does not.
      rope: the rotary embedding, or None.
      learned_positions: whether a table of `max_positions` + `position_offset` rows is added to the token embedding.
      position_offset: the number of rows of that table before position 0 (2 for OPT).
      norm: the kind of normalisation, RMS norm or layer norm.
      norm_eps: the constant added to the variance, inside the square root.
      norm_offset: the constant added to the stored scale (1 for Gemma).
      norm_bias: whether layer norms have a bias.
      norm_affine: whether norms have parameters at all (False for some OPT models).
      norm_position: ``pre`` normalises the input of a block, ``post`` the residual sum after it (OPT-350M).
      final_norm: whether there is a norm before the output head.
      parallel_residual: whether attention and MLP read the same input (GPT-NeoX).
      activation: Hugging Face name of the MLP's activation function.
      gated_mlp: whether the MLP computes activation(gate) * up instead of activation(up).
      qkv_bias: whether the query, key and value projections have a bias.
      out_bias: whether the output projection of attention has a bias.
      mlp_bias: whether the projections of the MLP have a bias.
      head_bias: whether the output head has a bias.
      qk_norm: whether each head's query and key pass through an RMS norm (Qwen3).
      embed_size: the number of features of the token embedding, which is projected if it differs from `hidden_size`
        (OPT-350M); 0 for `hidden_size`.
      embed_scale: factor on the token embedding (sqrt(hidden_size) for Gemma).
      tie_embeddings: whether the output head is the token embedding.
      windows: per layer, the number of newest positions that a query sees, its own included, or None for all. An empty
        tuple means None for every layer.
      bos_token_id: id of the beginning-of-text token, or None.
      eos_token_ids: ids of the end-of-text tokens.
      pad_token_id: id of the padding token, or None.
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

    def __post_init__(self) -> None:
        if not self.embed_size:
            object.__setattr__(self, "embed_size", self.hidden_size)
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        if len(self.windows) != self.num_layers:
            raise ConfigError(
                f"windows has {len(self.windows)} entries for {self.num_layers} layers; give one for each, or () for "
                "none."
            )
