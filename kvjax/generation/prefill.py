"""Prefill: runs prompts through the model, in one shot or in blocks, and returns a cache for decoding.

The sizes of all arrays and the programs to run are determined on the host first (`kvjax.cache.planning.lowering`), so
that invalid arguments raise an error before anything is traced.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax import policies
from kvjax.attention import Implementation
from kvjax.cache import shared_layers, shared_prefix
from kvjax.cache.empty import empty_layers
from kvjax.cache.layer_stack import repeated
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.limits import Sizes, prompt_bucket, sizes_for
from kvjax.cache.planning.lowering import Budgets, lower, max_positions
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState
from kvjax.generation import compiling, layer_calls, prompt_reuse, prompt_store
from kvjax.generation.context import PAD, Context, Made, Span
from kvjax.generation.layer_calls import GroupBudgets
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.generation.program import program
from kvjax.generation.prompt_end import converted
from kvjax.generation.prompt_replay import replayed
from kvjax.inputs import Batch, check_batch, check_count, check_positions, warn_beyond_context
from kvjax.models.bound import bind, logprobs_of
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy

Array = jax.Array


@cache_keywords()
def prefill(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    max_new_tokens: int,
    lengths: ArrayLike | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Context:
    """Runs prompts through the model.

    Args:
      model: see `kvjax.generate`.
      tokens: see `kvjax.generate`.
      policy: see `kvjax.generate`.
      max_new_tokens: the number of tokens that will be generated, for which the cache has room.
      lengths: see `kvjax.generate`.
      options: see `kvjax.CacheOptions`. Decoding needs the same calibration.
      cache: fields of the options.

    Raises:
      InputError: see `kvjax.generate`.
      PolicyError: see `kvjax.generate`.
      StorageError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "prefill")
    model, spec = options.resolve(model, policy)
    return run_prefill(model, spec, tokens, lengths, max_new_tokens, options)


def run_prefill(
    model: Model,
    spec: CacheSpec,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    max_new_tokens: int,
    options: CacheOptions,
) -> Context:
    """Runs `prefill` with what `CacheOptions.resolve` returns."""
    check_count("max_new_tokens", max_new_tokens)
    batch = check_batch(model.config, tokens, lengths, new_tokens=max_new_tokens)
    # [B]: the last new token is not fed back to the model.
    total = batch.lengths + max_new_tokens - 1
    return run_batch(model, spec, batch, total, max_new_tokens - 1, options, last_fed=False)


