"""Attention rows reduced as they come, in linear memory: what every measure of `kvjax.analysis` is made of.

The rows of one tile of queries exist at a time: `over_tiles` goes through texts under the full cache, `over_steps`
decodes texts under several caches side by side.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.rows import Span, bounds, look
from kvjax.cache import shared_prefix
from kvjax.cache.empty import empty_layers
from kvjax.cache.layer_stack import arranged, arranged_state, common_runs, stacked_runs
from kvjax.cache.planning.layout import Group, keep_everything
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.cache.spec import CacheSpec, as_spec, on_device
from kvjax.cache.state import Block, KVState
from kvjax.errors import InputError
from kvjax.generation.options import CacheOptions
from kvjax.generation.prefill import prepare, run_prompts
from kvjax.generation.program import program
from kvjax.inputs import check_batch, check_prompt
from kvjax.kernels.prefill.xla import tile_rows
from kvjax.models.bound import BoundDecoder, bind
from kvjax.models.calibrate import calibrated
from kvjax.models.config import DecoderConfig
from kvjax.models.layer_loop import possible_runs
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.base import Policy
from kvjax.typing import PyTree

Array = jax.Array
# (the layer's carry, the layer's rows in each run, *arguments) -> (the carry, a result for each query)
Step = Callable[..., tuple[Any, Any]]
ANALYSIS = "kvjax.analysis"  # for messages
STEPS = 64  # decoding steps of one call; texts of any length share its program


class Reduced(NamedTuple):
    """The result of a scan, on the host; H = K * G query heads, or K where a measure has one number per KV head.

    Attributes:
      carried: the last carry, leaves [L, B, heads, ..., T].
      queries: the result for each query, leaves [L, B, heads, ..., T]; meaningless where there is no query.
      lengths: [B] int32 tokens of each row.
      prompt: [B] int32 tokens of each row's prompt.
    """

    carried: Any
    queries: Any
    lengths: np.ndarray
    prompt: np.ndarray


def over_tiles(
    model: Model, tokens: ArrayLike, lengths: ArrayLike | None, step: Step, start: Callable[..., Any], *args: Any
) -> Reduced:
    """Reduces every attention row of the full cache, one tile of queries at a time.

    A tile is a block of a block-wise prefill, whose results are those of a prefill in one shot.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int.
      lengths: [B] real tokens of each row, or None.
      step: ``step(carry, (rows,), *args)``, a function of a module, since the program is compiled for it; its results
        have dimensions [B, K, G or 1, ...].
      start: (B, K, G, T) -> the carry that each layer starts with, leaves [B, K, G or 1, ..., T].
      args: arrays and numbers, which are not compiled in.

    Raises:
      ConfigError: a model that is spread over several processes.
    """
    distributed.check_alone(model.params, ANALYSIS)
    shared_prefix.refuse(model.params, ANALYSIS)
    config = model.config
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    ids = _padded(batch.tokens)
    rows, width = ids.shape
    shape = (rows, config.num_kv_heads, config.num_heads // config.num_kv_heads, width)
    alike = keep_everything(config.num_layers)
    with model.on_mesh():
        carried, queries = scan_tiles(
            model.params, *model.place((ids, batch.lengths)), (start(*shape),) * config.num_layers, args,
            config=config, step=step, tile=tile_rows(rows * config.num_heads * width, width),
            runs=possible_runs(config, model.params, alike, alike),
        )  # fmt: skip
    size = batch.tokens.shape[1]
    return Reduced(_by_head(carried, size), _by_head(queries, size), batch.lengths, np.zeros_like(batch.lengths))


@program(static_argnames=("config", "step", "tile", "runs"))
def scan_tiles(params, tokens, lengths, carried, args, *, config, step, tile, runs=()):
    """`over_tiles` for tokens [B, T] and one carry per layer.

    Returns:
      The last carries, and the result for each query, leaves [..., T].
    """
    rows, width = tokens.shape
    count = -(-width // tile)
    phase = tuple((Group(slots=(count * tile,)),) for _ in range(config.num_layers))
    budget = ((None,),) * config.num_layers
    decoder = bind(config, params).looped(runs)
    empty = empty_layers(phase, rows, config.num_kv_heads, config.head_dim, decoder.dtype)
    layers = arranged(empty, decoder.runs)
    kv = KVState(layers, jnp.zeros((rows,), jnp.int32), prompt=lengths, total=lengths, budget=budget)
    # [tiles, B, tile]
    ids = jnp.pad(tokens, ((0, 0), (0, count * tile - width))).reshape(rows, count, tile).swapaxes(0, 1)

    def body(carry, inputs):
        kv, carried = carry
        first, ids = inputs
        position = first + jnp.arange(tile, dtype=jnp.int32)
        # [B, tile]
        position = jnp.where(position < lengths[:, None], position, -1)
        block = Block(position=position, prompt=lengths, total=lengths, budget=budget)
        kv, spans = look(decoder, ids, kv, block, phase)
        carried, results = _reduce(step, carried, [(position, spans)], args, config, width)
        return (kv, carried), results

    stacks = _stacked(carried, decoder)
    (_, stacks), results = jax.lax.scan(body, (kv, stacks), (jnp.arange(count, dtype=jnp.int32) * tile, ids))

    def join(leaf):
        # [tiles, ..., tile] -> [..., T]
        leaf = jnp.moveaxis(leaf, 0, -2)
        return leaf.reshape(*leaf.shape[:-2], count * tile)[..., :width]

    return _by_layer(stacks, decoder), jax.tree.map(join, _by_layer(results, decoder, axis=1))


def over_steps(
    model: Model,
    tokens: ArrayLike,
    policies: tuple[Policy | CacheSpec, ...],
    step: Step,
    start: Callable[..., Any],
    *args: Any,
    prompt_length: ArrayLike,
    lengths: ArrayLike | None,
) -> Reduced:
    """Reduces the attention rows of decoding, one query at a time, under several caches side by side.

    Every run sees the same text: prompts go in at once, the tokens after them one by one, as in `log_likelihood`.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int.
      policies: what the cache of each run keeps.
      step: ``step(carry, (rows of the first run, rows of the second, ...), *args)``; see `over_tiles`.
      start: (the layer's cache in each run after the prompts, B, K, G, T) -> the carry that the layer starts with.
      args: see `over_tiles`.
      prompt_length: int or [B], tokens of each row's prompt.
      lengths: see `over_tiles`.

    Raises:
      InputError: no token follows any prompt; what `log_likelihood` raises.
      ConfigError: a model that is spread over several processes.
      PolicyError: a policy that cannot work.
    """
    distributed.check_alone(model.params, ANALYSIS)
    shared_prefix.refuse(model.params, ANALYSIS)
    config = model.config
    # What attention saw of a pool in host memory is not kept, and is the same as of one on the device.
    specs = tuple(on_device(as_spec(policy)) for policy in policies)
    for spec in specs:
        calibrated(model, spec, None)
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    prompt = check_prompt(prompt_length, batch.lengths)
    steps = int((batch.lengths - prompt).max())
    if steps == 0:
        raise InputError(
            f"prompt_length={prompt_length!r} leaves no query to measure: the longest row has {batch.lengths.max()} "
            "tokens; give a shorter prompt or longer texts."
        )
    padded = _padded(batch.tokens)
    shape = (len(padded), config.num_kv_heads, config.num_heads // config.num_kv_heads, padded.shape[1])
    with model.on_mesh():
        # XLA's ops, step by step: a kernel that does a whole step reports no rows.
        options = CacheOptions(implementation="xla")
        prepared = [
            prepare(model, spec, prompt, batch.lengths, width=int(prompt.max()), options=options) for spec in specs
        ]
        states = tuple(
            run_prompts(model, batch.tokens, prompt, batch.lengths, each, score=False)[2] for each in prepared
        )
        carried = tuple(start(runs, *shape) for runs in zip(*(kv.layers for kv in states), strict=True))
        ids, ends = model.place((padded, batch.lengths))
        parts = []
        for _ in range(0, steps, STEPS):
            states, carried, results = scan_steps(
                model.params, states, carried, ids, ends, args, config=config,
                phases=tuple(each.layout.decode for each in prepared), step=step,
            )  # fmt: skip
            parts.append(jax.device_get(results))
    size = batch.tokens.shape[1]

    def place(*leaves):
        """Parts [STEPS, B, heads, ..., 1] -> [B, heads, ..., T], NaN where there is no query."""
        leaf = np.concatenate(leaves)
        placed = np.full((*leaf.shape[1:-1], size), np.nan, np.float32)
        for row, (first, end) in enumerate(zip(prompt, batch.lengths, strict=True)):
            placed[row, ..., first:end] = np.moveaxis(leaf[: end - first, row, ..., 0], 0, -1)
        return placed

    return Reduced(_by_head(carried, size), _by_head(jax.tree.map(place, *parts), size), batch.lengths, prompt)


@program(static_argnames=("config", "phases", "step"), donate_argnames=("states",))
def scan_steps(params, states, carried, tokens, lengths, args, *, config, phases, step):
    """The next `STEPS` steps of `over_steps`.

    Args:
      states: the state of each run.
      carried: one carry per layer.
      tokens: [B, T] int32.
      lengths: [B] int32 tokens of each row, past which it feeds padding.
      phases: the groups of each layer, for each run.

    Returns:
      The states, the carries, and the result for each query, leaves [STEPS, ..., 1].
    """
    row, width = jnp.arange(tokens.shape[0]), tokens.shape[1]
    decoder = bind(config, params)
    stacked = [stacked_runs(kv.layers) for kv in states]
    now = [decoder.runs_now(kv, phase) for kv, phase in zip(states, phases, strict=True)]
    decoder = decoder.looped(common_runs(now, config.num_layers))
    states = tuple(arranged_state(kv, decoder.runs) for kv in states)

    def body(carry, _):
        states, carried = carry
        at = states[0].length
        # [B, 1]
        position = jnp.where(at < lengths, at, -1)[:, None]
        ids = tokens[row, jnp.minimum(at, width - 1)][:, None]
        looks = [
            look(decoder, ids, kv, Block(position, kv.prompt, kv.total, kv.budget), phase)
            for kv, phase in zip(states, phases, strict=True)
        ]
        carried, results = _reduce(step, carried, [(position, spans) for _, spans in looks], args, config, width)
        return (tuple(kv for kv, _ in looks), carried), results

    (states, stacks), results = jax.lax.scan(body, (states, _stacked(carried, decoder)), length=STEPS)
    states = tuple(arranged_state(kv, runs) for kv, runs in zip(states, stacked, strict=True))
    return states, _by_layer(stacks, decoder), _by_layer(results, decoder, axis=1)


def _reduce(
    step: Step,
    carried: tuple[PyTree, ...],
    runs: Sequence[tuple[Array, list[Span]]],
    args: tuple[Any, ...],
    config: DecoderConfig,
    width: int,
) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
    """Calls `step` for each layer, with its carry and its rows in each run.

    Args:
      step: see `over_tiles`.
      carried: of each span of layers, leaves [L, ...].
      runs: positions of the queries and what layers saw, of each run; all have the same spans.
      args: of `step`.
      config: the decoder.
      width: the number of positions of the text.

    Returns:
      The carries and the results of each span, leaves [L, ...].
    """

    def of_layer(own: tuple[Span, ...], values: PyTree) -> tuple[PyTree, PyTree]:
        carry, arrays = values
        each = zip(own, runs, arrays, strict=True)
        return step(carry, tuple(span.rows(x, position, config, width) for span, (position, _), x in each), *args)

    made = []
    for carry, own in zip(carried, zip(*(spans for _, spans in runs), strict=True), strict=True):
        values = (carry, tuple(span.arrays for span in own))
        if jax.tree.leaves(values)[0].shape[0] > 1:
            made.append(jax.lax.map(functools.partial(of_layer, own), values))
        else:
            single = of_layer(own, jax.tree.map(lambda leaf: leaf[0], values))
            made.append(jax.tree.map(lambda leaf: leaf[None], single))
    return tuple(carry for carry, _ in made), tuple(result for _, result in made)


def _stacked(carried: tuple[PyTree, ...], decoder: BoundDecoder) -> tuple[PyTree, ...]:
    """Returns the carries of layers by span, leaves [L, ...]."""
    return tuple(
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *carried[start:stop])
        for start, stop in bounds(len(carried), decoder.runs)
    )


def _by_layer(stacks: tuple[PyTree, ...], decoder: BoundDecoder, axis: int = 0) -> tuple[PyTree, ...]:
    """Inverts `_stacked`: one tree for each layer.

    Args:
      stacks: of each span.
      decoder: whose spans they are.
      axis: of the layers.
    """
    return tuple(
        jax.tree.map(lambda leaf, i=i: jax.lax.index_in_dim(leaf, i, axis, keepdims=False), stack)
        for stack, (start, stop) in zip(stacks, bounds(decoder.config.num_layers, decoder.runs), strict=True)
        for i in range(stop - start)
    )


def _padded(tokens: np.ndarray) -> np.ndarray:
    """Tokens [B, T], padded to a size that many lengths share."""
    size = tokens.shape[1]
    return np.pad(tokens, ((0, 0), (0, prompt_bucket(size) - size)))


def _by_head(layers: PyTree, size: int) -> Any:
    """One pytree per layer, leaves [B, K, G, ..., T'] -> one pytree, leaves [L, B, K * G, ..., size], on the host."""

    def stack(*leaves):
        leaf = np.stack([np.asarray(leaf)[..., :size] for leaf in leaves])
        return leaf.reshape(*leaf.shape[:2], -1, *leaf.shape[4:])

    return jax.tree.map(stack, *layers)
