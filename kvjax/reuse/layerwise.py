"""Runs some tokens of a text through the layers one after the other, over keys and values that were computed before.

Each layer is a call of one program, so that a deep model compiles no longer than a shallow one, and between two layers
the caller may leave tokens out.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.cache import shared_prefix
from kvjax.cache.groups import Group
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.cache.state import EMPTY, Block, Layer, LayerKV, exact_store
from kvjax.contexts.room import BY_LENGTH
from kvjax.errors import InputError
from kvjax.generation.program import program
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder_layer import run_layer
from kvjax.models.model import Model
from kvjax.numerics.rope import Rope
from kvjax.parallel.sharding import Params

Array = jax.Array


class LayerResult(NamedTuple):
    """A layer after some tokens have gone through it.

    Attributes:
      key: [1, K, S, D], the keys of the text by position, not rotated, with those of the tokens.
      value: [1, K, S, D], the values.
      key_deviation: [1, n] float32, the squared distance of each token's key from the one before, over KV heads.
      value_deviation: [1, n] float32, the same of values.
      query: [1, H, n, D], not rotated.
    """

    key: Array
    value: Array
    key_deviation: Array
    value_deviation: Array
    query: Array


class Run(NamedTuple):
    """Some tokens after all layers.

    Attributes:
      hidden: [1, n, E], what leaves the last layer, of the tokens that went through it.
      position: [n] int32, their positions.
      active: [L, S] bool, the positions whose tokens went on after each layer.
    """

    hidden: Array
    position: np.ndarray
    active: np.ndarray


#: Given the index of a layer, its result and the positions [n] of the tokens: the indices of those that go on.
Choose = Callable[[int, LayerResult, np.ndarray], np.ndarray]


def check_movable(config: DecoderConfig) -> None:
    """Checks that keys can be moved to other positions.

    Raises:
      InputError: the model has learned positions, or RoPE whose frequencies depend on the length of the text.
    """
    ropes = [config.kind(index).rope for index in range(config.num_layers)]
    if scalings := {rope.scaling for rope in ropes if rope is not None} & {*BY_LENGTH}:
        raise InputError(
            f"keys and values cannot be reused in another text: under {', '.join(sorted(scalings))} RoPE, they depend "
            "on the length of theirs."
        )
    if config.learned_positions:
        raise InputError(
            "chunks cannot be reused at other positions: this model has a table of learned positions, which keys and "
            "values depend on."
        )


def run_tokens(
    model: Model,
    tokens: np.ndarray,
    position: np.ndarray,
    keys: Sequence[Array],
    values: Sequence[Array],
    known: np.ndarray,
    *,
    total: int,
    choose: Choose | None = None,
    record: Callable[[int, LayerResult, int], None] | None = None,
) -> Run:
    """Runs tokens through all layers; at each, their keys and values replace those at their positions.

    Args:
      model: the model.
      tokens: [n] int32.
      position: [n] int32, ascending. A token attends to what is known up to its position, and to the tokens before it.
      keys: of each layer, [1, K, S, D] by position, not rotated.
      values: of each layer, [1, K, S, D].
      known: [S] bool, the positions that have a key and value.
      total: the number of tokens that RoPE is for; see `KVState`.
      choose: says which tokens go on after a layer; None = all.
      record: is given the index and the result of each layer, and n, after which its arrays have padding.
    """
    shared_prefix.refuse(model.params, "kvjax.reuse")
    config, dtype = model.config, model.dtype
    size, layers = len(known), config.num_layers
    active = np.zeros((layers, size), bool)
    x = None
    for index in range(layers):
        if not len(position):
            break
        count, width = len(position), prompt_bucket(len(position))
        # [1, width]
        at = np.full((1, width), EMPTY, np.int32)
        at[0, :count] = position
        if x is None:
            ids = np.zeros((1, width), np.int32)
            ids[0, :count] = tokens
            x = _enter(model.params, jnp.asarray(ids), jnp.asarray(at), config=config)
        held = np.where(known, np.arange(size), EMPTY).astype(np.int32)
        held[position] = EMPTY
        x, result = _run_layer(
            model.params[f"layer_{index}"], x, jnp.asarray(at), keys[index], values[index], jnp.asarray(held[None]),
            jnp.full((1,), total, jnp.int32), config=config, kind=config.kind(index), dtype=dtype,
        )  # fmt: skip
        if record is not None:
            record(index, result, count)
        if choose is not None:
            chosen = choose(index, result, position)
            if len(chosen) < count:
                position = position[chosen]
                # [1, width of those that are left, hidden]
                gathered = np.zeros((prompt_bucket(max(len(chosen), 1)),), np.int32)
                gathered[: len(chosen)] = chosen
                x = jnp.take(x, jnp.asarray(gathered), axis=1)
        active[index, position] = True
    if x is None:
        x = jnp.zeros((1, 0, config.hidden_size), dtype)
    return Run(x, position, active)


def next_logits(model: Model, run: Run) -> Array:
    """Returns the logits [V] float32 after the last token of a run."""
    last = run.hidden[:, len(run.position) - 1]
    logits: Array = _leave(model.params, last, config=model.config)
    return logits[0]


@program(static_argnames=("config", "kind", "dtype"))
def _run_layer(
    params: Params,
    x: Array,
    position: Array,
    key: Array,
    value: Array,
    held: Array,
    total: Array,
    *,
    config: DecoderConfig,
    kind: LayerKind,
    dtype: DTypeLike,
) -> tuple[Array, LayerResult]:
    """Runs tokens through a layer.

    Args:
      params: of the layer.
      x: [1, n, hidden].
      position: [1, n] int32, -1 = padding.
      key: [1, K, S, D] by position, not rotated.
      value: [1, K, S, D].
      held: [1, S] int32, the positions to attend to, besides the tokens themselves; -1 = none.
      total: [1] int32.
      config: the decoder.
      kind: of the layer.
      dtype: of the parameters.
    """
    n, size = x.shape[1], key.shape[2]
    # A step writes its tokens to empty slots.
    room = ((0, 0), (0, 0), (0, n), (0, 0))
    slots = jnp.pad(jnp.broadcast_to(held[:, None], key.shape[:3]), room[:3], constant_values=EMPTY)
    store = exact_store(jnp.pad(rotated(kind.rope, key, held, total), room), jnp.pad(value, room))
    layer = Layer((LayerKV(slots, (store,), {}, {}, key.shape[3]),))
    block = Block(position=position, prompt=total, total=total, budget=(None,), layer=jnp.int32(0))
    groups = (Group(slots=(size + n,)),)
    output = run_layer(params, x, layer, block, None, config=config, kind=kind, dtype=dtype, groups=groups)
    query, own_key, own_value = output.projected
    # [n]: padding is out of range, and is neither read nor written
    at = jnp.where(position[0] >= 0, position[0], size)

    def deviation(new: Array, old: Array) -> Array:
        before = jnp.take(old, at, axis=2, mode="clip").astype(jnp.float32)
        return jnp.sum(jnp.square(new.astype(jnp.float32) - before), axis=(1, 3))

    return output.x, LayerResult(
        key.at[:, :, at].set(own_key, mode="drop"), value.at[:, :, at].set(own_value, mode="drop"),
        deviation(own_key, key), deviation(own_value, value), query,
    )  # fmt: skip


def rotated(rope: Rope | None, key: Array, position: Array, total: Array) -> Array:
    """Rotates keys [1, heads, S, D] to positions [1, S], for texts of `total` [1] tokens."""
    return key if rope is None else rope.rotate(key, position, rope.frequencies(total))


@program(static_argnames=("config",))
def _enter(params: Params, tokens: Array, position: Array, *, config: DecoderConfig) -> Array:
    row = jnp.zeros((1,), jnp.int32)
    block = Block(position=position, prompt=row, total=row, budget=())
    return bind(config, params).enter(tokens, block)


@program(static_argnames=("config",))
def _leave(params: Params, x: Array, *, config: DecoderConfig) -> Array:
    decoder = bind(config, params)
    return decoder.logits(decoder.leave(x))
