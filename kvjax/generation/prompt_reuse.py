"""Programs that record the activations of prompts, and that make a cache of them; see `kvjax.reuse_prompts`."""

import functools
import hashlib
from collections.abc import Hashable

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from kvjax import products
from kvjax.cache import shared_layers, shared_prefix
from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import LayerRun, LayerStack, sequence_of
from kvjax.cache.planning.layout import CacheLayout, Phase
from kvjax.cache.state import Block, KVState, Layer
from kvjax.cache.step.step import step_layer
from kvjax.generation import compiling, layer_calls
from kvjax.generation.program import program
from kvjax.generation.prompt_store import Activations, Entry, Projected, PromptStore
from kvjax.models.bound import bind, logprobs_of
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder_layer import POLICY, SIDES, SKEW, attention_args, run_layer
from kvjax.models.model import Model
from kvjax.numerics.slices import AXIS
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params

Array = jax.Array
CACHE_PARAMS = (SKEW, SIDES, POLICY)  # optional parameters of an attention that only the cache depends on
BY_LENGTH = ("dynamic", "longrope")  # scalings of RoPE that depend on the tokens to come


def can_reuse(store: PromptStore, model: Model, layout: CacheLayout, rows: int, width: int) -> bool:
    """Returns whether a batch of prompts may be shared.

    Args:
      store: of `reuse_prompts`.
      model: the model.
      layout: the layout of the cache.
      rows: the number of rows of the batch.
      width: the number of tokens that prompts are padded to.
    """
    early = [group for groups in layout.prompt for group in groups]
    if layout.block is not None or layout.replay is not None or shared_prefix.PARAM in model.params:
        return False
    if not all(group.selection.reads_all for group in early):
        return False
    if any(group.writes for group in early):
        # They are computed from the input of attention, which is not among the activations.
        return False
    config, leaves = model.config, jax.tree.leaves(model.params)
    if model.mesh is not None or any(
        isinstance(leaf, jax.core.Tracer) or not isinstance(leaf, Array) for leaf in leaves
    ):
        return False
    ropes = [config.kind(index).rope for index in range(config.num_layers)]
    if any(rope is not None and rope.scaling in BY_LENGTH for rope in ropes):
        return False
    return nbytes_of(model, rows, width) <= store.max_bytes


def nbytes_of(model: Model, rows: int, width: int) -> int:
    """Returns the number of bytes of the activations of a batch, and of its log-probabilities."""
    config = model.config
    heads = config.num_layers * (config.num_heads + 2 * config.num_kv_heads)
    numbers = heads * config.head_dim + config.embed_size
    return int(rows * width * (numbers * model.dtype.itemsize + np.dtype(np.float32).itemsize))


def _key(model: Model, tokens: np.ndarray, lengths: np.ndarray, layout: CacheLayout) -> Hashable:
    """Returns the name of prompts [B, n] in a store: all that their activations depend on."""
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    numerics = (precision, products.setting(), layout)
    return (*map(id, _weights(model)), model.config, numerics, tokens.shape, _digest(tokens, lengths))


def _digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(each).tobytes() for each in arrays)).hexdigest()


def _weights(model: Model) -> tuple[Array, ...]:
    """Returns the parameters that prompts depend on: those of selections and calibrations are not among them."""
    paths = jax.tree_util.tree_flatten_with_path(model.params)[0]

    def is_used(path: KeyPath) -> bool:
        return not any(getattr(each, "key", None) in CACHE_PARAMS for each in path)

    return tuple(leaf for path, leaf in paths if is_used(path))


