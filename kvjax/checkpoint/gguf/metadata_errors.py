"""Errors of metadata whose values are of other types than the format has."""

import functools
from collections.abc import Callable
from typing import TypeVar

from kvjax.checkpoint.gguf.container import Container
from kvjax.checkpoint.readers import MAX_REASON
from kvjax.errors import CheckpointError, KvjaxError

T = TypeVar("T")
#: What Python and the libraries raise for a text in place of a number, an id beyond the vocabulary, and the like.
_KINDS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


def checked(read: Callable[[Container], T]) -> Callable[[Container], T]:
    """Returns a function of a file that raises CheckpointError where its metadata are of wrong types."""

    @functools.wraps(read)
    def reads(container: Container) -> T:
        try:
            return read(container)
        except KvjaxError:
            raise
        except _KINDS as error:
            reason = f"{type(error).__name__}: {error}"[:MAX_REASON].encode("utf-8", "backslashreplace").decode()
            raise CheckpointError(f"{container.path} is damaged: its metadata cannot be read ({reason}).") from None

    return reads
