"""The layers that decoders are made of: norms, MLPs and embeddings (Flax Linen, used functionally).

Projections are stored [in, out], while most Hugging Face checkpoints have [out, in]; loading transposes them. XLA's
products of several rows are faster so on some processors (17.4 GB/s instead of 11.0 at batch 8 on one EPYC) and slower
on others (6.1 instead of 11.4 on a Xeon with AVX-512); kvjax's own form is as fast with either layout, see
`kvjax.products`. Tables (embeddings, and an output head that is tied to one) are stored [rows, features]; as codes,
[features, rows].
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from kvjax.models.config import DecoderConfig
from kvjax.products import IndexedMatrix, QuantizedMatrix, product
from kvjax.products.quantized import outputs_of

Array = jax.Array

QUICK_GELU_SLOPE = 1.702  # sigmoid approximation of GELU (arXiv:1606.08415, section 2)
POSITION_STDDEV = 0.02  # standard deviation of a freshly initialised position table (GPT-2)

#: Activation functions by their Hugging Face names.
ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(QUICK_GELU_SLOPE * x),
}


class Linear(nn.Module):
    """y = x W + b with W stored [in, out], as in `flax.linen.Dense`.

    Attributes:
      features: the number of output features.
      use_bias: whether b is present.
      dtype: of the parameters.
    """

    features: int
    use_bias: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [..., in] to [..., features]."""
        shape = (x.shape[-1], self.features)
        # [in, features]; Flax would compare the arrays of a quantised or indexed matrix with this shape
        kernel: Array | QuantizedMatrix | IndexedMatrix | None = self.get_variable("params", "kernel")
        if not isinstance(kernel, QuantizedMatrix | IndexedMatrix):
            kernel = self.param("kernel", nn.initializers.normal(shape[0] ** -0.5), shape, self.dtype)
        # [..., features]
        y = product(x, kernel)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        return y


class Norm(nn.Module):
    """RMS norm or layer norm over the last axis, computed in float32.

    Attributes:
      config: the decoder.
      dtype: of the parameters.
      heads: the number of heads that have a scale each, [heads, features], and no bias; None = one scale [features].
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32
    heads: int | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises [..., features], or [..., heads, features], in the dtype of x."""
        config = self.config
        shape = x.shape[-1:] if self.heads is None else (self.heads, x.shape[-1])
        # [..., features]
        y = x.astype(jnp.float32)
        if config.norm == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_eps)
        if not config.norm_affine:
            return y.astype(x.dtype)
        # [features] or [heads, features], so that scale + norm_offset is 1 at initialisation
        scale = self.param("scale", nn.initializers.constant(1.0 - config.norm_offset), shape, self.dtype)
        y = y * (scale.astype(jnp.float32) + config.norm_offset)
        if config.norm_bias and config.norm == "layer" and self.heads is None:
            y = y + self.param("bias", nn.initializers.zeros, shape, self.dtype).astype(jnp.float32)
        return y.astype(x.dtype)


class Mlp(nn.Module):
    """The MLP of one layer: down(activation(up x)), or down(activation(gate x) * up x).

    Attributes:
      config: the decoder.
      dtype: of the parameters.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Maps [B, n, hidden] to [B, n, hidden]."""
        config = self.config
        activation = ACTIVATIONS[config.activation]
        # [B, n, mlp]
        y = Linear(config.mlp_size, config.mlp_bias, self.dtype, name="up")(x)
        if config.gated_mlp:
            y = y * activation(Linear(config.mlp_size, config.mlp_bias, self.dtype, name="gate")(x))
        else:
            y = activation(y)
        return Linear(config.hidden_size, config.mlp_bias, self.dtype, name="down")(y)


class Embed(nn.Module):
    """The token embedding.

    Attributes:
      config: the decoder.
      dtype: of the parameters.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32

    def setup(self) -> None:
        shape = (self.config.vocab_size, self.config.embed_size)
        # [V, embed], or a quantised matrix [embed, V], whose arrays Flax would compare with this shape
        table: Array | QuantizedMatrix | None = self.get_variable("params", "tokens")
        if not isinstance(table, QuantizedMatrix):
            table = self.param("tokens", nn.initializers.normal(shape[1] ** -0.5), shape, self.dtype)
        self.tokens = table

    def __call__(self, tokens: Array) -> Array:
        """Looks up tokens: [B, n] int32 -> [B, n, embed]."""
        # [B, n, embed]
        if isinstance(self.tokens, QuantizedMatrix):
            x = outputs_of(self.tokens, tokens, self.dtype)
        else:
            x = jnp.take(self.tokens, tokens, axis=0)
        return x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def attend(self, hidden: Array) -> Array:
        """Multiplies by the transposed table, for a tied output head: [..., embed] -> [..., V]."""
        # [..., V]
        return product(hidden, self.tokens, transposed=not isinstance(self.tokens, QuantizedMatrix))


class PositionEmbed(nn.Module):
    """The learned position table.

    Attributes:
      config: the decoder.
      dtype: of the parameters.
    """

    config: DecoderConfig
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, position: Array) -> Array:
        """Looks up positions: [B, n] int32, -1 for padding -> [B, n, hidden]."""
        shape = (self.config.max_positions + self.config.position_offset, self.config.hidden_size)
        # [rows, hidden]
        table = self.param("table", nn.initializers.normal(POSITION_STDDEV), shape, self.dtype)
        # [B, n, hidden]
        return jnp.take(table, jnp.maximum(position, 0) + self.config.position_offset, axis=0)
