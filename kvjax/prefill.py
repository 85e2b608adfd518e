"""Prefill: prompts go through the model, in one shot or in blocks, and leave a cache for decoding.

Budgets and capacities are settled on the host first, so that every user error is raised before anything is traced.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention, fused, layers
from kvjax.allocation import Allocation, allocate
from kvjax.attention import Implementation
from kvjax.cache import Block, KVState
from kvjax.errors import PolicyError
from kvjax.inputs import check_batch, check_count, check_positions
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.policies.base import Policy, check

Array = jax.Array
SCORE_ROWS = 512  # prompt tokens whose logits exist at once when scoring


class Prefilled(NamedTuple):
    """A prompt that has gone in: what decoding starts from.

    Attributes:
      logits: [B, V] float32 of each row's last prompt token.
      state: the cache; budget: one [B] int32 a layer, for decoding.
    """

    logits: Array
    state: KVState
    budget: tuple[Array, ...]


def prefill(
    model: Model,
    tokens: Any,
    policy: Policy,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    prefill_block: int | None = None,
    implementation: Implementation = "auto",
) -> Prefilled:
    """Runs prompts through the model and leaves a cache with room for `max_new_tokens`; arguments as in `generate`."""
    policy = check(policy)
    check_positions(model.config, policy.positions)
    check_count("max_new_tokens", max_new_tokens)
    batch = check_batch(model.config, tokens, lengths, new_tokens=max_new_tokens)
    # The last new token is never fed back.
    total = batch.lengths + max_new_tokens - 1
    implementation = attention.resolve(implementation, model.platform)
    block, allocation = allocate_for(model, policy, batch.lengths, total, prefill_block, implementation)
    with model.on_mesh():
        budget, decode_budget = model.place((allocation.budget, allocation.decode_budget))
        logits, _, state = prefill_steps(
            model.params, model.place(batch.tokens), model.place(batch.lengths), budget, config=model.config,
            policy=policy, capacity=allocation.capacity, block_capacity=allocation.block_capacity, block=block,
            score=False, implementation=implementation,
        )  # fmt: skip
    return Prefilled(logits, state, decode_budget)


def allocate_for(
    model: Model,
    policy: Policy,
    prompt: np.ndarray,
    total: np.ndarray,
    prefill_block: int | None,
    implementation: Implementation = "xla",
) -> tuple[int | None, Allocation]:
    """Block size (None = one shot) and slots; a block that holds the longest prompt is one shot."""
    if prefill_block is not None:
        check_count("prefill_block", prefill_block)
        prefill_block = None if prefill_block >= prompt.max() else prefill_block
    if prefill_block is not None and policy.mask is not None and policy.mask.band is not None:
        raise PolicyError(f"policy {policy.name}: it looks at all of a text at once; leave out prefill_block.")
    config = model.config
    slots = allocate(policy, prompt, total, config.num_layers, config.num_kv_heads, prefill_block or 1)
    itemsize = jax.tree.leaves(model.params)[0].dtype.itemsize
    return prefill_block, slots.rounded_up(fused.capacity_multiple(implementation, itemsize))


STATIC = ("config", "policy", "capacity", "block_capacity", "block", "score", "implementation")


@functools.partial(jax.jit, static_argnames=STATIC)
def prefill_steps(
    params, tokens, lengths, budget, *, config, policy, capacity, block_capacity, block, score, implementation="xla"
):
    """Prompts, in one shot or in blocks.

    Args:
      tokens: [B, T] int32; lengths: [B] prompt lengths; when scoring, T is one more than the longest if there is one.

    Returns:
      logits [B, V] of each row's last prompt token; logprobs [B, T - 1] of the tokens after the first, or None;
      the state, with decode capacities, and statistics of the policy that decodes.
    """
    decoder = bind(config, params)
    rows, width = tokens.shape
    step = width if block is None else block
    count = -(-width // step)
    padded = jnp.pad(tokens, ((0, 0), (0, count * step + 1 - width)))

    def consume(kv, start, ids, targets, block_slots):
        position = start + jnp.arange(step, dtype=jnp.int32)
        position = jnp.where(position < lengths[:, None], position, -1)
        # [B, step, E]
        block = Block(
            position=position, budget=budget, policy=policy, capacity=block_slots, prompt=lengths,
            implementation=implementation,
        )  # fmt: skip
        x, kv = decoder.hidden(ids, kv, block)
        at = jnp.clip(lengths - 1 - start, 0, step - 1)
        # [B, E]
        last = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        return kv, last, logprobs_of(decoder, x, targets) if score else jnp.zeros((rows, 0), jnp.float32)

    if block is None:
        kv, last, logprobs = consume(None, 0, tokens, padded[:, 1 : width + 1], capacity)
    else:
        start = layers.empty(policy, block_capacity, rows, config.num_kv_heads, config.head_dim, decoder.dtype)
        kv = KVState(start, jnp.zeros((rows,), jnp.int32))
        blocks = [x.reshape(rows, count, step).swapaxes(0, 1) for x in (padded[:, :-1], padded[:, 1:])]

        # For gradients: a block is computed again instead of remembered, so that what is held of it is the cache alone.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(carry, inputs):
            kv, last = carry
            start, ids, targets = inputs
            kv, newest, logprobs = consume(kv, start, ids, targets, None)
            here = (lengths - 1 >= start) & (lengths - 1 < start + step)
            return (kv, jnp.where(here[:, None], newest, last)), logprobs

        starts = jnp.arange(count, dtype=jnp.int32) * step
        last = jnp.zeros((rows, config.embed_size), decoder.dtype)
        (kv, last), logprobs = jax.lax.scan(body, (kv, last), (starts, *blocks))
        kv = kv.replace(layers=layers.resize(kv.layers, policy, capacity))
        logprobs = logprobs.swapaxes(0, 1).reshape(rows, -1)
    if policy.then is not None:
        kv = kv.replace(layers=tuple(layer.replace(stats=policy.hand_over(layer.stats)) for layer in kv.layers))
    logits = decoder.logits(last)
    return logits, logprobs[:, : width - 1], kv


class Bound(NamedTuple):
    """A decoder with its parameters: what the jitted loops call.

    Attributes:
      hidden: (tokens [B, n], state, block) -> (hidden states [B, n, E], state).
      logits: hidden states [..., E] -> [..., V] float32.
      dtype: of parameters and cache.
    """

    hidden: Callable[[Array, KVState | None, Block], tuple[Array, KVState]]
    logits: Callable[[Array], Array]
    dtype: Any


def bind(config: DecoderConfig, params: Any) -> Bound:
    dtype = params["embed"]["tokens"].dtype
    decoder = Decoder(config, dtype)

    def call(method: str) -> Callable[..., Any]:
        return functools.partial(decoder.apply, {"params": params}, method=method)

    return Bound(call("hidden"), call("logits"), dtype)


def logprobs_of(decoder: Bound, hidden: Array, targets: Array) -> Array:
    """log p(target) of each position: hidden [B, n, E], targets [B, n] -> [B, n]; logits exist a part at a time."""

    def score(x, target):
        logits = decoder.logits(x)
        chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    n = hidden.shape[1]
    if n <= SCORE_ROWS:
        return score(hidden, targets)
    parts = -(-n // SCORE_ROWS)
    pad = parts * SCORE_ROWS - n
    x = jnp.pad(hidden, ((0, 0), (0, pad), (0, 0))).reshape(hidden.shape[0], parts, SCORE_ROWS, -1).swapaxes(0, 1)
    y = jnp.pad(targets, ((0, 0), (0, pad))).reshape(hidden.shape[0], parts, SCORE_ROWS).swapaxes(0, 1)
    scores = jax.lax.map(lambda xy: score(*xy), (x, y))
    return scores.swapaxes(0, 1).reshape(hidden.shape[0], -1)[:, :n]
