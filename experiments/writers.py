"""Writers of metrics beside metrics.jsonl, each behind an extra: TensorBoard's event files, and Weights & Biases.

``--writers=tensorboard,wandb`` gives them every event that metrics.jsonl gets. Neither library is imported otherwise.
"""

import importlib
import importlib.util
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from absl import flags

from experiments.lines import numbered
from kvjax.arguments import did_you_mean
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

FLAG = "writers"
PROJECT = "kvjax"  # of Weights & Biases, unless $WANDB_PROJECT names another
RUN_ID = "wandb_run.txt"  # has the run's id, with which a run that goes on is found again


class Writer(Protocol):
    """Takes the numbers of a run."""

    def write(self, values: Mapping[str, float], step: int) -> None:
        """Writes numbers by their tags, such as ``loss/total``, at a step."""

    def close(self) -> None:
        """Ends the run."""


class TensorBoard:
    """Event files in the folder ``tensorboard`` of a run, by tensorboardX.

    Args:
      folder: of the run.
      name: of the run.
      config: the run's settings, as JSON would hold them.
      step: the step that the run goes on from; later ones of an earlier process are dropped.
    """

    def __init__(self, folder: Path, name: str, config: JsonObject, step: int):
        library = importlib.import_module("tensorboardX")
        self._writer = library.SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=step + 1 if step else None,
            filename_suffix=f".{os.getpid()}",  # files of the same second would be one
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; whether it goes to a server is for its own settings to say (``WANDB_MODE``).

    Args: see `TensorBoard`.
    """

    def __init__(self, folder: Path, name: str, config: JsonObject, step: int):
        library = importlib.import_module("wandb")
        kept = folder / RUN_ID
        if not (step and kept.is_file()):
            kept.write_text(uuid.uuid4().hex)
        project = None if os.environ.get("WANDB_PROJECT") else PROJECT
        self._run = library.init(
            project=project, name=name, config=config, dir=str(folder), id=kept.read_text(), resume="allow"
        )

    def write(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


#: Name -> the module that it needs, the extra that has it, and the class.
WRITERS: dict[str, tuple[str, str, Any]] = {
    "tensorboard": ("tensorboardX", "tensorboard", TensorBoard),
    "wandb": ("wandb", "wandb", WeightsAndBiases),
}


def define(values: flags.FlagValues) -> None:
    """Adds the flag that `selected` reads."""
    about = f"comma-separated writers of metrics in addition to metrics.jsonl, of {', '.join(WRITERS)}"
    flags.DEFINE_list(FLAG, [], about, flag_values=values)


def selected(values: flags.FlagValues) -> list[str]:
    """Returns the writers that a command line names.

    Raises:
      ConfigError: an unknown one, or one whose library is not installed.
    """
    names = list(values[FLAG].value or ())
    for name in names:
        if name not in WRITERS:
            hint = did_you_mean(name, WRITERS)
            raise ConfigError(f"--{FLAG}={name}: unknown writer; {hint}known writers: {', '.join(WRITERS)}.")
        module, extra, _ = WRITERS[name]
        if not _is_installed(module):
            raise ConfigError(f"--{FLAG}={name} needs {module}: pip install 'kvjax[{extra}]'.")
    return names


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # something forbids it to be imported
        return False


class Metrics:
    """Several writers as one.

    Args:
      names: of `WRITERS`.
      folder: of the run.
      name: of the run.
      config: the run's settings, as JSON would hold them.
      step: the step that the run goes on from.
    """

    def __init__(self, names: Sequence[str], folder: Path, name: str, config: JsonObject, step: int = 0):
        self._writers: list[Writer] = [WRITERS[each][2](folder, name, config, step) for each in names]

    def write(self, event: Mapping[str, Any]) -> None:
        """Writes the numbers of an event of metrics.jsonl; see `numbers`."""
        for step, values in numbers(event) if self._writers else ():
            for writer in self._writers:
                writer.write(values, step)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def copy(names: Sequence[str], folder: Path) -> None:
    """Gives what the folder of a finished run has in metrics.jsonl to writers, step by step.

    Args:
      names: of `WRITERS`.
      folder: that has config.json and metrics.jsonl.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    by_step: dict[int, dict[str, float]] = {}
    for _, line in numbered((folder / "metrics.jsonl").read_bytes()):
        for step, values in numbers(json.loads(line)):
            by_step.setdefault(step, {}).update(values)
    for name in names:
        writer: Writer = WRITERS[name][2](folder, config["name"], config, 0)
        for step in sorted(by_step):  # Weights & Biases drops a step that comes after a later one
            writer.write(by_step[step], step)
        writer.close()


def numbers(event: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, float]]]:
    """Yields the steps of an event, and the numbers of each by their tags.

    A tag is the event's kind, its policy if it has one, and the number's name. The entries of a list of numbers are at
    the steps 0, 1, ...; everything else is at the event's own step, or 0. What is no number is left out.
    """
    prefix = "/".join(str(event[key]) for key in ("kind", "policy") if key in event)
    values = {f"{prefix}/{name}": value for name, value in event.items() if _is_number(value) and name != "step"}
    if values:
        yield event.get("step", 0), values
    for name, entries in event.items():
        if isinstance(entries, list) and all(map(_is_number, entries)):
            yield from ((step, {f"{prefix}/{name}": value}) for step, value in enumerate(entries))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
