"""A layer of a decoder: attention over a cache and MLP, with their norms and residual connections (Flax Linen).

It does not depend on the policy: attention passes unrotated queries, keys and values to `kvjax.cache.step.step`, which
returns the output and the updated cache of the layer.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.typing import DTypeLike

from kvjax.cache.groups import Group
from kvjax.cache.state import Block
from kvjax.cache.state import Layer as LayerCache
from kvjax.cache.step.interface import AttentionOperands, LayerArgs
from kvjax.cache.step.step import step_layer
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.experts import Experts
from kvjax.models.layers import Linear, Mlp, Norm
from kvjax.models.output_gram import output_gram
from kvjax.parallel import host_memory, sharding
from kvjax.parallel.sharding import Params
from kvjax.products import as_matrix

Array = jax.Array

SKEW = "skew"  # optional parameter of an attention, [K, D, D]; see `kvjax.models.skew`
SIDES = "sides"  # optional parameters of an attention, {"key": {part: [K, ...]}, "value": ...}; see `kvjax.calibrate`
POLICY = "policy"  # optional parameters of an attention, {name of `Parameters`: {part: [K or 1, ...]}}
SHIFT = "shift"  # optional parameters of an attention, added to {"key": [B, K, n, D], "value": ...}, for gradients
#: Optional parameter of an attention that replaces its output: `models.gates.Gates`, `models.nested.Nested`, or
#: `kvjax.training.GatedAttention`.
GATES = "gates"


class Streams(NamedTuple):
    """The inputs and outputs of a layer and of its attention, for `kvjax.analysis`; all [B, n, hidden].

    Attributes:
      block_input: the residual stream that enters the layer.
      attention_input: what is multiplied by the projections of queries, keys and values.
      attention_output: what attention adds to the residual stream.
      mlp_output: what the MLP adds to it.
    """

    block_input: Array
    attention_input: Array
    attention_output: Array
    mlp_output: Array


class LayerOutput(NamedTuple):
    """The result of a layer, or of its attention.

    Attributes:
      x: [B, n, hidden].
      cache: the layer's updated cache.
      seen: per group of heads, the operands of attention, for `kvjax.analysis`.
      entered: [B, n, hidden], the input of attention.
      projected: the query [B, H, n, D], the key [B, K, n, D] and the value [B, K, n, D], not rotated.
      streams: inputs and outputs of the layer's parts; None from `Attention`.
    """

    x: Array
    cache: LayerCache
    seen: tuple[AttentionOperands | None, ...]
    entered: Array
    projected: tuple[Array, Array, Array]
    streams: Streams | None = None


def attention_args(config: DecoderConfig, kind: LayerKind, params: Params, guess: Array | None = None) -> LayerArgs:
    """Returns the arguments of an attention's steps besides queries, keys and values.

    Args:
      config: the decoder.
      kind: the settings in which the layer may differ from others.
      params: the parameters of the attention, of which only optional ones are used.
      guess: see `LayerArgs`.
    """
    return LayerArgs(
        rope=kind.rope, scale=config.attention_scale, soft_cap=config.attention_soft_cap, window=kind.window,
        guess=guess, skew=params.get(SKEW), sides=params.get(SIDES), params=params.get(POLICY),
    )  # fmt: skip


class Attention(nn.Module):
    """Self-attention over the cache of one layer.

    Attributes:
      config: the decoder.
      kind: the settings in which the layer may differ from others.
      dtype: of the parameters.
    """

    config: DecoderConfig
    kind: LayerKind
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, layer: LayerCache | None, block: Block, groups: tuple[Group, ...], hint: Array | None = None
    ) -> LayerOutput:
        """Attends to the cache, which is updated with the tokens of the block.

        Args:
          x: [B, n, hidden], normalised.
          layer: the layer's cache so far; None if the block is the whole prompt.
          block: positions and budgets of the tokens, of this layer.
          groups: the layer's groups of heads.
          hint: [B, n, hidden], the input of the attention of the layer before, from which selections that look ahead
            guess the query; None if none does.

        Returns:
          The output, [B, n, hidden], the updated cache and the operands of attention.
        """
        config = self.config
        batch, n, _ = x.shape

        def projection(name: str, count: int, norm: str | None = None) -> Callable[[Array], Array]:
            linear = Linear(count * config.head_dim, config.qkv_bias, self.dtype, name=name)
            joint, of_each = config.qk_norm_form == "joint", count if config.qk_norm_form == "per_head" else None
            normalised = Norm(config, self.dtype, of_each, name=norm) if norm and config.qk_norm else None

            def heads(x: Array) -> Array:
                # [B, n, heads * D]
                y = linear(x)
                # Without this barrier before the reshape, XLA's TPU compiler keeps a transposed copy of the kernel.
                y = jax.lax.platform_dependent(y, tpu=jax.lax.optimization_barrier, default=lambda y: y)
                y = sharding.constrain_heads(y, count)
                y = normalised(y) if normalised is not None and joint else y
                # [B, n, heads, D]
                y = y.reshape(batch, n, count, config.head_dim)
                y = normalised(y) if normalised is not None and not joint else y
                # [B, heads, n, D]
                return jnp.swapaxes(y, 1, 2)

            return heads

        optional: Params = {
            name: self.get_variable("params", name)
            for name in (SKEW, SIDES, POLICY, SHIFT, GATES)
            if self.has_variable("params", name)
        }
        to_query = projection("query", config.num_heads, "query_norm")
        # [B, H, n, D]
        query = to_query(x)
        # [B, K, n, D]
        key = projection("key", config.num_kv_heads, "key_norm")(x)
        value = projection("value", config.num_kv_heads)(x)
        if (shift := optional.get(SHIFT)) is not None:
            key, value = key + shift["key"], value + shift["value"]
        args = attention_args(config, self.kind, optional, None if hint is None else to_query(hint))
        if any(group.replaying and group.replay is not None and group.replay.output_norm for group in groups):
            gram = output_gram(self.get_variable("params", "out")["kernel"], config.num_heads)
            # [B, n]
            norm = jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=2))
            args = args._replace(output_gram=gram, hidden_norm=norm)
        if writes := [score for group in groups for score in group.writes]:
            args = args._replace(hidden=x)
            if any(score.projects for score in writes) and not self.is_initializing():
                args = args._replace(out_kernel=as_matrix(self.variables["params"]["out"]["kernel"]))
        output, after, seen = step_layer(layer, query, key, value, block=block, groups=groups, args=args)
        if layer is None and (gates := optional.get(GATES)) is not None:
            output = gates.blend(output, query, key, value, block, args._replace(hidden=x))
        # [B, n, H * D]
        output = jnp.swapaxes(output, 1, 2).reshape(batch, n, config.num_heads * config.head_dim)
        output = sharding.constrain_heads(output, config.num_heads, enters=True)
        # [B, n, hidden]
        output = Linear(config.hidden_size, config.out_bias, self.dtype, name="out")(output)
        return LayerOutput(output, after, seen, x, (query, key, value))


class Layer(nn.Module):
    """One layer: attention and MLP with their norms and residual connections.

    Attributes:
      config: the decoder.
      kind: the settings in which the layer may differ from others.
      dtype: of the parameters.
    """

    config: DecoderConfig
    kind: LayerKind
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, x: Array, layer: LayerCache | None, block: Block, groups: tuple[Group, ...], hint: Array | None = None
    ) -> LayerOutput:
        """Returns the residual stream [B, n, hidden] after the layer, and more; see `Attention`."""
        config = self.config
        attention = Attention(config, self.kind, self.dtype, name="attention")
        mlp = (Experts if config.num_experts else Mlp)(config, self.dtype, name="mlp")
        norm = functools.partial(Norm, config, self.dtype)
        # [B, n, hidden] all
        before = x
        if config.norm_position == "post":
            output = attention(x, layer, block, groups, hint)
            x = norm(name="attention_norm")(x + output.x)
            added = mlp(x)
            x = norm(name="mlp_norm")(x + added)
            return output._replace(x=x, streams=Streams(before, output.entered, output.x, added))

        def entering(x: Array, name: str) -> Array:
            return x if config.norm_position == "output" else norm(name=name)(x)

        def leaving(x: Array, name: str) -> Array:
            x = x if config.norm_position == "pre" else norm(name=name)(x)
            return x if config.residual_scale == 1 else x * jnp.asarray(config.residual_scale, x.dtype)

        entered = entering(x, "attention_norm")
        output = attention(entered, layer, block, groups, hint)
        first = leaving(output.x, "attention_out_norm")
        if config.shared_norm:
            added = mlp(entered)
        else:
            added = mlp(entering(x if config.parallel_residual else x + first, "mlp_norm"))
        added = leaving(added, "mlp_out_norm")
        return output._replace(x=x + first + added, streams=Streams(before, output.entered, first, added))


@functools.partial(jax.jit, static_argnames=("config", "kind", "dtype", "groups"))
def run_layer(
    params: Params,
    x: Array,
    layer: LayerCache | None,
    block: Block,
    hint: Array | None,
    *,
    config: DecoderConfig,
    kind: LayerKind,
    dtype: DTypeLike,
    groups: tuple[Group, ...],
) -> LayerOutput:
    """Runs one layer; see `Layer`.

    A jitted function inside of a jitted loop is traced and lowered once for all layers that are alike, and inlined by
    the compiler: the first call of OPT-125M's shape takes 0.7 times as long, and 0.6 times with compiled programs kept.
    """
    module = Layer(config, kind, dtype, parent=None)
    # Weights in host memory are on the device while their layer runs.
    return cast(LayerOutput, module.apply({"params": host_memory.to_device(params)}, x, layer, block, groups, hint))
