"""Fine-tunes a model through a cache, and measures the gap to the full cache; see `experiments.tune`."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from experiments import specs
from experiments.progress import print_status
from experiments.reports.tables import Row
from experiments.runs.session import calibrated_for
from experiments.training.config import files
from experiments.training.run_folder import events
from experiments.tuning import evaluate, parameters, report, training_run
from experiments.tuning.config import SPEC, TuneConfig, check, experiment
from experiments.tuning.optimizer import State, likelihood_step, optimizer_of
from kvjax.cache import CacheSpec
from kvjax.checkpoint.huggingface import save
from kvjax.errors import ConfigError, KvjaxError
from kvjax.generation.score_function import score_function
from kvjax.models.model import Model
from kvjax.models.stacked_params import unstacked
from kvjax.parallel import distributed
from kvjax.policies import full
from kvjax.policies.traits import evicting_in_prompt
from kvjax.selection import everything
from kvjax.typing import JsonObject, PyTree

BEFORE = "before.json"


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
    shape = config.windows
    # As many devices as the windows of a step can be divided among.
    devices = math.gcd(jax.device_count(), config.rows)
    own = experiment(config, f"data:{devices}" if devices > 1 else "")
    spec = specs.build_spec(own)
    under = spec if config.train_under == SPEC else CacheSpec(full())
    print_status(f"loading {config.model.path} ...")
    with training_run.open_run(config, own, command=command, progress=progress, writers=writers) as run:
        model = run.model
        ready = calibrated_for(model, under, None)
        function = score_function(
            ready, under, rows=config.rows, prompt_length=shape.prompt_length, length=run.size,
            prefill_block=shape.prefill_block,
        )  # fmt: skip
        _check_reads_cache(config, spec, function.least_slots)
        optimizer = optimizer_of(config)
        everywhere = None if model.mesh is None else NamedSharding(model.mesh, PartitionSpec())

        @functools.partial(jax.jit, out_shardings=everywhere)
        def initial(params: PyTree) -> State:
            trained = parameters.initial(config, params)
            return {"trained": trained, "optimizer": optimizer.init(trained)}

        def measured(model: Model, when: str) -> list[Row]:
            print_status(f"measuring {spec.name} and the full cache {when} training ...")
            return evaluate.measured(model, spec, run.held_out, config)

        step_of = likelihood_step(
            optimizer, function, lambda params, trained: parameters.merged(params, trained, config), everywhere
        )
        state, tokens = initial(ready.params), model.place(run.texts.batch(run.start, config.rows, run.size))
        _check_gradient(step_of, (state, ready.params, tokens), under)
        state = run.restore(state)
        before = run.baselines(BEFORE, lambda: measured(model, "before"))
        log, environment = run.begin(devices_used=devices)
        if not run.start:
            log.write(kind="evaluation", step=0, **_scores(before))
        trained = f"{parameters.count(state['trained']):,} trained numbers ({config.method})"
        each_step = f"{config.rows} windows of {run.size} tokens"
        print_status(f"training {trained} under {under.name}, {each_step} a step; compiling ...")
        state = run.train(log, step_of, state, ready.params)
        tuned = _tuned(config, model, state["trained"])
        save(tuned, run.folder / "model")
        after = measured(tuned, "after")
        log.write(kind="evaluation", step=config.steps, **_scores(after))
        log.close()
    if distributed.is_first():
        about = [
            run.description,
            f"{trained}, {config.steps} steps of {each_step}, under {under.name}; "
            f"{len(run.held_out)} held-out windows of {shape.prompt_length} prompt tokens and "
            f"{config.evaluation.new_tokens} scored ones.",
            f"On {environment['device']} ({environment['cpu']}, {environment['cores']} cores); "
            f"jax {environment['jax']}, commit {environment['commit'] or 'unknown'}.",
        ]
        gap = evaluate.gap_of(before, after)
        losses = {event["step"]: event["total"] for event in events(run.folder, "loss")}
        table = report.write(run.folder, config, before, after, gap, losses, about=about, command=command)
        print(f"\n{table}\n{f'{chr(10)}{gap.sentence()}{chr(10)}' if gap else ''}", flush=True)
    return run.folder


def _tuned(config: TuneConfig, model: Model, trained: PyTree) -> Model:
    """Returns the model with the trained parameters merged into its own, divided as these are."""
    own = unstacked(model.params)
    places = jax.tree.map(lambda leaf: leaf.sharding, own)
    merge = jax.jit(lambda params, trained: parameters.merged(params, trained, config), out_shardings=places)
    return Model(model.config, merge(own, trained), model.tokenizer, model.mesh, model.generation, model.rules)


def _scores(rows: Sequence[Row]) -> JsonObject:
    """Returns the perplexities of both caches, for the log."""
    return {"full": rows[0]["perplexity"], "cache": rows[1]["perplexity"]}


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
