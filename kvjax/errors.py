"""Errors that a user can cause: one paragraph that says what is wrong, what was given and what is valid."""


class KvjaxError(ValueError):
    """Base of every error that kvjax raises on purpose for something the caller gave."""


class PolicyError(KvjaxError):
    """A policy, budget or scope that cannot work (raised when built, or once the lengths are known)."""


class StorageError(KvjaxError):
    """A storage or a codec that cannot work (raised when built, or once shapes are known)."""


class SelectionError(PolicyError):
    """A selection that cannot work, or does not compose with a policy, a storage or a way of placing positions."""


class InputError(KvjaxError):
    """Tokens, lengths or settings of a call that do not fit the model."""


class ConfigError(KvjaxError):
    """An experiment's or a model's configuration that is unknown or contradicts itself."""


class CheckpointError(KvjaxError):
    """A checkpoint that is missing, damaged or does not hold what its config promises."""
