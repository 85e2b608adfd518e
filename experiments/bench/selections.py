"""A decoding step of long contexts: a full cache that is read whole, and what selections read of it.

Contexts are filled with random keys and values: a prompt of 32,768 tokens would take a CPU many minutes.
"""

import numpy as np
from absl import flags

from experiments.bench.contestants import in_turns, lengths, milliseconds, random_model, ratio, shape
from experiments.bench.fill import filled_steps
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

CONTEXTS = (2048, 8192, 32768)
WHOLE = "full"
READ = 512  # slots that a selection reads at most


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Times in milliseconds per step, at every context."""
    contexts = lengths(values) or CONTEXTS
    return [row for context in contexts for row in one_context(values, context)]


def one_context(values: flags.FlagValues, context: int) -> list[JsonObject]:
    """A row for every side."""
    batch, tokens, rounds = values.batch or 1, values.tokens, values.rounds
    model = random_model(shape(values.shape or "opt-125m"), context + (rounds + 2) * tokens, values.dtype)
    specs = combinations(context)
    chosen = values.caches or [name for name in specs if name != WHOLE]
    if unknown := [name for name in chosen if name not in specs or name == WHOLE]:
        known = "; ".join(name for name in specs if name != WHOLE)
        raise ConfigError(f"--caches={unknown[0]!r} is unknown; known caches: {known}.")
    rows = []
    # In pairs with the full cache, because the caches of all of them at once need more memory than a small machine has.
    for name in chosen:
        pair = {which: filled_steps(model, specs[which], batch, context, tokens, rounds) for which in (WHOLE, name)}
        times = in_turns(pair, rounds)
        rows.append(
            {
                "batch": batch,
                "context": context,
                "cache": name,
                **milliseconds(times[name]),
                "full ms/step": 1e3 * float(np.median(times[WHOLE])),
                "faster than full": ratio(times[WHOLE], times[name]),
            }
        )
    return rows


def combinations(context: int) -> dict[str, CacheSpec]:
    """Returns the caches that are compared with a full one, by name.

    The first two layers read everything unless the name says otherwise: of 12 layers, those alone take a sixth of the
    time of attention.
    """
    full, read = policies.full(), min(READ, context // 4)
    host = storage.dense(memory="host")
    guess, pages = selection.infinigen(cap=read), selection.quest(page=16, budget=read)
    return {
        WHOLE: CacheSpec(full),
        "full, on host": CacheSpec(full, host),
        "infinigen": CacheSpec(full, selection=guess),
        "quest": CacheSpec(full, selection=pages),
        "infinigen from layer 1": CacheSpec(full, selection=selection.infinigen(cap=read, first_layer=1)),
        "quest in every layer": CacheSpec(full, selection=selection.quest(page=16, budget=read, first_layer=0)),
        "optimal": CacheSpec(full, selection=selection.optimal(read, first_layer=2)),
        "infinigen, on host": CacheSpec(full, host, guess),
        "quest, on host": CacheSpec(full, host, pages),
    }
