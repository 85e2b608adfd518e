"""Serving prompts that begin alike: a runner with a prefix store, and one without.

The trace is one of questions about documents: each prompt is one of five system prompts, a document and a question.
"""

import statistics
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from tqdm.auto import tqdm

import kvjax
from experiments.bench.contestants import LLAMA, lengths, policy_of, random_model, shape
from experiments.bench.serve import TRAINED
from kvjax.cache import CacheSpec, Limits
from kvjax.models.model import Model
from kvjax.serve import Request, Runner
from kvjax.serve.prompt_states import PromptStates
from kvjax.serve.prompts import Prompts
from kvjax.typing import JsonObject

SYSTEMS, QUESTIONS = 5, 10  # system prompts, and questions of each document
SYSTEM_SHARE, QUESTION_SHARE = 0.15, 0.04  # of a prompt
NEAR = 10  # documents whose questions come at the same time, in any order
PLAIN, STORED = "without a store", "with a store"
STORE_BYTES = 10**9
TIMINGS = 9  # of a hit, and of what it saves


class Outcome(NamedTuple):
    """The results of one side.

    Attributes:
      seconds: it took.
      cpu_seconds: of all cores of the process, which other load disturbs less.
      answers: the new tokens of each request.
      found: tokens of prompts that were found.
      nbytes: bytes of states at the end.
    """

    seconds: float
    cpu_seconds: float
    answers: list[list[int]]
    found: int
    nbytes: int


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each side: useful new tokens a second, the tokens of prompts that were found, and equal answers."""
    rows, most = values.batch or 8, values.tokens
    longest = (lengths(values) or [768])[0]
    limits = Limits(prompt=longest, new_tokens=most)
    if values.shape == TRAINED:
        model = kvjax.load(TRAINED, dtype=values.dtype)
    else:
        model = random_model(shape(values.shape or LLAMA), longest + most, values.dtype)
    spec = CacheSpec(policy_of(values.policies[0], values.budget))
    prompts = trace(values.requests, longest, model.config.vocab_size)
    store = kvjax.PrefixStore(STORE_BYTES)
    made: dict[str, list[Outcome]] = {PLAIN: [], STORED: []}
    for turn in range(values.rounds + 1):
        for name in list(made)[:: -1 if turn % 2 else 1]:
            store.clear()
            # The first round compiles the programs.
            some = prompts if turn else prompts[: 4 * QUESTIONS]
            outcome = answered(model, spec, some, most, rows, limits, store if name == STORED else None)
            if turn:
                made[name].append(outcome)
    cost, saved = hit_milliseconds(model, spec, limits)
    seconds = {name: statistics.median(each.seconds for each in found) for name, found in made.items()}
    cpu = {name: statistics.median(each.cpu_seconds for each in found) for name, found in made.items()}
    new, total = most * len(prompts), sum(map(len, prompts))
    same = np.mean([one == two for one, two in zip(made[PLAIN][-1].answers, made[STORED][-1].answers, strict=True)])
    return [
        {
            "side": name,
            "policy": spec.name,
            "rows": rows,
            "requests": len(prompts),
            "prompt tokens": total,
            "new tokens": new,
            "seconds": seconds[name],
            "CPU seconds": cpu[name],
            "tokens/s": new / seconds[name],
            f"times {PLAIN}": seconds[PLAIN] / seconds[name],
            "times, by CPU seconds": cpu[PLAIN] / cpu[name],
            "% of prompts found": 100 * found[-1].found / total,
            "% of answers equal": 100 * float(same),
            "MB of states": found[-1].nbytes / 1e6,
            "ms a hit": cost if name == STORED else None,
            "% of what it saves": 100 * cost / saved if name == STORED else None,
        }
        for name, found in made.items()
    ]


def trace(count: int, longest: int, vocabulary: int) -> list[np.ndarray]:
    """Returns the prompts of requests in order; questions of `NEAR` documents come at the same time."""
    rng = np.random.default_rng(0)

    def text(size: int) -> np.ndarray:
        return rng.integers(5, vocabulary, size, dtype=np.int32)

    systems = [text(max(1, int(SYSTEM_SHARE * longest))) for _ in range(SYSTEMS)]
    question = max(1, int(QUESTION_SHARE * longest))
    found: list[np.ndarray] = []
    while len(found) < count:
        near = []
        for _ in range(NEAR):
            system = systems[rng.integers(SYSTEMS)]
            room = longest - len(system) - question
            begins = np.concatenate([system, text(int(rng.integers(max(1, room // 2), room + 1)))])
            near += [np.concatenate([begins, text(question)]) for _ in range(QUESTIONS)]
        found += [near[index] for index in rng.permutation(len(near))]
    return found[:count]


def answered(
    model: Model,
    spec: CacheSpec,
    prompts: list[np.ndarray],
    new_tokens: int,
    rows: int,
    limits: Limits,
    store: kvjax.PrefixStore | None,
) -> Outcome:
    """Answers requests with a `Runner`."""
    runner = Runner(model, spec, rows=rows, limits=limits, prefix_store=store)
    start, cpu, waiting, ended = time.perf_counter(), time.process_time(), iter(prompts), {}
    with tqdm(total=len(prompts), desc=PLAIN if store is None else STORED, disable=None) as bar:
        more = True
        while more or not runner.idle:
            while more and runner.load.waiting < 2 * rows:
                tokens = next(waiting, None)
                more = tokens is not None
                if tokens is not None:
                    runner.submit(Request(tokens=tokens, max_new_tokens=new_tokens))
            for progress in runner.step():
                if progress.result is not None:
                    ended[progress.id] = progress.result.tokens.tolist()
                    bar.update()
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    nbytes = 0 if store is None else store.nbytes
    return Outcome(seconds, used, [ended[number] for number in sorted(ended)], runner.counts.found_tokens, nbytes)


def hit_milliseconds(model: Model, spec: CacheSpec, limits: Limits) -> tuple[float, float]:
    """Returns the milliseconds of a hit of the longest prompt without its last block, and of what that saves."""
    prompts = Prompts(model, spec, limits=limits, rows=1, stored=True)
    states = PromptStates(kvjax.PrefixStore(STORE_BYTES), prompts)
    tokens = np.random.default_rng(1).integers(5, model.config.vocab_size, limits.prompt, dtype=np.int32)
    prompt = prompts.prompt(tokens, 1)
    block = prompts.block or limits.prompt
    other = prompts.prompt(np.concatenate([tokens[:-1], tokens[-1:] ^ 1]), 1)
    for each in (prompt, other):
        begun = states.begin(each, None) if prompts.block else None
        while begun is not None and begun.advance() is None:
            pass
    times: tuple[list[float], list[float]] = [], []
    for _ in range(TIMINGS if prompts.block else 0):
        start = time.perf_counter()
        begun = states.begin(other, None)
        jax.block_until_ready(begun.state)
        times[0].append(time.perf_counter() - start)
        start, plain = time.perf_counter(), prompts.begin(other)
        for _ in range(begun.found // block):
            plain.advance()
        jax.block_until_ready(plain.state)
        times[1].append(time.perf_counter() - start)
    cost, saved = (1e3 * min(each, default=float("nan")) for each in times)
    return cost, saved
