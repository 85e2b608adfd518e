"""Errors that callers can cause. Each message is one paragraph: what is wrong, what was given, what would be valid."""

LONGEST = 200  # characters of a value that a message shows


def shown(value: object, longest: int = LONGEST) -> str:
    """Returns the `repr` of a value for a message, shortened to `longest` characters."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of more digits than Python prints, or endless nesting
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


class KvjaxError(ValueError):
    """Base class of the errors that kvjax raises for invalid arguments, files and configurations."""


class PolicyError(KvjaxError):
    """An invalid policy, budget or scope. Raised when it is built, or once the lengths of a batch are known."""


class StorageError(KvjaxError):
    """An invalid storage or codec. Raised when it is built, or once shapes are known."""


class SelectionError(PolicyError):
    """An invalid selection, or one that cannot be combined with the policy, the storage or the kind of positions."""


class InputError(KvjaxError):
    """Tokens, lengths or options of a call that do not fit the model."""


class ConfigError(KvjaxError):
    """An experiment or model configuration that is unknown or contradictory."""


class CheckpointError(KvjaxError):
    """A checkpoint that is missing or damaged, or whose tensors do not match its configuration."""
