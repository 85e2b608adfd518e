"""One decoder for every family: pure functions of parameters, tokens and a cache (Flax Linen, used functionally).

Layers are unrolled: on a CPU that reads memory four times as fast as a scan over stacked layers. Projections are stored
[in, out] (Hugging Face has most of them the other way round; loading transposes): on two CPU cores with jax 0.10.2 and
0.12 a [768, 3072] MLP then reads its weights at 28 GB/s instead of 30 at batch 1, but 17.4 instead of 11.0 at batch 8
and 20 instead of 12 at batch 4, where the compiler otherwise transposes them in every step. Tables (embeddings, and an
output head that is tied to one) stay [rows, features]. The decoder knows nothing of policies: it hands
unrotated queries, keys and values to `kvjax.cache.step` and gets an output and the layer's new cache back.
"""

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kvjax import sharding
from kvjax.cache.layout import Group, Phase, keep_everything
from kvjax.cache.state import Block, KVState, Layer as LayerSlots
from kvjax.cache.step import step_layer
from kvjax.models.config import DecoderConfig

Array = jax.Array

ACTIVATIONS = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_fast": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
}


PART = 192  # fewest inputs of a part; see `project`


def project(x: Array, kernel: Array) -> Array:
    """[..., in] x [in, out] -> [..., out].

    A single row on a CPU goes in parts of the input, one after another in memory, whose results are added: threads then
    read whole stretches of the kernel instead of columns of it (a decode step of OPT-125M: 19.5 ms instead of 22.1).
    """
    inputs = x.shape[-1]
    parts = 1
    while inputs % (2 * parts) == 0 and inputs // (2 * parts) >= PART:
        parts *= 2
    if x.size > inputs or parts == 1:
        return x @ kernel

    def in_parts(x: Array, kernel: Array) -> Array:
        y = jnp.einsum("pi,pio->po", x.reshape(parts, -1), kernel.reshape(parts, -1, kernel.shape[1]))
        # Sums of slices, which XLA writes into whatever reads the result; a reduction would be a step of its own.
        return functools.reduce(operator.add, (y[i] for i in range(parts))).reshape(*x.shape[:-1], -1)

    return jax.lax.platform_dependent(x, kernel, cpu=in_parts, default=jnp.matmul)


class Linear(nn.Module):
    """y = x W + b with W stored [in, out], as Flax's own Dense has it."""

    features: int
    use_bias: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1], self.features)
        kernel = self.param("kernel", nn.initializers.normal(shape[0] ** -0.5), shape, self.dtype)
        y = project(x, kernel)
        if self.use_bias:
            y = y + self.param("bias", nn.initializers.zeros, (self.features,), self.dtype)
        return y


class Norm(nn.Module):
    """RMS or layer norm over the last axis, computed in float32."""

    config: DecoderConfig
    rms: bool
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        config, size = self.config, x.shape[-1]
        y = x.astype(jnp.float32)
        if not self.rms:
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + config.norm_eps)
        if not config.norm_affine:
            return y.astype(x.dtype)
        one = nn.initializers.constant(1.0 - config.norm_offset)
        scale = self.param("scale", one, (size,), self.dtype)
        y = y * (scale.astype(jnp.float32) + config.norm_offset)
        if config.norm_bias and not self.rms:
            y = y + self.param("bias", nn.initializers.zeros, (size,), self.dtype).astype(jnp.float32)
        return y.astype(x.dtype)


