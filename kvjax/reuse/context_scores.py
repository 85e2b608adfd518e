"""How much of a chunk's cache depends on chunks that are missing or moved: Cache-Craft's CCI and CFO."""

import collections
import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class ContextScore(NamedTuple):
    """The dependence of a chunk's cache on chunks that are missing or moved (arXiv:2502.15734, section 3).

    Attributes:
      cci: the chunk's context impact, from 0.5 to 1: how much its tokens attended to other chunks.
      beta: the share of this attention that was on chunks that are there again.
      gamma: the share of pairs of these chunks whose order is another one.
      cfo: the cache fix overhead, from 0 to 1: the share of tokens to recompute.
    """

    cci: float
    beta: float
    gamma: float
    cfo: float

    def count(self, length: int) -> int:
        """Returns the number of tokens to recompute of a chunk of `length` tokens."""
        return math.ceil(self.cfo * length - 1e-9)


def _numbered(chunks: Sequence[Hashable]) -> list[tuple[Hashable, int]]:
    seen: collections.Counter[Hashable] = collections.Counter()
    found = []
    for each in chunks:
        found.append((each, seen[each]))
        seen[each] += 1
    return found


def context_score(
    inter: np.ndarray,
    intra: np.ndarray,
    *,
    length: int,
    old: Sequence[Hashable],
    new: Sequence[Hashable],
    lengths: Mapping[Any, int],
    alpha: float,
) -> ContextScore:
    """Compares the chunks before a cache with those that were there when it was computed.

    Args:
      inter: [old chunks, L], see `kvjax.reuse.Variant`.
      intra: [L].
      length: the tokens of the chunk.
      old: the chunks before it when it was computed.
      new: the chunks before it now.
      lengths: the tokens of each chunk before.
      alpha: a factor of the share of tokens, to be calibrated.
    """
    inter = np.asarray(inter, np.float64).reshape(len(old), len(intra))
    sizes = np.array([lengths[each] for each in old], np.float64)
    outside = float(np.mean((inter / (sizes[:, None] * length)).sum(axis=0))) if len(old) else 0.0
    inside = float(np.mean(np.asarray(intra, np.float64))) / length**2
    cci = 1 / (1 + math.exp(-outside / inside))
    # A chunk that occurs several times is known by its number too.
    old, new = _numbered(old), _numbered(new)
    present = set(new)
    if len(old):
        common = np.array([each in present for each in old])
        beta = float(inter[common].sum() / inter.sum()) if inter.any() else 1.0
    else:
        # A chunk that came first lacks all that is before it now. Other implementations of the paper say 1, and never
        # repair such a chunk.
        beta = 0.0 if new else 1.0
    place = {each: number for number, each in enumerate(new)}
    kept = [place[each] for each in old if each in present]
    pairs = list(itertools.combinations(kept, 2))
    gamma = sum(one > two for one, two in pairs) / len(pairs) if pairs else 0.0
    if len(old) and not inter.any():
        # A chunk that depended on none, where windows hide all that is before it, lacks nothing in any order.
        return ContextScore(cci, beta, gamma, 0.0)
    return ContextScore(cci, beta, gamma, min(1.0, alpha * cci * (1 - beta * (1 - gamma))))
