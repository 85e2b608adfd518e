"""A decoding step of long contexts: a full cache that is read whole, and what selections read of it.

Contexts are filled with random keys and values: a prompt of 32,768 tokens would take a CPU many minutes.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import kvjax
from experiments.bench.sides import advance, dtype_of, in_turns, lengths, random_model, ratio, shape
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, KVState, Layer, LayerKV, Limits
from kvjax.cache.convert import Prompt, convert
from kvjax.cache.layout import Group
from kvjax.cache.limits import sizes_for
from kvjax.cache.lowering import lower
from kvjax.cache.slots import empty_stats, transient
from kvjax.prefill import Prefilled

CONTEXTS = (2048, 8192, 32768)
WHOLE = "full"
READ = 512  # slots that a selection reads at most


def run(values: flags.FlagValues) -> list[dict[str, Any]]:
    """Times in milliseconds per step, at every context."""
    contexts = lengths(values) or CONTEXTS
    return [row for context in contexts for row in one_context(values, context)]


def one_context(values: flags.FlagValues, context: int) -> list[dict[str, Any]]:
    """A row for every side."""
    batch, tokens, rounds = values.batch or 1, values.tokens, values.rounds
    model = random_model(shape(values.shape or "opt-125m"), context + (rounds + 2) * tokens, values.dtype)
    specs = combinations(context)
    rows = []
    # In pairs with the full cache, because the caches of all of them at once need more memory than a small machine has.
    for name in [name for name in specs if name != WHOLE]:
        pair = {which: side(model, specs[which], batch, context, tokens, rounds) for which in (WHOLE, name)}
        times = in_turns(pair, rounds)
        rows.append(
            {
                "batch": batch,
                "context": context,
                "cache": name,
                "ms/step": 1e3 * float(np.median(times[name])),
                "min": 1e3 * float(min(times[name])),
                "max": 1e3 * float(max(times[name])),
                "full ms/step": 1e3 * float(np.median(times[WHOLE])),
                "faster than full": ratio(times[WHOLE], times[name]),
            }
        )
    return rows


def combinations(context: int) -> dict[str, CacheSpec]:
    """What is compared with a full cache, by name.

    The first two layers read everything unless the name says otherwise: of 12 layers, those alone take a sixth of the
    time of attention.
    """
    full, read = policies.full(), min(READ, context // 4)
    host = storage.dense(memory="host")
    guess, pages = selection.infinigen(cap=read), selection.quest(page=16, budget=read)
    return {
        WHOLE: CacheSpec(full),
        "infinigen": CacheSpec(full, selection=guess),
        "quest": CacheSpec(full, selection=pages),
        "infinigen from layer 1": CacheSpec(full, selection=selection.infinigen(cap=read, first_layer=1)),
        "quest in every layer": CacheSpec(full, selection=selection.quest(page=16, budget=read, first_layer=0)),
        "optimal": CacheSpec(full, selection=selection.optimal(read, first_layer=2)),
        "infinigen, on host": CacheSpec(full, host, guess),
        "quest, on host": CacheSpec(full, host, pages),
    }


def side(model: kvjax.Model, spec: CacheSpec, batch: int, context: int, tokens: int, rounds: int) -> Iterator[float]:
    """Seconds a step; each round continues the last one."""
    prefilled = filled(model, spec, batch, context, (rounds + 1) * tokens)
    while True:
        seconds, prefilled = advance(model, prefilled, tokens)
        yield seconds


def filled(model: kvjax.Model, spec: CacheSpec, batch: int, context: int, tokens: int) -> Prefilled:
    """A cache of `context` random keys and values, with room for `tokens` more."""
    prompts = np.full((batch,), context, np.int32)
    limits = Limits(context, tokens, shortest=context)
    sizes = sizes_for(prompts, tokens, width=context, block=None, limits=limits, last_fed=True)
    config, dtype = model.config, dtype_of(model)
    lowered = lower(spec, config, sizes, prompts, implementation="xla", dtype=dtype)
    layout, row = lowered.layout, jnp.asarray(prompts)
    kv_heads, dim = config.num_kv_heads, config.head_dim

    @functools.partial(jax.jit, static_argnames=("before", "after"))
    def make(key: jax.Array, before: Group, after: Group) -> LayerKV:
        # [B, K, S, D]
        keys = jax.random.normal(key, (2, batch, kv_heads, context, dim), dtype)
        position = jnp.broadcast_to(jnp.arange(context, dtype=jnp.int32), (batch, context))
        stats = empty_stats(before.needs, before.policy.remembers, (batch, kv_heads, context))
        # Sums of a prompt that a selection would have watched; their values do not change the time of a step.
        sums: Any = {} if before.watch is None else before.watch.start((batch, kv_heads), dim)
        layer = transient(keys[0], keys[1], position, stats, sums)
        return convert(layer, before, after, Prompt(row))

    keys = jax.random.split(jax.random.key(0), config.num_layers)
    layers = tuple(
        Layer((make(key, before[0], after[0]),))
        for key, before, after in zip(keys, layout.prompt, layout.decode, strict=True)
    )
    budget: Any = jax.tree.map(jnp.asarray, lowered.budgets.decode)
    # Each is an array of its own, which can be donated.
    state = KVState(layers, length=row.copy(), prompt=row.copy(), total=row + tokens, budget=budget)
    return Prefilled(jnp.zeros((batch, config.vocab_size)), state, layout)
