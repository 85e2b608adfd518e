"""Fine-tunes a model through a cache, and measures the gap to the full cache; see `experiments.tune`."""

import functools
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec
from tqdm.auto import tqdm

from experiments import fields, results, specs
from experiments.lines import numbered
from experiments.programs.train import METRICS, Diverged, Log, removed_if_unused
from experiments.reports.tables import Row
from experiments.runs import identity, machine
from experiments.runs.session import Session, calibrated_for, describe
from experiments.training import checkpoints
from experiments.training.config import files
from experiments.tuning import evaluate, parameters, report, windows
from experiments.tuning.config import SPEC, TuneConfig, check, experiment, past
from experiments.tuning.gate_config import TrainGateConfig
from experiments.tuning.merge_config import TrainMergeConfig
from kvjax.cache import CacheSpec
from kvjax.checkpoint.huggingface import save
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.score_function import ScoreFunction, score_function
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies import full
from kvjax.policies.traits import evicting_in_prompt
from kvjax.selection import everything
from kvjax.typing import JsonObject, PyTree

Array = jax.Array
State = dict[str, PyTree]  # "trained": see `parameters.initial`; "optimizer": the state of optax
Step = Callable[[State, PyTree, Array], tuple[State, dict[str, Array]]]
BEFORE, INPUTS = "before.json", "inputs.json"


def start(config: TuneConfig, names: Sequence[str], argv: Sequence[str]) -> int:
    """Runs the command `tune`.

    Args:
      config: the settings.
      names: of the writers.
      argv: the command line.

    Returns:
      The exit status.
    """
    folder = tune(config, command=shlex.join(["python", "-m", "experiments.tune", *argv[1:]]), writers=names)
    print(f"Wrote {folder}/ (model, results.json, report.md, report.html, metrics.jsonl)")
    return 0


def tune(config: TuneConfig, *, command: str = "", progress: bool | None = None, writers: Sequence[str] = ()) -> Path:
    """Trains a model through a cache, or continues a run; exports the model and writes the report.

    Args:
      config: the settings.
      command: the command line, for the log.
      progress: whether a bar is shown; None = on a terminal.
      writers: names of further writers of metrics; see `experiments.writers`.

    Returns:
      The folder of the run; the model is in its folder ``model``.

    Raises:
      ConfigError: settings that cannot work, or an output folder that holds a run with others.
      KvjaxError: a cache that cannot be built or does not suit the model.
      Diverged: the loss or its gradient is not finite.
    """
    check(config)
    files(config)
    with removed_if_unused(Path(config.output)):
        return _tune(config, command, progress, writers)


def _tune(config: TuneConfig, command: str, progress: bool | None, writers: Sequence[str]) -> Path:
    """See `tune`."""
    folder, shape = Path(config.output), config.windows
    # As many devices as the windows of a step can be divided among.
    devices = math.gcd(jax.device_count(), config.rows)
    own = experiment(config, f"data:{devices}" if devices > 1 else "")
    spec = specs.build_spec(own)
    results.make_folder(folder)
    if distributed.is_first():
        print(f"loading {config.model.path} ...", file=sys.stderr, flush=True)
    model = Session().model(own)
    texts = windows.load(config, model)
    held_out = texts.evaluation(config.evaluation.windows, shape.prompt_length + config.evaluation.new_tokens)
    under = spec if config.train_under == SPEC else CacheSpec(full())
    ready = calibrated_for(model, under, None)
    size = shape.prompt_length + shape.new_tokens
    function = score_function(
        ready, under, rows=config.rows, prompt_length=shape.prompt_length, length=size,
        prefill_block=shape.prefill_block,
    )  # fmt: skip
    _check_reads_cache(config, spec, function.least_slots)
    optimizer = optimizer_of(config)
    everywhere = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())

    @functools.partial(jax.jit, out_shardings=everywhere)
    def begin(params: PyTree) -> State:
        trained = parameters.initial(config, params)
        return {"trained": trained, "optimizer": optimizer.init(trained)}

    step_of = make_step(config, function, optimizer, everywhere)
    inputs = {"texts": windows.checksums(config), "model": identity.of_weights(config.model.path)}
    with model.on_mesh(), checkpoints.manager(folder, config.checkpoint_every) as manager:
        start = manager.latest_step() or 0
        if start:
            check_same_past(config, folder, start, inputs)
        state = begin(ready.params)
        tokens = model.place(texts.batch(start, config.rows, size))
        _check_gradient(step_of, (state, ready.params, tokens), under)
        trained = f"{parameters.count(state['trained']):,} trained numbers ({config.method})"
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))
        before = results.read_json(folder / BEFORE) if start else None
        if before is None:
            _say(f"measuring {spec.name} and the full cache before training ...")
            before = evaluate.measured(model, spec, held_out, config)
        if distributed.is_first():
            results.write(folder / "config.json", results.to_json(fields.to_dict(config)))
            results.write(folder / INPUTS, results.to_json(inputs))
            results.write(folder / BEFORE, results.to_json(before))
        log = Log(folder / METRICS, start, config, writers)
        environment = machine.environment()
        log.write(kind="start", step=start, command=command, devices_used=devices, **environment, **inputs)
        if not start:
            log.write(kind="evaluation", step=0, **_scores(before))
        _say(f"training {trained} under {under.name}, {config.rows} windows of {size} tokens a step; compiling ...")
        state = run_steps(config, step_of, state, ready, texts, start, (manager, log, progress))
    tuned = _tuned(config, model, state["trained"])
    with model.on_mesh():
        save(tuned, folder / "model")
        _say(f"measuring {spec.name} and the full cache after training ...")
        after = evaluate.measured(tuned, spec, held_out, config)
    log.write(kind="evaluation", step=config.steps, **_scores(after))
    log.close()
    if distributed.is_first():
        about = [
            describe(model, own.model),
            f"{trained}, {config.steps} steps of {config.rows} windows of {size} tokens, under {under.name}; "
            f"{len(held_out)} held-out windows of {shape.prompt_length} prompt tokens and "
            f"{config.evaluation.new_tokens} scored ones.",
            f"On {environment['device']} ({environment['cpu']}, {environment['cores']} cores); "
            f"jax {environment['jax']}, commit {environment['commit'] or 'unknown'}.",
        ]
        gap = evaluate.gap_of(before, after)
        losses = _losses(folder / METRICS)
        table = report.write(folder, config, before, after, gap, losses, about=about, command=command)
        print(f"\n{table}\n{f'{chr(10)}{gap.sentence()}{chr(10)}' if gap else ''}", flush=True)
    return folder


