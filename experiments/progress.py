"""Progress of a long program: a bar on a terminal, a line for each item in a log."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tqdm.auto import tqdm

from kvjax.parallel import distributed

T = TypeVar("T")


def tracked(
    items: Sequence[T], *, unit: str, name: Callable[[T], str], show: bool | None, leave: bool = True
) -> Iterator[T]:
    """Yields items, and says on stderr which one is worked on.

    Args:
      items: what is worked on.
      unit: what an item is.
      name: of an item.
      show: whether to say anything; None = a bar on a terminal, and elsewhere a line when an item is done. Of several
        processes the first one says it.
      leave: whether the bar stays.
    """
    terminal = sys.stderr.isatty()
    show = show if distributed.is_first() else False
    bar = tqdm(items, unit=unit, disable=not (show or (show is None and terminal)), leave=leave)
    for number, item in enumerate(bar):
        bar.set_description(name(item))
        start = time.perf_counter()
        yield item
        if show is None and not terminal:
            took = time.perf_counter() - start
            print(f"{unit} {number + 1} of {len(items)}: {name(item)}, {took:.1f} s", file=sys.stderr, flush=True)
