"""Prompts that go through the model once, and are then kept by several caches.

A prompt in one shot attends to its own keys and values, whatever a cache keeps of them. Its queries, keys and values in
all layers are therefore the same under every policy, storage and selection, and most of the work of a prompt is to
compute them. Within `reuse_prompts` they are held. A prompt that comes again under another cache runs only the steps of
that cache: attention, statistics, eviction and storage.
"""

import collections
import contextlib
import contextvars
import functools
import hashlib
import threading
from collections.abc import Iterator
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import shared_layers
from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import LayerRun, LayerRuns, LayerStack, sequence_of
from kvjax.cache.planning.layout import CacheLayout, Phase
from kvjax.cache.state import Block, KVState, Layer
from kvjax.cache.step.step import step_layer
from kvjax.errors import ConfigError
from kvjax.generation.program import program
from kvjax.models.bound import bind, logprobs_of
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.decoder import SIDES, SKEW, attention_args
from kvjax.models.model import Model
from kvjax.numerics.stack_slices import AXIS
from kvjax.parallel.sharding import Params
from kvjax.units import size

Array = jax.Array
Projected = tuple[Array, ...]  # queries [B, H, n, D], keys [B, K, n, D], values [B, K, n, D]


class Activations(flax.struct.PyTreeNode):
    """What a model computes of prompts that no cache changes.

    Attributes:
      projected: queries, keys and values of one layer, or of the layers of a run, [L, B, heads, n, D] each.
      spans: the layers of each of these.
      hidden: [B, n, E], the input of the output head.
    """

    projected: tuple[Projected, ...]
    spans: LayerRuns = flax.struct.field(pytree_node=False)
    hidden: Array

    def of_layer(self, index: int) -> Projected:
        """Returns queries, keys and values of a layer."""
        for own, span in zip(self.projected, self.spans, strict=True):
            if index in span.layers:
                return own if len(span) == 1 else tuple(each[index - span.start] for each in own)
        raise AssertionError(f"no layer {index}")

    def of_run(self, run: LayerRun) -> Projected:
        """Returns queries, keys and values of consecutive layers, [L, B, heads, n, D] each."""
        for own, span in zip(self.projected, self.spans, strict=True):
            if span == run:
                return own
        layers = [self.of_layer(index) for index in run.layers]
        return tuple(jnp.stack(each) for each in zip(*layers, strict=True))


class _Entry(NamedTuple):
    """Activations that are held, and what they are of, whose addresses name them.

    Attributes:
      activations: of the prompts.
      weights: the leaves of the model's parameters.
      logprobs: [B, n] float32 of each next token; None if nothing asked for them.
    """

    activations: Activations
    weights: tuple[Array, ...]
    logprobs: Array | None