class Attention(nn.Module):
    config: DecoderConfig
    index: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, layer: LayerSlots | None, block: Block, groups: tuple[Group, ...]
    ) -> tuple[Array, LayerSlots]:
        config = self.config
        batch, n, _ = x.shape

        def heads(name: str, count: int) -> Array:
            y = Linear(count * config.head_dim, config.qkv_bias, self.dtype, name=name)(x)
            # Between product and heads: XLA's TPU compiler would otherwise keep a transposed copy of the kernel too.
            y = jax.lax.platform_dependent(y, tpu=jax.lax.optimization_barrier, default=lambda y: y)
            # [B, n, heads, D]
            return y.reshape(batch, n, count, config.head_dim)

        query = heads("query", config.num_heads)
        key = heads("key", config.num_kv_heads)
        value = heads("value", config.num_kv_heads)
        if config.qk_norm:
            query = Norm(config, rms=True, dtype=self.dtype, name="query_norm")(query)
            key = Norm(config, rms=True, dtype=self.dtype, name="key_norm")(key)
        # [B, heads, n, D]
        query, key, value = (jnp.swapaxes(y, 1, 2) for y in (query, key, value))
        output, layer, seen = step_layer(
            layer, query, key, value, block=block, groups=groups, rope=config.rope, window=config.windows[self.index]
        )
        # For `kvjax.analysis`; nothing is kept unless a caller asks for it.
        self.sow("intermediates", "seen", seen)
        # [B, n, H * D]
        output = jnp.swapaxes(output, 1, 2).reshape(batch, n, config.num_heads * config.head_dim)
        return Linear(config.hidden_size, config.out_bias, self.dtype, name="out")(output), layer


class Mlp(nn.Module):
    config: DecoderConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array) -> Array:
        config = self.config
        activation = ACTIVATIONS[config.activation]
        # [B, n, mlp]
        y = Linear(config.mlp_size, config.mlp_bias, self.dtype, name="up")(x)
        if config.gated_mlp:
            y = y * activation(Linear(config.mlp_size, config.mlp_bias, self.dtype, name="gate")(x))
        else:
            y = activation(y)
        return Linear(config.hidden_size, config.mlp_bias, self.dtype, name="down")(y)


class Layer(nn.Module):
    config: DecoderConfig
    index: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, layer: LayerSlots | None, block: Block, groups: tuple[Group, ...]
    ) -> tuple[Array, LayerSlots]:
        config = self.config
        rms = config.norm == "rms"
        attention_norm = Norm(config, rms, self.dtype, name="attention_norm")
        mlp_norm = Norm(config, rms, self.dtype, name="mlp_norm")
        attention = Attention(config, self.index, self.dtype, name="attention")
        mlp = Mlp(config, self.dtype, name="mlp")
        if config.norm_position == "post":
            attended, layer = attention(x, layer, block, groups)
            x = attention_norm(x + attended)
            return mlp_norm(x + mlp(x)), layer
        attended, layer = attention(attention_norm(x), layer, block, groups)
        if config.parallel_residual:
            return x + attended + mlp(mlp_norm(x)), layer
        x = x + attended
        return x + mlp(mlp_norm(x)), layer


