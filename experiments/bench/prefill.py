"""A prompt in one shot: with a policy's statistics, without, and by the peers."""

import functools
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np
from absl import flags

import kvjax
from experiments import peers
from experiments.bench.decode import check_same, names_of_peers, shape_for
from experiments.bench.sides import in_turns, lengths, policy_of, random_model, random_prompt, ratio, timed
from kvjax.cache import Limits
from kvjax.errors import ConfigError
from kvjax.prefill import prefill

CONTEXT = 2048


def run(values: flags.FlagValues) -> list[dict[str, Any]]:
    against = names_of_peers(values.against)
    if "llama.cpp" in against:
        raise ConfigError("llama.cpp is measured decoding only; give --against=transformers, kvpress or none.")
    return [row for context in lengths(values) or [CONTEXT] for row in one_length(values, against, context)]


def one_length(values: flags.FlagValues, against: list[str], context: int) -> list[dict[str, Any]]:
    """A row for every side, times in milliseconds a prompt."""
    batch = values.batch or 1
    config = shape_for(values, against)
    model = random_model(config, context + 1, values.dtype)
    prompt = random_prompt(config, batch, context)
    sides: dict[str, Iterator[float]] = {}
    for name in dict.fromkeys(("full", *values.policies)):
        run = functools.partial(
            prefill, model, prompt, policy_of(name, values.budget), max_new_tokens=1,
            implementation=values.implementation, limits=Limits(context, 1, shortest=context),
        )  # fmt: skip
        sides[name] = timed(lambda run=run: run().state)  # type: ignore[misc]
    with tempfile.TemporaryDirectory() as folder:
        if against:
            kvjax.save(model, folder)
        for name in against:
            peer = peers.PEERS[name].load(folder)
            check_same(model, peer, prompt[:1, :64], name, values.implementation)
            # Weights of attention, which some presses need, exist under eager attention alone.
            for kind in ("sdpa", "eager"):
                sides[f"{name}, {kind}"] = peer.prefill(prompt, kind)
        times = in_turns(sides, values.rounds)
    return [
        {
            "batch": batch,
            "context": context,
            "side": name,
            "ms/prompt": 1e3 * float(np.median(each)),
            "min": 1e3 * min(each),
            "max": 1e3 * max(each),
            "tokens/s": batch * context / float(np.median(each)),
            "times full": ratio(each, times["full"]),
        }
        for name, each in times.items()
    ]
