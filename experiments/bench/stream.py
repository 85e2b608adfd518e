"""Generation without end in a fixed number of slots: time per token, bytes held, what the model makes of a text."""

from collections.abc import Iterator

import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import advance, copied, in_turns, ratio
from experiments.config import DataConfig
from experiments.runs import data
from kvjax import cache, policies
from kvjax.cache import Limits
from kvjax.generation.context import Context
from kvjax.generation.prefill import prefill
from kvjax.typing import JsonObject

SHORT = 1_000  # tokens of a turn at the beginning, and at the end


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A tenth of the tokens a row: milliseconds a generated token, bytes of keys and values, perplexity of the text.

    Then the first 1,000 tokens (or a tenth) again, and as many after the last, in turns: what 100,000 tokens have
    slowed a token down, and nothing else has.
    """
    model = kvjax.load("kvjax-tiny", dtype=values.dtype)
    policy = policies.streaming_llm(budget=values.slots)
    tenth = max(values.tokens // 10, 1)
    settings = DataConfig(text=values.text, num_sequences=1, prompt_length=values.slots, new_tokens=10 * tenth)
    tokens, prompt_length, _ = data.load(settings, model, 0)
    scored = kvjax.log_likelihood(
        model,
        tokens,
        policy,
        prompt_length=prompt_length,
        limits=Limits(prompt_length, 10 * tenth, shortest=prompt_length),
    )
    nats = -np.asarray(scored.logprobs)[0, prompt_length - 1 :].reshape(10, tenth)
    slots = max(int(cache.live_slots(group).max()) for _, group in cache.layers_of(scored.state))
    held = cache.nbytes(scored.state)

    limits = Limits(prompt_length, tenth + 1, shortest=prompt_length)
    beginning = prefill(model, tokens[:, :prompt_length], policy, max_new_tokens=tenth + 1, limits=limits)
    short = max(min(SHORT, tenth), 1)
    advance(model, copied(beginning), short + 1)  # compiles
    end, spent = copied(beginning), []
    for _ in range(10):
        seconds, end = advance(model, end, tenth + 1)
        spent.append(seconds)
    sides = {"first": again(model, beginning, short + 1), "last": again(model, end, short + 1)}
    times = in_turns(sides, values.rounds)
    rows = [
        {
            "tokens": f"{turn * tenth:,} to {(turn + 1) * tenth:,}",
            "ms/token": 1e3 * seconds,
            "times the first": None,
            "slots": slots,
            "bytes held": held,
            "perplexity of the text": float(np.exp(nats[turn].mean(dtype=np.float64))),
        }
        for turn, seconds in enumerate(spent)
    ]
    for name, start in (("first", 0), ("last", 10 * tenth)):
        rows.append(
            dict.fromkeys(rows[0])
            | {
                "tokens": f"{start:,} to {start + short:,}, in turns",
                "ms/token": 1e3 * float(np.median(times[name])),
                "times the first": ratio(times[name], times["first"]),
                "slots": slots,
                "bytes held": held,
            }
        )
    return rows


def again(model: kvjax.Model, start: Context, tokens: int) -> Iterator[float]:
    """Seconds a step of generating the same tokens, every time."""
    while True:
        yield advance(model, copied(start), tokens)[0]