def record(
    store: PromptStore, model: Model, tokens: np.ndarray, lengths: np.ndarray, layout: CacheLayout, *, score: bool
) -> tuple[Activations, Array]:
    """Computes the activations of prompts, or finds them in a store.

    Args:
      store: the store.
      model: the model.
      tokens: [B, n] int32, or [B, n + 1] when scoring, with the token after each.
      lengths: [B] int32, the number of tokens of each prompt.
      layout: the layout of a full cache.
      score: whether to compute log-probabilities.

    Returns:
      The activations, and the log-probability of the token after each token, [B, n] float32, or [B, 0].
    """
    width = tokens.shape[1] - (1 if score else 0)
    inside = np.arange(width) < lengths[:, None]
    # The tokens that follow a prompt in its row are not part of it.
    prompts = np.where(inside, tokens[:, :width], 0).astype(np.int32)
    key = _key(model, prompts, lengths, layout)
    with store.lock:
        entry = store.find(key)
        if entry is None:
            needed = nbytes_of(model, *prompts.shape)
            has_room = store.make_room(key, needed)
            ids, rows = model.place((prompts, lengths))
            record_program = record_by_layer if layout.calls_layers else record_steps
            made = record_program(model.params, ids, rows, config=model.config, layout=layout)
            entry = Entry(made, _weights(model), needed)
            if has_room:
                store.add(key, entry)
        if not score:
            return entry.activations, jnp.zeros((len(tokens), 0), jnp.float32)
        targets = np.where(inside, tokens[:, 1:], 0).astype(np.int32)
        if entry.logprobs is None or entry.targets != _digest(targets):
            entry.targets = _digest(targets)
            (ids,) = model.place((targets,))
            entry.logprobs = _logprobs(model.params, entry.activations.hidden, ids, config=model.config)
        return entry.activations, entry.logprobs


@program(static_argnames=("config", "layout"))
def record_steps(
    params: Params, tokens: Array, lengths: Array, *, config: DecoderConfig, layout: CacheLayout
) -> Activations:
    """Returns the activations of prompts [B, n] of lengths [B]."""
    block = _block(tokens.shape[1], lengths, lengths, ((None,),) * config.num_layers)
    hidden, found = bind(config, params).looped(layout.runs).projected(tokens, block, layout.prompt)
    runs = {run.start: run for run in layout.runs}
    spans = tuple(runs.get(index, LayerRun(index, index + 1)) for index in sorted(found))
    return Activations(tuple(found[span.start] for span in spans), spans, hidden)


def record_by_layer(
    params: Params, tokens: Array, lengths: Array, *, config: DecoderConfig, layout: CacheLayout
) -> Activations:
    """Does what `record_steps` does, by programs of single layers; see `kvjax.generation.layer_calls`."""
    rest = layer_calls.without_layers(params)
    zeros = np.zeros((len(tokens),), np.int32)
    x, position, _ = layer_calls.enter(rest, tokens, lengths, np.int32(0), zeros, config=config)
    found = []
    for index, groups in enumerate(layout.prompt):
        budget = (None,) * len(groups)
        block = Block(position, prompt=lengths, total=lengths, budget=budget, layer=np.int32(index))
        kind = config.kind(index)
        x, projected = _project(params[f"layer_{index}"], x, block, config=config, kind=kind, groups=groups)
        found.append(projected)
    spans = tuple(LayerRun(index, index + 1) for index in range(config.num_layers))
    return Activations(tuple(found), spans, _left(rest, x, config=config))


@program(static_argnames=("config", "kind", "groups"), donate_argnames=("x",))
def _project(
    params: Params, x: Array, block: Block, *, config: DecoderConfig, kind: LayerKind, groups: tuple[Group, ...]
) -> tuple[Array, Projected]:
    """Returns the residual stream after a layer, [B, n, hidden], and the layer's queries, keys and values."""
    compiling.traced()
    output = run_layer(params, x, None, block, None, config=config, kind=kind, dtype=x.dtype, groups=groups)
    return output.x, output.projected


@program(static_argnames=("config",))
def _left(params: Params, x: Array, *, config: DecoderConfig) -> Array:
    return bind(config, params).leave(x)


@program(static_argnames=("config",))
def _logprobs(params: Params, hidden: Array, targets: Array, *, config: DecoderConfig) -> Array:
    return logprobs_of(bind(config, params), hidden, targets)


@program(static_argnames=("config", "layout"))
def keep_steps(
    params: Params,
    activations: Activations,
    lengths: Array,
    total: Array,
    budget: tuple[tuple[Array | None, ...], ...],
    decode_budget: tuple[tuple[Array | None, ...], ...],
    *,
    config: DecoderConfig,
    layout: CacheLayout,
) -> tuple[Array, KVState]:
    """Makes the cache of prompts whose activations are known.

    Args:
      params: the parameters of the decoder.
      activations: the activations of the prompts.
      lengths: see `kvjax.generation.prefill.prefill_steps`.
      total: see `kvjax.generation.prefill.prefill_steps`.
      budget: see `kvjax.generation.prefill.prefill_steps`.
      decode_budget: see `kvjax.generation.prefill.prefill_steps`.
      config: the decoder.
      layout: the static description of the cache, with a prompt in one shot.

    Returns:
      The logits after each row's last token, [B, V] float32, and the cache.
    """
    width = activations.hidden.shape[1]
    block = _block(width, lengths, total, budget)
    last, length = _last_of(activations.hidden, lengths)
    runs = {run.start: run for run in layout.runs}
    entries: list[Layer | LayerStack] = []
    index = 0
    while index < config.num_layers:
        if (run := runs.get(index)) is not None:
            entries.append(_keep_run(params, activations.of_run(run), run, block, config, layout.prompt))
            index = run.stop
        else:
            own, groups = _optional(params, index), layout.prompt[index]
            projected, kind = activations.of_layer(index), config.kind(index)
            entries.append(_keep(projected, own, block.of_layer(index), config=config, kind=kind, groups=groups))
            index += 1
    layers = shared_layers.join_prompts(sequence_of(entries), layout.decode)
    state = KVState(layers, length, prompt=lengths, total=total, budget=decode_budget)
    return bind(config, params).logits(last), state


