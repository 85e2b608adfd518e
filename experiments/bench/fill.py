"""Caches filled with random keys and values: decoding at a long context without the time and memory of a prompt."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.bench.contestants import advance, dtype_of
from kvjax.attention import Implementation
from kvjax.cache import CacheSpec, KVState, Layer, LayerKV, Limits, shared_layers
from kvjax.cache.planning.layout import Group
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.slots import empty_stats, transient
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.generation.context import Context


def filled_steps(
    model: kvjax.Model,
    spec: CacheSpec,
    batch: int,
    context: int,
    tokens: int,
    rounds: int,
    implementation: Implementation = "xla",
) -> Iterator[float]:
    """Seconds a step; each round continues the last one, and there is room for `rounds` after one that warms up."""
    prefilled = filled(model, spec, batch, context, (rounds + 1) * tokens, implementation)
    while True:
        seconds, prefilled = advance(model, prefilled, tokens)
        yield seconds


def filled(
    model: kvjax.Model, spec: CacheSpec, batch: int, context: int, tokens: int, implementation: Implementation = "xla"
) -> Context:
    """A cache as after a prompt of `context` tokens, with room for `tokens` more; what is kept is the newest.

    All heads of a layer must be one group.
    """
    prompts = np.full((batch,), context, np.int32)
    limits = Limits(context, tokens, shortest=context)
    sizes = sizes_for(prompts, tokens, width=context, block=None, limits=limits, last_fed=True)
    config, dtype = model.config, dtype_of(model)
    lowered = lower(
        spec, config, sizes, prompts, implementation=implementation, platform=model.platform, dtype=dtype
    )  # fmt: skip
    layout, row = lowered.layout, jnp.asarray(prompts)
    kv_heads, dim = config.num_kv_heads, config.head_dim

    @functools.partial(jax.jit, static_argnames=("before", "after", "live"))
    def make(key: jax.Array, before: Group, after: Group, live: int) -> LayerKV:
        # [2, B, K, live, D]
        both = jax.random.normal(key, (2, batch, kv_heads, live, dim), dtype)
        position = jnp.broadcast_to(jnp.arange(context - live, context, dtype=jnp.int32), (batch, live))
        stats = empty_stats(before.needs, before.policy.remembers, (batch, kv_heads, live))
        # Sums of a prompt that a selection would have watched; their values do not change the time of a step.
        sums: Any = {} if before.prompt_index is None else before.prompt_index.start((batch, kv_heads), dim)
        # A prompt that would be replayed has no other group to move its slots to.
        then = before.decode_group or after
        return convert(transient(both[0], both[1], position, stats, sums), before, then, Prompt(row))

    keys = jax.random.split(jax.random.key(0), config.num_layers)
    kept = [context if budget is None else min(int(np.max(budget)), context) for (budget,) in lowered.budgets.prompt]
    layers = tuple(
        Layer((make(key, before, after, live),))
        for key, (before,), (after,), live in zip(keys, layout.prompt, layout.decode, kept, strict=True)
    )
    layers = jax.jit(functools.partial(shared_layers.join_prompts, phase=layout.decode))(layers)
    budget: Any = jax.tree.map(jnp.asarray, lowered.budgets.decode)
    # Each is an array of its own, which can be donated.
    state = KVState(layers, length=row.copy(), prompt=row.copy(), total=row + tokens, budget=budget)
    return Context(jnp.zeros((batch, config.vocab_size)), state, layout)
