"""The numbers that attention moves between slow and fast memory, beside a lower bound, and the passes over keys."""

import math
from typing import NamedTuple

from kvjax.policies.base import Evict


class Traffic(NamedTuple):
    """The numbers that attention moves for one query head.

    Attributes:
      prefill: of a prompt.
      prefill_statistics: what a policy's statistics of a prompt add.
      prefill_causal: of a prompt whose tiles after the diagonal are skipped.
      prefill_statistics_causal: what statistics add there.
      decode: of a token. Statistics add nothing, because the keys are there.
      bound: the order of the lower bound of a prompt without its constant, max(n·D, min(n²D²/M, n²D/√M)) (Saha and Ye,
        arXiv:2402.07443): no share of an optimum.
    """

    prefill: int
    prefill_statistics: int
    prefill_causal: float
    prefill_statistics_causal: float
    decode: int
    bound: float


def attention_traffic(tokens: int, dim: int, *, tile: int, memory: int, slots: int) -> Traffic:
    """Counts what kernels move that keep a tile of queries in fast memory and read all keys and values for each.

    Args:
      tokens: of a prompt.
      dim: features of a head.
      tile: rows of a tile of queries.
      memory: numbers that the fast memory holds.
      slots: of the cache while decoding.
    """
    size, tiles = tokens * dim, math.ceil(tokens / tile)
    causal = tiles / 2
    bound = max(size, min(size**2 / memory, tokens**2 * dim / math.sqrt(memory)))
    return Traffic(
        prefill=(2 + 2 * tiles) * size, prefill_statistics=(1 + tiles) * size, prefill_causal=(2 + 2 * causal) * size,
        prefill_statistics_causal=(1 + causal) * size, decode=2 * slots * dim, bound=bound,
    )  # fmt: skip


def passes_over_keys(policy: Evict) -> int:
    """Returns how often a policy's prompt reads the keys (FuseMax, arXiv:2406.10491).

    One pass computes attention. A statistic of probabilities takes another one, since a probability is known when the
    sum of its row is. Softmax as it is written takes three: the maximum, the sum, the quotients.
    """
    return 2 if any(each.needs_attention for each in policy.needs) else 1


class PartBytes(NamedTuple):
    """The bytes that attention over slots on several devices moves, for a layer, a row and each further device.

    None of them depends on the length of the text (Infinite-LLM, arXiv:2401.02669).

    Attributes:
      out: the queries, to the device.
      back: outputs, maxima and sums of its part in float32.
      victim: the priority, the position and the slot of the candidate that each KV head would evict.
    """

    out: int
    back: int
    victim: int


def part_bytes(heads: int, kv_heads: int, dim: int, width: int = 2) -> PartBytes:
    """Returns the bytes of attention in parts.

    Args:
      heads: query heads.
      kv_heads: KV heads.
      dim: features of a head.
      width: bytes of a number of queries.
    """
    return PartBytes(heads * dim * width, heads * (dim + 2) * 4, kv_heads * 12)
