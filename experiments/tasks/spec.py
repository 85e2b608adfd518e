"""A task as a config names it, before it is made for a model."""

import abc
from pathlib import Path

from experiments.tasks.base import Asked, Setting
from kvjax.errors import ConfigError


class TaskSpec(abc.ABC):
    """A task and its settings, as a frozen dataclass."""

    def files(self, folder: Path | None) -> list[Path]:
        """The files that it reads.

        Raises:
          ConfigError: one is not there, or `folder` is None and the task has published files.
        """
        return []

    @abc.abstractmethod
    def make(self, setting: Setting) -> Asked:
        """Reads or generates the questions.

        Raises:
          ConfigError: a damaged file, or a setting that cannot work.
        """


def at_least_one(task: str, **settings: int | None) -> None:
    """Refuses numbers below 1; None is for what is not limited.

    Raises:
      ConfigError: with the first one.
    """
    for name, value in settings.items():
        if value is not None and value < 1:
            raise ConfigError(f"task {task}: {name}={value} should be at least 1.")


def too_long(text: str, most: int, setting: Setting) -> bool:
    """Whether a text has more than `most` tokens."""
    # A character is at most a token or so; most texts need no tokenizer to be seen to fit.
    return len(text) > most and len(setting.tokenizer.encode(text)) > most


def room(task: str, new_tokens: int, setting: Setting) -> int:
    """The tokens that a question may have before an answer of `new_tokens`.

    Raises:
      ConfigError: there is no room for a question.
    """
    left = setting.max_length - new_tokens
    if left < 2:
        raise ConfigError(
            f"task {task}: with {new_tokens} new tokens, no question fits in the model's {setting.max_length} "
            "tokens; lower new_tokens."
        )
    return left


def check_length(task: str, length: int, new_tokens: int, setting: Setting) -> None:
    """Checks that a context and question of `length` tokens leave room for an answer.

    Raises:
      ConfigError: they do not.
    """
    if length + new_tokens > setting.max_length:
        raise ConfigError(
            f"task {task}: a length of {length} and {new_tokens} new tokens exceed the model's {setting.max_length}; "
            "lower length."
        )


def folder_of(task: str, folder: Path | None) -> Path:
    """The folder of the published files.

    Raises:
      ConfigError: it was not given, or there is none.
    """
    if folder is None:
        raise ConfigError(f"task {task} reads published files; give their folder as --config.tasks.folder=FOLDER.")
    if not folder.is_dir():
        raise ConfigError(f"tasks.folder={str(folder)!r} is not a folder.")
    return folder
