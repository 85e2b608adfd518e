"""The stages of a run, such as compiling and generating: code that enters one names it, and a progress line shows it.

A context variable has the display, so that threads that measure several caches at once show their stages in one place.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

MOST = 3  # caches whose stages are shown at once


class Stages:
    """The stages that are entered now, by the cache that each is of.

    Args:
      changed: is called with this object after a stage is entered.
    """

    def __init__(self, changed: "Callable[[Stages], object]" = lambda stages: None) -> None:
        self._now: dict[str, str] = {}
        self._changed = changed

    def enter(self, name: str, stage: str) -> None:
        self._now[name] = stage
        self._changed(self)

    def leave(self, name: str) -> None:
        self._now.pop(name, None)

    def text(self, known: str = "") -> str:
        """Returns the stages in one line.

        Args:
          known: a name that is shown anyway, and not repeated where it is the only one.
        """
        now = list(self._now.items())
        if len(now) == 1 and now[0][0] in ("", known):
            return now[0][1]
        shown = [f"{name}: {stage}" if name else stage for name, stage in now[-MOST:]]
        return "; ".join(["...", *shown] if len(now) > MOST else shown)


_DISPLAY: ContextVar[Stages | None] = ContextVar("display", default=None)
_NAME: ContextVar[str] = ContextVar("name", default="")


def enter(stage: str) -> None:
    """Shows that a stage begins, if anything shows stages."""
    if (display := _DISPLAY.get()) is not None:
        display.enter(_NAME.get(), stage)


@contextlib.contextmanager
def during(stage: str) -> Iterator[None]:
    """Shows that a stage begins, and that it has ended."""
    enter(stage)
    try:
        yield
    finally:
        if (display := _DISPLAY.get()) is not None:
            display.leave(_NAME.get())


@contextlib.contextmanager
def of(name: str) -> Iterator[None]:
    """Stages that are entered inside are those of this cache."""
    before = _NAME.get()
    _NAME.set(name)
    try:
        yield
    finally:
        _NAME.set(before)
        if (display := _DISPLAY.get()) is not None:
            display.leave(name)


@contextlib.contextmanager
def shown_by(display: Stages) -> Iterator[None]:
    """Stages that are entered inside are shown by this display."""
    # No token is reset: a generator that is not finished may be closed in another context.
    before = _DISPLAY.get()
    _DISPLAY.set(display)
    try:
        yield
    finally:
        _DISPLAY.set(before)
