"""Serving: many requests of mixed lengths, through rows that are refilled and through batches of a fixed length.

A server of OpenAI's API that runs the same model can take the same requests, from as many clients as rows.
"""

import http.client
import json
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from absl import flags
from tqdm.auto import tqdm

import kvjax
from experiments.bench.contestants import LLAMA, NOISE, lengths, policy_of, random_model, shape
from kvjax.attention import Implementation
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.errors import ConfigError
from kvjax.generation.decoding import CHUNK
from kvjax.models.model import Model
from kvjax.serve import Request, Runner
from kvjax.typing import JsonObject

FIXED, RUNNER = "fixed batches", "rows refilled"
SHORTEST = 8  # tokens of a prompt
TIMEOUT = 3600  # seconds of one request to a server
TRAINED = "kvjax-tiny"  # a model that servers can load too


class Asked(NamedTuple):
    """The requests.

    Attributes:
      prompts: token ids of each.
      wanted: new tokens of each.
    """

    prompts: list[np.ndarray]
    wanted: list[int]

    def first(self, count: int) -> "Asked":
        """The first of them."""
        return Asked(self.prompts[:count], self.wanted[:count])


class Outcome(NamedTuple):
    """The results of one side.

    Attributes:
      seconds: it took.
      steps: decoding steps, each of all rows; None where that is not known.
      useful: steps of rows that were wanted; None likewise.
      reads: times that the host waited for the device; None likewise.
    """

    seconds: float
    steps: int | None = None
    useful: int | None = None
    reads: int | None = None


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each side: useful new tokens a second, the share of row-steps that were useful, reads by the host.

    Lengths of prompts and of answers are spread evenly over their logarithms, up to --context and --tokens. Sides take
    turns, A B B A.
    """
    rows, most = values.batch or 32, values.tokens
    longest = (lengths(values) or [512])[0]
    limits = Limits(prompt=longest, new_tokens=most)
    if values.shape == TRAINED:
        model = kvjax.load(TRAINED, dtype=values.dtype)
    else:
        model = random_model(shape(values.shape or LLAMA), longest + most, values.dtype)
    asked = requests(values.requests, longest, most, model.config.vocab_size)
    spec = CacheSpec(policy_of(values.policies[0], values.budget))
    sides: dict[str, Callable[[Asked], Outcome]] = {
        FIXED: lambda some: fixed(model, spec, some, rows, limits, values.implementation),
        RUNNER: lambda some: refilled(model, spec, some, rows, limits, values.implementation),
    }
    for given in values.servers:
        name, equals, url = given.partition("=")
        if not equals or urllib.parse.urlsplit(url).scheme != "http":
            raise ConfigError(f"--servers={given!r} is not of the form NAME=http://HOST:PORT.")
        sides[name] = lambda some, url=url: served(url, some, rows)  # type: ignore[misc]
    # Requests of every length, so that every program is compiled before the timing.
    few = min(len(asked.prompts), 2 * rows)
    for side in sides.values():
        side(Asked([*asked.prompts[:few], max(asked.prompts, key=len)], [*asked.wanted[:few], most]))
    times: dict[str, list[Outcome]] = {name: [] for name in sides}
    for turn in range(values.rounds):
        for name in list(sides)[:: -1 if turn % 2 else 1]:
            times[name].append(sides[name](asked))
    seconds = {name: float(np.median([each.seconds for each in found])) for name, found in times.items()}
    for name, found in times.items():
        if max(each.seconds for each in found) > NOISE * min(each.seconds for each in found):
            print(f"unreliable: rounds of {name} differ by more than 50 %")
    total = sum(asked.wanted)
    return [
        {
            "side": name,
            "policy": spec.name,
            "rows": rows,
            "requests": len(asked.prompts),
            "new tokens": total,
            "seconds": seconds[name],
            "tokens/s": total / seconds[name],
            f"times {FIXED}": seconds[FIXED] / seconds[name],
            "% of row-steps useful": share(found[-1], rows),
            "reads": found[-1].reads,
        }
        for name, found in times.items()
    ]


def requests(count: int, longest: int, most: int, vocabulary: int) -> Asked:
    """Requests whose lengths are spread evenly over their logarithms."""
    rng = np.random.default_rng(0)

    def sizes(least: int, largest: int) -> np.ndarray:
        return np.exp(rng.uniform(np.log(least), np.log(largest + 1), count)).astype(int).clip(least, largest)

    prompts = [rng.integers(5, vocabulary, size, dtype=np.int32) for size in sizes(min(SHORTEST, longest), longest)]
    return Asked(prompts, [int(each) for each in sizes(1, most)])


def refilled(
    model: Model, spec: CacheSpec, asked: Asked, rows: int, limits: Limits, implementation: Implementation
) -> Outcome:
    """Answers requests with a `Runner`."""
    runner = Runner(model, spec, rows=rows, limits=limits, implementation=implementation)
    start = time.perf_counter()
    waiting = iter(zip(asked.prompts, asked.wanted, strict=True))
    with tqdm(total=len(asked.prompts), desc=RUNNER, disable=None) as bar:
        more = True
        while more or not runner.idle:
            while more and runner.load.waiting < 2 * rows:
                each = next(waiting, None)
                more = each is not None
                if each is not None:
                    runner.submit(Request(tokens=each[0], max_new_tokens=each[1]))
            bar.update(sum(progress.result is not None for progress in runner.step()))
    counts = runner.counts
    assert counts.tokens == sum(asked.wanted)
    seconds = time.perf_counter() - start
    return Outcome(seconds, counts.steps, counts.useful_row_steps, counts.reads)


def fixed(
    model: Model, spec: CacheSpec, asked: Asked, rows: int, limits: Limits, implementation: Implementation
) -> Outcome:
    """Answers requests in batches, in their order; each batch runs until its longest answer is there."""
    start, steps, reads = time.perf_counter(), 0, 0
    for begin in tqdm(range(0, len(asked.prompts), rows), desc=FIXED, disable=None):
        prompts, wanted = asked.prompts[begin : begin + rows], asked.wanted[begin : begin + rows]
        prompts = [*prompts, *[prompts[-1]] * (rows - len(prompts))]  # a last batch has as many rows
        sizes = np.array([len(prompt) for prompt in prompts], np.int32)
        tokens = np.zeros((rows, int(sizes.max())), np.int32)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = prompt
        made = kvjax.generate(
            model, tokens, spec, lengths=sizes, max_new_tokens=max(wanted), implementation=implementation,
            limits=Limits(prompt=prompt_bucket(int(sizes.max())), new_tokens=limits.new_tokens),
        )  # fmt: skip
        jax.block_until_ready(made.state)
        steps += max(wanted) - 1
        reads += 1 + -(-(max(wanted) - 1) // CHUNK)
    useful = sum(each - 1 for each in asked.wanted)
    return Outcome(time.perf_counter() - start, steps, useful, reads)


def served(url: str, asked: Asked, rows: int) -> Outcome:
    """Answers requests with a server, from `rows` clients.

    Raises:
      ConfigError: the server cannot be reached, or answers otherwise.
    """
    where = urllib.parse.urlsplit(url)

    def ask(each: tuple[np.ndarray, int]) -> None:
        prompt, wanted = each
        body = {"prompt": prompt.tolist(), "max_tokens": wanted, "temperature": 0, "ignore_eos": True}
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=TIMEOUT)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except OSError as error:
            raise ConfigError(f"{url} cannot be reached: {error}.") from None
        finally:
            connection.close()
        made = json.loads(content).get("usage", {}).get("completion_tokens") if response.status == 200 else None
        if made != wanted:
            raise ConfigError(f"{url} was asked for {wanted} tokens, and its answer was {content[:200]!r}.")

    start = time.perf_counter()
    with ThreadPoolExecutor(rows) as clients:
        list(clients.map(ask, zip(asked.prompts, asked.wanted, strict=True)))
    return Outcome(time.perf_counter() - start)


def share(outcome: Outcome, rows: int) -> float | None:
    """The share of row-steps that were useful, in percent."""
    if outcome.steps is None or outcome.useful is None:
        return None
    return 100 * outcome.useful / max(outcome.steps * rows, 1)
