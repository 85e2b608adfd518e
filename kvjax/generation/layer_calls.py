"""Prompts by programs of single layers, which are called one after the other.

Where layers do not run as loops (see `kvjax.models.layer_loop`), a program of all layers takes a compiler minutes.
Layers that are alike share one program here, which is compiled once and called for each of them: the host dispatches
the next layer while a device computes the one before. Decoding does not work this way, since its steps are a loop
within one program.

SmolLM2-135M under h2o, one core of an EPYC, loops forbidden: a first prompt takes 0.8 CPU seconds instead of 10.5, and
later ones the same time as by one program (64 tokens 112 ms for 115, 512 tokens 827 for 860).

One program runs prompts in blocks of less than `MIN_BLOCK` tokens, those with a replay, after a shared prefix or with
weights in host memory, layers that share slots (`minicache`) or a budget, and models with less than
`MIN_LAYERS_PER_KIND` layers of a kind. ``KVJAX_LAYER_LOOPS=off`` runs all prompts by one program, and
``KVJAX_LAYER_LOOPS=calls`` calls layers that could run as loops, too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_prefix
from kvjax.cache.empty import empty_layers
from kvjax.cache.groups import Group, Phase
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.state import Block, KVState, Layer
from kvjax.generation import compiling
from kvjax.generation.program import program
from kvjax.generation.prompt_end import converted
from kvjax.models import layer_loop
from kvjax.models.bound import bind, logprobs_of
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder_layer import run_layer
from kvjax.models.stacked_params import LAYER, StackedParams
from kvjax.parallel import host_memory, sharding
from kvjax.parallel.sharding import Params

Array = jax.Array
GroupBudgets = tuple[tuple[Array | None, ...], ...]  # per layer and group of heads
MIN_LAYERS_PER_KIND = 3  # a mean; with fewer, layers hardly share programs
MIN_BLOCK = 64  # tokens; with fewer, the calls themselves take long


def with_layer_programs(layout: CacheLayout, config: DecoderConfig, params: Params) -> CacheLayout:
    """Returns a layout with the layers that run as loops on this machine, or by calls; all others are unrolled.

    Args:
      layout: of the cache.
      config: the decoder.
      params: its parameters.
    """
    runs = layer_loop.possible_runs(config, params, layout.prompt, layout.decode)
    layout = dataclasses.replace(layout, runs=runs)
    return dataclasses.replace(layout, calls_layers=calls_layers(config, params, layout))


def calls_layers(config: DecoderConfig, params: Params, layout: CacheLayout) -> bool:
    """Returns whether prompts call a program for each layer.

    Args:
      config: the decoder.
      params: its parameters, or their shapes.
      layout: of the cache, with the layers that run as loops.

    Raises:
      ConfigError: ``KVJAX_LAYER_LOOPS`` has another value than those that exist.
    """
    allowed = layer_loop.setting() != layer_loop.OFF
    if not allowed or layout.runs or layout.replay is not None or layout.shares_layers:
        return False
    if layout.block is not None and layout.block < MIN_BLOCK:
        return False
    # A layer's slices of stacks would be copied for each call.
    if isinstance(params, StackedParams) or shared_prefix.PARAM in params:
        return False
    if any(map(host_memory.on_host, jax.tree.leaves(params))):
        return False
    if any(group.arrangement.borrows(group) for layer in layout.decode for group in layer):
        return False
    kinds = {(config.kind(index), groups) for index, groups in enumerate(layout.prompt)}
    return config.num_layers >= MIN_LAYERS_PER_KIND * len(kinds)


def prefill_by_layer(
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
    """Does what `kvjax.generation.prefill.prefill_steps` does, by several programs; see there."""
    rest = without_layers(params)
    width = tokens.shape[1] - (1 if score else 0)
    step = width if layout.block is None else layout.block
    dtype = params["embed"]["tokens"].dtype.name
    state, last = begin(lengths, total, budget, config=config, layout=layout, dtype=dtype)
    scores = []
    for start in range(0, width, step):
        ids, targets = block_at(tokens, np.int32(start), step=step)
        x, state = run_block(params, ids, np.int32(start), state, config=config, phase=layout.prompt)
        last, logprobs = leave(rest, x, targets, lengths, np.int32(start), last, config=config, score=score)
        scores.append(logprobs)
    logits, state = finish(params, state, last, decode_budget, config=config, layout=layout)
    # [B, width] or [B, 0]
    logprobs = scores[0] if len(scores) == 1 else jnp.concatenate(scores, axis=1)[:, :width]
    return logits, logprobs, state


def finish(
    params: Params,
    state: KVState,
    last: Array,
    decode_budget: GroupBudgets,
    *,
    config: DecoderConfig,
    layout: CacheLayout,
) -> tuple[Array, KVState]:
    """Returns the logits after prompts, and their cache for decoding.

    Args:
      params: of the decoder.
      state: the cache after the last block.
      last: [B, E], the hidden state of each prompt's last token.
      decode_budget: see `prefill_by_layer`.
      config: the decoder.
      layout: of the cache.

    Returns:
      The logits after the prompts, [B, V] float32, and the cache in the arrays of the decoding phase.
    """
    if layout.block is not None:
        state = state.replace(layers=converted(state, layout, config, params))
    return logits_of(without_layers(params), last, config=config), state.replace(budget=decode_budget)


def run_block(
    params: Params, tokens: Array, start: np.int32, state: KVState, *, config: DecoderConfig, phase: Phase
) -> tuple[Array, KVState]:
    """Runs a block of prompts through all layers.

    Args:
      params: of the decoder.
      tokens: [B, n] int32.
      start: the first position of the block, int32.
      state: the cache, whose layers are donated; without layers if the block is the whole prompt.
      config: the decoder.
      phase: the groups of each layer.

    Returns:
      The residual stream after the last layer, [B, n, hidden], and the cache.
    """
    x, position, length = enter(without_layers(params), tokens, state.prompt, start, state.length, config=config)
    layers = []
    for index, groups in enumerate(phase):
        block = Block(
            position=position, prompt=state.prompt, total=state.total, budget=state.budget[index],
            layer=np.int32(index),
        )  # fmt: skip
        own, held = params[f"layer_{index}"], state.layers[index] if state.layers else None
        x, layer = call_layer(own, x, held, block, config=config, kind=config.kind(index), groups=groups)
        layers.append(layer)
    return x, state.replace(layers=tuple(layers), length=length)


def without_layers(params: Params) -> Params:
    """Returns the parameters that belong to no layer."""
    return {name: params[name] for name in params if not name.startswith(LAYER)}


@program(static_argnames=("config", "layout", "dtype"))
def begin(
    lengths: Array, total: Array, budget: GroupBudgets, *, config: DecoderConfig, layout: CacheLayout, dtype: str
) -> tuple[KVState, Array]:
    """Returns an empty cache, in the arrays of the prompt phase, and the hidden states of no tokens, [B, E].

    The cache of prompts in one shot has no layers yet.
    """
    rows = lengths.shape[0]
    layers: tuple[Layer, ...] = ()
    if layout.block is not None:
        layers = empty_layers(layout.prompt, rows, config.num_kv_heads, config.head_dim, dtype)
    state = KVState(layers, jnp.zeros_like(lengths), prompt=lengths, total=total, budget=budget)
    return state, jnp.zeros((rows, config.embed_size), dtype)


@program(static_argnames=("step",))
def block_at(tokens: Array, start: np.int32, *, step: int) -> tuple[Array, Array]:
    """Returns the tokens [B, step] from a position on, and the token after each; 0 after the end of [B, n] tokens."""
    padded = jnp.pad(tokens, ((0, 0), (0, step + 1)))
    # [B, step + 1]
    own = jax.lax.dynamic_slice_in_dim(padded, start, step + 1, axis=1)
    return own[:, :-1], own[:, 1:]


@program(static_argnames=("config",))
def enter(
    params: Params, tokens: Array, lengths: Array, start: np.int32, before: Array, *, config: DecoderConfig
) -> tuple[Array, Array, Array]:
    """Embeds a block of prompts.

    Args:
      params: those that belong to no layer.
      tokens: [B, n] int32.
      lengths: [B] int32, of the whole prompts.
      start: the first position of the block, int32.
      before: [B] int32, the number of tokens of each row before the block.
      config: the decoder.

    Returns:
      What enters the first layer, [B, n, hidden]; positions [B, n] int32, -1 for padding; and the number of tokens of
      each row after the block, [B] int32.
    """
    compiling.traced()
    position = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    # [B, n]
    position = jnp.where(position < lengths[:, None], position, -1)
    # Outside of layers, a block needs no budgets.
    block = Block(position=position, prompt=lengths, total=lengths, budget=None)
    x = bind(config, params).enter(tokens, block)
    return _constrained(x), position, before + jnp.sum(position >= 0, axis=1, dtype=jnp.int32)


@program(static_argnames=("config", "kind", "groups"), donate_argnames=("x", "layer"))
def call_layer(
    params: Params,
    x: Array,
    layer: Layer | None,
    block: Block,
    *,
    config: DecoderConfig,
    kind: LayerKind,
    groups: tuple[Group, ...],
) -> tuple[Array, Layer]:
    """Runs one layer on a block of prompts.

    Args:
      params: of the layer.
      x: [B, n, hidden], which is donated.
      layer: its cache, which is donated; None if the block is the whole prompt.
      block: the tokens, with the budgets and the number of the layer.
      config: the decoder.
      kind: the settings in which the layer may differ from others.
      groups: its groups of heads.

    Returns:
      The residual stream after the layer, [B, n, hidden], and the layer's cache.
    """
    compiling.traced()
    output = run_layer(
        params, _constrained(x), layer, block, None, config=config, kind=kind, dtype=x.dtype, groups=groups
    )
    return _constrained(output.x), output.cache


@program(static_argnames=("config", "score"))
def leave(
    params: Params,
    x: Array,
    targets: Array,
    lengths: Array,
    start: np.int32,
    last: Array,
    *,
    config: DecoderConfig,
    score: bool,
) -> tuple[Array, Array]:
    """Returns the hidden state of each prompt's last token, and log-probabilities.

    Args:
      params: those that belong to no layer.
      x: [B, n, hidden].
      targets: [B, n] int32, the token after each.
      lengths: [B] int32, of the whole prompts.
      start: the first position of the block, int32.
      last: [B, E], from earlier blocks.
      config: the decoder.
      score: whether to compute log-probabilities.

    Returns:
      The hidden state of each prompt's last token so far, [B, E], and the log-probabilities of `targets`, [B, n]
      float32, or [B, 0].
    """
    decoder = bind(config, params)
    rows, step = x.shape[:2]
    # [B]
    at = jnp.clip(lengths - 1 - start, 0, step - 1)
    # [B, E]
    newest = decoder.leave(jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0])
    last = jnp.where((lengths > start)[:, None], newest, last)
    logprobs = logprobs_of(decoder, decoder.leave(x), targets) if score else jnp.zeros((rows, 0), jnp.float32)
    return last, logprobs


@program(static_argnames=("config",))
def logits_of(params: Params, hidden: Array, *, config: DecoderConfig) -> Array:
    """Returns logits [B, V] float32 for hidden states [B, E]."""
    return bind(config, params).logits(hidden)


def _constrained(x: Array) -> Array:
    """Returns x [B, n, hidden] with its rows divided as those of tokens, so that all layers share a program."""
    return sharding.constrain(x, ("batch", None, None))
