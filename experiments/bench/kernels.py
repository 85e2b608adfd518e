"""Attention of one query a head over a cache, alone: bytes a second, against those of a copy."""

import functools
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.bench import sides
from experiments.bench.sides import in_turns, ratio, timed
from kvjax.attention import IMPLEMENTATIONS, attend
from kvjax.errors import ConfigError
from kvjax.statistics import MASS

CALLS = 10  # in a row, waited for together: a device that is asked ahead does not wait for Python
SAME = {"float32": 1e-4, "bfloat16": 2e-2}  # largest difference of an output from XLA's; values are about 1


def run(values: flags.FlagValues) -> list[dict[str, Any]]:
    shapes = [parse(each) for each in values.grid]
    return [row for shape in shapes for row in one_shape(*shape, values.dtype, values.rounds)]


def parse(text: str) -> tuple[int, int, int]:
    """``12x512x64`` as rows (batch times heads), slots and features of a head."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise ConfigError(f"--grid={text!r} is not valid; give BATCH*HEADSxSLOTSxHEAD_DIM, as in 12x512x64.")
    rows, slots, dim = (int(each) for each in text.split("x"))
    return rows, slots, dim


def one_shape(rows: int, slots: int, dim: int, dtype: str, rounds: int) -> list[dict[str, Any]]:
    """A row for every implementation, without statistics and with one; and for a copy of as many bytes or more."""
    query, key, value = (
        jax.random.normal(jax.random.key(i), (1, rows, n, dim), dtype) for i, n in enumerate((1, slots, slots))
    )
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "query_position": jnp.full((1, 1), slots - 1, jnp.int32),
        "key_position": jnp.tile(jnp.arange(slots, dtype=jnp.int32), (1, rows, 1)),
    }
    runs: dict[tuple[str, str], Callable[[], Any]] = {}
    refused: dict[tuple[str, str], str] = {}
    for name in (name for name in IMPLEMENTATIONS if name != "auto"):
        for statistics, needs in (("none", frozenset()), ("mass", frozenset({MASS}))):
            program = jax.jit(functools.partial(attend, needs=needs, implementation=name))
            try:
                output = jax.block_until_ready(program(**inputs))[0]
            except Exception as error:  # what a platform cannot run is refused in many ways, by us and by compilers
                refused[name, statistics] = " ".join((type(error).__name__, *str(error).split()))[:100]
                continue
            if name == "xla":
                expected = np.asarray(output, np.float32)
            elif not (worst := float(np.abs(np.asarray(output, np.float32) - expected).max())) < SAME[dtype]:
                raise ConfigError(f"{name} differs from xla by {worst:.1e}; its time would mean nothing.")
            runs[name, statistics] = lambda program=program: [program(**inputs) for _ in range(CALLS)]  # type: ignore[misc]

    item = jnp.dtype(dtype).itemsize
    # Keys, values and positions read, a query read and an output written; a statistic written.
    moved = {key: rows * (slots * (2 * dim * item + 4 + 4 * (key[1] != "none")) + 2 * dim * item) for key in runs}
    # As many bytes, and more than any cache holds, half of them read and half written.
    copied = max(*moved.values(), sides.READ_BYTES) // 8 * 8
    turns = {key: timed(each) for key, each in runs.items()} | {("copy", ""): copying(copied // 8)}
    times = in_turns(turns, rounds)
    a_byte = np.array(times.pop(("copy", ""))) / copied
    common = {"batch*heads": rows, "slots": slots, "head dim": dim, "dtype": dtype}

    def row(name: str, statistics: str | None, seconds: Any, size: float) -> dict[str, Any]:
        return common | {
            "implementation": name,
            "statistics": statistics,
            "ms": 1e3 * float(np.median(seconds)),
            "MB": size / 1e6,
            "GB/s": 1e-9 * size / float(np.median(seconds)),
            "% of a copy": 100 * ratio(size * a_byte, seconds),
            "not run because": None,
        }

    measured = [row(*key, np.array(times[key]) / CALLS, moved[key]) for key in runs]
    measured.append(row("copy", None, copied * a_byte, copied))
    skipped = [
        dict.fromkeys(measured[0]) | common | {"implementation": name, "statistics": statistics, "not run because": why}
        for (name, statistics), why in refused.items()
    ]
    return measured + skipped


def copying(count: int) -> Iterator[float]:
    """Seconds of reading and writing so many float32, in place: a new array would be paid for page by page."""
    copy, array = jax.jit(lambda x: -x, donate_argnums=0), jnp.ones((count,))
    while True:
        start = time.perf_counter()
        array = jax.block_until_ready(copy(array))
        yield time.perf_counter() - start
