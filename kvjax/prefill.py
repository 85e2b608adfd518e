"""Prefill: prompts go through the model, in one shot or in blocks, and leave a cache for decoding.

What is allocated, and which programs run, is settled on the host first (`kvjax.cache.lowering`), so that every user error
is raised before anything is traced.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.attention import Implementation
from kvjax.cache.convert import convert, empty_layers
from kvjax.cache.layout import CacheLayout, Phase
from kvjax.cache.limits import Limits, sizes_for
from kvjax.cache.lowering import lower
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.cache.state import Block, KVState, Layer
from kvjax.inputs import check_batch, check_count, check_positions
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.selection.base import Selection
from kvjax.storage.base import Storage

Array = jax.Array
SCORE_ROWS = 512  # prompt tokens whose logits exist at once when scoring


class Prefilled(NamedTuple):
    """A prompt that has gone in: what decoding starts from.

    Attributes:
      logits: [B, V] float32 of each row's last prompt token.
      state: the cache.
      layout: what programs know of it.
    """

    logits: Array
    state: KVState
    layout: CacheLayout


def prefill(
    model: Model,
    tokens: Any,
    policy: Policy | CacheSpec,
    *,
    max_new_tokens: int,
    lengths: Any = None,
    prefill_block: int | None = None,
    implementation: Implementation = "auto",
    storage: Storage | None = None,
    selection: Selection | None = None,
    limits: Limits | None = None,
) -> Prefilled:
    """Runs prompts through the model and leaves a cache with room for `max_new_tokens`; arguments as in `generate`."""
    spec = as_spec(policy, storage, selection)
    check_count("max_new_tokens", max_new_tokens)
    batch = check_batch(model.config, tokens, lengths, new_tokens=max_new_tokens)
    # The last new token is never fed back.
    total = batch.lengths + max_new_tokens - 1
    with model.on_mesh():
        prepared = prepare(
            model, spec, batch.lengths, total, width=batch.width, prefill_block=prefill_block, limits=limits,
            implementation=implementation, last_fed=False,
        )  # fmt: skip
        logits, _, state = run_prompts(model, batch.tokens, batch.lengths, total, prepared, score=False)
    return Prefilled(logits, state, prepared.layout)


class Prepared(NamedTuple):
    """What a batch runs: its layout and budgets, and the width that prompts are padded to."""

    layout: CacheLayout
    budgets: Any
    width: int


def prepare(
    model: Model,
    spec: CacheSpec,
    prompt: np.ndarray,
    total: np.ndarray,
    *,
    width: int,
    prefill_block: int | None,
    implementation: Implementation,
    limits: Limits | None = None,
    last_fed: bool = True,
) -> Prepared:
    """Lowers a spec for a batch, on the mesh in force.

    Args:
      prompt: [B] tokens of each row's prompt.
      total: [B] tokens that each row will hold.
      width: of the caller's array of prompts.
      prefill_block, implementation, limits: as in `generate`.
      last_fed: see `sizes_for`.
    """
    check_positions(model.config, spec.policy.positions)
    if prefill_block is not None:
        check_count("prefill_block", prefill_block)
    sizes = sizes_for(
        prompt, int(np.max(total - prompt)), width=width, block=prefill_block, limits=limits, last_fed=last_fed
    )
    lowered = lower(
        spec, model.config, sizes, prompt, implementation=implementation, platform=model.platform,
        dtype=jax.tree.leaves(model.params)[0].dtype,
    )  # fmt: skip
    return Prepared(lowered.layout, lowered.budgets, sizes.prompt)


def run_prompts(
    model: Model, tokens: np.ndarray, lengths: np.ndarray, total: np.ndarray, prepared: Prepared, *, score: bool
) -> tuple[Array, Array, KVState]:
    """`prefill_steps` for a batch on the host, padded; when scoring, tokens may go on behind the prompts."""
    width = prepared.width + (1 if score else 0)
    ids = np.zeros((len(tokens), width), np.int32)
    known = min(width, tokens.shape[1])
    ids[:, :known] = tokens[:, :known]
    place = model.place
    return prefill_steps(
        model.params, *place((ids, lengths, total.astype(np.int32), prepared.budgets.prompt, prepared.budgets.decode)),
        config=model.config, layout=prepared.layout, score=score,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("config", "layout", "score"))
def prefill_steps(params, tokens, lengths, total, budget, decode_budget, *, config, layout, score):
    """Prompts, in one shot or in blocks.

    Args:
      tokens: [B, T] int32; when scoring, T is one more than the width of the prompts.
      lengths: [B] prompt lengths.
      total: [B], see `KVState`.
      budget: per layer and group, [B] slots of the policy for prompts.
      decode_budget: the same of the policy that decodes.

    Returns:
      logits [B, V] of each row's last prompt token; logprobs [B, width] of the tokens after each, or [B, 0];
      the state, in the decoding phase's arrays.
    """
    decoder = bind(config, params)
    rows = tokens.shape[0]
    width = tokens.shape[1] - (1 if score else 0)
    step = width if layout.block is None else layout.block
    count = -(-width // step)
    padded = jnp.pad(tokens, ((0, 0), (0, count * step + 1 - tokens.shape[1])))

    def consume(kv, start, ids, targets):
        # [B, step]
        position = start + jnp.arange(step, dtype=jnp.int32)
        position = jnp.where(position < lengths[:, None], position, -1)
        block = Block(position=position, prompt=lengths, total=total, budget=budget)
        # [B, step, E]
        x, kv = decoder.hidden(ids, kv, block, layout.prompt)
        at = jnp.clip(lengths - 1 - start, 0, step - 1)
        # [B, E]
        last = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        return kv, last, logprobs_of(decoder, x, targets) if score else jnp.zeros((rows, 0), jnp.float32)

    if layout.block is None:
        kv, last, logprobs = consume(None, 0, padded[:, :width], padded[:, 1 : width + 1])
    else:
        start = empty_layers(layout.prompt, rows, config.num_kv_heads, config.head_dim, decoder.dtype)
        zero = jnp.zeros((rows,), jnp.int32)
        kv = KVState(start, zero, prompt=lengths, total=total, budget=budget)
        blocks = [x.reshape(rows, count, step).swapaxes(0, 1) for x in (padded[:, :-1], padded[:, 1:])]

        # For gradients: a block is computed again instead of remembered, so that what is held of it is the cache alone.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(carry, inputs):
            kv, last = carry
            start, ids, targets = inputs
            kv, newest, logprobs = consume(kv, start, ids, targets)
            here = (lengths - 1 >= start) & (lengths - 1 < start + step)
            return (kv, jnp.where(here[:, None], newest, last)), logprobs

        starts = jnp.arange(count, dtype=jnp.int32) * step
        last = jnp.zeros((rows, config.embed_size), decoder.dtype)
        (kv, last), logprobs = jax.lax.scan(body, (kv, last), (starts, *blocks))
        kv = kv.replace(layers=_converted(kv, layout))
        logprobs = logprobs.swapaxes(0, 1).reshape(rows, -1)
    return decoder.logits(last), logprobs[:, :width], kv.replace(budget=decode_budget)


def _converted(kv: KVState, layout: CacheLayout) -> tuple[Layer, ...]:
    """The prompt's slots in the arrays of the decoding phase."""
    return tuple(
        Layer(convert(*each, kv.length - 1) for each in zip(layer, before, after, strict=True))
        for layer, before, after in zip(kv.layers, layout.prompt, layout.decode, strict=True)
    )


class Bound(NamedTuple):
    """A decoder with its parameters: what the jitted loops call.

    Attributes:
      hidden: (tokens [B, n], state, block, phase) -> (hidden states [B, n, E], state).
      logits: hidden states [..., E] -> [..., V] float32.
      dtype: of parameters and cache.
    """

    hidden: Callable[[Array, KVState | None, Block, Phase], tuple[Array, KVState]]
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
