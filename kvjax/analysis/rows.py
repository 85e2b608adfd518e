"""Real attention rows of a run, reduced as they come: what every measure of `kvjax.analysis` is made of.

A step of the decoder is run as it is; its queries are captured, its keys are in the cache, and the rows are computed
from both as `cache.step` and `attention.attend` do. Rows exist for one tile of queries at a time: `scan_tiles` goes
through texts under the full cache, `scan_steps` decodes texts under several policies side by side.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import cache
from kvjax.cache import Block, KVState, LayerKV
from kvjax.errors import InputError, PolicyError
from kvjax.inputs import check_batch, check_positions, check_prompt
from kvjax.kernels import softmax
from kvjax.kernels.prefill.xla import tile_rows
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.model import Model
from kvjax.policies.base import Policy, View, check
from kvjax.policies.window import full
from kvjax.prefill import allocate_for, prefill_steps

Array = jax.Array
# (what is carried, the same layer's rows in each run, arguments) -> (what is carried, what each query leaves)
Step = Callable[..., tuple[Any, Any]]


class Rows(NamedTuple):
    """Attention of n queries in one layer of one run, columns in the order of the text whatever the slots' order.

    Attributes:
      probability: [B, K, G, n, T] float32 softmax weights of the G query heads of each KV head; 0 for what is not seen.
      seen: [B, K, 1, n, T] bool, the tokens that a query sees: held by the cache, not hidden, within the window.
      query: [B, n] int32 positions of the queries, -1 = padding.
    """

    probability: Array
    seen: Array
    query: Array


class Reduced(NamedTuple):
    """What a scan leaves, on the host; query heads H = K * G, or K where a measure leaves one number a KV head.

    Attributes:
      carried: the last carry, leaves [L, B, heads, ...].
      queries: what each query left, leaves [L, B, heads, ..., T], meaningless where there is no query.
      lengths, prompt: [B] int32 tokens of each row, and how many of these were its prompt.
    """

    carried: Any
    queries: Any
    lengths: np.ndarray
    prompt: np.ndarray


def over_tiles(model: Model, tokens: Any, lengths: Any, step: Step, start: Callable[..., Any], *args: Any) -> Reduced:
    """Reduces every attention row of the full cache, a tile of queries at a time.

    A tile is a block of block-wise prefill: where RoPE's frequencies follow the text's length (``dynamic``,
    ``longrope``), a block's keys are rotated by the length so far.

    Args:
      tokens: [B, T] or [T]; lengths: [B] or None.
      step: a module's own function, ``step(carry, (rows,), *args)``; its results have dimensions [B, K, G or 1, ...].
      start: (B, K, G, T) -> what one layer carries at first.
      args: arrays and numbers, not compiled in.
    """
    config = model.config
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    rows, width = batch.tokens.shape
    shape = (rows, config.num_kv_heads, config.num_heads // config.num_kv_heads, width)
    with model.on_mesh():
        carried, queries = scan_tiles(
            model.params, *model.place((batch.tokens, batch.lengths)), (start(*shape),) * config.num_layers, args,
            config=config, step=step, tile=tile_rows(rows * config.num_heads * width, width),
        )  # fmt: skip
    return Reduced(_by_head(carried), _by_head(queries), batch.lengths, np.zeros_like(batch.lengths))


@functools.partial(jax.jit, static_argnames=("config", "step", "tile"))
def scan_tiles(params, tokens, lengths, carried, args, *, config, step, tile):
    """`over_tiles` for tokens [B, T] and one carry a layer: the last carries, and what the queries left, [..., T]."""
    rows, width = tokens.shape
    count, policy = -(-width // tile), full()
    dtype = params["embed"]["tokens"].dtype
    layer = cache.empty(policy, rows, config.num_kv_heads, count * tile, config.head_dim, dtype)
    kv = KVState((layer,) * config.num_layers, jnp.zeros((rows,), jnp.int32))
    ids = jnp.pad(tokens, ((0, 0), (0, count * tile - width))).reshape(rows, count, tile).swapaxes(0, 1)

    def body(carry, inputs):
        kv, carried = carry
        first, ids = inputs
        position = first + jnp.arange(tile, dtype=jnp.int32)
        block = Block(position=jnp.where(position < lengths[:, None], position, -1), budget=(), policy=policy)
        kv, attention = look(params, config, ids, kv, block, width)
        carried, left = _reduce(step, carried, [(rows,) for rows in attention], args)
        return (kv, carried), left

    (_, carried), left = jax.lax.scan(body, (kv, carried), (jnp.arange(count, dtype=jnp.int32) * tile, ids))

    def join(leaf):
        # [tiles, ..., tile] -> [..., T]
        leaf = jnp.moveaxis(leaf, 0, -2)
        return leaf.reshape(*leaf.shape[:-2], count * tile)[..., :width]

    return carried, jax.tree.map(join, left)


def over_steps(
    model: Model,
    tokens: Any,
    policies: tuple[Policy, ...],
    step: Step,
    start: Callable[[tuple[LayerKV, ...], int], Any],
    *args: Any,
    prompt_length: Any,
    lengths: Any,
) -> Reduced:
    """Reduces the attention rows of decoding, one query at a time, under several policies side by side.

    Every run sees the same text: prompts go in at once, the tokens after them one by one, as in `log_likelihood`.

    Args:
      step: a module's own function, ``step(carry, (rows of the first policy, of the second, ...), *args)``.
      start: (the runs' caches of a layer after the prompts, T) -> what that layer carries at first.
      tokens, args, lengths: as in `over_tiles`; prompt_length: int or [B].

    Raises:
      InputError: nothing follows any prompt; what `log_likelihood` raises.
      PolicyError: a policy that cannot work.
    """
    config = model.config
    policies = tuple(check(policy) for policy in policies)
    for policy in policies:
        check_positions(config, policy.positions)
        if policy.parts:
            raise PolicyError(f"policy {policy.name}: measures compare caches whose heads share one policy.")
    batch = check_batch(config, tokens, lengths, new_tokens=0)
    prompt = check_prompt(prompt_length, batch.lengths)
    steps = int((batch.lengths - prompt).max())
    if steps == 0:
        raise InputError(
            f"prompt_length={prompt_length!r} leaves no query to measure: the longest row has {batch.lengths.max()} "
            "tokens; give a shorter prompt or longer texts."
        )
    allocations = [allocate_for(model, policy, prompt, batch.lengths, None)[1] for policy in policies]
    with model.on_mesh():
        ids, ends, starts = model.place((batch.tokens, batch.lengths, prompt))
        states = tuple(
            prefill_steps(
                model.params, ids[:, : prompt.max()], starts, model.place(slots.budget), config=config, policy=policy,
                capacity=slots.capacity, block_capacity=slots.block_capacity, block=None, score=False,
            )[2]
            for policy, slots in zip(policies, allocations, strict=True)
        )  # fmt: skip
        carried = tuple(start(runs, ids.shape[1]) for runs in zip(*(kv.layers for kv in states), strict=True))
        carried, left = scan_steps(
            model.params, states, carried, ids, ends, tuple(model.place(slots.decode_budget) for slots in allocations),
            args, config=config, policies=tuple(policy.then or policy for policy in policies), step=step, steps=steps,
        )  # fmt: skip

    def place(leaf):
        """[steps, B, heads, ..., 1] -> [B, heads, ..., T], NaN where there is no query."""
        placed = np.full((*leaf.shape[1:-1], batch.tokens.shape[1]), np.nan, np.float32)
        for row, (first, end) in enumerate(zip(prompt, batch.lengths, strict=True)):
            placed[row, ..., first:end] = np.moveaxis(leaf[: end - first, row, ..., 0], 0, -1)
        return placed

    return Reduced(_by_head(carried), _by_head(jax.tree.map(place, jax.device_get(left))), batch.lengths, prompt)


@functools.partial(jax.jit, static_argnames=("config", "policies", "step", "steps"))
def scan_steps(params, states, carried, tokens, lengths, budgets, args, *, config, policies, step, steps):
    """`over_steps` from the states after the prompts: the last carries, and what the queries left, [steps, ..., 1]."""
    row, width = jnp.arange(tokens.shape[0]), tokens.shape[1]

    def body(carry, _):
        states, carried = carry
        at = states[0].length
        position = jnp.where(at < lengths, at, -1)[:, None]
        ids = tokens[row, jnp.minimum(at, width - 1)][:, None]
        looks = [
            look(params, config, ids, kv, Block(position, budget, policy, decoding=True), width)
            for kv, budget, policy in zip(states, budgets, policies, strict=True)
        ]
        carried, left = _reduce(step, carried, list(zip(*(rows for _, rows in looks), strict=True)), args)
        return (tuple(kv for kv, _ in looks), carried), left

    (_, carried), left = jax.lax.scan(body, (states, carried), length=steps)
    return carried, left


def look(
    params: Any, config: DecoderConfig, ids: Array, kv: KVState, block: Block, width: int
) -> tuple[KVState, list[Rows]]:
    """One step of the decoder: the state afterwards, and the rows of each layer over `width` positions."""
    decoder = Decoder(config, params["embed"]["tokens"].dtype)
    (_, new), captured = decoder.apply(
        {"params": params}, ids, kv, block, method="hidden", mutable="intermediates",
        capture_intermediates=lambda module, _: module.name in ("query", "query_norm"),
    )  # fmt: skip
    rows = []
    for index, (before, after) in enumerate(zip(kv.layers, new.layers, strict=True)):
        own = captured["intermediates"][f"layer_{index}"]["attention"]
        query = own["query_norm" if config.qk_norm else "query"]["__call__"][0]
        # [B, H, n, D]
        query = jnp.swapaxes(query.reshape(*ids.shape, config.num_heads, config.head_dim), 1, 2)
        rows.append(_rows(before, after, query, block, index, config, width))
    return new, rows


def _rows(
    before: LayerKV, after: LayerKV, query: Array, block: Block, index: int, config: DecoderConfig, width: int
) -> Rows:
    """The rows of a step from its queries, [B, H, n, D] not rotated, and the layer before and after it."""
    policy, rope = block.policy, config.rope
    batch, heads, n, dim = query.shape
    kv_heads, group = config.num_kv_heads, heads // config.num_kv_heads
    # As attention saw it: the block appended, nothing evicted. Eviction clears a slot's position and leaves its key.
    nothing = jnp.zeros_like(after.key, shape=(batch, kv_heads, n, dim))
    layer = cache.append(before, nothing, nothing, block.position).replace(key=after.key, value=after.value)
    key, newest = layer.key, jnp.max(block.position, axis=1)
    if rope is not None and policy.positions == "cache":
        query_rank, key_rank = cache.ranks(block.position, layer.position, in_order=False)
        frequencies = rope.frequencies(cache.longest(layer.position))
        query = rope.rotate(query, jnp.repeat(query_rank, group, axis=1), frequencies)
        key = rope.rotate(key, key_rank, frequencies)
    elif rope is not None:
        query = rope.rotate(query, block.position, rope.frequencies(newest + 1))
    position = layer.position
    if policy.mask is not None:
        view = View(
            position, layer.key, layer.value, newest, block.budget[index], newest + 1, index, decoding=block.decoding
        )
        new = position >= block.position[:, :1, None]
        position = jnp.where(new | policy.mask.visible(layer.stats, view), position, cache.EMPTY)
    # Slots into the order of the text: [B, K, T, D] and [B, K, T]; out of bounds nothing is written.
    place = jax.vmap(jax.vmap(lambda at, new, into: into.at[at].set(new, mode="drop")))
    target = jnp.where(position >= 0, position, width)
    key = place(target, key, jnp.zeros_like(key, shape=(batch, kv_heads, width, dim)))
    position = place(target, position, jnp.full((batch, kv_heads, width), cache.EMPTY, jnp.int32))
    # [B, K, n, T]
    seen = softmax.visible(block.position, position, config.windows[index])
    grouped = query.reshape(batch, kv_heads, group, n, dim)
    logits = jnp.einsum("bkgnd,bktd->bkgnt", grouped, key, preferred_element_type=jnp.float32) * dim**-0.5
    if policy.merge is not None and policy.merge.log_weight is not None:
        weight = policy.merge.log_weight(layer.stats)
        logits = logits + place(target, weight, jnp.zeros_like(weight, shape=position.shape))[:, :, None, None]
    return Rows(softmax.probabilities(logits, seen), seen[:, :, None], block.position)


def _reduce(step: Step, carried: Any, attention: Any, args: Any) -> tuple[Any, Any]:
    """One carry a layer and its rows in each run -> the carries, and what the queries left with leaves [B, ...]."""
    pairs = [step(carry, rows, *args) for carry, rows in zip(carried, attention, strict=True)]
    return tuple(carry for carry, _ in pairs), tuple(left for _, left in pairs)


def _by_head(layers: Any) -> Any:
    """One pytree a layer, leaves [B, K, G, ...] -> one pytree, leaves [L, B, K * G, ...], on the host."""

    def stack(*leaves):
        leaf = np.stack([np.asarray(leaf) for leaf in leaves])
        return leaf.reshape(*leaf.shape[:2], -1, *leaf.shape[4:])

    return jax.tree.map(stack, *layers)
