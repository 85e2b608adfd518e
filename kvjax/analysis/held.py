"""The tokens that a cache holds: their positions and the statistics that the policy keeps of them, on the host."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kvjax.cache.planning.layout import CacheLayout, kept
from kvjax.cache.state import KVState, Layer
from kvjax.errors import InputError
from kvjax.parallel import distributed
from kvjax.summary import one_line

#: Statistics in words, those that say most about a slot first; `kvjax.numerics.statistics` defines them.
WORDS = {
    "mass": "accumulated attention", "last": "attention of the last query",
    "above": "number of queries that gave it at least the uniform share", "mass_sq": "accumulated squared attention",
    "fetched": "number of queries that chose it", "last_fetched": "last query that chose it",
    "count": "number of queries that saw it",
}  # fmt: skip
BEGINNINGS = {"tail[": "attention of the prompt's last queries", "decayed(": "exponential average of attention"}


@dataclasses.dataclass(frozen=True)
class HeldTokens:
    """The tokens that the cache of one row holds, in L layers and K KV heads.

    Attributes:
      layers: the numbers of the L layers.
      positions: for each layer and KV head [n] int32, ascending.
      statistics: for each layer and KV head, statistic name -> [n] float32, in the order of `positions`. Only what has
        one number per slot is here; a head whose policy keeps no statistic has none.
      prompt: the number of tokens of the prompt.
      length: the number of tokens that the cache has seen, those of the prompt among them.
    """

    layers: tuple[int, ...]
    positions: Sequence[Sequence[np.ndarray]]
    statistics: Sequence[Sequence[Mapping[str, np.ndarray]]]
    prompt: int
    length: int

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def heads(self) -> int:
        """K, the number of KV heads."""
        return len(self.positions[0])


def held_tokens(
    layout: CacheLayout | None, state: KVState, row: int = 0, layers: Sequence[int] | None = None
) -> HeldTokens:
    """Returns the tokens that a row of a cache holds, copied to the host.

    Of several processes, all must call it.

    Args:
      layout: of the cache, such as `kvjax.generation.generate.Generation.layout`.
      state: the cache.
      row: the number of the row.
      layers: the numbers of the layers; None = all.

    Raises:
      InputError: there is no such layer, or no layout.
    """
    length, prompt = distributed.to_host((state.length, state.prompt))
    count = len(state.layers)
    numbers = range(count) if layers is None else layers
    positions, statistics = [], []
    for layer in numbers:
        positions.append(kept(layout, state, layer, len(length))[row])
        assert layout is not None  # `kept` has raised an error
        statistics.append(_statistics(layout, state.layers[layer], layer, row))
    return HeldTokens(
        tuple(int(layer) % count for layer in numbers), positions, statistics, int(prompt[row]), int(length[row])
    )


def in_words(statistic: str) -> str:
    """Returns what a statistic is, for readers; its own name if it is none of kvjax's."""
    return WORDS.get(statistic) or next(
        (words for beginning, words in BEGINNINGS.items() if statistic.startswith(beginning)), statistic
    )


def shades(values: np.ndarray) -> np.ndarray:
    """Returns the share of the other values that each value exceeds, [n] uint8, where 255 stands for all of them.

    Attention is divided so unevenly among tokens that shades in proportion to it would show a few of them alone.

    Args:
      values: [n] float32.
    """
    below = np.searchsorted(np.sort(values), values, side="left")
    return np.round(255 * below / max(len(values) - 1, 1)).astype(np.uint8)


def check_row(row: int, rows: int) -> int:
    """Returns the number of a row, counted from the first.

    Raises:
      InputError: there is no such row.
    """
    if isinstance(row, bool) or not isinstance(row, int | np.integer) or not -rows <= row < rows:
        raise InputError(f"row must be a whole number from 0 to {rows - 1}; got {row!r}.")
    return int(row) % rows


def _statistics(layout: CacheLayout, layer: Layer, number: int, row: int) -> list[dict[str, np.ndarray]]:
    """Returns the statistics of each KV head's live slots by position: name -> [n] float32."""
    found: dict[int, dict[str, np.ndarray]] = {}
    order_of = {name: place for place, name in enumerate(WORDS)}
    for group, slots in zip(layout.decode[number], layer, strict=True):
        # [B, k, S] each
        numbers = {name: values for name, values in slots.stats.items() if values.ndim == 3}
        position, numbers = distributed.to_host((slots.position, numbers))
        names = sorted(numbers, key=lambda name: (order_of.get(name, 0), name))
        for place, head in enumerate(group.heads or range(layout.kv_heads)):
            # [S]
            own = position[row, place]
            order = np.argsort(own)[np.sum(own < 0) :]
            found[head] = {name: np.asarray(numbers[name][row, place][order], np.float32) for name in names}
    return [found[head] for head in sorted(found)]
