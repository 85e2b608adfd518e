"""Checks of the values of JSON files that describe a model, and the bounds that they must be within.

A damaged or hostile file can hold any value of any size for any key. Every number is compared with its bounds before
anything is allocated, looped over or computed from it. The bounds are far beyond every published decoder.
"""

from collections.abc import Sequence
from typing import Any, TypeGuard, TypeVar

from kvjax.errors import ConfigError, shown

Json = dict[str, Any]  # a JSON object
T = TypeVar("T", bound=str)

MAX_SIZE = 1 << 26  # features, tokens of a vocabulary, positions
MAX_LAYERS = 1000
MAX_ENTRIES = 1 << 17  # layers times heads, and layers times experts, each of which can be a tensor of its own
MAX_ELEMENTS = 1 << 40  # of one parameter
MAX_ID = (1 << 31) - 1  # of tokens, which are int32
SMALLEST, LARGEST = 1e-20, 1e11  # of numbers that are not whole; the largest are bases of rotary frequencies
MAX_EPSILON = 1.0  # of norms


def is_whole(value: object, minimum: int, maximum: int) -> TypeGuard[int]:
    """Returns whether a JSON value is a whole number from `minimum` to `maximum`; true and 1.0 are none."""
    return isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum


def is_number(value: object, minimum: float = SMALLEST, maximum: float = LARGEST) -> TypeGuard[float]:
    """Returns whether a JSON value is a number from `minimum` to `maximum`; NaN is none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and minimum <= value <= maximum


def choice(where: str, key: str, value: object, valid: Sequence[T]) -> T:
    """Returns a text that is one of a few.

    Args:
      where: the file and the object in it, for the message.
      key: the key of the value.
      value: the value.
      valid: the texts.

    Raises:
      ConfigError: if it is none of them.
    """
    for each in valid:
        if each == value:
            return each
    raise ConfigError(f"{where}: {key} is {shown(value)}; valid: {', '.join(valid)}.")


def json_object(where: str, key: str, value: object) -> Json:
    """Returns an object, empty for null.

    Args:
      where: see `choice`.
      key: see `choice`.
      value: see `choice`.

    Raises:
      ConfigError: if it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {key} must be an object or null, but is {shown(value)}.")
    return value
