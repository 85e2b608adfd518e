"""Answers to needles under compressors, and under kvpress's presses of the same name with the same weights."""

import contextlib
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from absl import flags

import kvjax
from experiments import specs
from experiments.bench.contestants import lengths
from experiments.bench.decode import interpreters
from experiments.config import PolicyConfig, TasksConfig
from experiments.peers.kvpress import PROMPT_PRESSES
from experiments.peers.process import PeerProcess
from experiments.tasks import answering
from experiments.tasks.journal import Journal
from experiments.tasks.written import Written
from kvjax.cache import CacheSpec
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.policies import Fraction
from kvjax.typing import JsonObject

PEER = "kvpress"
MODEL, CONTEXT, ROWS = "kvjax-tiny", 512, 11
DEPTHS = 11  # of the needles


def check(values: flags.FlagValues) -> None:
    """Checks the flags before anything is loaded.

    Raises:
      ConfigError: a cache that kvpress has no press for, another peer, or several lengths.
    """
    if values.against not in ([PEER], ["none"]):
        raise ConfigError(f"bench answers compares with {PEER}; got --against={','.join(values.against)}.")
    if unknown := [cache for cache in values.caches if cache not in PROMPT_PRESSES]:
        raise ConfigError(f"--caches={unknown[0]}: no press is known for it; known: {'; '.join(PROMPT_PRESSES)}.")
    if len(lengths(values)) > 1:
        raise ConfigError(f"bench answers takes one --context; got {','.join(map(str, values.context))}.")


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each cache: how many answers are equal, token by token, and how many are right on either side."""
    (size,) = lengths(values) or [CONTEXT]
    model = kvjax.load(values.model or MODEL, dtype=values.dtype)
    task = f"needle(lengths=({size},), depths={DEPTHS}, repeats={math.ceil(values.documents / DEPTHS)})"
    asked = answering.make(TasksConfig(names=(task,)), model, 0)
    questions = asked[task]
    assert isinstance(questions, Written)
    rows = []
    with _peer(model, values) as peer:
        for cache in values.caches or PROMPT_PRESSES:
            spec = CacheSpec(specs.build_policy(PolicyConfig(name=cache, budget=values.budget)))
            found = answering.answers(model, spec, asked, rows=values.batch or ROWS, journal=Journal(None))[task]
            own = [list(answer["tokens"]) for answer in found]
            row: JsonObject = {"cache": cache, "budget": values.budget, "questions": len(own)}
            row["% right, kvjax"] = float(np.mean(questions.by_question(found)))
            if peer is not None:
                theirs = _answers_of_peer(peer, model, questions, cache, values.budget)
                texts = [{"text": _text(model, tokens), "tokens": tokens} for tokens in theirs]
                row[f"% right, {PEER}"] = float(np.mean(questions.by_question(texts)))
                row["answers equal"] = sum(a == b for a, b in zip(own, theirs, strict=True))
            rows.append(row)
    return rows


def _answers_of_peer(peer: PeerProcess, model: Model, questions: Written, cache: str, budget: float) -> list[list[int]]:
    """Returns the tokens of each answer, without those that end a text."""
    assert model.tokenizer is not None
    encode = model.tokenizer.encode
    contexts = [list(encode(item.context)) for item in questions.items]
    asked = [list(encode(item.question, bos=False)) for item in questions.items]
    kept = [Fraction(budget).slots(len(context), 1)[0] for context in contexts]
    stop = {*model.eos_token_ids, model.tokenizer.eos_id}
    found = peer.answers(cache, contexts, asked, kept, questions.items[0].new_tokens)
    return [_before(tokens, stop) for tokens in found]


def _before(tokens: Sequence[int], stop: set[int | None]) -> list[int]:
    """Returns the tokens before the first that ends a text."""
    end = next((place for place, token in enumerate(tokens) if token in stop), len(tokens))
    return list(tokens[:end])


def _text(model: Model, tokens: Sequence[int]) -> str:
    assert model.tokenizer is not None
    return model.tokenizer.decode(tokens)


@contextlib.contextmanager
def _peer(model: Model, values: flags.FlagValues) -> Iterator[PeerProcess | None]:
    """Yields kvpress with the model's weights, in a process, or None if nothing is compared."""
    if values.against == ["none"]:
        yield None
        return
    with tempfile.TemporaryDirectory() as folder:
        kvjax.save(model, Path(folder) / "model")
        with PeerProcess(PEER, Path(folder) / "model", interpreters(values.python).get(PEER)) as peer:
            yield peer
