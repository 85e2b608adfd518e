"""The folder of a training that can be continued: its log, and the settings that it began with."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments import fields, results
from experiments.lines import divided, numbered
from experiments.writers import Metrics
from kvjax.errors import ConfigError, KvjaxError
from kvjax.parallel import distributed
from kvjax.typing import JsonObject

CONFIG, METRICS, CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


class Diverged(KvjaxError):
    """Training went to infinity; the last checkpoint before that is kept."""


class Log:
    """JSON lines, one an event; those of steps that are about to be repeated are dropped. The first process writes.

    Args:
      path: the file.
      start: the number of finished steps.
      config: the settings of the run.
      writers: names of further writers of metrics; see `experiments.writers`.
    """

    def __init__(self, path: Path, start: int, config: fields.Config, writers: Sequence[str] = ()):
        self.path = path if distributed.is_first() else None
        named = writers if distributed.is_first() else ()
        self._metrics = Metrics(named, path.parent, config.name, fields.to_dict(config), start)
        if self.path is None:
            return
        content = path.read_bytes() if path.is_file() else b""
        # The last line may not be whole.
        lines = divided(content[: content.rfind(b"\n") + 1])
        results.write(path, b"".join(line + b"\n" for line in lines if json.loads(line)["step"] <= start))

    def write(self, **event: Any) -> None:
        """Writes an event, with its ``kind`` and ``step``."""
        if self.path is None:
            return
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")
        if event["kind"] != "start":  # the environment
            self._metrics.write(event)

    def close(self) -> None:
        """Closes the further writers."""
        self._metrics.close()


def events(folder: Path, kind: str) -> list[JsonObject]:
    """Returns the events of a kind in the log of a run."""
    found = [json.loads(line) for _, line in numbered((folder / METRICS).read_bytes())]
    return [each for each in found if each["kind"] == kind]


@contextlib.contextmanager
def removed_if_unused(folder: Path) -> Iterator[None]:
    """Removes the folder of a run that ends in an error before its first step, or what the run made of it."""
    made = [each for each in (folder, folder / CHECKPOINTS) if not each.exists()]
    try:
        yield
    except KvjaxError:
        # There is no checkpoint to continue from.
        if made and distributed.is_first() and not (folder / METRICS).exists():
            shutil.rmtree(made[0], ignore_errors=True)
        raise


def check_same_past(
    config: fields.Config,
    step: int,
    past: Callable[[fields.Config], JsonObject],
    changed: Sequence[str] = (),
    advice: str = "",
) -> None:
    """Checks that a run is continued under settings that would have led to its last checkpoint.

    Args:
      config: the settings.
      step: the number of finished steps.
      past: settings -> those of them that determine the results of these steps.
      changed: names of inputs that have changed.
      advice: a further sentence of the message.

    Raises:
      ConfigError: what differs.
    """
    folder = Path(config.output)
    try:
        before, now = past(fields.from_dict(type(config), results.read_json(folder / CONFIG))), past(config)
    except (KeyError, TypeError):
        raise ConfigError(
            f"{folder} has checkpoints but no config.json of this version of kvjax; give another --config.output."
        ) from None
    if differing := [*(name for name in now if now[name] != before[name]), *changed]:
        raise ConfigError(
            f"{folder} contains a run at step {step} with different {', '.join(differing)}; give its settings to "
            f"continue it, or another --config.output.{advice}"
        )
