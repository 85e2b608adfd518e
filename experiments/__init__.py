"""Thin programs over the library: run, sweep, bench."""

import importlib.util

#: What programs here import first, of the extra ``experiments``.
_MODULES = ("absl", "matplotlib", "ml_collections", "optax")


def _missing() -> list[str]:
    """Returns the modules that are not installed."""
    return [module for module in _MODULES if importlib.util.find_spec(module) is None]


if _missing():
    raise ImportError(f"experiments need {', '.join(_missing())}: pip install 'kvjax[experiments]'")
