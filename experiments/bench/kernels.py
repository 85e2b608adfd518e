"""Attention of one query a head over a cache, and a layer's whole decoding step: bytes a second, against a copy's."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.bench import contestants
from experiments.bench.contestants import CALLS, in_turns, ratio, timed
from experiments.bench.device import copying
from experiments.bench.names import KINDS, STEP
from kvjax import attention, policies
from kvjax.attention import IMPLEMENTATIONS, Implementation
from kvjax.cache import Block, Group, LayerKV, Limits
from kvjax.cache.empty import empty
from kvjax.cache.planning.kernel_choice import Chooser
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.step.step import step as one_step
from kvjax.errors import ConfigError
from kvjax.models import shapes
from kvjax.numerics.statistics import MASS, Statistic
from kvjax.typing import JsonObject, PyTree

Array = jax.Array
# Rows, slots, features, dtype and implementation -> the output, calls to be timed, and the kernel that runs
Work = Callable[[int, int, int, str, Implementation], tuple[np.ndarray, Callable[[], object], str]]

SAME = {"float32": 1e-4, "bfloat16": 2e-2}  # largest difference of an output from XLA's; values are about 1


def run(values: flags.FlagValues) -> list[JsonObject]:
    shapes = [parse(each) for each in values.grid]
    if unknown := [kind for kind in values.kinds if kind not in KINDS]:
        raise ConfigError(f"--kinds={unknown[0]!r} is unknown; known kinds: {', '.join(KINDS)}.")
    # Outputs are compared with XLA's.
    names = [name for name in IMPLEMENTATIONS if name != "auto"]
    if values.implementation != "auto":
        names = list(dict.fromkeys(("xla", values.implementation)))
    return [row for shape in shapes for row in one_shape(*shape, values.dtype, values.rounds, names, values.kinds)]


def parse(text: str) -> tuple[int, int, int]:
    """``12x512x64`` as rows (batch times heads), slots and features of a head."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise ConfigError(f"--grid={text!r} is not valid; give BATCH*HEADSxSLOTSxHEAD_DIM, as in 12x512x64.")
    rows, slots, dim = (int(each) for each in text.split("x"))
    return rows, slots, dim


