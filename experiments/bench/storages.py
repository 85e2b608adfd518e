"""A decoding step with each storage, under h2o and of a full cache, and with selections of it, against dense slots."""

from collections.abc import Iterator

import numpy as np
from absl import flags

from experiments.bench.contestants import (
    dtype_of,
    in_turns,
    lengths,
    milliseconds,
    ours,
    random_model,
    random_prompt,
    ratio,
    shape,
)
from experiments.bench.fill import filled_steps
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

DENSE = "h2o, dense"


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Times in milliseconds per step, and the bytes of keys and values that are held."""
    rounds, tokens, budget = values.rounds, values.tokens, values.slots
    batch, (context, *others) = values.batch or 1, lengths(values) or [budget + 1]
    if others:
        raise ConfigError(f"give one --context for `storages`, not {','.join(map(str, values.context))}.")
    config = shape(values.shape or "opt-125m")
    model = random_model(config, context + (rounds + 1) * tokens, values.dtype)
    specs = combinations(budget)
    if unknown := [name for name in values.caches if name not in specs]:
        raise ConfigError(f"--caches={unknown[0]!r} is unknown; known caches: {'; '.join(specs)}.")
    wanted = {*values.caches, *map(dense_of, values.caches)} or specs
    specs = {name: spec for name, spec in specs.items() if name in wanted}

    def side(spec: CacheSpec) -> Iterator[float]:
        if values.fill:
            return filled_steps(model, spec, batch, context, tokens, rounds)
        # A full cache has room for one round, and starts again.
        restart = spec.policy.budget is None
        return ours(model, random_prompt(config, batch, context), spec, tokens, restart=restart, implementation="xla")

    times = in_turns({name: side(spec) for name, spec in specs.items()}, rounds)

    def held(spec: CacheSpec) -> int:
        lengths = np.full((batch,), context, np.int32)
        limits = Limits(context, tokens, shortest=context)
        sizes = sizes_for(lengths, tokens - 1, width=context, block=None, limits=limits, last_fed=False)
        return lower(spec, config, sizes, lengths, dtype=dtype_of(model)).layout.bytes(batch)

    return [
        {
            "cache": name,
            "MB": held(specs[name]) / 1e6,
            **milliseconds(each),
            "times dense": ratio(each, times[dense_of(name)]),
        }
        for name, each in times.items()
    ]


def dense_of(name: str) -> str:
    """Returns the dense cache that a cache is compared with."""
    return DENSE if name.startswith("h2o") else "full, dense"


def combinations(budget: int) -> dict[str, CacheSpec]:
    """Returns the caches that are compared, by name."""
    h2o, full = policies.h2o(budget), policies.full()
    made = {DENSE: CacheSpec(h2o)}
    storages = (storage.int8(), storage.int4(), storage.fp8(), storage.turboquant(4))
    made |= {f"h2o, {held.name}": CacheSpec(h2o, held) for held in storages}
    made["full, dense"] = CacheSpec(full)
    made |= {f"full, {held.name}": CacheSpec(full, held) for held in storages}
    for read in (selection.quest(page=16, budget=max(budget // 4, 48)), selection.optimal(max(budget // 4, 1))):
        made[f"full, {read.name}"] = CacheSpec(full, selection=read)
    return made
