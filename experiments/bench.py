"""Decoding speed, kvjax and its peers side by side in one process: A B A B, medians and ratios.

  python -m experiments.bench decode --against=transformers
  python -m experiments.bench decode --against=none --batch=1 --context=512
  python -m experiments.bench policies --slots=512
  python -m experiments.bench stream --slots=512 --tokens=100000 --text=FILE

decode: both sides hold the same random weights (saved by kvjax, loaded by the peer), all cores, float32; the peer runs
its full cache, dynamic and static, and the faster of the two counts. Before anything is timed, both sides'
log-probabilities under a full cache are compared. A third side, "no policy", attends to the same number of slots
without choosing any: what the policy itself costs. Everything is warmed up and waited for.
policies: a decoding step of every policy that evicts while decoding, on the same slots, against h2o.
stream: kvjax-tiny under streaming_llm: time a generated token and bytes held, first and last; then the perplexity of a
text (a generated story, or --text), a tenth of it at a time.
"""

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import cli, data, machine, peers
from experiments.config import DataConfig
from kvjax import cache, policies
from kvjax.errors import ConfigError
from kvjax.generate import decode
from kvjax.models.decoder import random_parameters
from kvjax.models.shapes import by_name
from kvjax.policies.base import slots as budget_slots
from kvjax.prefill import Prefilled, prefill

WORK = ((1, 512), (8, 2048))  # batch, context: what is measured unless the command line says otherwise
TASKS = ("decode", "policies", "stream")
NEEDED = {"strided": {"stride": 4}, "fixed": {"block": 64, "columns": 8}}  # what has no default
SAME = 1e-3  # largest difference in log-probability between two implementations of the same model


def define(values: flags.FlagValues) -> None:
    text, whole = flags.DEFINE_string, flags.DEFINE_integer
    flags.DEFINE_enum("against", "transformers", ["transformers", "none"], "the peer", flag_values=values)
    text("shape", "opt-125m", "decoder shape, of kvjax.models.shapes", flag_values=values)
    text("policy", "h2o", "policy", flag_values=values)
    flags.DEFINE_float("budget", 0.2, "fraction of the context", 0.0, 1.0, flag_values=values)
    whole("batch", None, "rows; with --context, instead of the two standard settings", 1, flag_values=values)
    whole("context", None, "prompt tokens", 1, flag_values=values)
    whole("slots", 512, "budget of every policy, for `policies`", 16, flag_values=values)
    whole("tokens", 128, "new tokens of kvjax a round; a slow peer generates fewer", 2, flag_values=values)
    whole("rounds", 5, "rounds A B A B", 1, flag_values=values)
    text("text", None, "a file to score, for `stream`", flag_values=values)
    text("output", None, "also write the figures as JSON to this file", flag_values=values)


def main(argv: Sequence[str]) -> int:
    values = flags.FlagValues()
    define(values)
    if {"--help", "-h"} & set(argv):
        print(__doc__.strip(), *(f"  --{name}: {values[name].help}" for name in values), sep="\n")
        return 0
    try:
        task, *rest = values(argv, known_only=False)[1:] or ["decode"]
    except flags.Error as error:
        raise ConfigError(str(error)) from None
    if task not in TASKS or rest:
        raise ConfigError(f"unknown benchmark {' '.join([task, *rest])!r}; known benchmarks: {', '.join(TASKS)}.")
    if (values.batch is None) != (values.context is None):
        raise ConfigError("give --batch and --context together, or neither for the two standard settings.")
    settings = WORK if values.batch is None else ((values.batch, values.context),)
    if task == "decode":
        rows = [row for batch, context in settings for row in bench_decode(values, batch, context)]
    else:
        rows = bench_policies(values) if task == "policies" else bench_stream(values)
    print(tabulate(rows, headers="keys", floatfmt=".2f", tablefmt="github"))
    if values.output:
        result = {"environment": machine.environment(), task: rows}
        Path(values.output).write_text(json.dumps(result, indent=2) + "\n")
    return 0


def bench_decode(values: flags.FlagValues, batch: int, context: int) -> list[dict[str, Any]]:
    """One setting: a row for every side, times in milliseconds a step (all rows of the batch advance one token)."""
    rounds, tokens = values.rounds, values.tokens
    slots = budget_slots(values.budget, context) + 1
    # Room for every round to continue where the last one stopped, on a learned position table too.
    config = dataclasses.replace(by_name(values.shape), max_positions=context + (rounds + 1) * tokens + slots)
    model = kvjax.Model(config, random_parameters(config, jax.random.key(0)))
    prompt = np.random.default_rng(0).integers(5, config.vocab_size, (batch, context))
    policy = policies.by_name(values.policy, budget=values.budget)
    # The same slots, all of them kept: a prompt that leaves room for exactly this run's tokens.
    unpoliced = prompt[:, : max(1, slots + 1 - tokens)]
    sides: dict[str, Iterator[float]] = {
        values.policy: ours(model, prompt, policy, tokens),
        "no policy, same slots": ours(model, unpoliced, policies.full(), min(tokens, slots), restart=True),
    }
    if values.against == "transformers":
        with tempfile.TemporaryDirectory() as folder:
            kvjax.save(model, folder)
            peer = peers.Transformers(folder)
        check_same(model, peer, prompt[:1, :64])
        for kind in ("static", "dynamic"):
            sides[f"transformers, {kind}"] = peer.decode(prompt, kind, rounds, tokens)
    times = in_turns(sides, rounds)
    medians = {name: float(np.median(each)) for name, each in times.items()}
    fastest = min((v for k, v in medians.items() if k.startswith("transformers")), default=float("nan"))
    return [
        {
            "batch": batch,
            "context": context,
            "side": name,
            "slots": slots if "transformers" not in name else f"{context}+",
            "ms/step": median,
            "min": min(times[name]),
            "max": max(times[name]),
            "tokens/s": 1e3 * batch / median,
            f"times {values.policy}": median / medians[values.policy],
            "speed-up over the peer": fastest / median,
        }
        for name, median in medians.items()
    ]


