"""Cartridges: trains the slots of a compacted context on the text that follows it, with the model frozen."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import count_argument, number_argument, plain_signature
from kvjax.cache import shared_prefix
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import Phase
from kvjax.cache.state import Block, KVState, Layer, LayerKV
from kvjax.errors import InputError
from kvjax.generation.context import Context, check_context
from kvjax.generation.continuations import takes_blocks, without_step_kernels
from kvjax.generation.generate import check_room
from kvjax.inputs import check_batch
from kvjax.models.bound import bind, logprobs_of
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model, check_model
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies.matched import LOG_WEIGHT
from kvjax.summary import one_line

Array = jax.Array
Slots = list[list[dict[str, Array]]]  # per layer and group: key, value and log_weight


class Cartridge(NamedTuple):
    """The result of `cartridge`.

    Attributes:
      prefilled: the cache with trained slots, which is continued like any other prefilled context.
      losses: [steps + 1] float32, the mean negative log-probability of a token, before each step and after the last.
    """

    prefilled: Context
    losses: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


@plain_signature
def cartridge(
    model: Model,
    prefilled: Context,
    tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    steps: int = 100,
    learning_rate: float = 1e-2,
    optimizer: Any = None,
) -> Cartridge:
    """Trains the slots of a compacted context on the text that follows it (Cartridges, arXiv:2506.06266).

    An optax optimizer trains the rotated keys, the values and the logarithms of the weights of the context's slots. The
    loss is the cross-entropy of the continuation under teacher forcing. The model is frozen, and the slots keep their
    positions. Training begins at the result of `kvjax.policies.matched`. The paper trains on questions about the text
    that the model generates.

    Args:
      model: the model of the context.
      prefilled: from ``prefill(model, context, kvjax.policies.matched(slots), max_new_tokens=...)``, with room for the
        continuation and for tokens generated afterwards. It is not changed.
      tokens: [B, n] int, the continuation of each row, padded at the end; n at least 2.
      lengths: [B] int, the number of real tokens of each row, at least 2; None for n.
      steps: the number of steps, each on all rows.
      learning_rate: the learning rate of Adam.
      optimizer: an `optax.GradientTransformation`; None for ``optax.adam(learning_rate)``.

    Returns:
      The trained cache and the losses. The loss leaves out the first token of the continuation, because the logits that
      predict it do not depend on the slots.

    Raises:
      InputError: a cache without weights, a cache whose slots are coded, evicted or chosen while decoding, tokens that
        do not fit the model or the rows, too few slots, or a number that is not valid.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    check_model(model)
    distributed.check_alone(model.params, "training of slots")
    shared_prefix.refuse(model.params, "training of slots")
    check_context(prefilled, "prefilled")
    steps = count_argument("steps", steps, error=InputError)
    learning_rate = number_argument("learning_rate", learning_rate, minimum=0.0, maximum=float("inf"), error=InputError)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    rows, width = batch.tokens.shape
    if rows != prefilled.num_rows or prefilled.logits.shape[0] != rows:
        raise InputError(
            f"tokens has {rows} rows, but the cache has {prefilled.num_rows}, and {prefilled.logits.shape[0]} with "
            "padding; give one continuation per row, and on a mesh a number of rows that it divides."
        )
    if batch.lengths.min() < 2:
        raise InputError("a continuation has fewer than 2 tokens, and predicts none; give at least 2 in each row.")
    phase = prefilled.layout.decode
    if not takes_blocks(phase):
        raise InputError(
            "the slots of this cache are coded, evicted or chosen while decoding, or their keys are rotated by rank; "
            "prefill with kvjax.policies.matched(slots) alone, an exact storage and no selection."
        )
    state = arranged_state(prefilled.state, ())
    if any(LOG_WEIGHT not in group.stats for layer in state.layers for group in layer):
        raise InputError(
            f"the slots of {prefilled.layout.name} have no weights to train; prefill with "
            "kvjax.policies.matched(slots)."
        )
    check_room(prefilled, width)
    optimizer = optax.adam(learning_rate) if optimizer is None else optimizer
    phase = without_step_kernels(phase)
    with model.on_mesh():
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            slots = slots_of(state)
            memory = optimizer.init(slots)
        data = model.place((batch.tokens, batch.lengths.astype(np.int32)))
        losses = []
        for _ in range(steps):
            slots, memory, value = _step(
                model.params, slots, memory, state, *data, config=model.config, phase=phase, optimizer=optimizer
            )
            losses.append(value)
        losses.append(_loss(slots, model.params, state, *data, config=model.config, phase=phase))
        trained = arranged_state(with_slots(state, slots), stacked_runs(prefilled.state.layers))
    return Cartridge(prefilled._replace(state=trained), np.asarray(jax.device_get(losses), np.float32))


