"""One line that says what a result, a layer or a cache is: shapes and dtypes in place of the numbers of its arrays."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

MAX_TEXT = 60  # characters of a text or of another value's own repr
MAX_KINDS = 4  # different items of a sequence that are listed


def one_line(result: object) -> str:
    """Returns the `repr` of a dataclass or a named tuple of arrays, as in ``Generation(tokens=int32[2, 64], ...)``.

    Attributes that are None or empty mappings, private ones, and those that a dataclass does not show, are left out.
    """
    fields = getattr(result, "__dataclass_fields__", {})
    names = getattr(result, "_fields", None) or [name for name, field in fields.items() if field.repr]
    shown = {name: getattr(result, name) for name in names if not name.startswith("_")}
    empty = {name for name, value in shown.items() if value is None or (isinstance(value, Mapping) and not value)}
    parts = [f"{name}={described(value)}" for name, value in shown.items() if name not in empty]
    return f"{type(result).__name__}({', '.join(parts)})"


def described(value: Any) -> str:
    """Returns an array's dtype and shape, and of other values what they hold, in one line."""
    if isinstance(value, np.generic | bool | int | float):
        return repr(value.item() if isinstance(value, np.generic) else value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if isinstance(value, bytes):
        return f"bytes[{len(value)}]"
    if isinstance(value, str):
        return _short(repr(value))
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_short(str(key))}: {described(each)}' for key, each in value.items())}}}"
    if type(value) in (list, tuple):
        return f"{'[' if isinstance(value, list) else '('}{items(value)}{']' if isinstance(value, list) else ')'}"
    own = " ".join(repr(value).split())
    return own if hasattr(value, "__dataclass_fields__") or hasattr(value, "_fields") else _short(own)


def items(values: Sequence[Any]) -> str:
    """Describes the items of a sequence; those in a row that are alike are described once."""
    if len(values) > MAX_KINDS and all(isinstance(each, int | float) for each in values):
        return f"{described(values[0])}, {described(values[1])}, ... {len(values)} in all"
    runs: Iterator[tuple[str, int]] = (
        (text, sum(1 for _ in run)) for text, run in itertools.groupby(map(described, values))
    )
    parts = [text if count == 1 else f"{count} x {text}" for text, count in itertools.islice(runs, MAX_KINDS)]
    more = next(runs, None)
    return ", ".join(parts) + (f", ... {len(values)} in all" if more else "")


def _short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."
