"""Trains KV prediction or cache augmentation; see `experiments.train_reuse`."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import results
from experiments.progress import print_status
from experiments.reports import reuse_plots, tables
from experiments.reports.reuse_plots import Curve
from experiments.runs import data
from experiments.training.config import files
from experiments.training.run_folder import events
from experiments.tuning import reuse_measures, training_run
from experiments.tuning.optimizer import State, apply_gradients, optimizer_of
from experiments.tuning.reuse_config import TrainReuseConfig, check
from experiments.tuning.reuse_measures import Point
from experiments.tuning.reuse_methods import METHODS, Augmentation, Prediction
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.typing import JsonObject

Array = jax.Array
RESULTS, PLOT = "results.json", "plot.png"


def train_reuse(
    config: TrainReuseConfig, *, command: str = "", progress: bool | None = None, writers: Sequence[str] = ()
) -> Path:
    """Trains learned reuse, or continues a run; saves what was trained and writes the report.

    Args:
      config: the settings.
      command: the command line, for the log and the results.
      progress: whether a bar is shown; None = on a terminal.
      writers: names of further writers of metrics; see `experiments.writers`.

    Returns:
      The folder of the run.

    Raises:
      ConfigError: settings that cannot work, or an output folder that holds a run with others.
      KvjaxError: a model that does not suit the method.
      Diverged: the loss or its gradient is not finite.
    """
    check(config)
    files(config)
    with training_run.open_run(config, command=command, progress=progress, writers=writers) as run:
        model, held_out = run.model, run.held_out
        distributed.check_alone(model.params, "experiments.train_reuse")
        method = METHODS[config.method](config, model)

        def evaluate(done: int, state: State) -> None:
            found = method.held_out(model.params, state["trained"], held_out)
            log.write(kind="evaluation", step=done, **found)
            shown = ", ".join(f"{name} {x:.4f}" for name, x in found.items())
            print_status(f"step {done} of {config.steps}, held-out losses: {shown}")

        optimizer, trained = optimizer_of(config), method.initial()
        step, memories = make_step(config, method, optimizer), [optimizer.init(each) for each in trained]
        state = run.restore({"trained": trained, "optimizer": memories, "step": jnp.int32(0)})
        log, environment = run.begin()
        if not run.start:
            evaluate(0, state)
        state = run.train(log, step, state, model.params, evaluate=evaluate, evaluate_every=config.evaluate_every)
        log.close()
    method.save(run.folder, state["trained"])
    about: JsonObject = {
        "name": config.name, "method": config.method, "model": config.model.path, "weights": run.checksums["model"],
        "command": command, "texts": [path.name for path in files(config)[0]],
        "held_out": [path.name for path in files(config)[1]], "windows": len(held_out), "environment": environment,
    }  # fmt: skip
    opening = len(data.opening(model))
    print(f"\n{_report(run.folder, config, model, method, state['trained'], held_out, opening, about)}\n", flush=True)
    return run.folder


def make_step(
    config: TrainReuseConfig, method: Prediction | Augmentation, optimizer: optax.GradientTransformation
) -> Any:
    """Returns a step of all variants: state, parameters of the model and tokens [B, T] int32 -> state and losses."""

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state: State, params: Any, tokens: Array) -> tuple[State, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state["step"])
        trained, memories, losses, norms = [], [], {}, []
        total = jnp.float32(0)
        for variant, (name, own) in enumerate(zip(config.variants, state["trained"], strict=True)):

            def loss_of(own: Any, variant: int = variant) -> tuple[Array, Array]:
                return method.loss(variant, params, own, tokens, key)

            (loss, losses[name]), gradients = jax.value_and_grad(loss_of, has_aux=True)(own)
            own, memory = apply_gradients(optimizer, gradients, state["optimizer"][variant], own)
            trained.append(own)
            memories.append(memory)
            norms.append(optax.tree.norm(gradients))
            total = total + loss
        made = {"trained": trained, "optimizer": memories, "step": state["step"] + 1}
        return made, {"total": total, "norm": jnp.max(jnp.stack(norms)), **losses}

    return step


def _curve(folder: Path) -> Curve:
    """Returns the evaluations of a run."""
    return [
        (each["step"], {name: x for name, x in each.items() if name not in ("kind", "step")})
        for each in events(folder, "evaluation")
    ]


def _report(
    folder: Path, config: TrainReuseConfig, model: Model, method: Prediction | Augmentation, trained: Any,
    held_out: np.ndarray, opening: int, about: JsonObject,
) -> str:  # fmt: skip
    """Measures what was trained, writes results.json, the plot and report.md, and returns the table."""
    curve, weights = _curve(folder), about["weights"]
    if isinstance(method, Prediction):
        points = reuse_measures.prediction_points(config, model, method, trained, held_out, opening)
        rows = _prediction_rows(points)
        found: list[JsonObject] = [dataclasses.asdict(each) for each in points]
        plot = reuse_plots.prediction_plot(points, curve, config.variants, weights)
    else:
        found = reuse_measures.augmentation_points(config, model, method, trained, held_out)
        rows = _augmentation_rows(found)
        plot = reuse_plots.augmentation_plot(found, curve, config.variants, weights)
    curves = [{"step": step, **own} for step, own in curve]
    results.write(folder / RESULTS, results.to_json({**about, "points": found, "curve": curves}))
    results.write(folder / PLOT, plot)
    text = [f"{len(held_out)} held-out windows; differences are by window, with the 95 % interval of their mean."]
    results.write(folder / "report.md", tables.markdown(config.name, [*text, f"`{about['command']}`"], rows))
    return tables.table(rows)


def _prediction_rows(points: Sequence[Point]) -> list[dict[str, str]]:
    rows = []
    for each in points:
        mean, half = reuse_measures.above(each.nats_by_window, points[0].nats_by_window)
        rows.append({
            "prompt": each.kind if each.kind == each.name else f"{each.kind} {each.name}",
            "GFLOPs": f"{each.flops / 1e9:.3f}", "perplexity": f"{np.exp(np.mean(each.nats_by_window)):.2f}",
            "nats above base": "" if each is points[0] else f"{mean:.3f} ± {half:.3f}",
        })  # fmt: skip
    return rows


def _augmentation_rows(cases: Sequence[JsonObject]) -> list[dict[str, str]]:
    rows = []
    for each in cases:
        mean, half = reuse_measures.above(each["nats_by_window"], cases[0]["nats_by_window"])
        nats = each["nats_by_distance"]
        rows.append({
            "cache": each["name"], "perplexity": f"{np.exp(np.mean(nats)):.2f}",
            "first token": f"{np.exp(nats[0]):.2f}", "last token": f"{np.exp(nats[-1]):.2f}",
            "nats above unchanged": "" if each is cases[0] else f"{mean:.3f} ± {half:.3f}",
        })  # fmt: skip
    return rows
