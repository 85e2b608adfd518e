"""Scores tokens after a prompt under many caches, and compares them; see `experiments.after_prompt`."""

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

import kvjax
from experiments import results, stages
from experiments.config import ExperimentConfig
from experiments.fields import to_dict
from experiments.reports.after_prompt_page import report
from experiments.runs import data, machine
from experiments.runs.resolve import dtype_of, specs_of
from experiments.runs.session import Session, calibrated_for, given_calibration
from experiments.tasks import score
from experiments.tasks.prompts import Prompt
from kvjax import analysis
from kvjax.cache import CacheSpec, Limits
from kvjax.contexts import extend
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.generate import decode
from kvjax.generation.likelihood import score_continuation
from kvjax.generation.prefill import prefill
from kvjax.models.model import Model
from kvjax.typing import JsonObject

JSON_FILE, PAGE = "results.json", "report.md"
ALL, RECURRING, OTHERS = "all", "recurring", "others"  # classes of tokens
CACHES = ("policy", "storage", "selection", "baselines", "output", "name")  # fields that choose no text and no question


def recurring(tokens: np.ndarray, prompt: int, gap: int) -> np.ndarray:
    """Marks tokens that end a pair of tokens which was last seen long ago.

    Args:
      tokens: [rows, T] int.
      prompt: the number of tokens of each row that are its prompt; pairs in it count as seen, but never as recurring.
      gap: the number of tokens; a token recurs if the same pair ended more than `gap` tokens before it.

    Returns:
      [rows, T - prompt] bool, of the tokens after the prompt.
    """
    found = np.zeros((len(tokens), tokens.shape[1] - prompt), bool)
    for row, ids in enumerate(tokens):
        last: dict[tuple[int, int], int] = {}
        for at in range(1, len(ids)):
            pair = int(ids[at - 1]), int(ids[at])
            before = last.get(pair, -1)
            if at >= prompt:
                found[row, at - prompt] = before >= prompt and at - before > gap
            last[pair] = at
    return found


def classes(tokens: np.ndarray, prompt: int, gap: int | None, chunk: int | None) -> dict[str, np.ndarray]:
    """Returns classes of the tokens after a prompt, name -> [rows, T - prompt] bool.

    Args:
      tokens: [rows, T] int.
      prompt: the number of tokens of each row that are its prompt.
      gap: see `recurring`; None = no such class.
      chunk: the number of tokens of consecutive parts, which are classes too; None = no parts.
    """
    shape = (len(tokens), tokens.shape[1] - prompt)
    made = {ALL: np.ones(shape, bool)}
    if gap is not None:
        again = recurring(tokens, prompt, gap)
        made |= {RECURRING: again, OTHERS: ~again}
    at, size = np.arange(shape[1]), chunk or shape[1]
    for start in range(0, shape[1], size) if chunk else ():
        end = min(start + size, shape[1])
        made[f"{start} to {end}"] = np.broadcast_to((at >= start) & (at < end), shape)
    return made


@dataclasses.dataclass(frozen=True)
class Inputs:
    """The text and the questions that every cache is measured on.

    Attributes:
      tokens: [rows, T] int32 of the text.
      prompt: the number of tokens of each row, and of each question, that are its prompt.
      marked: see `classes`.
      asked: questions of each task.
      gap: the number of tokens after which a token recurs, or None.
      rows: the number of rows, or of questions, of a batch.
      options: for `kvjax.generation.prefill.prefill`.
    """

    tokens: np.ndarray
    prompt: int
    marked: Mapping[str, np.ndarray]
    asked: Mapping[str, Sequence[Prompt]]
    gap: int | None
    rows: int
    options: Mapping[str, Any]

    def batches(self) -> Iterator[np.ndarray]:
        """Yields the rows of each batch, [rows, T]."""
        for start in range(0, len(self.tokens), self.rows):
            stages.enter(f"rows {start + 1} to {min(start + self.rows, len(self.tokens))} of {len(self.tokens)}")
            yield self.tokens[start : start + self.rows]


def nats(model: Model, spec: CacheSpec, inputs: Inputs) -> JsonObject:
    """Returns the mean negative log-likelihood and the number of tokens, by class and row, and bytes per row."""
    limits = Limits(prompt=inputs.prompt, new_tokens=inputs.tokens.shape[1] - inputs.prompt, shortest=inputs.prompt)
    scored, held = [], 0
    for part in inputs.batches():
        prefilled = prefill(
            model, part[:, : inputs.prompt], spec, max_new_tokens=limits.new_tokens, limits=limits, **inputs.options
        )
        held = prefilled.layout.bytes(len(part)) // len(part)
        scored.append(-score_continuation(model, prefilled, part[:, inputs.prompt :]))
    # [rows, T - prompt]
    every = np.concatenate(scored).astype(np.float64)
    found: JsonObject = {"kv_bytes": held, "mean": {}, "tokens": {}}
    for name, mask in inputs.marked.items():
        count = mask.sum(axis=1)
        found["mean"][name] = [float(x) for x in np.where(mask, every, 0).sum(axis=1) / np.maximum(count, 1)]
        found["tokens"][name] = [int(x) for x in count]
    return found


