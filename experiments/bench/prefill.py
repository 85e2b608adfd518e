"""A prompt in one shot: with a policy's statistics, without, and by the peers."""

import contextlib
import functools
import tempfile
from collections.abc import Iterator

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
from kvjax.cache import Limits
from kvjax.devices import TERA
from kvjax.generation.prefill import prefill
from kvjax.typing import JsonObject

CONTEXT = 2048
PRODUCT = "a large product"


def check(values: flags.FlagValues) -> None:
    """Raises ConfigError if a peer has no such model, or a length is not valid."""
    shape_for(values, names_of_peers(values.against))
    lengths(values)


def run(values: flags.FlagValues) -> list[JsonObject]:
    against = names_of_peers(values.against)
    return [row for context in lengths(values) or [CONTEXT] for row in one_length(values, against, context)]


def one_length(values: flags.FlagValues, against: list[str], context: int) -> list[JsonObject]:
    """A row for every side, times in milliseconds a prompt."""
    batch = values.batch or 1
    config = shape_for(values, against)
    model = random_model(config, context + 1, values.dtype)
    prompt = random_prompt(config, batch, context)
    sides: dict[str, Iterator[float]] = {PRODUCT: multiplying(values.dtype)}
    for name in dict.fromkeys(("full", *values.policies)):
        run = functools.partial(
            prefill, model, prompt, policy_of(name, values.budget), max_new_tokens=1,
            implementation=values.implementation, limits=Limits(context, 1, shortest=context),
        )  # fmt: skip
        sides[name] = timed(lambda run=run: run().state)  # type: ignore[misc]
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
            "tokens/s": batch * context / float(np.median(each)),
            "times full": ratio(each, times["full"]),
            "TFLOP/s": work / float(np.median(each)) / TERA,
            "% of a large product": 100 * ratio(work * an_operation, each),
            "% of published": most and 100 * work / float(np.median(each)) / most,
        }
        for name, each in times.items()
    ]
