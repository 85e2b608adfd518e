"""Numbers with units, as text."""

import math

SI_PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float | None, unit: str) -> str:
    """Formats a value with an SI prefix, such as ``8.56 GB/s``.

    Args:
      value: the value; None or a value that is not finite is formatted as ``-``.
      unit: the unit.
    """
    if value is None or not math.isfinite(value):
        return "-"
    for factor, prefix in SI_PREFIXES:
        if abs(value) >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def size(count: float | None) -> str:
    """Formats a number of bytes in decimal units, such as ``8.56 GB``.

    Args:
      count: the number of bytes; None if unknown.
    """
    return si(count, "B")


def parse_size(text: str) -> int:
    """Returns the number of bytes that a text such as ``2GB``, ``500 MB`` or ``4096`` says, in decimal units.

    Raises:
      ValueError: it is not of this form, or negative.
    """
    number = text.strip().removesuffix("B").strip()
    factor = next((factor for factor, prefix in SI_PREFIXES if number.lower().endswith(prefix.lower())), 1.0)
    made = float(number[:-1] if factor > 1 else number) * factor
    if not (math.isfinite(made) and made >= 0):
        raise ValueError(f"{text!r} is not a number of bytes")
    return int(made)
