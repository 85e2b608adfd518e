"""A run of a command that trains under a cache: its inputs, its folder, its checkpoints, its log and its steps.

The same command, run again, continues from the last checkpoint. Of several processes, the first one writes the files.
"""

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from tqdm.auto import tqdm

from experiments import fields, results
from experiments.config import ExperimentConfig, ModelConfig
from experiments.progress import print_status
from experiments.runs import identity, machine
from experiments.runs.session import Session, describe
from experiments.training import checkpoints
from experiments.training.run_folder import CONFIG, METRICS, Diverged, Log, check_same_past, removed_if_unused
from experiments.tuning import windows
from experiments.tuning.config import past
from experiments.tuning.optimizer import State
from experiments.tuning.windows import TrainingConfig, Windows
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.typing import JsonObject, PyTree

T = TypeVar("T")
Array = jax.Array
#: State, parameters of the model and tokens [rows, size] int32 -> state and losses, "total" among them for a log line.
Step = Callable[[State, PyTree, Array], tuple[State, dict[str, Array]]]
INPUTS = "inputs.json"


@dataclasses.dataclass(frozen=True)
class TrainingRun:
    """A run whose folder is open; see `open_run`.

    Attributes:
      config: the settings.
      model: the model, without a calibration.
      description: one line about the model.
      texts: the source of the training windows.
      size: the number of tokens of a training window.
      held_out: [windows, prompt + scored tokens] int32, the held-out windows.
      checksums: the checksums of the texts, of the weights and of further files, by name.
      manager: Orbax's manager of the checkpoints.
      start: the number of steps that are finished, from the last checkpoint.
      command: the command line, for the log.
      progress: whether a bar is shown; None = on a terminal.
      writers: names of further writers of metrics; see `experiments.writers`.
    """

    config: TrainingConfig
    model: Model
    description: str
    texts: Windows
    size: int
    held_out: np.ndarray
    checksums: JsonObject
    manager: ocp.CheckpointManager
    start: int
    command: str
    progress: bool | None
    writers: Sequence[str]

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self.config.output)

    def restore(self, state: State) -> State:
        """Returns the state of the last checkpoint, or the given one, whose tree is the same, if there is none."""
        return self.manager.restore(self.start, args=ocp.args.StandardRestore(state)) if self.start else state

    def baselines(self, name: str, measure: Callable[[], T]) -> T:
        """Returns what is measured before the first step; a continued run reads it from the JSON file `name`."""
        found = results.read_json(self.folder / name) if self.start else None
        if found is None:
            found = measure()
            self._write(name, found)
        return found

    def begin(self, **about: Any) -> tuple[Log, JsonObject]:
        """Writes the settings, the checksums and the first line of the log.

        Args:
          about: further values of that line.

        Returns:
          The log, and the environment of the run (`machine.environment`).
        """
        self._write(CONFIG, fields.to_dict(self.config))
        self._write(INPUTS, self.checksums)
        log, environment = Log(self.folder / METRICS, self.start, self.config, self.writers), machine.environment()
        log.write(kind="start", step=self.start, command=self.command, **about, **environment, **self.checksums)
        return log, environment

    def _write(self, name: str, value: object) -> None:
        if distributed.is_first():
            results.write(self.folder / name, results.to_json(value))

    def train(
        self, log: Log, step_of: Step, state: State, params: PyTree, *,
        evaluate: Callable[[int, State], None] | None = None, evaluate_every: int = 1,
    ) -> State:  # fmt: skip
        """Takes steps, writes log lines and checkpoints (after the last step too), and returns the last state.

        Args:
          log: from `begin`.
          step_of: takes one step.
          state: the state before the first step.
          params: the parameters of the model, with the calibration that a step needs.
          evaluate: called with the number of finished steps and the state, before the state is saved.
          evaluate_every: the number of steps between these calls; there is one after the last step too.

        Raises:
          Diverged: the loss or its gradient is not finite.
        """
        config, steps = self.config, range(self.start, self.config.steps)
        disable = None if self.progress is None else not self.progress
        bar = tqdm(total=steps.stop, initial=steps.start, unit="step", disable=disable)
        in_log = self.progress is None and not sys.stderr.isatty()
        since, logged = time.perf_counter(), steps.start
        for number in steps:
            tokens = self.model.place(self.texts.batch(number, config.rows, self.size))
            state, losses = step_of(state, params, tokens)
            done, last = number + 1, number + 1 == steps.stop
            if done % config.log_every == 0 or last:
                values = {name: float(value) for name, value in distributed.to_host(losses).items()}
                if not np.isfinite(list(values.values())).all():
                    raise Diverged(
                        f"the loss is {values['total']} and the norm of its gradient {values['norm']} at step {done}; "
                        "lower optimizer.learning_rate."
                    )
                speed = round((done - logged) * config.rows * self.size / (time.perf_counter() - since))
                since, logged = time.perf_counter(), done
                log.write(kind="loss", step=done, **values, tokens_per_second=speed)
                bar.set_postfix({"loss": f"{values['total']:.3f}", "tok/s": speed})
                if in_log:
                    print_status(f"step {done} of {steps.stop}: loss {values['total']:.3f}, tok/s {speed}")
            bar.update()
            if evaluate is not None and (done % evaluate_every == 0 or last):
                began = time.perf_counter()
                evaluate(done, state)
                since += time.perf_counter() - began
            self.manager.save(done, args=ocp.args.StandardSave(state), force=last)
        bar.close()
        return state


@contextlib.contextmanager
def open_run(
    config: TrainingConfig, experiment: ExperimentConfig | None = None, *, sources: Mapping[str, str] | None = None,
    command: str = "", progress: bool | None = None, writers: Sequence[str] = (),
) -> Iterator[TrainingRun]:  # fmt: skip
    """Opens a run in a context that applies the model's mesh; an error before its first step removes a new folder.

    Args:
      config: the settings; they and the files of the texts were checked.
      experiment: has the model and its mesh; None = the model of the settings, without a mesh.
      sources: checksums of further files that the run reads, by name.
      command, progress, writers: see `TrainingRun`.

    Raises:
      ConfigError: texts that cannot be used, or a folder that cannot be written or has a run with other settings or
        inputs.
      KvjaxError: a model that cannot be loaded.
    """
    folder, shape, evaluation = Path(config.output), config.windows, config.evaluation
    if experiment is None:
        experiment = ExperimentConfig(model=ModelConfig(path=config.model.path, dtype=config.model.dtype))
    with removed_if_unused(folder):
        results.make_folder(folder)
        model = Session().model(experiment)
        texts = windows.load(config, model)
        held_out = texts.evaluation(evaluation.windows, shape.prompt_length + evaluation.new_tokens)
        checksums: JsonObject = {"texts": windows.checksums(config), "model": identity.of_weights(config.model.path)}
        checksums |= sources or {}
        with model.on_mesh(), checkpoints.manager(folder, config.checkpoint_every) as manager:
            start = manager.latest_step() or 0
            if start:
                before = results.read_json(folder / INPUTS) or {}
                changed = [f"contents of {name}" for name in checksums if before.get(name) != checksums[name]]
                check_same_past(config, start, past, changed)
            yield TrainingRun(
                config, model, describe(model, experiment.model), texts, shape.prompt_length + shape.new_tokens,
                held_out, checksums, manager, start, command, progress, writers,
            )  # fmt: skip
