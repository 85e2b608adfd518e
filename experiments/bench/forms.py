"""A decoding step with products in a fixed form and in the forms that are fastest on this machine, in turns."""

import time
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags

from experiments.bench.contestants import (
    bytes_a_step,
    copied,
    in_turns,
    lengths,
    milliseconds,
    policy_of,
    random_model,
    random_prompt,
    ratio,
    reading,
    shape,
)
from kvjax import Model, products
from kvjax.cache import Limits
from kvjax.generation.decoding import decode_steps, first_token
from kvjax.generation.prefill import prefill
from kvjax.generation.sampling import Greedy
from kvjax.policies.base import Policy
from kvjax.typing import JsonObject

WORK = ((1, 512), (8, 512), (8, 2048), (32, 512))  # batch, context
FORMS = ("fixed", "auto")


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Milliseconds a step, a row for every setting, policy and form."""
    before = products.setting()
    settings = tuple((values.batch or 1, context) for context in lengths(values) or (512,))
    if not (values.batch or values.context):
        settings = WORK
    try:
        return [
            row
            for batch, context in settings
            for name in values.policies
            for row in _one_setting(values, batch, context, name)
        ]
    finally:
        products.use(before)


def _one_setting(values: flags.FlagValues, batch: int, context: int, name: str) -> list[JsonObject]:
    tokens = min(values.tokens, 32)
    model = random_model(shape(values.shape or "opt-125m"), context + (values.rounds + 2) * tokens, values.dtype)
    policy = policy_of(name, values.budget)
    prompt = random_prompt(model.config, batch, context)
    sides: dict[str, Iterator[float]] = {"limit": reading()}
    for form in FORMS:
        products.use(form)
        sides[form] = _steps(model, prompt, policy, tokens)
        next(sides[form])  # traced and compiled with this form
    times = in_turns(sides, values.rounds)
    a_byte = np.array(times.pop("limit"))
    must = bytes_a_step(model, policy, batch, context, tokens)
    return [
        {
            "batch": batch,
            "context": context,
            "policy": name,
            "products": form,
            **milliseconds(each),
            "times fixed": ratio(each, times["fixed"]),
            "% of the limit": 100 * ratio(must * a_byte, each),
        }
        for form, each in times.items()
    ]


def _steps(model: Model, prompt: np.ndarray, policy: Policy, tokens: int) -> Iterator[float]:
    """Seconds a step of the same `tokens` steps after a prompt, by a program that later settings leave as it is."""
    limits = Limits(prompt.shape[1], tokens + 1, shortest=prompt.shape[1])
    prefilled = prefill(model, prompt, policy, max_new_tokens=tokens + 1, limits=limits)
    # [0], no token ends a row
    stop = np.zeros((0,), np.int32)
    request = np.arange(len(prompt), dtype=np.int32)
    start, _, _ = first_token(
        prefilled.logits, copied(prefilled).state, request, jax.random.key(0), stop, sampler=Greedy()
    )
    program = decode_steps.lower(
        model.params, start, stop, tokens, config=model.config, phase=prefilled.layout.decode, sampler=Greedy()
    ).compile()
    while True:
        carry = jax.block_until_ready(jax.tree.map(lambda x: x.copy(), start))
        began = time.perf_counter()
        jax.block_until_ready(program(model.params, carry, stop, tokens))
        yield (time.perf_counter() - began) / tokens
