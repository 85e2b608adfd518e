"""Answers the questions of a config's tasks under one cache, and goes on from the answers that there are."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import stages
from experiments.config import TasksConfig
from experiments.progress import counted
from experiments.tasks import registry
from experiments.tasks.base import Answer, Asked, Setting
from experiments.tasks.journal import Journal, key_of
from kvjax.attention import Implementation
from kvjax.cache import CacheSpec
from kvjax.errors import ConfigError
from kvjax.lm_eval.runner import Runner
from kvjax.models.model import Model

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of a function in a policy's text, which differs between processes


def check(config: TasksConfig) -> None:
    """Refuses tasks that are not known, and files that are not there, before anything is loaded.

    Raises:
      ConfigError: see `registry.build`.
    """
    files_of(config)


def files_of(config: TasksConfig) -> list[Path]:
    """The files that a config's tasks read.

    Raises:
      ConfigError: see `registry.build`; or a file is not there.
    """
    if config.questions == 0:
        raise ConfigError("tasks.questions must be at least 1, or none for all questions; got 0.")
    folder = None if config.folder is None else Path(config.folder)
    return [path for name in config.names for path in registry.build(name).files(folder)]


def make(config: TasksConfig, model: Model, seed: int) -> dict[str, Asked]:
    """The questions of each task.

    Raises:
      ConfigError: as `check`; a damaged file, a setting that cannot work, or a model without a tokenizer.
    """
    if not config.names:
        return {}
    if model.tokenizer is None:
        raise ConfigError(
            "tasks are text, and the model has no tokenizer; give --config.model.path=FOLDER, or "
            "--config.tasks.names=none."
        )
    folder = None if config.folder is None else Path(config.folder)
    setting = Setting(folder, config.questions, seed, model.tokenizer, model.config.max_positions)
    return {name: registry.build(name).make(setting) for name in config.names}


def answers(
    model: Model,
    spec: CacheSpec,
    asked: Mapping[str, Asked],
    *,
    rows: int,
    journal: Journal,
    texts: str = "",
    prefill_block: int | None = None,
    implementation: Implementation = "auto",
    progress: bool | None = None,
) -> dict[str, list[Answer]]:
    """The answers to each task's questions, in their order.

    Args:
      model: with a tokenizer, and with the calibration of a storage that needs one.
      spec: policy, storage and selection.
      asked: the questions of each task.
      rows: questions that are answered at once.
      journal: has the answers that there are, and is given each new one as soon as it is there.
      texts: what a config calls its caches. Functions of a user's own in `spec` are told apart by it, between runs.
      prefill_block: see `kvjax.CacheOptions`.
      implementation: see `kvjax.CacheOptions`.
      progress: see `experiments.progress.counted`.
    """
    assert model.tokenizer is not None  # `make` refuses models without
    options: dict[str, Any] = {"prefill_block": prefill_block, "implementation": implementation}
    runner = Runner(model, spec, rows=rows, max_length=model.config.max_positions, **options)
    found = {}
    shown, functions = _ADDRESS.subn("", repr(spec))
    for name, each in asked.items():
        key = key_of(shown, texts if functions else "", each.content)
        known = journal.known(key)
        wanted = [number for number in range(len(each)) if number not in known]
        with counted(len(each), done=len(known), unit="question", name=name, show=progress) as answered:

            def done(number: int, answer: Answer, key: str = key, answered: Callable[[], object] = answered) -> None:
                journal.add(key, number, answer)
                answered()

            if wanted:
                stages.enter(f"{name}, {len(wanted)} of {len(each)} questions")
                each.ask(runner, model.tokenizer, wanted, done)
        found[name] = [known[number] for number in range(len(each))]
    return found
