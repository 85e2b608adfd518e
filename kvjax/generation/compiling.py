"""Says that a program is compiled, where that takes more than `PATIENCE`: on a terminal, elsewhere to `logging`.

A call of a jitted function compiles it, or does not; its body runs only if it does. The caller names the program with
`announced`, and the body calls `traced`.
"""

import contextlib
import contextvars
import logging
import sys
import threading
import time
from collections.abc import Iterator

from tqdm.auto import tqdm

from kvjax.cache.planning.layout import CacheLayout, Phase
from kvjax.parallel import distributed

PATIENCE = 2.0  # seconds after which a program is named

log = logging.getLogger(__name__)


class _Call:
    """A call of a jitted function.

    Attributes:
      what: the name of the program.
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._start = 0.0
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._said = self._ended = False

    def begin(self) -> None:
        """The function is traced."""
        if self._timer is None:
            self._start = time.perf_counter()
            self._timer = threading.Timer(PATIENCE, self._say)
            self._timer.daemon = True
            self._timer.start()

    def end(self, failed: bool) -> None:
        """The call has returned, or has raised an error."""
        if self._timer is not None:
            self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._said:
                seconds = time.perf_counter() - self._start
                _write(f"{'not compiled' if failed else 'compiled'}: {self.what}, {seconds:.0f} s")

    def _say(self) -> None:
        with self._lock:
            if not self._ended:
                self._said = True
                _write(f"compiling {self.what} ...")


def _write(text: str) -> None:
    if not distributed.is_first():
        return
    if sys.stderr.isatty():
        # Above a progress bar, if there is one.
        tqdm.write(text, file=sys.stderr)
    else:
        log.info(text)


_current: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("call", default=None)


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Names the program of the jitted functions that are called within.

    Args:
      what: the name, as in "compiling {what} ...".
    """
    call = _Call(what)
    token = _current.set(call)
    failed = True
    try:
        yield
        failed = False
    finally:
        _current.reset(token)
        call.end(failed)


def traced() -> None:
    """Is called by the body of a function that jit traces."""
    if (call := _current.get()) is not None:
        call.begin()


def prompts_of(layout: CacheLayout, width: int) -> str:
    """Returns the name of the program for prompts of up to `width` tokens."""
    return f"{_policies(layout.prompt)} for prompts to {width:,} tokens"


def tokens_of(phase: Phase) -> str:
    """Returns the name of the program for the tokens that follow a prompt."""
    capacity = max(group.capacity for layer in phase for group in layer)
    return f"{_policies(phase)} for new tokens, with {capacity:,} slots"


def _policies(phase: Phase) -> str:
    return " and ".join(dict.fromkeys(group.policy.name for layer in phase for group in layer))
