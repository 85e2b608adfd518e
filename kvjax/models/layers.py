"""The layers that decoders are made of: products, norms, MLPs and embeddings (Flax Linen, used functionally).

Projections are stored [in, out], while most Hugging Face checkpoints have [out, in]; loading transposes them. Measured
on two CPU cores with jax 0.10.2 and 0.12, a [768, 3072] MLP then reads its weights at 28 GB/s instead of 30 at batch 1,
at 20 instead of 12 at batch 4 and at 17.4 instead of 11.0 at batch 8, where the compiler otherwise transposes them in
every step. Tables (embeddings, and an output head that is tied to one) are stored [rows, features].
"""

import functools
import operator
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from kvjax.models.config import DecoderConfig

Array = jax.Array

MIN_PART = 192  # smallest number of input features in one part of a split product; see `project`
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


def project(x: Array, kernel: Array) -> Array:
    """Multiplies by a kernel.

    On a CPU, the product of a single row is split over the input features and the partial products are added. Each
    thread then reads contiguous memory of the kernel instead of some of its columns: a decode step of OPT-125M takes
    19.5 ms instead of 22.1 ms.

    Args:
      x: [..., in].
      kernel: [in, out].

    Returns:
      [..., out].
    """
    inputs = x.shape[-1]
    parts = 1
    while inputs % (2 * parts) == 0 and inputs // (2 * parts) >= MIN_PART:
        parts *= 2
    if x.size > inputs or parts == 1:
        # [..., out]
        return x @ kernel

    def split_product(x: Array, kernel: Array) -> Array:
        # [parts, out]
        y = jnp.einsum("pi,pio->po", x.reshape(parts, -1), kernel.reshape(parts, -1, kernel.shape[1]))
        # [..., out]: XLA fuses a sum of slices into the operation that reads it, but not a reduction.
        return functools.reduce(operator.add, (y[i] for i in range(parts))).reshape(*x.shape[:-1], -1)

    return jax.lax.platform_dependent(x, kernel, cpu=split_product, default=jnp.matmul)


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
        # [in, features]
        kernel = self.param("kernel", nn.initializers.normal(shape[0] ** -0.5), shape, self.dtype)
        # [..., features]
        y = project(x, kernel)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        return y


class Norm(nn.Module):
    """RMS norm or layer norm over the last axis, computed in float32.

    Attributes:
      config: the decoder.
      rms: whether this is an RMS norm.
      dtype: of the parameters.
    """

    config: DecoderConfig
    rms: bool
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalises [..., features], in the dtype of x."""
        config, size = self.config, x.shape[-1]
        # [..., features]
        y = x.astype(jnp.float32)
        if not self.rms:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_eps)
        if not config.norm_affine:
            return y.astype(x.dtype)
        # [features], so that scale + norm_offset is 1 at initialisation
        scale = self.param("scale", nn.initializers.constant(1.0 - config.norm_offset), (size,), self.dtype)
        y = y * (scale.astype(jnp.float32) + config.norm_offset)
        if config.norm_bias and not self.rms:
            y = y + self.param("bias", nn.initializers.zeros, (size,), self.dtype).astype(jnp.float32)
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
        # [V, embed]
        self.tokens = self.param("tokens", nn.initializers.normal(shape[1] ** -0.5), shape, self.dtype)

    def __call__(self, tokens: Array) -> Array:
        """Looks up tokens: [B, n] int32 -> [B, n, embed]."""
        # [B, n, embed]
        x = jnp.take(self.tokens, tokens, axis=0)
        return x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def attend(self, hidden: Array) -> Array:
        """Multiplies by the transposed table, for a tied output head: [..., embed] -> [..., V]."""
        # [..., V]
        return jax.lax.dot_general(hidden, self.tokens, (((hidden.ndim - 1,), (1,)), ((), ())))


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
