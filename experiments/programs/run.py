"""Runs one experiment and writes its folder, or plans it; see `experiments.run`."""

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from experiments import fields, results, specs, writers
from experiments.config import ExperimentConfig
from experiments.reports import heat_maps, plots, run_page
from experiments.reports import tables as report
from experiments.runs import identity, machine
from experiments.runs.resolve import CannotRun, codes_of, decoder_config, dtype_of, model_name, specs_of
from experiments.runs.session import Outcome, Session, describe
from experiments.tasks import answering, score
from kvjax.errors import ConfigError, KvjaxError
from kvjax.parallel import distributed
from kvjax.parallel.rules import Rules

ONLY_PLANNED = 3  # the exit status if a run was asked for that this machine, or its disk, has no model for


def run(config: ExperimentConfig, *, command: str = "", progress: bool | None = None) -> Path:
    """Runs a config and writes its folder. Of several processes, all run it, and the first one writes.

    Returns:
      The folder, which is there whole or not at all; another one than the config's if that cannot be written when the
      results are there. In other processes than the first, the config's.

    Raises:
      NotWritten: no folder could be written; the results were printed.
      KvjaxError: something in the config that cannot work; CannotRun: the model is not here or does not fit.
    """
    specs_of(config)
    score.check(config.recall)
    answering.check(config.tasks)
    session = Session(view=True)
    if distributed.is_first():
        print(f"loading {model_name(config.model)} ...", file=sys.stderr, flush=True)
    print(describe(session.model(config), config.model), flush=True)
    if not distributed.is_first():
        session.run(config, progress=progress)
        return Path(config.output)
    name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    outcome = None
    try:
        with results.folder(config.output, name) as (folder, target):
            outcome = session.run(config, progress=progress)
            show(outcome)
            write(folder, config, outcome, command)
    except OSError as error:
        if outcome is None:
            raise
        target = _rescue(name, config, outcome, command, error)
    session.finish()
    print(f"Wrote {target}/ (report.md, report.html, report.png, metrics.jsonl, config.json, environment.json)")
    print(f"Open {target}/report.html in a browser.")
    return target


def show(outcome: Outcome) -> None:
    """Prints a run's table, before anything is written."""
    print(outcome.text)
    print(f"\n{report.table([report.cells(row) for row in outcome.rows()])}\n")
    for measurement, text in zip(outcome.measurements, outcome.continuations, strict=True):
        if outcome.prompted:
            print(f"{measurement.policy}: {text.strip()}")
    for note in outcome.notes:
        print(f"Note: {note}")
    sys.stdout.flush()


class NotWritten(KvjaxError):
    """Results for which no folder could be written."""


def _rescue(name: str, config: ExperimentConfig, outcome: Outcome, command: str, error: OSError) -> Path:
    """Writes a run's results to another folder, or prints what metrics.jsonl would have held."""
    folder = results.elsewhere(name, error)
    try:
        if folder is not None:
            write(folder, config, outcome, command)
            return folder
    except OSError:
        pass
    for row in outcome.rows():
        print(json.dumps({"kind": "summary"} | row))
    raise NotWritten(f"results cannot be written ({error}); they are printed above.") from None