def optimizer_of(config: TuneConfig | TrainGateConfig | TrainMergeConfig) -> optax.GradientTransformation:
    """Returns AdamW after clipping by the global norm; its rate warms up linearly and falls to 0 as a cosine."""
    settings = config.optimizer
    rate = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, settings.warmup_steps, config.steps)
    return optax.chain(optax.clip_by_global_norm(settings.clip), optax.adamw(rate, weight_decay=settings.weight_decay))


def make_step(config: TuneConfig, function: ScoreFunction, optimizer: optax.GradientTransformation, place: Any) -> Any:
    """Returns a jitted step: state, parameters before training and tokens [B, T] int32 -> state and losses.

    The loss is the mean negative log-likelihood of the tokens of the windows under the cache, in nats.
    """

    @functools.partial(jax.jit, donate_argnames="state", out_shardings=place)
    def step(state: State, params: PyTree, tokens: Array) -> tuple[State, dict[str, Array]]:
        def loss_of(trained: PyTree) -> Array:
            return -jnp.mean(function.score(parameters.merged(params, trained, config), tokens))

        loss, gradient = jax.value_and_grad(loss_of)(state["trained"])
        updates, after = optimizer.update(gradient, state["optimizer"], state["trained"])
        trained = optax.apply_updates(state["trained"], updates)
        return {"trained": trained, "optimizer": after}, {"total": loss, "norm": optax.tree.norm(gradient)}

    return step


def run_steps(
    config: TuneConfig | TrainGateConfig | TrainMergeConfig,
    step_of: Step,
    state: State,
    model: Model,
    texts: windows.Windows,
    start: int,
    outputs: tuple[ocp.CheckpointManager, Log, bool | None],
    evaluate: Callable[[int, State], None] | None = None,
) -> State:
    """Runs the steps after `start`, and writes log lines and checkpoints.

    Args:
      config: the settings.
      step_of: runs one step.
      state: the state after `start` steps.
      model: the model, with the calibration that a step needs.
      texts: the source of the windows.
      start: the number of finished steps.
      outputs: the checkpoints, the log, and whether a bar is shown.
      evaluate: called with the number of steps and the state after every ``evaluate_every`` steps.
    """
    manager, log, progress = outputs
    size = config.windows.prompt_length + config.windows.new_tokens
    bar = tqdm(total=config.steps, initial=start, unit="step", disable=None if progress is None else not progress)
    in_log = progress is None and not sys.stderr.isatty() and distributed.is_first()
    since, logged = time.perf_counter(), start
    for number in range(start, config.steps):
        tokens = model.place(texts.batch(number, config.rows, size))
        state, losses = step_of(state, model.params, tokens)
        done, last = number + 1, number + 1 == config.steps
        if done % config.log_every == 0 or last:
            values = {name: float(value) for name, value in distributed.to_host(losses).items()}
            if not np.isfinite(list(values.values())).all():
                raise Diverged(
                    f"the loss is {values['total']} and the norm of its gradient {values['norm']} at step {done}; "
                    "lower optimizer.learning_rate."
                )
            speed = round((done - logged) * config.rows * size / (time.perf_counter() - since))
            since, logged = time.perf_counter(), done
            log.write(kind="loss", step=done, **values, tokens_per_second=speed)
            bar.set_postfix({"loss": f"{values['total']:.3f}", "tok/s": speed})
            if in_log:
                print(f"step {done} of {config.steps}: loss {values['total']:.3f}, tok/s {speed}", file=sys.stderr)
        bar.update()
        every = config.steps if isinstance(config, TuneConfig) else config.evaluate_every
        if evaluate is not None and (done % every == 0 or last):
            began = time.perf_counter()
            evaluate(done, state)
            since += time.perf_counter() - began
        manager.save(done, args=ocp.args.StandardSave(state), force=last)
    bar.close()
    return state


