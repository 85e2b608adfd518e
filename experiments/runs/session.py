"""Runs configs in one process, and keeps what the next one can use: the model, the text, results already measured."""

import concurrent.futures
import contextlib
import contextvars
import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

import kvjax
from experiments import fields, stages
from experiments.config import ExperimentConfig, ModelConfig
from experiments.progress import tracked
from experiments.runs import data, identity, machine, text_view
from experiments.runs.measure import Measurement, measure
from experiments.runs.resolve import CannotRun, check_fit, dtype_of, model_name, specs_of
from experiments.specs import STORED, build_weights
from experiments.tasks import answering, score
from experiments.tasks.journal import FOLDER, Journal
from kvjax.analysis.viewer import Viewer
from kvjax.cache import CacheSpec
from kvjax.checkpoint.skew import load_skew
from kvjax.errors import CheckpointError
from kvjax.models import shapes
from kvjax.models.calibrate import needs_of
from kvjax.models.model import Model
from kvjax.models.offload import offload
from kvjax.models.parameters import parameter_count, random_parameters
from kvjax.models.quantize import WeightCodes, quantize_weights
from kvjax.models.skew import skewed
from kvjax.parallel import distributed, sharding
from kvjax.parallel.rules import Rules, using
from kvjax.products.quantized import is_quantized
from kvjax.specs import user_files
from kvjax.storage.calibration import Calibration
from kvjax.typing import JsonObject