def slots_of(state: KVState) -> Slots:
    """Returns the trained arrays of a cache whose layers are not stacked, in float32."""

    def own(group: LayerKV) -> dict[str, Array]:
        arrays = {"key": group.key, "value": group.value, LOG_WEIGHT: group.stats[LOG_WEIGHT]}
        # Copies, because a step donates its inputs.
        return {name: jnp.array(array, jnp.float32) for name, array in arrays.items()}

    return [[own(group) for group in layer] for layer in state.layers]


def with_slots(state: KVState, slots: Slots) -> KVState:
    """Returns the cache with other keys, values and weights in its live slots; empty slots are unchanged."""

    def changed(group: LayerKV, own: dict[str, Array]) -> LayerKV:
        # [B, K, S]: a token that follows takes an empty slot, with weight 1
        live = group.position >= 0
        key, value = (
            jnp.where(live[..., None], own[name].astype(old.dtype), old)
            for name, old in (("key", group.key), ("value", group.value))
        )
        stats = group.stats | {LOG_WEIGHT: jnp.where(live, own[LOG_WEIGHT], 0.0)}
        return group.with_exact(key, value).replace(stats=stats)

    layers = tuple(
        Layer(changed(group, own) for group, own in zip(layer, each, strict=True))
        for layer, each in zip(state.layers, slots, strict=True)
    )
    return state.replace(layers=layers)


def continuation_loss(
    slots: Slots, params: Params, state: KVState, tokens: Array, lengths: Array, *, config: DecoderConfig, phase: Phase
) -> Array:
    """Returns the mean negative log-probability of the tokens of continuations after their first ones, float32.

    Args:
      slots: the trained arrays, from `slots_of`.
      params: of the decoder.
      state: the cache of the contexts, whose layers are not stacked.
      tokens: [B, n] int32.
      lengths: [B] int32, the number of real tokens of each row.
      config: the decoder.
      phase: the groups of heads of each layer while decoding, without kernels of one token.
    """
    decoder, kv = bind(config, params), with_slots(state, slots)
    # [n - 1]
    number = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)
    # [B, n - 1]: the last token of a row is not fed
    real = number < lengths[:, None] - 1
    position = jnp.where(real, kv.length[:, None] + number, -1)
    block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
    # [B, n - 1, E]
    x, _ = decoder.hidden(tokens[:, :-1], kv, block, phase)
    # [B, n - 1]
    scores = logprobs_of(decoder, x, tokens[:, 1:])
    return -jnp.sum(jnp.where(real, scores, 0.0)) / jnp.sum(real, dtype=jnp.float32)


_loss = jax.jit(continuation_loss, static_argnames=("config", "phase"))


@functools.partial(jax.jit, static_argnames=("config", "phase", "optimizer"), donate_argnames=("slots", "memory"))
def _step(
    params: Params,
    slots: Slots,
    memory: Any,
    state: KVState,
    tokens: Array,
    lengths: Array,
    *,
    config: DecoderConfig,
    phase: Phase,
    optimizer: Any,
) -> tuple[Slots, Any, Array]:
    """Takes one training step; returns the new slots and optimizer state, and the loss before the step."""
    loss = functools.partial(continuation_loss, config=config, phase=phase)
    value, slope = jax.value_and_grad(loss)(slots, params, state, tokens, lengths)
    with jax.numpy_dtype_promotion("standard"):
        change, memory = optimizer.update(slope, memory, slots)
        slots = jax.tree.map(jnp.add, slots, change)
    return slots, memory, value