def run_batch(
    model: Model,
    spec: CacheSpec,
    batch: Batch,
    total: np.ndarray,
    following: int,
    options: CacheOptions,
    *,
    last_fed: bool,
    first: int | None = None,
    check: Callable[[CacheLayout], None] | None = None,
) -> Context:
    """Runs checked prompts.

    Args:
      model: with the calibration of the cache.
      spec: policy, storage and selection.
      batch: the prompts.
      total: [B] int32, the number of tokens that each row will hold in all.
      following: the number of tokens after a prompt that arrays are made for.
      options: blocks of the prompt, limits and implementation.
      last_fed: see `prepare`.
      first: the number of tokens of each prompt to run; arrays and budgets are those of whole prompts. None = all.
      check: raises an error for a layout that the caller cannot use, before anything runs.
    """
    whole = batch.lengths
    with model.on_mesh():
        prepared = prepare(
            model, spec, whole, total, width=batch.width, options=options, last_fed=last_fed, pad_rows=True,
            following=following,
        )  # fmt: skip
        if check is not None:
            check(prepared.layout)
        if first is not None:
            block = prepared.layout.block
            width = min(prepared.width, prompt_bucket(first) if block is None else -(-first // block) * block)
            prepared = prepared._replace(width=width)
            batch = Batch(batch.tokens[:, :first], np.minimum(batch.lengths, first), first)
        logits, _, state = run_prompts(model, batch.tokens, batch.lengths, total, prepared, score=False)
    rows = len(batch.lengths)
    # [B, 2]
    resolved = np.stack([whole, total], axis=1).astype(np.int32)
    # [B, T]
    padding = np.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
    known = np.where(padding, PAD, batch.tokens)
    known = np.pad(known, ((0, prepared.rows - rows), (0, 0)), constant_values=PAD)
    block = prepared.layout.block
    boundaries = tuple((Span(int(n), int(n) if block is None else min(block, int(n))),) for n in batch.lengths)
    made = Made(model, spec, options, prepared.sizes)
    return Context(logits, state, prepared.layout, known, rows, boundaries, made, resolved)


class Prepared(NamedTuple):
    """A batch that has been lowered.

    Attributes:
      layout: the static description of the cache.
      budgets: the number of slots that each row may keep.
      width: the number of tokens that prompts are padded to.
      rows: the number of rows of arrays; those after the batch's have no token.
      implementation: of attention, as it was asked for.
      sizes: that the batch was lowered for.
    """

    layout: CacheLayout
    budgets: Budgets
    width: int
    rows: int
    implementation: Implementation
    sizes: Sizes


def prepare(
    model: Model,
    spec: CacheSpec,
    prompt: np.ndarray,
    total: np.ndarray,
    *,
    width: int,
    options: CacheOptions,
    last_fed: bool = True,
    pad_rows: bool = False,
    following: int | None = None,
) -> Prepared:
    """Lowers a spec for a batch, on the current mesh. Warns if the model was not trained for so many positions.

    Args:
      model: the model.
      spec: policy, storage and selection.
      prompt: [B] int32, the number of tokens of each row's prompt.
      total: [B] int32, the number of tokens that each row will hold in all.
      width: the number of columns of the caller's array of prompts.
      options: blocks of the prompt, limits and implementation.
      last_fed: see `kvjax.cache.planning.limits.sizes_for`.
      pad_rows: whether arrays have rows without a token where the mesh does not divide those of the batch.
      following: the number of tokens after a prompt that arrays are made for; None = as `total` says.

    Raises:
      InputError: if the batch exceeds the limits, or the model has no rotary positions to place by rank.
      PolicyError: if policy, storage and selection cannot be combined.
      StorageError: if the storage cannot be combined with the policy.
      ConfigError: if an implementation was requested by name that cannot run.
    """
    check_positions(model.config, spec.policy.positions)
    if options.prefill_block is not None:
        check_count("prefill_block", options.prefill_block)
    rows = model.rows_on_mesh(len(prompt)) if pad_rows else len(prompt)
    # A row without a token has the budget of the first one, and holds nothing.
    prompt, total = (np.concatenate([each, np.repeat(each[:1], rows - len(each))]) for each in (prompt, total))
    sizes = sizes_for(
        prompt, int(np.max(total - prompt)) if following is None else following, width=width,
        block=options.prefill_block, limits=options.limits, last_fed=last_fed,
    )  # fmt: skip
    implementation = shared_prefix.implementation_for(model.params, options.implementation)
    lowered = lower(
        spec, model.config, sizes, prompt, implementation=implementation, platform=model.platform,
        dtype=model.dtype, totals=total,
    )  # fmt: skip
    # The prediction after the last token of a scored text is not used, so that its position does not matter.
    positions = (total - 1 if last_fed else total) + shared_prefix.tokens_of(model.params)
    warn_beyond_context(model.config, max_positions(lowered, prompt, positions, options.prefill_block))
    layout = lowered.layout
    # kvjax's own product with an index has no gradient.
    if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(model.params)):
        layout = layer_calls.with_layer_programs(layout, model.config, model.params)
    return Prepared(layout, lowered.budgets, sizes.prompt, rows, implementation, sizes)


def run_prompts(
    model: Model, tokens: np.ndarray, lengths: np.ndarray, total: np.ndarray, prepared: Prepared, *, score: bool
) -> tuple[Array, Array, KVState]:
    """Pads a batch and calls `prefill_steps`.

    Args:
      model: the model.
      tokens: [B, T] int32. When scoring, a row may continue after its prompt.
      lengths: [B] int32, the number of tokens of each row's prompt.
      total: see `prepare`.
      prepared: from `prepare`.
      score: whether to compute the log-probabilities of the prompt's tokens.

    Returns:
      As `prefill_steps`, for all rows of arrays.
    """
    width = prepared.width + (1 if score else 0)
    rows = len(tokens)
    # [B, width]
    ids = np.zeros((prepared.rows, width), np.int32)
    given = min(width, tokens.shape[1])
    ids[:rows, :given] = tokens[:, :given]
    lengths, total = (np.pad(each, (0, prepared.rows - rows)) for each in (lengths, total))
    budgets = prepared.budgets
    store = prompt_store.active()
    # A kernel by name may be one that a full cache has not.
    named = prepared.implementation not in ("auto", "xla")
    sizes = (prepared.rows, prepared.width)
    if store is not None and not named and prompt_reuse.can_reuse(store, model, prepared.layout, *sizes):
        return _run_reused(store, model, ids, lengths, total, prepared, score=score)
    arrays = model.place((ids, lengths, total.astype(np.int32), budgets.prompt, budgets.decode))
    with compiling.announced(compiling.prompts_of(prepared.layout, prepared.width)):
        return prefill_program(prepared.layout)(
            model.params, *arrays, config=model.config, layout=prepared.layout, score=score
        )  # fmt: skip


def prefill_program(layout: CacheLayout) -> Callable[..., tuple[Array, Array, KVState]]:
    """Returns `prefill_steps`, or what does the same by programs of single layers."""
    return layer_calls.prefill_by_layer if layout.calls_layers else prefill_steps


def _run_reused(
    store: prompt_store.PromptStore,
    model: Model,
    tokens: np.ndarray,
    lengths: np.ndarray,
    total: np.ndarray,
    prepared: Prepared,
    *,
    score: bool,
) -> tuple[Array, Array, KVState]:
    """Does what `run_prompts` does, with the activations of prompts that were run before; tokens [B, width]."""
    options = CacheOptions(implementation=prepared.implementation)
    full = prepare(model, CacheSpec(policies.full()), lengths, lengths, width=prepared.width, options=options)
    with compiling.announced(compiling.prompts_of(prepared.layout, prepared.width)):
        activations, logprobs = prompt_reuse.record(store, model, tokens, lengths, full.layout, score=score)
        budgets = prepared.budgets
        arrays = model.place((lengths, total.astype(np.int32), budgets.prompt, budgets.decode))
        by_layer = prepared.layout.calls_layers
        keep = prompt_reuse.keep_by_layer if by_layer else prompt_reuse.keep_steps
        logits, state = keep(model.params, activations, *arrays, config=model.config, layout=prepared.layout)
    return logits, logprobs, state


@program(static_argnames=("config", "layout", "score"))
def prefill_steps(
    params: Params,
    tokens: Array,
    lengths: Array,
    total: Array,
    budget: GroupBudgets,
    decode_budget: GroupBudgets,
    *,
    config: DecoderConfig,
    layout: CacheLayout,
    score: bool,
) -> tuple[Array, Array, KVState]:
    """Runs prompts through the model, in one shot or in blocks.

    Args:
      params: of the decoder.
      tokens: [B, T] int32. T is the width of the prompts, plus 1 when scoring.
      lengths: [B] int32, the number of tokens of each row's prompt.
      total: [B] int32, see `KVState`.
      budget: per layer and group of heads, [B] int32 slots of the prompt's policy, or None.
      decode_budget: per layer and group of heads, [B] int32 slots of the decoding policy, or None.
      config: the decoder.
      layout: the static description of the cache.
      score: whether to compute log-probabilities.

    Returns:
      The logits after each row's last prompt token, [B, V] float32; the log-probability of the token after each token,
      [B, width] float32, or [B, 0] when not scoring; and the cache, in the arrays of the decoding phase.
    """
    compiling.traced()
    decoder = bind(config, params).looped(layout.runs)
    rows = tokens.shape[0]
    width = tokens.shape[1] - (1 if score else 0)
    step = width if layout.block is None else layout.block
    count = -(-width // step)
    # [B, count * step + 1]
    padded = jnp.pad(tokens, ((0, 0), (0, count * step + 1 - tokens.shape[1])))

    def run_block(kv: KVState | None, start: Array | int, ids: Array, targets: Array) -> tuple[KVState, Array, Array]:
        """Runs one block.

        Returns:
          The cache; the hidden state [B, E] of the last prompt token, for rows whose prompt ends in the block; and the
          scores.
        """
        # [B, step]
        position = start + jnp.arange(step, dtype=jnp.int32)
        position = jnp.where(position < lengths[:, None], position, -1)
        block = Block(position=position, prompt=lengths, total=total, budget=budget)
        # [B, step, E]
        x, kv = decoder.hidden(ids, kv, block, layout.prompt)
        # [B]: index in the block
        at = jnp.clip(lengths - 1 - start, 0, step - 1)
        # [B, E]
        last = jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]
        # [B, step] or [B, 0]
        return kv, last, logprobs_of(decoder, x, targets) if score else jnp.zeros((rows, 0), jnp.float32)

    if layout.block is None:
        kv, last, logprobs = run_block(None, 0, padded[:, :width], padded[:, 1 : width + 1])
        if layout.replay is None:
            kv = kv.replace(layers=shared_layers.join_prompts(kv.layers, layout.decode))
    else:
        empty = empty_layers(layout.prompt, rows, config.num_kv_heads, config.head_dim, decoder.dtype)
        start = repeated(empty, layout.runs)
        # [B]
        zero = jnp.zeros((rows,), jnp.int32)
        kv = KVState(start, zero, prompt=lengths, total=total, budget=budget)
        # [count, B, step]: tokens, and the token after each
        blocks = [x.reshape(rows, count, step).swapaxes(0, 1) for x in (padded[:, :-1], padded[:, 1:])]

        # In a gradient, a block is recomputed in the backward pass, so that only the cache is stored per block.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def body(
            carry: tuple[KVState, Array], inputs: tuple[Array, Array, Array]
        ) -> tuple[tuple[KVState, Array], Array]:
            kv, last = carry
            start, ids, targets = inputs
            kv, newest, logprobs = run_block(kv, start, ids, targets)
            # [B]: whether the row's last prompt token is in the block
            here = (lengths - 1 >= start) & (lengths - 1 < start + step)
            return (kv, jnp.where(here[:, None], newest, last)), logprobs

        # [count]
        starts = jnp.arange(count, dtype=jnp.int32) * step
        # [B, E]
        last = jnp.zeros((rows, config.embed_size), decoder.dtype)
        (kv, last), logprobs = jax.lax.scan(body, (kv, last), (starts, *blocks))
        # [B, count * step] or [B, 0]
        logprobs = logprobs.swapaxes(0, 1).reshape(rows, -1)
    if layout.replay is not None:
        kv = replayed(decoder, kv, padded[:, :-1], layout)
    if layout.block is not None or layout.replay is not None:
        kv = kv.replace(layers=converted(kv, layout, config, params))
    return decoder.logits(last), logprobs[:, :width], kv.replace(budget=decode_budget)