def _tuned(config: TuneConfig, model: Model, trained: PyTree) -> Model:
    """Returns the model with the trained parameters merged into its own, divided as these are."""
    places = jax.tree.map(lambda leaf: leaf.sharding, model.params)
    merge = jax.jit(lambda params, trained: parameters.merged(params, trained, config), out_shardings=places)
    with model.on_mesh():
        return Model(
            model.config, merge(model.params, trained), model.tokenizer, model.mesh, model.generation, model.rules
        )


def _say(text: str) -> None:
    if distributed.is_first():
        print(text, file=sys.stderr, flush=True)


def _scores(rows: Sequence[Row]) -> JsonObject:
    """Returns the perplexities of both caches, for the log."""
    return {"full": rows[0]["perplexity"], "cache": rows[1]["perplexity"]}


def _losses(path: Path) -> dict[int, float]:
    """Returns the losses of a log by step."""
    events = [json.loads(line) for _, line in numbered(path.read_bytes())]
    return {event["step"]: event["total"] for event in events if event["kind"] == "loss"}


def _check_reads_cache(config: TuneConfig, spec: CacheSpec, least_slots: int | None) -> None:
    """Refuses a cache under which training is the same as under the full cache.

    Raises:
      ConfigError: the policy keeps every token, or no token attends to the slots that it leaves.
    """
    if not spec.storage.exact or spec.selection != everything() or config.train_under != SPEC:
        return
    size = config.windows.prompt_length + config.windows.new_tokens
    if least_slots is None or least_slots >= size:
        raise ConfigError(
            f"{spec.name} with policy.budget={config.policy.budget} keeps every token of a window of {size}, as the "
            "full cache does; lower policy.budget, or give another policy, a storage or a selection."
        )
    if config.windows.new_tokens < 2 and evicting_in_prompt(spec.policy) is None:
        raise ConfigError(
            f"{spec.name} evicts when the prompt has ended, and windows.new_tokens={config.windows.new_tokens}: no "
            "token attends to the slots that are left; give at least 2 new tokens."
        )


def _check_gradient(step_of: Any, arguments: tuple[Any, ...], spec: CacheSpec) -> None:
    """Refuses, before anything runs, a cache whose score has no gradient, such as one with a callback.

    Raises:
      ConfigError: the cache, and JAX's reason.
    """
    try:
        step_of.trace(*arguments)
    except KvjaxError:
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"the score under {spec.name} has no gradient: {reason} Give a policy, a storage and a selection of JAX "
            "operations that can be differentiated; those of kvjax can."
        ) from error


def check_same_past(
    config: TuneConfig | TrainGateConfig | TrainMergeConfig, folder: Path, step: int, inputs: JsonObject
) -> None:
    """Checks that a continued run has the settings, texts and weights that it began with.

    Raises:
      ConfigError: what differs.
    """
    saved, before = results.read_json(folder / "config.json"), results.read_json(folder / INPUTS)
    try:
        then, now = past(fields.from_dict(type(config), saved)), past(config)
    except (KeyError, TypeError):
        raise ConfigError(
            f"{folder} has checkpoints but no config.json of this version of kvjax; give another --config.output."
        ) from None
    differing = [name for name in now if now[name] != then[name]]
    differing += [f"contents of {name}" for name in inputs if not before or before.get(name) != inputs[name]]
    if differing:
        raise ConfigError(
            f"{folder} contains a run at step {step} with different {', '.join(differing)}; give its settings to "
            "continue it, or another --config.output."
        )
