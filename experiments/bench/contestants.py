"""Parts of the benchmarks: sides that take turns, kvjax as one of them, and what this machine can read a second.

Programs are compiled for exactly the sizes that are measured, not for buckets of them.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from absl import flags

import kvjax
from experiments.bench.names import LLAMA
from kvjax.attention import Implementation
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.devices import Device
from kvjax.generation.context import Context
from kvjax.generation.generate import decode
from kvjax.generation.prefill import prefill
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import random_parameters
from kvjax.models.quantize import WeightCodes
from kvjax.models.shapes import by_name
from kvjax.numerics.rope import Rope
from kvjax.planning.roofline import average_slots, decode_shapes, roofline
from kvjax.policies import evict, low_norm
from kvjax.policies.base import Policy

Key = TypeVar("Key")
NOISE = 1.5  # rounds of one side that differ by a larger factor were disturbed
READ_BYTES = 1 << 30  # of the array that is read to measure a machine: no cache holds it
#: Calls in a row of what takes about a millisecond, so that an accelerator does not wait for Python between them.
CALLS = 10


def shape(name: str) -> DecoderConfig:
    """A decoder by name: `LLAMA` (12 layers of 768, MLP 3,072, vocabulary 32,000), or one of kvjax.models.shapes."""
    if name != LLAMA:
        return by_name(name)
    return dataclasses.replace(
        by_name("llama2-7b"), hidden_size=768, num_layers=12, num_heads=12, num_kv_heads=12, head_dim=64,
        mlp_size=3072, embed_size=768, rope=Rope(dim=64), windows=(),
    )  # fmt: skip


def random_model(config: DecoderConfig, positions: int, dtype: str = "float32") -> kvjax.Model:
    """Random weights, made on the device, with room for `positions` positions.

    All layers have the same shapes: two small programs make a decoder of any depth.
    """
    config = dataclasses.replace(config, max_positions=positions)
    one = dataclasses.replace(config, num_layers=1, windows=config.windows[:1])
    make = functools.partial(random_parameters, one, dtype=jnp.dtype(dtype))
    another = jax.jit(lambda key: make(key)["layer_0"])
    key = jax.random.key(0)
    params = jax.jit(make)(key)
    for index in range(1, config.num_layers):
        params[f"layer_{index}"] = another(jax.random.fold_in(key, index))
    return kvjax.Model(config, params)


def dtype_of(model: kvjax.Model) -> jnp.dtype:
    """The dtype of a model's weights."""
    return model.dtype


def random_prompt(config: DecoderConfig, batch: int, length: int) -> np.ndarray:
    """[batch, length] token ids, none of them special."""
    return np.random.default_rng(0).integers(5, config.vocab_size, (batch, length))


def policy_of(name: str, budget: int | float) -> Policy:
    """A policy by name; what only shortens prompts evicts here at every step, if it can rank a slot at any time."""
    if name == "knorm":
        return evict(importance=low_norm, budget=budget, name="knorm")
    return kvjax.policies.full() if name == "full" else kvjax.policies.by_name(name, budget=budget)


def lengths(values: flags.FlagValues) -> list[int]:
    """--context; empty if it was not given."""
    return list(values.context or [])


