"""Keys and values of whole texts, before the norm of keys and before rotation, and a full cache that is made of them.

These functions are pure and have gradients: predictions run them, and so do the losses that train these.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp

from kvjax.cache import shared_prefix
from kvjax.cache.empty import empty_layers
from kvjax.cache.groups import Group, Phase
from kvjax.cache.state import EMPTY, Block, KVState, Layer, LayerKV, exact_store
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import run_layer
from kvjax.models.layers import Linear, Norm
from kvjax.parallel.sharding import Params
from kvjax.policies.window import full
from kvjax.reuse.layerwise import rotated

Array = jax.Array


class KeyValue(NamedTuple):
    """The keys and values of a layer.

    Attributes:
      key: [B, K, n, D], as projected: neither normalised nor rotated.
      value: [B, K, n, D].
    """

    key: Array
    value: Array


def whole_block(lengths: Array, width: int, layers: int) -> Block:
    """Returns the block of whole texts, [B] int32 tokens each, that are padded at the end to `width`."""
    # [B, n]
    position = jnp.arange(width, dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, -1)
    return Block(position=position, prompt=lengths, total=lengths, budget=((None,),) * layers)


def run_whole(
    config: DecoderConfig, params: Params, tokens: Array, lengths: Array
) -> tuple[Array, tuple[KeyValue, ...]]:
    """Runs whole texts under full attention.

    Each layer is a call of one program, unless the caller is a program itself.

    Args:
      config: the decoder.
      params: of the decoder.
      tokens: [B, n] int32, padded at the end.
      lengths: [B] int32, the tokens of each text.

    Returns:
      The input of the output head, [B, n, embed]; and the keys and values of each layer.
    """
    shared_prefix.refuse(params, "kvjax.reuse")
    decoder = bind(config, params)
    block = whole_block(lengths, tokens.shape[1], config.num_layers)
    x = decoder.enter(tokens, block)
    made = []
    for index in range(config.num_layers):
        own = params[f"layer_{index}"]
        output = run_layer(
            own, x, None, block.of_layer(index), None, config=config, kind=config.kind(index), dtype=decoder.dtype,
            groups=(Group(policy=full()),),
        )  # fmt: skip
        x, (_, key, value) = output.x, output.projected
        if config.qk_norm:
            key = _projected_key(config, own, output.entered)
        made.append(KeyValue(key, value))
    return decoder.leave(x), tuple(made)


def _projected_key(config: DecoderConfig, params: Params, entered: Array) -> Array:
    """Projects the input of a layer's attention [B, n, hidden] to keys, which are not normalised."""
    linear = Linear(config.num_kv_heads * config.head_dim, config.qkv_bias, entered.dtype, parent=None)
    # [B, n, K * D]
    y = cast(Array, linear.apply({"params": params["attention"]["key"]}, entered))
    return jnp.swapaxes(y.reshape(*y.shape[:2], config.num_kv_heads, config.head_dim), 1, 2)


def normalised_key(config: DecoderConfig, params: Params, key: Array) -> Array:
    """Applies the norm of a layer's keys, if there is one.

    Args:
      config: the decoder.
      params: of the layer.
      key: [B, K, n, D], as projected.
    """
    if not config.qk_norm:
        return key
    # [B, n, K, D]
    y = jnp.swapaxes(key, 1, 2)
    shape = y.shape
    if config.qk_norm_form == "joint":
        y = y.reshape(*shape[:2], -1)
    heads = config.num_kv_heads if config.qk_norm_form == "per_head" else None
    own = params["attention"].get("key_norm", {})
    normalised = cast(Array, Norm(config, y.dtype, heads, parent=None).apply({"params": own}, y))
    return jnp.swapaxes(normalised.reshape(shape), 1, 2)


def full_phase(config: DecoderConfig, slots: int) -> Phase:
    """Returns the groups of a full cache of a number of slots, one for the heads of each layer."""
    return ((Group(policy=full(), slots=(slots,), decoding=True),),) * config.num_layers


def full_cache(
    config: DecoderConfig, params: Params, layers: Sequence[KeyValue], lengths: Array, total: Array, slots: int
) -> KVState:
    """Returns a full cache of texts, of whose slots those after a text are empty.

    Args:
      config: the decoder.
      params: of the decoder, of which the norms of keys are used.
      layers: the keys and values [B, K, n, D] of each layer, by position.
      lengths: [B] int32, the tokens of each text.
      total: [B] int32, the tokens that each row will have in the end; see `KVState`.
      slots: of each layer, at least n.
    """
    dtype = params["embed"]["tokens"].dtype
    empty = empty_layers(full_phase(config, slots), len(lengths), config.num_kv_heads, config.head_dim, dtype)
    return KVState(
        filled(config, params, empty, layers, lengths, total), lengths, prompt=lengths, total=total,
        budget=((None,),) * config.num_layers,
    )  # fmt: skip


def filled(
    config: DecoderConfig, params: Params, empty: Sequence[Layer], layers: Sequence[KeyValue], lengths: Array,
    total: Array,
) -> tuple[Layer, ...]:  # fmt: skip
    """Fills empty slots of a full cache, which has one group of heads in each layer; see `full_cache`."""
    # [B, n]
    position = jnp.arange(layers[0].key.shape[2], dtype=jnp.int32)
    position = jnp.where(position < lengths[:, None], position, EMPTY)

    def of_layer(index: int, own: LayerKV) -> LayerKV:
        key, value = layers[index]
        key = normalised_key(config, params[f"layer_{index}"], key)
        key = rotated(config.kind(index).rope, key, position, total)
        room = (0, own.position.shape[2] - key.shape[2])
        key, value = (jnp.pad(each, ((0, 0), (0, 0), room, (0, 0))) for each in (key, value))
        at = jnp.pad(position, ((0, 0), room), constant_values=EMPTY)
        return own.replace(
            position=jnp.broadcast_to(at[:, None], own.position.shape), stores=(exact_store(key, value),)
        )

    return tuple(Layer((of_layer(index, *layer),)) for index, layer in enumerate(empty))