T = TypeVar("T")
SAMPLE_ROWS, SAMPLE_TOKENS = 4, 512  # of the story that calibrates storages


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a config.

    Attributes:
      model: what it is, in words.
      text: likewise.
      notes: what a reader should know before believing the numbers.
      measurements: one per policy, baselines first.
      continuations: the first row's greedy text under each.
      chunk: tokens of the parts of the continuation that have a perplexity of their own; None = no parts.
      prompted: whether a prompt was given, so that the continuations are answers.
      viewer: the first row's text with the tokens that each cache holds at the end; None = not asked for.
    """

    model: str
    text: str
    notes: list[str]
    measurements: list[Measurement]
    continuations: list[str]
    chunk: int | None = None
    prompted: bool = False
    viewer: Viewer | None = None

    @property
    def full(self) -> Measurement | None:
        return next((m for m in self.measurements if m.policy == "full"), None)

    def rows(self) -> list[JsonObject]:
        return [measurement.row(self.full, self.chunk) for measurement in self.measurements]

    def explain(self) -> dict[str, list[str]]:
        """Policy -> what ran and why nothing faster, in lines."""
        return {measurement.policy: measurement.explain.splitlines() for measurement in self.measurements}


def describe(model: Model, config: ModelConfig) -> str:
    """One line about a model and its calibration; says so if its weights are random."""
    decoder = model.config
    dtype = model.dtype
    size = f"{parameter_count(decoder) / 1e6:,.1f}M parameters"
    heads = f"{decoder.num_heads} heads" + (
        f" on {decoder.num_kv_heads} KV heads" if decoder.num_kv_heads != decoder.num_heads else ""
    )
    shape = f"{decoder.num_layers} layers of width {decoder.hidden_size}, {heads}, {size}, {dtype}{_codes(model)}"
    if config.path is None:
        return (
            f"RANDOM WEIGHTS: no checkpoint was given (--config.model.path=FOLDER), so this is a randomly initialised "
            f"{model_name(config)} decoder ({shape}). Its speed and memory are real; its perplexity and its text are "
            "not."
        )
    return f"{config.path}: {decoder.family}, {shape}.{_of_calibration(config)}"


def _of_calibration(config: ModelConfig) -> str:
    """Says what the file of a calibration was made from; nothing without a file."""
    given = given_calibration(config)
    if given is None:
        return ""
    source = "not known" if given.text is None else str(given.text)
    return f" Calibration {config.calibration}: {given.method}; its text: {source}."


class Session:
    """Loads each model and text once, and measures each policy on them once.

    Answers to tasks are kept under the output folder as they come, until `finish`.
    """

    def __init__(self, *, resume: bool = True, view: bool = False) -> None:
        """Loads nothing yet.

        Args:
          resume: whether answers of a run that was ended are used.
          view: whether outcomes have a viewer of the tokens that caches hold.
        """
        self._resume = resume
        self._view = view
        self._journals: dict[Path, Journal] = {}
        self._model: tuple[str, Model] | None = None
        self._files: dict[str, str] = {}  # of the model, when it was loaded
        self._measured: dict[tuple[str, str, CacheSpec], Measurement] = {}

    def model(self, config: ExperimentConfig) -> Model:
        """The config's model; only the last one is kept.

        Raises:
          CannotRun: it does not fit, or its shape is known and its checkpoint is not to be had.
        """
        if not self._is_loaded(config):
            check_fit(config)
            self._model, self._files = None, identity.of_model(config)
            with stages.during(f"loading {model_name(config.model)}"):
                self._model = (_model_key(config), _load(config))
        assert self._model is not None
        return self._model[1]

    def _is_loaded(self, config: ExperimentConfig) -> bool:
        """Whether the last model is the config's."""
        return self._model is not None and self._model[0] == _model_key(config)

    @user_files.pinned()
    def run(
        self, config: ExperimentConfig, *, progress: bool | None = False, capacity: int | float | None = None
    ) -> Outcome:
        """Measures a config's baselines and its policy.

        Args:
          config: what to run.
          progress: see `experiments.progress.tracked`.
          capacity: see `experiments.runs.measure.measure`; of no effect where steps are timed.
        """
        capacity = None if config.repeats else capacity
        machine.forget_programs()  # of the runs before, of which a sweep may have hundreds
        specs, task_specs = specs_of(config), specs_of(config, config.tasks.least_slots)
        score.check(config.recall)
        answering.check(config.tasks)
        model = self.model(config)
        given = given_calibration(config.model)
        for spec in specs if given is not None else ():
            calibrated_for(model, spec, given)  # one that does not fit is an error at once
        tokens, prompt_length, text = data.load(config.data, model, config.seed)
        asked = score.make_prompts(config.recall, model, config.seed)
        tasks, journal = answering.make(config.tasks, model, config.seed), self._journal(config)
        parts = (
            "model", "mesh", "rules", "seed", "data", "recall", "tasks", "prefill_block", "implementation", "repeats",
        )  # fmt: skip
        key, texts = _key(config, *parts), _key(config, "policy", "storage", "selection", "baselines")
        layers = text_view.shown_layers(model, tokens.shape[1], len(specs)) if self._view else ()
        # float32 means float32: left alone, GPUs and TPUs multiply it in fewer bits, and print other digits than CPUs.
        exact = "highest" if dtype_of(config.model) == jnp.float32 else None

        seconds: dict[tuple[str, CacheSpec], float] = {}  # several are measured at once

        def one(pair: tuple[CacheSpec, CacheSpec]) -> Measurement:
            start = time.perf_counter()
            try:
                with stages.of(pair[0].name):
                    return measured_one(*pair)
            finally:
                seconds[pair[0].name, pair[0]] = time.perf_counter() - start

        def measured_one(spec: CacheSpec, own: CacheSpec) -> Measurement:
            options: dict[str, Any] = {"prefill_block": config.prefill_block, "implementation": config.implementation}
            with jax.default_matmul_precision(exact):
                ready = calibrated_for(model, spec, given)
                measured = measure(
                    ready, tokens, spec, prompt_length=prompt_length, new_tokens=config.data.new_tokens,
                    repeats=config.repeats, recall=asked, capacity=capacity, held_layers=layers, **options,
                )  # fmt: skip
                if not tasks:
                    return measured
                found = answering.answers(
                    ready, own, tasks, rows=config.tasks.rows, journal=journal, texts=texts, **options
                )
            return dataclasses.replace(measured, asked=tasks, answers=found)

        # Specs of other names may be equal.
        pairs = zip(specs, task_specs, strict=True)
        missing = [pair for pair in pairs if (key, pair[0].name, pair[0]) not in self._measured]
        # Several processes must run the same programs in the same order.
        alone = bool(config.repeats) or distributed.count() > 1
        made = _side_by_side(one, missing, at_once=1 if alone else os.cpu_count() or 1)
        shown = tracked(
            missing, unit="policy", name=lambda pair: pair[0].name, show=progress, leave=False,
            seconds=lambda pair: seconds[pair[0].name, pair[0]],
        )  # fmt: skip
        for (spec, _), measurement in zip(shown, made, strict=True):
            self._measured[key, spec.name, spec] = measurement
        measurements = [self._measured[key, spec.name, spec] for spec in specs]
        # A prompt is answered; a text goes on.
        texts_of = data.decode if config.data.prompt is None else data.answer
        rows = "1 row" if len(tokens) == 1 else f"{len(tokens)} rows"
        return Outcome(
            model=describe(model, config.model),
            text=f"Text: {text}; {rows} of {prompt_length} prompt tokens and {config.data.new_tokens} new ones.",
            notes=_notes(model, config, prompt_length, measurements),
            measurements=measurements,
            continuations=[
                texts_of(model, m.tokens[0][m.tokens[0] >= 0], tokens[0][:prompt_length]) for m in measurements
            ],
            prompted=config.data.prompt is not None,
            chunk=config.data.chunk,
            viewer=text_view.viewer(model, config, tokens[0][:prompt_length], measurements) if self._view else None,
        )

    def finish(self, configs: Sequence[ExperimentConfig] = ()) -> None:
        """Removes the answers that were kept: they are part of results now.

        Args:
          configs: those whose answers other processes may have kept.
        """
        for config in configs:
            self._journal(config)
        for path, journal in self._journals.items():
            journal.remove()
            with contextlib.suppress(OSError):  # others may have answers there
                path.parent.rmdir()

    def _journal(self, config: ExperimentConfig) -> Journal:
        """The answers that there are to the tasks of a config, whatever its policies."""
        # Several processes must ask the same questions together, whatever a file has when each of them looks.
        if not config.tasks.names or distributed.count() > 1:
            return Journal(None)
        # A model that was replaced after it was loaded: its answers must not be taken for those of the new one.
        if self._is_loaded(config) and self._files != identity.of_model(config):
            return Journal(None)
        path = Path(config.output) / FOLDER / f"{identity.of_answers(config)}.jsonl"
        if path not in self._journals:
            if not self._resume:
                Journal(path).remove()
            self._journals[path] = Journal(path)
        return self._journals[path]