def in_turns(sides: Mapping[Key, Iterator[float]], rounds: int) -> dict[Key, list[float]]:
    """Seconds of every side and round, A B B A, after one round that warms up: no side always follows the same one."""
    times: dict[Key, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            elapsed = next(sides[name])
            if turn:
                times[name].append(elapsed)
    if noisy := [str(name) for name, each in times.items() if max(each) > NOISE * min(each)]:
        print(f"unreliable: rounds of {', '.join(noisy)} differ by more than 50 %")
    return times


def milliseconds(times: npt.ArrayLike, of: str = "step") -> dict[str, float]:
    """Columns of a table: the median of times in seconds, the shortest and the longest, in milliseconds."""
    seconds = np.asarray(times)
    middle, least, most = (1e3 * float(each) for each in (np.median(seconds), seconds.min(), seconds.max()))
    return {f"ms/{of}": middle, "min": least, "max": most}


def ratio(times: npt.ArrayLike, others: npt.ArrayLike) -> float:
    """How many times longer, round by round, in the median."""
    return float(np.median(np.divide(times, others)))


def lowered_for(model: kvjax.Model, policy: Policy, batch: int, context: int, tokens: int) -> Lowered:
    """Returns what kvjax runs for prompts of `context` tokens and `tokens` new ones, by XLA."""
    prompts = np.full((batch,), context, np.int32)
    sizes = sizes_for(
        prompts, tokens - 1, width=context, block=None, limits=Limits(context, tokens, shortest=context), last_fed=False
    )  # fmt: skip
    return lower(CacheSpec(policy), model.config, sizes, prompts, implementation="xla", dtype=dtype_of(model))


def grows(lowered: Lowered) -> bool:
    """Whether some head never evicts while decoding, so that its slots run out."""
    return any(not group.evicts for group in lowered.layout.groups)


def attended(config: DecoderConfig, lowered: Lowered, context: int, tokens: int) -> int:
    """Slots that a head attends to in a round's last step, the newest token's among them; the mean of all heads."""
    heads = [len(group.heads or range(config.num_kv_heads)) for group in lowered.layout.groups]

    def total(steps: int) -> float:
        # `average_slots` has the mean of the steps; a round of n tokens has n - 1.
        read = [each.read for each in average_slots(config, lowered, context, steps + 1)]
        return steps * float(np.average(read, weights=heads)) if steps else 0

    return round(total(tokens - 1) - total(tokens - 2))


def ours(
    model: kvjax.Model,
    prompt: np.ndarray,
    policy: Policy | CacheSpec,
    tokens: int,
    *,
    restart: bool = False,
    implementation: Implementation = "auto",
) -> Iterator[float]:
    """Seconds a step of kvjax: each round continues the last one, or restarts where slots would run out.

    A policy that evicts while decoding has the slots of its budget and one more, however many rounds follow; any other
    has room for the tokens of one round.
    """
    limits = Limits(prompt.shape[1], tokens, shortest=prompt.shape[1])
    prefilled = prefill(model, prompt, policy, max_new_tokens=tokens, implementation=implementation, limits=limits)
    while True:
        seconds, then = advance(model, copied(prefilled) if restart else prefilled, tokens)
        prefilled = prefilled if restart else then
        yield seconds


def advance(model: kvjax.Model, prefilled: Context, tokens: int) -> tuple[float, Context]:
    """Seconds a step of generating `tokens` tokens, and where to go on; what is given is consumed (donated)."""
    jax.block_until_ready(prefilled.state)
    start = time.perf_counter()
    result = decode(model, prefilled, max_new_tokens=tokens)
    jax.block_until_ready(result.state)
    # The last token is not fed back.
    seconds = (time.perf_counter() - start) / (tokens - 1)
    return seconds, prefilled._replace(state=result.state)


def copied(prefilled: Context) -> Context:
    """With a state of its own, which can be donated."""
    return prefilled._replace(state=jax.tree.map(lambda x: x.copy(), prefilled.state))


def timed(run: Callable[[], object], calls: int = 1) -> Iterator[float]:
    """Seconds of each of `calls` calls in a row, which are waited for together."""
    while True:
        start = time.perf_counter()
        jax.block_until_ready([run() for _ in range(calls)])
        yield (time.perf_counter() - start) / calls


def bytes_a_step(
    model: kvjax.Model, policy: Policy, batch: int, context: int, tokens: int, codes: WeightCodes | None = None
) -> int:
    """The least that a decoding step moves; see `roofline.Roofline`. `codes`: what weights are quantised to."""
    config, lowered = model.config, lowered_for(model, policy, batch, context, tokens)
    slots = average_slots(config, lowered, context, tokens)
    shapes = decode_shapes(config, lowered.layout, dtype_of(model), batch, None, weights=codes)
    step = roofline(config, shapes, slots, Device("", None, None, None, ""))
    return step.weights_moved + step.cache_moved


def reading() -> Iterator[float]:
    """Seconds a byte: an array that no cache holds is read by a sum and by both matrix-vector products; the fastest.

    Its numbers are random: pages that are all alike can be one page to the host of a virtual machine.
    """
    side = int((READ_BYTES / 4) ** 0.5)
    matrix, vector = jax.random.normal(jax.random.key(0), (side, side)), jnp.ones((side,))
    programs = [jax.jit(f) for f in (lambda m, v: m.sum(1), lambda m, v: m @ v, lambda m, v: v @ m)]
    calls = 1 if jax.default_backend() == "cpu" else CALLS  # an accelerator reads it in less time than a call takes
    reads = [timed(lambda f=f: f(matrix, vector), calls) for f in programs]  # type: ignore[misc]
    for each in reads:
        next(each)
    while True:
        yield min(float(np.median([next(each) for _ in range(3)])) for each in reads) / matrix.nbytes