def facts(model: Model, spec: CacheSpec, inputs: Inputs) -> JsonObject:
    """Returns task -> 1 for each question that is answered exactly, and 0 for the others."""
    found = {}
    for task, own in inputs.asked.items():
        stages.enter(f"{task}, {len(own)} questions")
        parts = (own[start : start + inputs.rows] for start in range(0, len(own), inputs.rows))
        answers = (answered(model, spec, part, inputs.prompt, **inputs.options) for part in parts)
        found[task] = [right for each in answers for right in each]
    return found


def recurrences(model: Model, spec: CacheSpec, inputs: Inputs) -> JsonObject:
    """Returns sums over layers, heads and queries of each field of `kvjax.analysis.Recurrences`, by row."""
    assert inputs.gap is not None
    parts = [
        analysis.recurrences(model, part, spec, prompt_length=inputs.prompt, gap=inputs.gap)
        for part in inputs.batches()
    ]
    # [batches][rows], sums over [L, B, K, T]
    return {
        name: [np.nansum(row) for part in parts for row in np.moveaxis(getattr(part, name), 1, 0).astype(np.float64)]
        for name in parts[0]._fields
    }


def errors(model: Model, spec: CacheSpec, inputs: Inputs) -> JsonObject:
    """Returns the mean over heads of each field of `kvjax.analysis.OutputError`, by row and layer."""
    parts = [analysis.output_error(model, part, spec, prompt_length=inputs.prompt) for part in inputs.batches()]
    return {
        name: np.concatenate([getattr(part, name).mean(axis=2).T for part in parts]).round(6).tolist()
        for name in parts[0]._fields
    }


MEASURES = {"nats": nats, "facts": facts, "recurrences": recurrences, "errors": errors}


def answered(model: Model, spec: CacheSpec, asked: Sequence[Prompt], prompt: int, **options: Any) -> list[int]:
    """Returns 1 for each question that is answered exactly, and 0 for the others."""
    tokens = np.stack([each.tokens for each in asked])
    longest = max(each.answer.size for each in asked) + score.SPARE_TOKENS
    room = tokens.shape[1] - prompt + longest
    limits = Limits(prompt=prompt, new_tokens=room, shortest=prompt)
    prefilled = prefill(model, tokens[:, :prompt], spec, max_new_tokens=room, limits=limits, **options)
    made = decode(model, extend(model, prefilled, tokens[:, prompt:], block=1), max_new_tokens=longest)
    return [int(score.answers(model, row, each)) for row, each in zip(made.tokens, asked, strict=True)]


def start(config: ExperimentConfig, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Measures the caches of a command line that have no result, and writes the page.

    Returns:
      The exit status.
    """
    recall = config.recall
    if recall.tasks and config.data.prompt_length >= recall.length:
        raise ConfigError(
            f"recall.length={recall.length} leaves no token after the prompt of data.prompt_length="
            f"{config.data.prompt_length}; raise length, or lower prompt_length."
        )
    score.check(recall)
    named = {spec.name: spec for spec in specs_of(config)}
    session = Session()
    model, calibration = session.model(config), given_calibration(config.model)
    tokens, prompt, about = data.load(config.data, model, config.seed)
    if tokens.shape[1] == prompt:
        raise ConfigError("data.prompt has no continuation to score; give data.text.")
    asked = score.make_prompts(recall, model, config.seed)
    measures = [name for name in values.measures if name != "facts" or asked]
    inputs = Inputs(
        tokens, prompt, classes(tokens, prompt, values.gap, config.data.chunk), asked, values.gap, values.rows,
        {"prefill_block": config.prefill_block, "implementation": config.implementation},
    )  # fmt: skip
    folder = Path(config.output) / config.name
    results.make_folder(folder)
    setting = {key: value for key, value in to_dict(config).items() if key not in CACHES} | {"gap": values.gap}
    before = {} if values.rerun else results.read_json(folder / JSON_FILE) or {}
    known = before.get("caches", {}) if before.get("setting") == setting else {}
    page: JsonObject = {
        "command": shlex.join(["python", "-m", "experiments.after_prompt", *argv[1:]]), "text": about,
        "setting": setting, "against": values.against, "environment": machine.environment(),
        "caches": {name: known[name] for name in (*named, *known) if name in known},
    }  # fmt: skip
    failed = False
    exact = "highest" if dtype_of(config.model) == jnp.float32 else None
    with kvjax.reuse_prompts(machine.prompt_room()), jax.default_matmul_precision(exact):
        for name, spec in named.items():
            own = dict(known.get(name, {}))
            for measure in measures:
                if measure in own:
                    continue
                began = time.perf_counter()
                try:
                    with stages.of(name):
                        own[measure] = MEASURES[measure](calibrated_for(model, spec, calibration), spec, inputs)
                except KvjaxError as error:
                    failed = True
                    print(f"failed, {measure} of {name}: {error}", file=sys.stderr)
                    continue
                print(f"{measure} of {name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
                every = page["caches"] | {name: own}
                page["caches"] = {each: every[each] for each in (*named, *every) if each in every}
                results.write(folder / JSON_FILE, json.dumps(page) + "\n")
    # Another call may compare what there is with other caches.
    results.write(folder / JSON_FILE, json.dumps(page) + "\n")
    results.write(folder / PAGE, report(page))
    print(report(page))
    return 1 if failed else 0
