"""Rows that follow one text: with a copy of its slots each, and with the slots held once."""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import copied, in_turns, lengths, random_model, ratio, shape
from kvjax import contexts, policies
from kvjax.cache.shared_prefix import PARAM
from kvjax.cache.state import nbytes
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.generate import Generation, decode
from kvjax.models.model import Model
from kvjax.typing import JsonObject

MODEL, CONTEXT, ROWS = "kvjax-tiny", 768, 8
QUESTION = 32  # tokens of each row after the text
TOLERANCE = 2e-3  # between the log-probabilities of the two sides
COPIES, SHARED = "copies", "shared"  # sides
PROMPT, STEP = "question", "step"  # what is timed

Key = tuple[str, str]


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each length of the text: the time of questions and of steps, and the bytes of slots."""
    sizes, batch = lengths(values) or [CONTEXT], values.batch or ROWS
    if values.shape:
        model = random_model(shape(values.shape), max(sizes) + QUESTION + values.tokens, values.dtype)
    else:
        model = kvjax.load(values.model or MODEL, dtype=values.dtype)
    return [one_length(model, size, batch, values.tokens, values.rounds) for size in sizes]


def one_length(model: Model, size: int, batch: int, tokens: int, rounds: int) -> JsonObject:
    """Times both sides after a random text of `size` tokens, whose answers are compared first."""
    rng = np.random.default_rng(0)
    # [1, size] and [batch, QUESTION]
    text, questions = (
        rng.integers(5, model.config.vocab_size, shape, dtype=np.int32) for shape in ((1, size), (batch, QUESTION))
    )
    full = policies.full()
    document = contexts.prefill(model, text, full, room=size + QUESTION + tokens)
    reader = contexts.with_prefix(model, document)
    copies = contexts.rows(document, [0] * batch)

    def shared_question() -> Context:
        return contexts.prefill(reader, questions, full, room=QUESTION + tokens)

    def copied_question() -> Context:
        return contexts.extend(model, copies, questions)

    def answer(side: str, after: Context) -> Generation:
        return decode(reader if side == SHARED else model, after, max_new_tokens=tokens)

    asked: dict[str, Callable[[], Context]] = {COPIES: copied_question, SHARED: shared_question}
    after = {side: ask() for side, ask in asked.items()}
    answers = {side: answer(side, copied(context)) for side, context in after.items()}
    difference = float(np.abs(answers[COPIES].logprobs[:, 0] - answers[SHARED].logprobs[:, 0]).max())
    if difference > TOLERANCE:
        raise InputError(f"the log-probabilities of the two sides differ by {difference:.2g}.")
    held = {
        COPIES: nbytes(after[COPIES].state),
        SHARED: nbytes(after[SHARED].state) + sum(leaf.nbytes for leaf in jax.tree.leaves(reader.params[PARAM].layers)),
    }
    sides: dict[Key, Iterator[float]] = {}
    for side, ask in asked.items():
        sides[side, PROMPT] = timed(functools.partial(_asked, ask), None)
        sides[side, STEP] = timed(functools.partial(answer, side), after[side])
    times = in_turns(sides, rounds)
    row: JsonObject = {"text": size, "rows": batch, "new tokens": tokens}
    row["% of tokens equal"] = 100 * float(np.mean(answers[COPIES].tokens == answers[SHARED].tokens))
    for side in asked:
        row[f"ms a step, {side}"] = 1e3 * float(np.median(times[side, STEP])) / (tokens - 1)
    row["times as fast, steps"] = ratio(times[COPIES, STEP], times[SHARED, STEP])
    for side in asked:
        row[f"s of the question, {side}"] = float(np.median(times[side, PROMPT]))
    row["times as fast, question"] = ratio(times[COPIES, PROMPT], times[SHARED, PROMPT])
    return row | {f"MB of slots, {side}": each / 1e6 for side, each in held.items()}


def _asked(ask: Callable[[], Context], _: None) -> Context:
    return ask()


def timed(function: Callable[[Any], Context | Generation], given: Context | None) -> Iterator[float]:
    """Seconds of each call with a copy of a context, which is made before."""
    while True:
        own = given if given is None else jax.block_until_ready(copied(given))
        start = time.perf_counter()
        jax.block_until_ready(function(own).state)
        yield time.perf_counter() - start