def _side_by_side(one: Callable[[T], Measurement], items: Sequence[T], at_once: int) -> Iterator[Measurement]:
    """Measures items, and yields the results in their order: while programs of one are compiled, others run."""
    if at_once == 1:
        yield from map(one, items)
        return
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        # In the context of the caller, which may share prompts.
        made = [pool.submit(contextvars.copy_context().run, one, item) for item in items]
        try:
            for each in made:
                yield each.result()
        finally:
            for each in made:
                each.cancel()


def _codes(model: Model) -> str:
    """Returns the codes of weights in words; empty if they are exact."""
    leaves = jax.tree.leaves(model.params, is_leaf=is_quantized)
    if not (matrices := [leaf for leaf in leaves if is_quantized(leaf)]):
        return ""
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    bits = " and ".join(map(str, sorted({matrix.bits for matrix in matrices})))
    return f" with matrices in {bits}-bit codes ({held / 1e6:,.1f} MB in all)"


def _key(config: ExperimentConfig, *parts: str) -> str:
    resolved = fields.to_dict(config)
    return json.dumps([resolved[part] for part in parts])


def _model_key(config: ExperimentConfig) -> str:
    return _key(config, "model", "mesh", "rules", "seed")


def _load(config: ExperimentConfig) -> Model:
    codes = build_weights(config.model)
    if config.model.skew is None:
        return _load_plain(config, codes)
    # A skew is folded into exact weights.
    model = skewed(_load_plain(config, None), load_skew(config.model.skew).matrices)
    return model if codes is None else quantize_weights(model, codes.bits, codes.group, head=codes.head)


def given_calibration(config: ModelConfig) -> Calibration | None:
    """The calibration that a config names."""
    return None if config.calibration is None else kvjax.load_calibration(config.calibration)


def calibrated_for(model: Model, spec: CacheSpec, given: Calibration | None) -> Model:
    """The model with the calibration of a storage that needs one: `given`, or one made from a generated story."""
    if not needs_of(spec, model.config.num_layers).any:
        return model
    if given is not None:
        return kvjax.calibrated(model, spec, given)
    sample = data.calibration_sample(model, SAMPLE_ROWS, min(SAMPLE_TOKENS, model.config.max_positions))
    return kvjax.calibrated(model, spec, kvjax.calibrate(model, sample, spec))


def _load_plain(config: ExperimentConfig, codes: WeightCodes | None) -> Model:
    mesh, rules = sharding.make_mesh(config.mesh) if config.mesh else None, Rules.parse(config.rules)
    distributed.check_mesh(mesh)
    dtype = dtype_of(config.model)
    if config.model.path is not None:
        try:
            return kvjax.load(
                config.model.path, dtype=dtype, mesh=mesh, rules=rules, host_weights=config.model.host_weights,
                weights=STORED if config.model.weights == STORED else codes,
            )  # fmt: skip
        except CheckpointError as error:
            if config.model.shape is None or Path(config.model.path).exists():
                raise
            raise CannotRun(f"{error} (Random weights of this shape: --config.model.path=none.)") from error
    decoder = shapes.by_name(config.model.shape or "tiny")
    init = functools.partial(random_parameters, decoder, dtype=dtype)
    key = jax.random.key(config.seed)
    placed = None
    if mesh is not None:
        mesh = sharding.fit(mesh, decoder.num_kv_heads, rules)
        with using(rules):
            placed = sharding.parameter_shardings(jax.eval_shape(init, key), mesh)
    model = Model(decoder, jax.jit(init, out_shardings=placed)(key), mesh=mesh, rules=rules)
    if codes is not None:
        model = quantize_weights(model, codes.bits, codes.group, head=codes.head)
    return offload(model, config.model.host_weights)


def _notes(model: Model, config: ExperimentConfig, prompt: int, measurements: list[Measurement]) -> list[str]:
    notes = []
    total = prompt + config.data.new_tokens
    if total > model.config.max_positions:
        notes.append(f"{total} tokens exceed the {model.config.max_positions} that the model was trained on.")
    if config.recall.tasks and config.recall.length > model.config.max_positions:
        trained = model.config.max_positions
        notes.append(
            f"Recall prompts of {config.recall.length} tokens exceed the {trained} that the model was trained on."
        )
    for measurement in measurements:
        limited = measurement.budget is not None or not measurement.keeps_all
        if limited and measurement.kv_bytes >= measurement.full_kv_bytes:
            notes.append(f"{measurement.policy}: all {total} tokens are held, so that no memory is saved.")
    if config.data.prompt is not None:
        notes.append("A prompt has no true continuation, so there is no perplexity.")
    return notes