class PromptStore:
    """Holds activations of prompts, of which the least recently used are dropped.

    Attributes:
      max_bytes: what they may take.
      hits: the number of calls whose prompts were held.
      misses: the number of calls whose prompts were computed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        # Threads of one caller compute a prompt once.
        self.lock = threading.RLock()
        self._entries: collections.OrderedDict[tuple[object, ...], _Entry] = collections.OrderedDict()

    def __repr__(self) -> str:
        return f"PromptStore({size(self.nbytes)} of {size(self.max_bytes)}, {self.hits} hits, {self.misses} misses)"

    @property
    def nbytes(self) -> int:
        """The bytes that are held."""
        return sum(map(_nbytes, self._entries.values()))

    def find(self, key: tuple[object, ...]) -> _Entry | None:
        """Returns what is held, as the newest, or None."""
        if (found := self._entries.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found

    def hold(self, key: tuple[object, ...], entry: _Entry) -> None:
        """Holds activations, and drops the least recently used ones for which there is no room."""
        self._entries[key] = entry
        self._entries.move_to_end(key)
        while len(self._entries) > 1 and self.nbytes > self.max_bytes:
            self._entries.popitem(last=False)


def _nbytes(entry: _Entry) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves((entry.activations, entry.logprobs)))


_store: contextvars.ContextVar[PromptStore | None] = contextvars.ContextVar("store", default=None)


@contextlib.contextmanager
def reuse_prompts(max_bytes: int) -> Iterator[PromptStore]:
    """Lets calls within share the work of equal prompts, whatever their policies, storages and selections are.

    `kvjax.log_likelihood`, `kvjax.generate` and `kvjax.score_choices` compute the queries, keys and values of a batch
    of prompts once. Results may differ in rounding from those of a call outside. Prompts in blocks, prompts of
    selections that act on them, models on meshes and gradients are not shared: there the cache changes the prompt.

    Args:
      max_bytes: the most that is held. A batch takes `H + 2 K` vectors of a head for each token and layer; one that
        takes more than `max_bytes` is not shared.

    Raises:
      ConfigError: `max_bytes` is less than 1.

    Example::

      with kvjax.reuse_prompts(4 << 30):
        for policy in (policies.full(), policies.h2o(0.2), policies.roco(0.2)):
          scored = kvjax.log_likelihood(model, tokens, policy, prompt_length=512)
    """
    if max_bytes < 1:
        raise ConfigError(f"max_bytes={max_bytes} must be at least 1.")
    store = PromptStore(max_bytes)
    token = _store.set(store)
    try:
        yield store
    finally:
        _store.reset(token)


def active() -> PromptStore | None:
    """Returns the store of `reuse_prompts`, or None outside of it."""
    return _store.get()


def can_reuse(model: Model, layout: CacheLayout, tokens: np.ndarray, max_bytes: int) -> bool:
    """Whether a cache leaves the prompts of a batch as they are, and these have room in a store.

    Args:
      model: the model.
      layout: of the cache.
      tokens: [B, n], the prompts.
      max_bytes: of the store.
    """
    early = [group.selection for groups in layout.prompt for group in groups]
    if layout.block is not None or not all(selection.reads_all for selection in early):
        return False
    leaves = jax.tree.leaves(model.params)
    if model.mesh is not None or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
        return False
    config = model.config
    vectors = config.num_layers * (config.num_heads + 2 * config.num_kv_heads)
    return bool(tokens.size * vectors * config.head_dim * leaves[0].dtype.itemsize <= max_bytes)


def key_of(model: Model, tokens: np.ndarray, lengths: np.ndarray) -> tuple[object, ...]:
    """Returns the name of prompts [B, n] of lengths [B] in a store."""
    ids = hashlib.sha256(tokens.tobytes() + lengths.tobytes()).hexdigest()
    return (*map(id, weights_of(model)), tokens.shape, ids)


def weights_of(model: Model) -> tuple[Array, ...]:
    """Returns the parameters that prompts depend on: not what selections guess by, and storages are calibrated by."""
    paths = jax.tree_util.tree_flatten_with_path(model.params)[0]
    apart = (SKEW, SIDES)
    return tuple(leaf for path, leaf in paths if not any(getattr(each, "key", None) in apart for each in path))


def record(
    store: PromptStore, model: Model, tokens: np.ndarray, lengths: np.ndarray, layout: CacheLayout, *, score: bool
) -> tuple[Activations, Array]:
    """Computes the activations of prompts, or finds them.

    Args:
      store: that holds them.
      model: the model.
      tokens: [B, n] int32, or [B, n + 1] when scoring: n tokens of prompts, and the next.
      lengths: [B] int32, of the prompts.
      layout: of the full cache.
      score: whether to compute log-probabilities.

    Returns:
      The activations, and the log-probability of the token after each token, [B, n] float32, or [B, 0].
    """
    prompts = tokens[:, :-1] if score else tokens
    key = key_of(model, prompts, lengths)
    with store.lock:
        entry = store.find(key)
        if entry is None:
            ids, rows = model.place((prompts, lengths))
            made = record_steps(model.params, ids, rows, config=model.config, layout=layout)
            entry = _Entry(made, weights_of(model), None)
            store.hold(key, entry)
        if not score:
            return entry.activations, jnp.zeros((len(tokens), 0), jnp.float32)
        if entry.logprobs is None:
            (targets,) = model.place((tokens[:, 1:],))
            logprobs = _logprobs(model.params, entry.activations.hidden, targets, config=model.config)
            entry = entry._replace(logprobs=logprobs)
            store.hold(key, entry)
        assert entry.logprobs is not None
        return entry.activations, entry.logprobs


@program(static_argnames=("config", "layout"))
def record_steps(
    params: Params, tokens: Array, lengths: Array, *, config: DecoderConfig, layout: CacheLayout
) -> Activations:
    """Runs prompts [B, n] of lengths [B] through the model; see `record`."""
    block = _block(tokens.shape[1], lengths, lengths, ((None,),) * config.num_layers)
    hidden, found = bind(config, params).looped(layout.runs).projected(tokens, block, layout.prompt)
    runs = {run.start: run for run in layout.runs}
    spans = tuple(runs.get(index, LayerRun(index, index + 1)) for index in sorted(found))
    return Activations(tuple(found[span.start] for span in spans), spans, hidden)


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
      params: of the decoder.
      activations: of the prompts.
      lengths: see `kvjax.generation.prefill.prefill_steps`.
      total: likewise.
      budget: likewise.
      decode_budget: likewise.
      config: the decoder.
      layout: the static description of the cache, with a prompt in one shot.

    Returns:
      The logits after each row's last token, [B, V] float32, and the cache.
    """
    width = activations.hidden.shape[1]
    block = _block(width, lengths, total, budget)
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
    length = jnp.sum(block.position >= 0, axis=1, dtype=jnp.int32)
    at = jnp.clip(lengths - 1, 0, width - 1)
    # [B, E]
    last = jnp.take_along_axis(activations.hidden, at[:, None, None], axis=1)[:, 0]
    state = KVState(layers, length, prompt=lengths, total=total, budget=decode_budget)
    return bind(config, params).logits(last), state


def _block(width: int, lengths: Array, total: Array, budget: tuple[tuple[Array | None, ...], ...]) -> Block:
    """Returns the tokens of prompts of some lengths [B], padded to a width."""
    # [B, n]
    position = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (lengths.shape[0], width))
    return Block(jnp.where(position < lengths[:, None], position, -1), prompt=lengths, total=total, budget=budget)


def _optional(params: Params, index: int) -> Params:
    """Returns the parameters of a layer that a cache depends on."""
    own = params[f"layer_{index}"]["attention"]
    return {name: own[name] for name in (SKEW, SIDES) if name in own}


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
