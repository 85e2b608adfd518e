"""Row swap: a row of a running batch to host memory and back into another row, as preemption moves it."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np
from absl import flags

from experiments.bench.contestants import LLAMA, lengths, policy_of, random_model, shape
from experiments.bench.fill import filled
from kvjax.cache import CacheSpec, KVState
from kvjax.devices import GIGA
from kvjax.serve.swap import row_bytes, swap_in, swap_out
from kvjax.typing import JsonObject

CONTEXT, ROWS = 2048, 8
ROOM = 128  # tokens that may follow


class Round(NamedTuple):
    """Seconds of the two ways.

    Attributes:
      out: to host memory.
      back: into another row.
    """

    out: float
    back: float


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for every policy and length: bytes of a row, and both ways in milliseconds and GB a second."""
    batch = values.batch or ROWS
    config = shape(values.shape or LLAMA)
    rows: list[JsonObject] = []
    for context in lengths(values) or [CONTEXT]:
        model = random_model(config, context + ROOM, values.dtype)
        for name in dict.fromkeys((*values.policies, "full")):
            state = filled(model, CacheSpec(policy_of(name, values.budget)), batch, context, ROOM).state
            nbytes, rounds = row_bytes(state), moving(state)
            next(rounds)  # compiles
            # [rounds, 2]
            seconds = np.array([next(rounds) for _ in range(values.rounds)])
            out, back = (float(each) for each in np.median(seconds, axis=0))
            rows.append(
                {
                    "policy": name,
                    "rows": batch,
                    "context": context,
                    "row MB": nbytes / 1e6,
                    "out ms": 1e3 * out,
                    "out GB/s": nbytes / out / GIGA,
                    "in ms": 1e3 * back,
                    "in GB/s": nbytes / back / GIGA,
                }
            )
    return rows


def moving(state: KVState) -> Iterator[Round]:
    """Moves a row out and into the next one, round after round; the cache that is given is consumed (donated)."""
    count, row = state.length.shape[0], 0
    while True:
        jax.block_until_ready(state)
        start = time.perf_counter()
        held = jax.block_until_ready(swap_out(state, row))
        middle = time.perf_counter()
        row = (row + 1) % count
        state = jax.block_until_ready(swap_in(state, row, held))
        yield Round(middle - start, time.perf_counter() - middle)