def keep_by_layer(
    params: Params,
    activations: Activations,
    lengths: Array,
    total: Array,
    budget: tuple[tuple[Array | None, ...], ...],
    decode_budget: tuple[tuple[Array | None, ...], ...],
    *,
    config: DecoderConfig,
    layout: CacheLayout,
) -> tuple[Array, KVState]:
    """Does what `keep_steps` does, by programs of single layers; see `kvjax.generation.layer_calls`."""
    block = _block(activations.hidden.shape[1], lengths, total, budget)
    layers = []
    for index, groups in enumerate(layout.prompt):
        own, projected, kind = _optional(params, index), activations.of_layer(index), config.kind(index)
        layers.append(_keep(projected, own, block.of_layer(index), config=config, kind=kind, groups=groups))
    last, length = _last_of(activations.hidden, lengths)
    logits = layer_calls.logits_of(layer_calls.without_layers(params), last, config=config)
    return logits, KVState(tuple(layers), length, prompt=lengths, total=total, budget=decode_budget)


@jax.jit
def _last_of(hidden: Array, lengths: Array) -> tuple[Array, Array]:
    """Returns the hidden state of each prompt's last token, [B, E], and the number of its tokens, [B] int32."""
    width = hidden.shape[1]
    at = jnp.clip(lengths - 1, 0, width - 1)
    return jnp.take_along_axis(hidden, at[:, None, None], axis=1)[:, 0], jnp.clip(lengths, 0, width)


@functools.partial(jax.jit, static_argnames="width")
def _block(width: int, lengths: Array, total: Array, budget: tuple[tuple[Array | None, ...], ...]) -> Block:
    """Returns the tokens of prompts of some lengths [B], padded to a width."""
    # [B, n]
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (lengths.shape[0], width))
    return Block(jnp.where(position < lengths[:, None], position, -1), prompt=lengths, total=total, budget=budget)


def _optional(params: Params, index: int) -> Params:
    """Returns the parameters of a layer that a cache depends on."""
    own = params[f"layer_{index}"]["attention"]
    found: Params = host_memory.to_device({name: own[name] for name in CACHE_PARAMS if name in own})
    return found


@functools.partial(jax.jit, static_argnames=("config", "kind", "groups"))
def _keep(
    projected: Projected, params: Params, block: Block, *, config: DecoderConfig, kind: LayerKind,
    groups: tuple[Group, ...],
) -> Layer:  # fmt: skip
    """Makes the cache of a layer."""
    args = attention_args(config, kind, params)
    return step_layer(None, *projected, block=block, groups=groups, args=args)[1]


def _keep_run(
    params: Params, projected: Projected, run: LayerRun, block: Block, config: DecoderConfig, phase: Phase
) -> LayerStack:
    """Makes the caches of layers that are alike, one after the other."""
    optional = jax.tree.map(lambda *each: jnp.stack(each), *(_optional(params, index) for index in run.layers))
    budgets = jax.tree.map(lambda *each: jnp.stack(each), *(block.budget[index] for index in run.layers))
    kind, groups = config.kind(run.start), phase[run.start]

    def keep(each: tuple[Projected, Params, tuple[Array | None, ...], Array]) -> Layer:
        own, params, budget, index = each
        return _keep(own, params, block.replace(budget=budget, layer=index), config=config, kind=kind, groups=groups)

    layers = jnp.arange(run.start, run.stop, dtype=jnp.int32)
    made = jax.lax.map(keep, (projected, optional, budgets, layers))
    return LayerStack(jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 0, AXIS), made), len(run))