def bench_policies(values: flags.FlagValues) -> list[dict[str, Any]]:
    """Every policy that evicts while decoding, on the same slots; times in milliseconds a step of one row."""
    rounds, tokens, budget = values.rounds, values.tokens, values.slots
    prompt_length = budget + 1
    config = dataclasses.replace(by_name(values.shape), max_positions=prompt_length + (rounds + 1) * tokens)
    model = kvjax.Model(config, random_parameters(config, jax.random.key(0)))
    prompt = np.random.default_rng(0).integers(5, config.vocab_size, (values.batch or 1, prompt_length))
    names = ["h2o", *(name for name in policies.POLICIES if name not in ("h2o", "full"))]
    built = {name: policies.by_name(name, budget=budget, **NEEDED.get(name, {})) for name in names}
    made = {
        name: policy
        for name, policy in built.items()
        if policy.then is None and not (policy.positions == "cache" and config.learned_positions)
    }
    made["scissorhands, history 400"] = policies.scissorhands(budget=budget, history=400)
    made["value_norm(h2o)"] = policies.value_norm(made["h2o"])
    made["with_heavy_hitters(window)"] = policies.with_heavy_hitters(made["window"])
    made |= {
        f"h2o(merge={name})": policies.h2o(budget=budget, merge=merge()) for name, merge in policies.MERGES.items()
    }
    sides = {name: ours(model, prompt, policy, tokens) for name, policy in made.items()}
    times = in_turns(sides, rounds)
    # Ratios round by round: a machine that slows down does so for both.
    return [
        {
            "policy": name,
            "slots": budget,
            "ms/step": float(np.median(each)),
            "times h2o": float(np.median(np.divide(each, times["h2o"]))),
        }
        for name, each in times.items()
    ]


def bench_stream(values: flags.FlagValues) -> list[dict[str, Any]]:
    """A tenth of the tokens a row: milliseconds a generated token, bytes of keys and values, perplexity of the text."""
    model = kvjax.load("kvjax-tiny", dtype="float32")
    policy = policies.streaming_llm(budget=values.slots)
    tenth = max(values.tokens // 10, 1)
    settings = DataConfig(text=values.text, num_sequences=1, prompt_length=values.slots, new_tokens=10 * tenth)
    rows, prompt_length, _ = data.load(settings, model, 0)
    scored = kvjax.log_likelihood(model, rows, policy, prompt_length=prompt_length)
    nats = -np.asarray(scored.logprobs)[0, prompt_length - 1 :].reshape(10, tenth)
    side = ours(model, rows[:, :prompt_length], policy, tenth + 1)
    next(side)  # compiles, and generates the first of them
    return [
        {
            "tokens": f"{turn * tenth:,} to {(turn + 1) * tenth:,}",
            "ms/token": 1e3 * next(side),
            "slots": int(cache.live_slots(scored.state.layers[0]).max()),
            "bytes held": cache.nbytes(scored.state),
            "perplexity of the text": float(np.exp(nats[turn].mean())),
        }
        for turn in range(10)
    ]


def in_turns(sides: Mapping[str, Iterator[float]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of every side and round, A B A B, after one round that warms up."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 1):
        for name, side in sides.items():
            elapsed = next(side)
            if turn:
                times[name].append(1e3 * elapsed)
    return times


def ours(model: kvjax.Model, prompt: np.ndarray, policy: Any, tokens: int, *, restart: bool = False) -> Iterator[float]:
    """Seconds a step of kvjax, each round continues the last, or restarts where slots would run out."""
    prefilled = jax.block_until_ready(prefill(model, prompt, policy, max_new_tokens=tokens))
    while True:
        kept = jax.tree.map(lambda x: x.copy(), prefilled) if restart else prefilled
        jax.block_until_ready(kept)
        start = time.perf_counter()
        result = decode(model, kept, policy, max_new_tokens=tokens)
        jax.block_until_ready(result.state)
        elapsed = (time.perf_counter() - start) / (tokens - 1)
        if not restart:
            prefilled = Prefilled(prefilled.logits, result.state, prefilled.budget)
        yield elapsed


def check_same(model: kvjax.Model, peer: "peers.Transformers", tokens: np.ndarray) -> None:
    """Both sides must compute the same model, or their times mean nothing."""
    mine = kvjax.log_likelihood(model, tokens, policies.full(), prompt_length=tokens.shape[1] // 2)
    worst = float(np.abs(np.asarray(mine.logprobs) - peer.logprobs(tokens)).max())
    print(f"largest difference of log-probabilities, full cache against full cache: {worst:.1e}")
    if not worst < SAME:
        raise ConfigError(f"the two sides disagree by {worst:.1e} in log-probability; timing them would mean nothing.")


if __name__ == "__main__":
    cli.main(main)