class Decoder(nn.Module):
    """A causal language model.

    ``decoder.apply({"params": params}, tokens, kv, block, phase) -> (logits, kv)``; `hidden` and `logits` are its two
    halves, for callers that need the logits of a few tokens only.
    """

    config: DecoderConfig
    dtype: Any = jnp.float32

    def setup(self):
        config, dtype = self.config, self.dtype
        self.embed = Embed(config, dtype)
        if config.learned_positions:
            self.position_embed = PositionEmbed(config, dtype)
        if config.embed_size != config.hidden_size:
            self.embed_in = Linear(config.hidden_size, False, dtype)
            self.embed_out = Linear(config.embed_size, False, dtype)
        self.layers = [Layer(config, i, dtype, name=f"layer_{i}") for i in range(config.num_layers)]
        if config.final_norm:
            self.final_norm = Norm(config, config.norm == "rms", dtype)
        if not config.tie_embeddings:
            self.head = Linear(config.vocab_size, config.head_bias, dtype)

    def __call__(
        self, tokens: Array, kv: KVState | None = None, block: Block | None = None, phase: Phase | None = None
    ) -> tuple[Array, KVState]:
        """Logits of every token and the cache afterwards.

        Args:
          tokens: [B, n] int32.
          kv: the cache so far; None = these tokens are the whole prompt.
          block: positions and budgets; None = every token is real.
          phase: the groups of each layer, of a `kvjax.cache.CacheLayout`; None = every token is kept, and the tokens are
            the whole prompt.

        Returns:
          logits [B, n, V] float32, and the new state.
        """
        hidden, kv = self.hidden(tokens, kv, block, phase)
        return self.logits(hidden), kv

    def hidden(
        self, tokens: Array, kv: KVState | None = None, block: Block | None = None, phase: Phase | None = None
    ) -> tuple[Array, KVState]:
        """As `__call__`, but the last hidden states [B, n, embed] before the output head."""
        config = self.config
        phase = keep_everything(config.num_layers) if phase is None else phase
        if block is None:
            batch, n = tokens.shape
            position = jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n))
            row = jnp.full((batch,), n, jnp.int32)
            block = Block(position=position, prompt=row, total=row, budget=((None,),) * config.num_layers)
        # [B, n, hidden]
        x = self.embed(tokens)
        if config.embed_size != config.hidden_size:
            x = self.embed_in(x)
        if config.learned_positions:
            x = x + self.position_embed(block.position)
        after = []
        for index, module in enumerate(self.layers):
            x = sharding.constrain(x, ("batch", None, None))
            x, layer = module(x, None if kv is None else kv.layers[index], block, phase[index])
            after.append(layer)
        if config.final_norm:
            x = self.final_norm(x)
        if config.embed_size != config.hidden_size:
            x = self.embed_out(x)
        # [B]
        added = jnp.sum(block.position >= 0, axis=1, dtype=jnp.int32)
        length = added if kv is None else kv.length + added
        return x, KVState(tuple(after), length, prompt=block.prompt, total=block.total, budget=block.budget)

    def logits(self, hidden: Array) -> Array:
        """[..., embed] -> [..., V] float32."""
        output = self.embed.attend(hidden) if self.config.tie_embeddings else self.head(hidden)
        return output.astype(jnp.float32)


class Embed(nn.Module):
    config: DecoderConfig
    dtype: Any = jnp.float32

    def setup(self):
        shape = (self.config.vocab_size, self.config.embed_size)
        self.tokens = self.param("tokens", nn.initializers.normal(shape[1] ** -0.5), shape, self.dtype)

    def __call__(self, tokens: Array) -> Array:
        x = jnp.take(self.tokens, tokens, axis=0)
        return x if self.config.embed_scale == 1 else x * jnp.asarray(self.config.embed_scale, x.dtype)

    def attend(self, hidden: Array) -> Array:
        return jax.lax.dot_general(hidden, self.tokens, (((hidden.ndim - 1,), (1,)), ((), ())))


class PositionEmbed(nn.Module):
    config: DecoderConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, position: Array) -> Array:
        shape = (self.config.max_positions + self.config.position_offset, self.config.hidden_size)
        table = self.param("table", nn.initializers.normal(0.02), shape, self.dtype)
        return jnp.take(table, jnp.maximum(position, 0) + self.config.position_offset, axis=0)


def parameter_shapes(config: DecoderConfig, dtype: Any = jnp.float32) -> Any:
    """The parameter tree's shapes and dtypes; nothing is allocated."""
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    init = Decoder(config, dtype).init
    return jax.eval_shape(lambda key, x: init(key, x)["params"], jax.random.key(0), tokens)


def parameter_count(config: DecoderConfig) -> int:
    """How many numbers the parameters are; the layers are alike, so that one is traced."""
    tree = parameter_shapes(dataclasses.replace(config, num_layers=1, windows=()))
    sizes = {name: sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(node)) for name, node in tree.items()}
    return sum(sizes.values()) + (config.num_layers - 1) * sizes["layer_0"]


def random_parameters(config: DecoderConfig, key: Array, dtype: Any = jnp.float32) -> Any:
    """Freshly initialised parameters, for training, tests and benchmarks."""
    return Decoder(config, dtype).init(key, jnp.zeros((1, 1), jnp.int32))["params"]
