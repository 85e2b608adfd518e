"""Progress of a long program: a bar on a terminal; elsewhere a line for each item, longer stage and ten seconds."""

import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

from experiments.stages import Stages, shown_by
from kvjax.parallel import distributed

T = TypeVar("T")

LINE_SECONDS = 10.0  # between lines of what goes on
STAGE_SECONDS = 2.0  # after which a new stage has a line of its own


def tracked(
    items: Sequence[T],
    *,
    unit: str,
    name: Callable[[T], str],
    show: bool | None,
    leave: bool = True,
    seconds: Callable[[T], float] | None = None,
) -> Iterator[T]:
    """Yields items, and says on stderr which one is worked on, and in which stage it is (`experiments.stages`).

    Args:
      items: what is worked on.
      unit: what an item is.
      name: of an item.
      show: whether to say anything; None = a bar on a terminal, and elsewhere a line when an item is done, and before
        that one for a new stage, after `STAGE_SECONDS`, and one every `LINE_SECONDS`. Of several processes the first
        one says it.
      leave: whether the bar stays.
      seconds: that an item took, once it is done; None = since the one before it.
    """
    terminal = sys.stderr.isatty()
    show = show if distributed.is_first() else False
    bar = tqdm(items, unit=unit, disable=not (show or (show is None and terminal)), leave=leave)
    for number, item in enumerate(bar):
        bar.set_description(name(item))
        if show is False:
            yield item
            continue
        if show or terminal:
            with shown_by(Stages(functools.partial(_postfix, bar, name(item)))):
                yield item
            continue
        start, said = time.perf_counter(), f"{unit} {number + 1} of {len(items)}: {name(item)}"
        stages = Stages()
        with shown_by(stages), lines(functools.partial(_line, said, stages, name(item)), stages.text):
            yield item
        took = time.perf_counter() - start if seconds is None else seconds(item)
        print(f"{said}, {took:.1f} s", file=sys.stderr, flush=True)


def _postfix(bar: tqdm, name: str, stages: Stages) -> None:
    bar.set_postfix_str(stages.text(name))


def _line(said: str, stages: Stages, name: str, seconds: float) -> str:
    """Returns a line about an item that is worked on: ``policy 2 of 7: h2o, 12 s so far: compiling``."""
    stage = stages.text(name)
    return f"{said}, {seconds:.0f} s so far{f': {stage}' if stage else ''}"


@contextlib.contextmanager
def lines(text: Callable[[float], str], stage: Callable[[], str] = str) -> Iterator[None]:
    """Prints a line on stderr every `LINE_SECONDS`, and within `STAGE_SECONDS` of a new stage, for a log.

    Args:
      text: seconds since the beginning -> the line.
      stage: the stage now; empty = none.
    """
    start, ended = time.perf_counter(), threading.Event()

    def run() -> None:
        printed, last = start, ""
        while not ended.wait(min(LINE_SECONDS, STAGE_SECONDS)):
            now, current = time.perf_counter(), stage()
            if now - printed >= 0.99 * LINE_SECONDS or current not in ("", last):
                print(text(now - start), file=sys.stderr, flush=True)
                printed, last = now, current

    thread = threading.Thread(target=run, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def counted(total: int, *, done: int, unit: str, name: str, show: bool | None) -> Iterator[Callable[[], object]]:
    """Yields a function to be called when one more item is done; says how many are, on stderr.

    Args:
      total: the number of items.
      done: the number of those that are done before.
      unit: what an item is.
      name: of all of them.
      show: whether to say anything; None = a bar on a terminal, and elsewhere a line every `LINE_SECONDS`.
    """
    terminal = sys.stderr.isatty()
    show = show if distributed.is_first() else False
    with tqdm(
        total=total, initial=done, desc=name, unit=unit, disable=not (show or (show is None and terminal)), leave=False
    ) as bar:
        if show is not None or terminal:
            yield bar.update
            return
        count = [done]

        def update() -> None:
            count[0] += 1

        with lines(lambda seconds: f"{name}: {unit} {count[0]} of {total}, {seconds:.0f} s so far"):
            yield update


def print_status(text: str) -> None:
    """Prints a line on stderr; of several processes, the first one does."""
    if distributed.is_first():
        print(text, file=sys.stderr, flush=True)
