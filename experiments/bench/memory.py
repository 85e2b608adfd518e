"""Bytes by length of the context: what a cache holds, what the programs need, what the process was seen to take."""

import ctypes
import functools
import gc
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags

import kvjax
from experiments import peers
from experiments.bench.contestants import lengths, policy_of, random_model, random_prompt
from experiments.bench.decode import names_of_peers, shape_for
from experiments.peers.transformers import cache_bytes
from kvjax.cache import Limits
from kvjax.errors import ConfigError
from kvjax.generation.generate import decode
from kvjax.generation.prefill import prefill
from kvjax.planning import plan
from kvjax.typing import JsonObject

CONTEXTS = (512, 1024, 2048, 4096)
NEW_TOKENS = 8


def check(values: flags.FlagValues) -> None:
    """Raises ConfigError if there is a peer whose memory is not measured, or that has no such model."""
    against = names_of_peers(values.against)
    if set(against) - {"transformers"}:
        raise ConfigError("memory is measured against transformers only; give --against=transformers or none.")
    shape_for(values, against)


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Rows in megabytes; weights, which all sides hold alike, are in none of them."""
    against = names_of_peers(values.against)
    return [row for context in lengths(values) or CONTEXTS for row in one_length(values, against, context)]


def one_length(values: flags.FlagValues, against: list[str], context: int) -> list[JsonObject]:
    batch = values.batch or 1
    config = shape_for(values, against)
    model = random_model(config, context + NEW_TOKENS, values.dtype)
    prompt = random_prompt(config, batch, context)
    rows = []

    def row(side: str, slots: int, cache: int, decoding: int | None, prompts: int | None, seen: int | None) -> None:
        columns = {"cache MB": cache, "decode MB": decoding, "prefill MB": prompts, "seen MB": seen}
        megabytes = {name: value if value is None else value / 1e6 for name, value in columns.items()}
        rows.append({"batch": batch, "context": context, "side": side, "slots": slots} | megabytes)

    for name in dict.fromkeys((*values.policies, "full")):
        policy = policy_of(name, values.budget)
        planned = plan(
            model.config, policy, batch=batch, prompt_length=context, new_tokens=NEW_TOKENS, dtype=values.dtype,
            prefill=True, implementation=values.implementation,
        )  # fmt: skip

        def generate(policy: Any = policy) -> Any:
            prefilled = prefill(
                model, prompt, policy, max_new_tokens=NEW_TOKENS, implementation=values.implementation,
                limits=Limits(context, NEW_TOKENS, shortest=context),
            )  # fmt: skip
            return decode(model, prefilled, max_new_tokens=NEW_TOKENS).state

        weights = planned.weights
        prompts = None if planned.prefill_total is None else planned.prefill_total - weights
        row(name, max(planned.slots), planned.cache, planned.total - weights, prompts, peak(generate))
    for name in against:
        with tempfile.TemporaryDirectory() as folder:
            kvjax.save(model, folder)
            peer = peers.PEERS[name].load(folder)
            for kind in ("static", "dynamic"):
                held = cache_bytes(peer.fill(prompt, kind, NEW_TOKENS))
                seen = peak(functools.partial(peer.fill, prompt, kind, NEW_TOKENS))
                row(f"{name}, {kind}", context + NEW_TOKENS - (kind == "dynamic"), held, None, None, seen)
    return rows


def peak(run: Callable[[], object]) -> int | None:
    """Bytes by which a process on Linux grew while `run` ran a second time; None elsewhere, and on accelerators."""
    jax.block_until_ready(run())
    if jax.default_backend() != "cpu":
        return None
    try:
        gc.collect()
        # What was freed and kept by the allocator would hide what is taken again.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest so far
        before = _status("VmRSS:")
        jax.block_until_ready(run())
        return max(_status("VmHWM:") - before, 0)
    except (OSError, AttributeError):  # not Linux, or not glibc
        return None


def _status(name: str) -> int:
    words = Path("/proc/self/status").read_text().split()
    return 1024 * int(words[words.index(name) + 1])
