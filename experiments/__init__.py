"""Thin programs over the library: run, sweep, bench."""

import importlib.util
import sys

#: What programs here import first, of the extra ``experiments``.
_MODULES = ("absl", "jinja2", "matplotlib", "ml_collections", "optax")


def _is_missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except (ImportError, ValueError):  # something forbids it to be imported
        return True


if _missing := list(filter(_is_missing, _MODULES)):
    _message = f"experiments need {', '.join(_missing)}: pip install 'kvjax[experiments]'"
    if sys.argv[:1] == ["-m"]:  # `python -m experiments.run`, which would print a traceback
        sys.exit(f"error: {_message}")
    raise ImportError(_message)
