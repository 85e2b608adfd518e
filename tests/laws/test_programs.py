"""Programs: how many are compiled for texts of many lengths, and that they are the same in every process."""

import contextlib
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import Limits
from kvjax.contexts import extend
from kvjax.contexts.choices import score_prefilled
from kvjax.generation.generate import decode
from kvjax.generation.prefill import prefill
from kvjax.serve import Request, Runner
from tests.conftest import ROOT
from tests.tiny import VOCAB, tiny

LENGTHS = range(20, 110, 3)  # 30 lengths in three buckets of prompts: 64, 96 and 128 tokens
BUCKETS = 3
OTHERS = 12  # the loop that decodes, and what is made once, such as a random key
POLICY = policies.h2o(policies.Fraction(0.5, min_slots=8))
ROWS = 3


@contextlib.contextmanager
def compilations():
    """Yields a list of what is compiled inside of the context, in this process or from the folder of programs."""
    found = []
    listener = lambda name, *_, **__: found.append(name) if "backend_compile" in name else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)


def tokens(length: int, rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(length).integers(0, VOCAB, (rows, length))


def generate(model):
    for length in LENGTHS:
        kvjax.generate(model, tokens(length), POLICY, max_new_tokens=2 + length % 5)


def generate_lists(model):
    for length in LENGTHS:
        kvjax.generate(model, [row[: length - i] for i, row in enumerate(tokens(length))], POLICY, max_new_tokens=2)


def score(model):
    for length in LENGTHS:
        kvjax.log_likelihood(model, tokens(length), POLICY, prompt_length=length // 2)


def score_prompts(model):
    for length in LENGTHS:
        kvjax.log_likelihood(model, tokens(length), POLICY, prompt_length=length)


def choices(model):
    for length in LENGTHS:
        asked = [[tokens(1 + length % 9, 1)[0], [3]]] * ROWS
        kvjax.score_choices(model, tokens(length), asked, POLICY)


def serve(model):
    runner = Runner(model, POLICY, rows=ROWS, limits=Limits(prompt=128, new_tokens=8))
    for length in LENGTHS:
        runner.submit(Request(tokens=tokens(length, 1)[0], max_new_tokens=2))
    assert len(list(runner)) == len(LENGTHS)


def extended(model):
    """Contexts of one bucket, since a prompt's program was counted already, and what follows of many lengths."""
    begun = prefill(model, tokens(60), POLICY, max_new_tokens=64)
    for length in range(1, 31):
        decode(model, extend(model, begun, tokens(length)), max_new_tokens=1 + length % 5)
        score_prefilled(model, begun, [[row[: 1 + length % 9], row] for row in tokens(length)])


@pytest.mark.sampled(0)
@pytest.mark.parametrize("work", [generate, generate_lists, score, score_prompts, choices, serve, extended])
def test_thirty_lengths_compile_few_programs(work):
    """A prefill for each bucket of prompts, a loop that decodes, and small ones that do not depend on lengths."""
    with compilations() as compiled:
        work(tiny(layers=1).model)
    assert len(compiled) <= OTHERS + BUCKETS


PROGRAM = """
import jax
import jax.numpy as jnp
from kvjax import policies
from kvjax.generation import sampling
from kvjax.generation.decoding import decode_steps
from kvjax.planning.roofline import decode_shapes
from tests.laws.test_compiled import WIDE, lowered

for policy in (policies.roco(16), policies.mean_attention(16), policies.h2o(16, merge=policies.cam())):
    layout = lowered(policy, 64).layout
    shapes = decode_shapes(WIDE, layout, jnp.float32, 1, None)
    stop = jax.ShapeDtypeStruct((1,), jnp.int32)
    print(decode_steps.trace(*shapes, stop, 5, config=WIDE, phase=layout.decode, sampler=sampling.Greedy()).jaxpr)
"""


@pytest.mark.sampled(0)
def test_programs_are_the_same_in_every_process():
    """Otherwise a program that was kept is not found, for example because the order of a set is that of hashes."""
    texts = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONHASHSEED": seed}, cwd=ROOT, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    assert len(texts[0]) > 10_000 and texts[0] == texts[1]
