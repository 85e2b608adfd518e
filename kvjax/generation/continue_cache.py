"""Continues one cache in several ways: a context is processed once, and questions are fed to copies of its cache."""

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import Phase
from kvjax.cache.planning.limits import half_steps, power_of_two
from kvjax.cache.state import EMPTY, Block, KVState, LayerKV
from kvjax.errors import InputError
from kvjax.generation import compiling
from kvjax.generation.generate import check_room
from kvjax.generation.multiple_choice import FEW_FED, MANY_FED, takes_blocks, without_step_kernels
from kvjax.generation.prefill import Prefilled
from kvjax.generation.program import program
from kvjax.inputs import check_batch
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.parallel import distributed, host_memory
from kvjax.parallel.sharding import Params

Array = jax.Array


@plain_signature
def extend(
    model: Model,
    prefilled: Prefilled,
    tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    rows: ArrayLike | None = None,
) -> Prefilled:
    """Copies rows of a cache and feeds more tokens to the copies, as if the model had generated them.

    What a policy keeps of the prompt was chosen before these tokens were known. Where nothing is evicted, encoded or
    left unread while decoding, the tokens are fed in one block, otherwise one at a time.

    Args:
      model: that of the prompts.
      prefilled: from `kvjax.generation.prefill.prefill`, whose `max_new_tokens` covers these tokens and those that are
        generated after them. It is unchanged, and can be extended again.
      tokens: [R, n] or [n] int, rows padded at the end; or a list of rows of any lengths.
      lengths: [R] int, the number of real tokens of each row, at least 1; None for n.
      rows: [R] int, the row of the cache that each row of tokens continues; None for the rows in their order.

    Returns:
      The copies, from which `kvjax.generation.generate.decode` generates. On a mesh that does not divide them, rows
      without a token follow; see `Prefilled`.

    Raises:
      InputError: tokens, lengths or rows that are not valid, or heads that evict nothing while decoding have too few
        slots.
    """
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    count, contexts = len(batch.lengths), prefilled.num_rows
    source = np.arange(count) if rows is None else np.asarray(rows)
    valid = source.shape == (count,) and np.issubdtype(source.dtype, np.integer)
    if not valid or source.min() < 0 or source.max() >= contexts:
        raise InputError(f"rows must be {count} whole numbers from 0 to {contexts - 1}, one per row; got {rows!r}.")
    # [R]
    fed = distributed.to_host(prefilled.state.length)[source] + batch.lengths
    if model.config.learned_positions and int(fed.max()) > model.config.max_positions:
        raise InputError(
            f"this model's learned position table ends at {model.config.max_positions} tokens, but a context and its "
            f"continuation have {int(fed.max())}; shorten them."
        )
    longest = int(batch.lengths.max())
    check_room(prefilled, longest + 1)
    phase = prefilled.layout.decode
    at_once = takes_blocks(phase)
    width = half_steps(longest, FEW_FED) if at_once else power_of_two(longest, MANY_FED)
    # One row is no more work for each device than a row of padding.
    padding = model.rows_on_mesh(count) - count if count > 1 else 0
    # [R + padding, width]
    ids = np.zeros((count + padding, width), np.int32)
    ids[:count, :longest] = batch.tokens
    # [R + padding]
    copied, lengths = (np.pad(each.astype(np.int32), (0, padding)) for each in (source, batch.lengths))
    with model.on_mesh(), compiling.announced(compiling.tokens_of(phase)):
        placed = model.place((copied, ids, lengths))
        logits, state = feed_copies(
            model.params, prefilled.state, *placed, config=model.config, at_once=at_once,
            phase=without_step_kernels(phase) if at_once else phase,
        )  # fmt: skip
    return Prefilled(logits, state, prefilled.layout, rows=count)


@program(static_argnames=("config", "phase", "at_once"))
def feed_copies(
    params: Params,
    state: KVState,
    rows: Array,
    tokens: Array,
    lengths: Array,
    *,
    config: DecoderConfig,
    phase: Phase,
    at_once: bool,
) -> tuple[Array, KVState]:
    """Copies rows of a cache and feeds tokens to each copy.

    Args:
      params: of the decoder.
      state: the cache; not donated.
      rows: [R] int32, the row that each copy is of.
      tokens: [R, n] int32.
      lengths: [R] int32, the number of tokens of each; 0 for a row of padding, which holds nothing afterwards.
      config: the decoder.
      phase: the groups of heads of each layer while decoding.
      at_once: whether tokens are fed in one block; see `kvjax.generation.multiple_choice.takes_blocks`.

    Returns:
      The logits after the last token of each, [R, V] float32, and the copies.
    """
    compiling.traced()
    decoder = bind(config, params)
    stacked, runs = stacked_runs(state.layers), decoder.runs_now(state, phase)
    state, decoder = arranged_state(state, runs), decoder.looped(runs)
    count, width = tokens.shape
    kv: KVState = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, rows), state)
    # [R]
    real = lengths > 0
    kv = kv.replace(
        length=jnp.where(real, kv.length, 0),
        layers=jax.tree.map(lambda group: _emptied(group, real), kv.layers, is_leaf=lambda x: isinstance(x, LayerKV)),
    )
    # [n]
    at = jnp.arange(width, dtype=jnp.int32)

    def block(position: Array) -> Block:
        return Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)

    if at_once:
        # [R, n]
        position = jnp.where(at < lengths[:, None], kv.length[:, None] + at, -1)
        # [R, n, E]
        x, kv = decoder.hidden(tokens, kv, block(position), phase)
        # [R, E]
        last = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        return decoder.logits(last), arranged_state(kv, stacked)

    def body(number: Array, carry: tuple[KVState, Array]) -> tuple[KVState, Array]:
        kv, last = carry
        # [R]
        active = number < lengths
        # [R, 1, E]
        x, kv = decoder.hidden(
            tokens[:, number][:, None], kv, block(jnp.where(active, kv.length, -1)[:, None]), phase
        )  # fmt: skip
        return kv, jnp.where(active[:, None], x[:, 0], last)

    # [R, E]
    last = jnp.zeros((count, config.embed_size), decoder.dtype)
    kv, last = jax.lax.fori_loop(0, jnp.max(lengths), body, (kv, last))
    return decoder.logits(last), arranged_state(kv, stacked)


def _emptied(layer: LayerKV, real: Array) -> LayerKV:
    """Returns slots, of a layer or of a stack of layers, without those of the rows that are not real, [B] bool."""
    # [B, 1, 1] or [B, 1, 1, 1]
    mask = real.reshape(-1, *(1,) * (layer.position.ndim - 1))
    return layer.replace(position=jnp.where(mask, layer.position, EMPTY))
