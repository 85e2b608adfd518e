"""Errors that callers can cause. Each message is one paragraph: what is wrong, what was given, what would be valid."""

from collections.abc import Sequence
from typing import Any

LONGEST_MESSAGE = 4000  # characters of a message
LONGEST = 200  # characters of a value that a message shows


def shown(value: object, longest: int = LONGEST) -> str:
    """Returns the `repr` of a value for a message, shortened to `longest` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more digits than Python prints, or endless nesting
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def without_middle(text: str, longest: int) -> str:
    """Returns a text; if it is longer than `longest` characters, only its beginning and its end."""
    return text if len(text) <= longest else f"{text[: longest // 2]} ... {text[-longest // 2 :]}"


class KvjaxError(ValueError):
    """Base class of the errors that kvjax raises for invalid arguments, files and configurations.

    What was given may have millions of characters: of a message longer than `LONGEST_MESSAGE` the middle is left out.
    """

    def __init__(self, message: str = ""):
        super().__init__(without_middle(message, LONGEST_MESSAGE))


class PolicyError(KvjaxError):
    """An invalid policy, budget or scope. Raised when it is built, or once the lengths of a batch are known."""


class StorageError(KvjaxError):
    """An invalid storage or codec. Raised when it is built, or once shapes are known."""


class CodecError(StorageError, PolicyError):
    """A user's own codec whose functions raise an error or do not fit each other."""


class SelectionError(PolicyError):
    """An invalid selection, or one that cannot be combined with the policy, the storage or the kind of positions."""


class InputError(KvjaxError):
    """Tokens, lengths or options of a call that do not fit the model."""


class NonFiniteError(KvjaxError):
    """A log-probability that is NaN or infinite, because the model's logits are.

    No finite logits have one: log-probabilities are of the logits before any filter, so that a token which a sampler
    excludes has a finite one, and so has a token whose probability is 0 in float32. The other rows of the batch are
    computed to their end, and have the results that they have without this one.

    Attributes:
      rows: the rows of the batch that have ended so.
      result: what the function would have returned. Of these rows it has the tokens before the first log-probability
        that is not finite, or, if the text was given, log-probabilities that are not finite.
    """

    def __init__(self, message: str, *, rows: Sequence[int] = (), result: Any = None):
        super().__init__(message)
        self.rows, self.result = tuple(rows), result


class ConfigError(KvjaxError):
    """An experiment or model configuration that is unknown or contradictory."""


class CheckpointError(KvjaxError):
    """A checkpoint that is missing or damaged, or whose tensors do not match its configuration."""
