"""`DecoderConfig`: the description of a decoder that all Hugging Face model families are converted to."""

import dataclasses
from typing import Literal, NamedTuple

from kvjax.errors import ConfigError
from kvjax.numerics.rope import Rope
from kvjax.policies.parameters import ModelSizes


class LayerKind(NamedTuple):
    """The settings of one layer. Layers of the same kind share a program.

    Attributes:
      window: the number of newest positions that a query sees, its own included; None = all.
      rope: the rotary embedding, or None.
    """

    window: int | None = None
    rope: Rope | None = None


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
      mlp_size: the number of hidden features of the MLP, or of one expert.
      max_positions: the trained context length in tokens. A learned position table ends there; RoPE does not.
      rope: the rotary embedding, or None.
      ropes: per layer, the rotary embedding or None, if layers differ in it (SmolLM3, Gemma 3); an empty tuple means
        `rope` for every layer.
      learned_positions: whether a table of `max_positions` + `position_offset` rows is added to the token embedding.
      position_offset: the number of rows of that table before position 0 (2 for OPT).
      norm: the kind of normalisation, RMS norm or layer norm.
      norm_eps: the constant added to the variance, inside the square root.
      norm_offset: the constant added to the stored scale (1 for Gemma).
      norm_bias: whether layer norms have a bias.
      norm_affine: whether norms have parameters at all (False for some OPT models).
      norm_position: ``pre`` normalises the input of attention and of the MLP, ``output`` what they add to the residual
        stream (OLMo 2), ``both`` input and output (Gemma 2), and ``post`` the residual sum (OPT-350M).
      final_norm: whether there is a norm before the output head.
      parallel_residual: whether attention and MLP read the same residual stream (GPT-NeoX).
      shared_norm: whether they read it through the same norm (Phi); only with `parallel_residual`.
      residual_scale: factor on the output of attention and of the MLP before it is added (Granite).
      activation: Hugging Face name of the MLP's activation function.
      gated_mlp: whether the MLP computes activation(gate) * up instead of activation(up).
      num_experts: the number of experts of the MLP, of which a router chooses some for each token; 0 = a dense MLP.
      experts_per_token: the number of experts that each token goes through.
      normalised_experts: whether the weights of a token's experts are divided by their sum.
      qkv_bias: whether the query, key and value projections have a bias.
      out_bias: whether the output projection of attention has a bias.
      mlp_bias: whether the projections of the MLP have a bias.
      head_bias: whether the output head has a bias.
      qk_norm: whether queries and keys pass through a norm of the kind `norm` before they are rotated.
      qk_norm_form: ``shared`` normalises each head by itself, with one scale [D] for all heads (Qwen3); ``per_head``
        has a scale for each head and no bias (StableLM); ``joint`` normalises all heads together, [heads * D] (OLMo 2).
      attention_scale: factor of the logits of attention; None = head_dim ** -0.5.
      attention_soft_cap: c, where logits of attention x become c · tanh(x / c) (Gemma 2); None = they stay as they are.
      embed_size: the number of features of the token embedding, which is projected if it differs from `hidden_size`
        (OPT-350M); 0 for `hidden_size`.
      embed_scale: factor on the token embedding (sqrt(hidden_size) for Gemma).
      tie_embeddings: whether the output head is the token embedding.
      logit_scale: factor on the logits of tokens (Cohere, Granite).
      logit_soft_cap: as `attention_soft_cap`, for the logits of tokens (Gemma 2).
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
    ropes: tuple[Rope | None, ...] = ()
    learned_positions: bool = False
    position_offset: int = 0
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    norm_bias: bool = False
    norm_affine: bool = True
    norm_position: Literal["pre", "output", "both", "post"] = "pre"
    final_norm: bool = True
    parallel_residual: bool = False
    shared_norm: bool = False
    residual_scale: float = 1.0
    activation: str = "silu"
    gated_mlp: bool = True
    num_experts: int = 0
    experts_per_token: int = 0
    normalised_experts: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: bool = False
    qk_norm_form: Literal["shared", "per_head", "joint"] = "shared"
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    embed_size: int = 0
    embed_scale: float = 1.0
    tie_embeddings: bool = True
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
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
        if self.num_experts and not 0 < self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"experts_per_token is {self.experts_per_token} of {self.num_experts} experts; it must be from 1 to "
                f"{self.num_experts}."
            )
        if self.num_experts and (self.mlp_bias or not self.gated_mlp):
            raise ConfigError("routed experts are gated MLPs without biases; leave out mlp_bias and gated_mlp=False.")
        if len(self.ropes) not in (0, self.num_layers):
            raise ConfigError(
                f"ropes has {len(self.ropes)} entries for {self.num_layers} layers; give one for each, or () for the "
                "same in all."
            )

    @property
    def rotates(self) -> bool:
        """Whether a layer has a rotary embedding."""
        return any(self.kind(index).rope is not None for index in range(self.num_layers))

    def kind(self, layer: int) -> LayerKind:
        """Returns what the layer of an index has of its own."""
        return LayerKind(self.windows[layer], self.ropes[layer] if self.ropes else self.rope)

    def one_layer(self) -> "DecoderConfig":
        """Returns the decoder with its first layer alone. All layers have parameters of the same shapes."""
        return dataclasses.replace(self, num_layers=1, windows=self.windows[:1], ropes=self.ropes[:1])


def model_sizes(config: DecoderConfig) -> ModelSizes:
    """Returns the sizes that determine the shapes of policies' parameters."""
    queries = config.num_heads // config.num_kv_heads
    rotary = None if config.rope is None else config.rope.dim
    return ModelSizes(config.num_kv_heads, queries, config.head_dim, config.hidden_size, rotary)