def write(folder: Path, config: ExperimentConfig, outcome: Outcome, command: str) -> None:
    """Fills a run's folder."""
    weights = identity.of_weights(config.model.path) if config.model.path else ""
    environment = machine.environment() | {"command": command, "weights": weights, "explain": outcome.explain()}
    (folder / "config.json").write_text(results.to_json(fields.to_dict(config)))
    (folder / "environment.json").write_text(results.to_json(environment))
    with (folder / "metrics.jsonl").open("w") as file:
        for row in outcome.rows():
            file.write(json.dumps({"kind": "summary"} | row) + "\n")
        for measurement in outcome.measurements:
            if measurement.logprobs is not None:
                loss = (-measurement.logprobs).mean(axis=0, dtype="float64")
                entry = {"kind": "loss", "policy": measurement.policy, "nats_by_token": [float(x) for x in loss]}
                file.write(json.dumps(entry) + "\n")
    summaries = outcome.rows()
    rows = [report.cells(row) for row in summaries]
    labels = [row["policy"] for row in rows]
    (folder / "report.png").write_bytes(plots.run_plot(outcome.measurements, weights))
    task_plots, sections = _write_answers(folder, outcome), report.sections(summaries)
    paragraphs = run_page.about(outcome, environment)
    text = report.markdown(config.name, [*paragraphs, *([f"`{command}`"] if command else [])], rows, "report.png")
    samples = [
        f"- **{label}**: {' '.join(sample.split())[:400]!r}"
        for label, sample in zip(labels, outcome.continuations, strict=True)
    ]
    (folder / "report.md").write_text(
        "\n".join(
            [
                text,
                report.LEGEND,
                "",
                *(f"{each.markdown()}\n" for each in sections),
                *(f"![{task}]({name})\n" for task, name in task_plots.items()),
                "## The first row's greedy continuation",
                "",
                *samples,
                "",
            ]
        )
    )
    files = {f"Plot of {config.name}": "report.png"} | task_plots
    drawn = {about: (folder / name).read_bytes() for about, name in files.items()}
    page = run_page.page(config, outcome, command=command, plots=drawn, paragraphs=paragraphs)
    (folder / "report.html").write_text(page, encoding="utf-8")


def _write_answers(folder: Path, outcome: Outcome) -> dict[str, str]:
    """Writes the answers to tasks, and a plot of each task over lengths and depths.

    Returns:
      Task -> the name of its plot's file.
    """
    drawn: dict[str, str] = {}
    if not (asked := outcome.measurements[0].asked):
        return drawn
    with (folder / "answers.jsonl").open("w", encoding="utf-8") as file:
        for measurement in outcome.measurements:
            for task, answers in measurement.answers.items():
                for number, answer in enumerate(answers):
                    entry = {"policy": measurement.policy, "task": task, "question": number, **answer}
                    file.write(json.dumps(entry, ensure_ascii=False) + "\n")
    for place, (task, each) in enumerate(asked.items(), 1):
        grids = {m.policy: each.grid(m.answers[task]) for m in outcome.measurements}
        if found := {policy: grid for policy, grid in grids.items() if grid is not None}:
            name = f"task-{place}.png"
            (folder / name).write_bytes(heat_maps.plot(task, found))
            drawn[task] = name
    return drawn


def plan(config: ExperimentConfig, topology: str | None) -> None:
    """Compiles the config's decode step from shapes alone, and prints what it takes.

    Raises:
      ConfigError: a decoder that is not known without its checkpoint.
    """
    from kvjax import planning  # compiles for TPUs too: not for every run

    decoder = decoder_config(config.model)
    if decoder is None:
        raise ConfigError(
            f"{config.model.path} is not on this machine, so that its size is unknown; give its --config.model.shape."
        )
    where = topology or "this machine"
    print(f"compiling the decode step for {where}; a large model takes minutes ...", file=sys.stderr, flush=True)
    planned = planning.plan(
        decoder,
        specs.build_spec(config),
        batch=config.data.num_sequences,
        prompt_length=config.data.prompt_length,
        new_tokens=config.data.new_tokens,
        dtype=dtype_of(config.model, "tpu" if topology else None),
        mesh_axes=config.mesh,
        rules=Rules.parse(config.rules),
        topology=topology,
        prefill_block=config.prefill_block,
        implementation=config.implementation,
        host_weights=config.model.host_weights,
        weights=codes_of(config.model),
    )
    print(planned.table())


def start(config: ExperimentConfig, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Runs what a command line asks for.

    Returns:
      The exit status.
    """
    names = writers.selected(values)
    if values.topology:
        # A program for a device that is not here can be written, and never read again.
        jax.config.update("jax_compilation_cache_dir", None)
        plan(config, values.topology)
        return 0
    try:
        folder = run(config, command=shlex.join(["python", "-m", "experiments.run", *argv[1:]]))
    except CannotRun as error:
        print(f"{config.name} was not run. {error}\nIt would need:\n", flush=True)
        plan(config, None)
        print(f"To plan for another device: python -m experiments.run --config={config.name} --topology=v5e:2x4")
        return ONLY_PLANNED
    if distributed.is_first():
        writers.copy(names, folder)
    return 0
