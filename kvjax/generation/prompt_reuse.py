"""Prompts that go through the model once, and are then kept by several caches.

A prompt in one shot attends to its own keys and values, whatever a cache keeps of them. Its queries, keys and values in
all layers are therefore the same under every cache that does not act on prompts, and most of the work of a prompt is to
compute them. Within `reuse_prompts` they are kept, and a second cache of the same prompt runs only its own steps.
"""

import collections
import contextlib
import contextvars
import dataclasses
import functools
import hashlib
import threading
from collections.abc import Hashable, Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from kvjax import products
from kvjax.arguments import number_argument
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
from kvjax.parallel import host_memory
from kvjax.parallel.sharding import Params
from kvjax.units import size

Array = jax.Array
LARGEST = 1 << 60  # bytes
BY_LENGTH = ("dynamic", "longrope")  # scalings of RoPE that depend on the tokens to come
Projected = tuple[Array, ...]  # queries [B, H, n, D], keys [B, K, n, D], values [B, K, n, D]


class Activations(flax.struct.PyTreeNode):
    """Activations of prompts that do not depend on the cache.

    Attributes:
      projected: queries, keys and values of each span: [B, heads, n, D] of one layer, [L, B, heads, n, D] of several.
      spans: the layers of each span.
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


@dataclasses.dataclass
class _Entry:
    """An entry of a store.

    Attributes:
      activations: of a batch of prompts.
      weights: the parameters that they depend on. An entry holds them, so that their ids stay unique.
      nbytes: the bytes of the activations and of one array of log-probabilities.
      targets: a digest of the next tokens that were scored last; None if none were.
      logprobs: [B, n] float32, the log-probabilities of these.
    """

    activations: Activations
    weights: tuple[Array, ...]
    nbytes: int
    targets: str | None = None
    logprobs: Array | None = None


class PromptStore:
    """Activations of prompts. The least recently used ones are dropped where there is no room for new ones.

    Attributes:
      max_bytes: the maximum number of bytes of all entries.
      hits: the number of calls whose prompts were in the store.
      misses: the number of calls whose prompts were computed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.hits = self.misses = 0
        # Threads of one caller compute a prompt once.
        self.lock = threading.RLock()
        self._entries: collections.OrderedDict[Hashable, _Entry] = collections.OrderedDict()

    def __repr__(self) -> str:
        return f"PromptStore({size(self.nbytes)} of {size(self.max_bytes)}, {self.hits} hits, {self.misses} misses)"

    @property
    def nbytes(self) -> int:
        """The number of bytes of all entries."""
        with self.lock:
            return sum(entry.nbytes for entry in self._entries.values())

    def find(self, key: Hashable) -> _Entry | None:
        """Returns an entry, which becomes the most recently used one, or None."""
        if (found := self._entries.get(key)) is None:
            self.misses += 1
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return found

    def make_room(self, nbytes: int) -> None:
        """Drops the least recently used entries until there is room for `nbytes` more."""
        while self._entries and self.nbytes + nbytes > self.max_bytes:
            self._entries.popitem(last=False)

    def add(self, key: Hashable, entry: _Entry) -> None:
        """Adds an entry, for which there is room."""
        self._entries[key] = entry

    def clear(self) -> None:
        """Drops all entries."""
        with self.lock:
            self._entries.clear()


_store: contextvars.ContextVar[PromptStore | None] = contextvars.ContextVar("store", default=None)


@contextlib.contextmanager
def reuse_prompts(max_bytes: int) -> Iterator[PromptStore]:
    """Within this context, calls on equal prompts under different caches compute the prompts once.

    `kvjax.log_likelihood`, `kvjax.generate` and `kvjax.score_choices` keep the queries, keys and values of a batch of
    prompts. A later call with the same model, batch and padding runs only the cache: attention, statistics, eviction
    and storage. Results may differ in rounding from those of a call outside of the context.

    Prompts in blocks, and those of selections that act on prompts, are computed in each call, because the cache changes
    them. So are those of models on meshes, in gradients, with parameters that are not JAX arrays, and with a RoPE
    scaling that depends on the number of tokens to come (``dynamic``, ``longrope``). Threads that the caller starts
    share prompts if they run in a copy of its context (`contextvars.copy_context`).

    Args:
      max_bytes: the maximum number of bytes of all activations that are kept. A batch needs (H + 2 K) D numbers for
        each token and layer, and E for each token; one that needs more than `max_bytes` is computed in each call. The
        parameters of the model are kept as well, which takes no memory as long as the caller has them.

    Yields:
      The store, which counts its hits and misses. It is empty after the context.

    Raises:
      ConfigError: `max_bytes` is not a positive number.

    Example::

      with kvjax.reuse_prompts(4 << 30):
        for policy in (policies.full(), policies.h2o(0.2), policies.roco(0.2)):
          scored = kvjax.log_likelihood(model, tokens, policy, prompt_length=512)
    """
    most = number_argument("max_bytes", max_bytes, minimum=1, maximum=LARGEST, error=ConfigError)
    store = PromptStore(int(most))
    token = _store.set(store)
    try:
        yield store
    finally:
        _store.reset(token)
        store.clear()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Within this context, which may be inside of `reuse_prompts`, prompts are computed: for measurements of time."""
    token = _store.set(None)
    try:
        yield
    finally:
        _store.reset(token)


def active() -> PromptStore | None:
    """Returns the store of `reuse_prompts`, or None outside of it."""
    return _store.get()


def can_reuse(store: PromptStore, model: Model, layout: CacheLayout, rows: int, width: int) -> bool:
    """Returns whether a batch of prompts may be shared.

    Args:
      store: of `reuse_prompts`.
      model: the model.
      layout: the layout of the cache.
      rows: the number of rows of the batch.
      width: the number of tokens that prompts are padded to.
    """
    early = [group.selection for groups in layout.prompt for group in groups]
    if layout.block is not None or not all(selection.reads_all for selection in early):
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
    return int(
        rows * width * (numbers * jax.tree.leaves(model.params)[0].dtype.itemsize + np.dtype(np.float32).itemsize)
    )


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
        return not any(getattr(each, "key", None) in (SKEW, SIDES) for each in path)

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
    # What follows a prompt in its row has no part in it.
    prompts = np.where(inside, tokens[:, :width], 0).astype(np.int32)
    key = _key(model, prompts, lengths, layout)
    with store.lock:
        entry = store.find(key)
        if entry is None:
            needed = nbytes_of(model, *prompts.shape)
            store.make_room(needed)
            ids, rows = model.place((prompts, lengths))
            made = record_steps(model.params, ids, rows, config=model.config, layout=layout)
            entry = _Entry(made, _weights(model), needed)
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
    found: Params = host_memory.to_device({name: own[name] for name in (SKEW, SIDES) if name in own})
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