def one_shape(
    rows: int, slots: int, dim: int, dtype: str, rounds: int, names: Sequence[Implementation], kinds: Sequence[str]
) -> list[JsonObject]:
    """A row for every implementation and kind of work; and for a copy of as many bytes or more."""
    known = {"none": attention_work(frozenset()), "mass": attention_work(frozenset({MASS})), STEP: step_work}
    works = {KINDS[kind]: known[KINDS[kind]] for kind in kinds}
    runs: dict[tuple[str, str], Callable[[], object]] = {}
    kernels: dict[tuple[str, str], str] = {}
    refused: dict[tuple[str, str], str] = {}
    expected: dict[str, np.ndarray] = {}
    for name in names:
        for kind, work in works.items():
            try:
                output, calls, kernel = work(rows, slots, dim, dtype, name)
            except Exception as error:  # what a platform cannot run is refused in many ways, by us and by compilers
                refused[name, kind] = " ".join((type(error).__name__, *str(error).split()))[:100]
                continue
            if name == "xla":
                expected[kind] = output
            elif kind not in expected:
                refused[name, kind] = "xla did not run, which it is compared with"
                continue
            elif not (worst := float(np.abs(output - expected[kind]).max())) < SAME[dtype]:
                refused[name, kind] = f"it differs from xla by {worst:.1e}: its time would mean nothing"
                continue
            runs[name, kind], kernels[name, kind] = calls, kernel

    item = jnp.dtype(dtype).itemsize
    # Keys, values and positions read, a query read and an output written; a statistic written. A step reads and writes
    # positions and the statistic, and the new pair.
    lines, pairs = {"none": 1, "mass": 2, STEP: 4}, {"none": 1, "mass": 1, STEP: 3}
    moved = {
        key: rows * (slots * (2 * dim * item + 4 * lines[key[1]]) + pairs[key[1]] * 2 * dim * item) for key in runs
    }
    # As many bytes, and more than any cache holds, half of them read and half written.
    copied = max([*moved.values(), contestants.READ_BYTES]) // 8 * 8
    turns = {key: timed(each) for key, each in runs.items()} | {("copy", ""): copying(copied // 8)}
    times = in_turns(turns, rounds)
    a_byte = np.array(times.pop(("copy", ""))) / CALLS / copied
    common = {"batch*heads": rows, "slots": slots, "head dim": dim, "dtype": dtype}

    def row(name: str, statistics: str | None, seconds: Sequence[float] | np.ndarray, size: float) -> JsonObject:
        return common | {
            "implementation": name,
            "statistics": statistics,
            "kernel": kernels.get((name, statistics or "")),
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


def attention_work(needs: frozenset[Statistic]) -> Work:
    """The attention of one query per head, to be timed."""

    def work(
        rows: int, slots: int, dim: int, dtype: str, implementation: Implementation
    ) -> tuple[np.ndarray, Callable[[], object], str]:
        query, key, value = (
            jax.random.normal(jax.random.key(i), (1, rows, n, dim), dtype) for i, n in enumerate((1, slots, slots))
        )
        position = jnp.tile(jnp.arange(slots, dtype=jnp.int32), (1, rows, 1))

        @jax.jit
        def program(query: Array, key: Array, value: Array, query_position: Array, key_position: Array) -> Any:
            problem = attention.problem(
                query, key, value, query_position=query_position, key_position=key_position, needs=needs
            )  # fmt: skip
            attended, columns = attention.attend_and_reduce(problem, implementation)
            return attended.output.astype(value.dtype), columns

        run = functools.partial(program, query, key, value, jnp.full((1, 1), slots - 1, jnp.int32), position)
        return np.asarray(run()[0], np.float32), lambda: [run() for _ in range(CALLS)], f"decode/{implementation}"

    return work


def step_work(
    rows: int, slots: int, dim: int, dtype: str, implementation: Implementation
) -> tuple[np.ndarray, Callable[[], object], str]:
    """A layer's whole decoding step under h2o: append, attend, observe, evict; all slots but one are live."""
    heads = math.gcd(rows, 8)
    batch, group = rows // heads, step_group(rows // heads, heads, slots, dim, dtype, implementation)
    query, new, key, value = (
        jax.random.normal(jax.random.key(i), (batch, heads, n, dim), dtype) for i, n in enumerate((1, 1, slots, slots))
    )
    position = jnp.tile(jnp.arange(slots, dtype=jnp.int32).at[-1].set(-1), (batch, heads, 1))
    layer = empty(group, batch, heads, dim, dtype).with_exact(key, value).replace(position=position)
    row = jnp.full((batch,), slots, jnp.int32)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(layer: LayerKV, at: Array) -> tuple[Array, LayerKV, Array]:
        block = Block(position=jnp.full((batch, 1), at), prompt=row, total=row, budget=None)
        output, layer, _ = one_step(layer, query, new, new, block=block, group=group, budget=row - 1)
        return output, layer, at + 1

    output, *state = step(layer, jnp.int32(slots))

    def calls() -> PyTree:
        nonlocal state
        for _ in range(CALLS):
            _, *state = step(*state)
        return state

    kernel = f"step/{group.step_implementation}" if group.step_implementation else f"decode/{group.attn_implementation}"
    return np.asarray(output, np.float32), calls, kernel


def step_group(batch: int, heads: int, slots: int, dim: int, dtype: str, implementation: Implementation) -> Group:
    """One layer under h2o, as `kvjax.cache.planning.lowering` has it, with the kernels of an implementation."""
    config = dataclasses.replace(
        shapes.by_name("tiny"), num_layers=1, num_heads=heads, num_kv_heads=heads, head_dim=dim, windows=()
    )  # fmt: skip
    sizes = sizes_for(
        np.full((batch,), slots), 1, width=slots, block=None, limits=Limits(slots, 1, shortest=slots), last_fed=True
    )  # fmt: skip
    policy = policies.h2o(budget=slots - 1)
    assert isinstance(policy, policies.Evict)
    group = Group(policy=policy.traced(), needs=policy.needs, slots=(slots,), decoding=True)
    return Chooser(config, sizes, implementation, jax.default_backend(), dtype).decode(group, heads)
