"""A prompt in one shot: with a policy's statistics, without, by selections that read pages of it, and by the peers."""

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import (
    in_turns,
    lengths,
    milliseconds,
    policy_of,
    random_model,
    random_prompt,
    ratio,
    timed,
)
from experiments.bench.decode import check_same, interpreters, names_of_peers, shape_for
from experiments.bench.device import multiplying, prompt_flops, published
from experiments.peers.process import PeerProcess
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.devices import GIGA, TERA
from kvjax.errors import ConfigError
from kvjax.generation.context import Context
from kvjax.generation.prefill import prefill
from kvjax.models.model import Model
from kvjax.planning.prompt_attention import prompt_attention_flops
from kvjax.policies import full
from kvjax.specs.parse import build
from kvjax.typing import JsonObject

CONTEXT = 2048
PRODUCT = "a large product"


def check(values: flags.FlagValues) -> None:
    """Raises ConfigError if a peer has no such model, or a length or a cache is not valid."""
    against = names_of_peers(values.against)
    if not values.model:
        shape_for(values, against)
    elif against:
        raise ConfigError("--model has no peers here; add --against=none.")
    lengths(values)
    caches(values)


def caches(values: flags.FlagValues) -> dict[str, CacheSpec]:
    """The full caches with the selections of --caches, by their text."""
    return {text: CacheSpec(full(), selection=build("selection", text)) for text in values.caches}


def attention_flops(model: Model, spec: CacheSpec, batch: int, context: int) -> int:
    """FLOPs of attention over the prompts, as XLA computes it."""
    prompts = np.full((batch,), context, np.int32)
    sizes = sizes_for(
        prompts, 0, width=context, block=None, limits=Limits(context, 1, shortest=context), last_fed=False
    )
    layout = lower(spec, model.config, sizes, prompts, implementation="xla").layout
    return prompt_attention_flops(model.config, layout, batch, context)


def run(values: flags.FlagValues) -> list[JsonObject]:
    against = names_of_peers(values.against)
    return [row for context in lengths(values) or [CONTEXT] for row in one_length(values, against, context)]


def one_length(values: flags.FlagValues, against: list[str], context: int) -> list[JsonObject]:
    """A row for every side, times in milliseconds a prompt."""
    batch = values.batch or 1
    if values.model:
        model = kvjax.load(values.model, dtype=values.dtype)
    else:
        model = random_model(shape_for(values, against), context + 1, values.dtype)
    config = model.config
    prompt = random_prompt(config, batch, context)
    sides: dict[str, Iterator[float]] = {PRODUCT: multiplying(values.dtype)}
    busy: dict[str, list[float]] = {}
    names = dict.fromkeys(("full", *values.policies))
    specs = {name: CacheSpec(policy_of(name, values.budget)) for name in names} | caches(values)
    for name, spec in specs.items():
        run = functools.partial(
            prefill, model, prompt, spec, max_new_tokens=1,
            implementation=values.implementation, limits=Limits(context, 1, shortest=context),
        )  # fmt: skip
        busy[name] = []
        sides[name] = timed(functools.partial(_counted, run, busy[name]))
    pythons = interpreters(values.python)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if against:
            kvjax.save(model, folder)
        for name in against:
            peer = stack.enter_context(PeerProcess(name, folder, pythons.get(name)))
            check_same(model, peer, prompt[:1, :64], name, values.implementation)
            sides |= {f"{name}, {kind}": side for kind, side in peer.prefill(prompt).items()}
        times = in_turns(sides, values.rounds)
    an_operation = np.array(times.pop(PRODUCT))
    work, known = prompt_flops(config, batch, context), published()
    most = known.flops if known and values.dtype == "bfloat16" else None
    return [
        {
            "batch": batch,
            "context": context,
            "side": name,
            **milliseconds(each, "prompt"),
            # The first call compiles.
            "CPU ms": 1e3 * float(np.median(busy[name][1:])) if name in busy else None,
            "tokens/s": batch * context / float(np.median(each)),
            "times full": ratio(each, times["full"]),
            "attention GFLOP": attention_flops(model, specs[name], batch, context) / GIGA if name in specs else None,
            **_speeds(name not in values.caches and work, each, an_operation, most),
        }
        for name, each in times.items()
    ]


def _counted(run: Callable[[], Context], seconds: list[float]) -> object:
    """Runs a prompt, and adds the seconds of all cores of this process: less of other load is in them than in time."""
    start = time.process_time()
    state = jax.block_until_ready(run().state)
    seconds.append(time.process_time() - start)
    return state


def _speeds(work: int, times: Sequence[float], an_operation: np.ndarray, most: float | None) -> JsonObject:
    """Columns of the FLOPs per second of prompts that are read whole; None where they are not (`work` is 0)."""
    if not work:
        return dict.fromkeys(("TFLOP/s", "% of a large product", "% of published"))
    middle = float(np.median(times))
    return {
        "TFLOP/s": work / middle / TERA,
        "% of a large product": 100 * ratio(work * an_operation, times),
        "% of published": most and 100 * work / middle / most,
    }
