"""Salient tokens in more bits than others (ZipCache, arXiv:2405.14256)."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.products.codes import Affine
from kvjax.storage.base import Parts, Storage, factory
from kvjax.storage.integer import Integer
from kvjax.storage.kivi import Channels
from kvjax.storage.layouts import Segments
from kvjax.storage.packing import MAX_BITS
from kvjax.storage.rounding import divide
from kvjax.storage.scaled import SCALE, Scaled
from kvjax.storage.side import PromptView, Shapes, Side

Array = jax.Array

WHOLE = 2**16  # channels of a group: all
MIN_RATIO = 1e-6


@dataclasses.dataclass(frozen=True)
class ChannelRoots(Side):
    """The divisors of the channels of values: sqrt(max |v_c|) over the prompt's tokens, 1 where that is 0.

    ZipCache, arXiv:2405.14256, section 4.1.
    """

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {SCALE: ((dim,), jnp.dtype(dtype))}

    def prepare(self, view: PromptView) -> dict[str, Array]:
        # [B, K, D]
        maximum = jnp.max(jnp.where(view.real[:, None, :, None], jnp.abs(view.own), 0.0), axis=2)
        return {SCALE: jnp.where(maximum > 0, jnp.sqrt(maximum), 1.0)}


@dataclasses.dataclass(frozen=True)
class Divided(Scaled):
    """Encodes x / c and decodes to y·c, where c is a side with an entry for each channel; see `Scaled`."""

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return self.codec.encode(divide(x, _scale(side)), None, dtype)

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return self.codec.decode(parts, None, dim) * _scale(side)

    def affine(self, parts: Parts, side: Parts | None, dim: int) -> Affine | None:
        made = self.codec.affine(parts, None, dim)
        return made and made.within(lambda q: q * _scale(side), lambda a: a * _scale(side))


def _scale(side: Parts | None) -> Array:
    assert side is not None
    return side[SCALE].astype(jnp.float32)


@factory
def zipcache(high: int = 4, low: int = 2, ratio: float = 0.6, window: int = 100) -> Storage:
    """Holds tokens of high mean attention in more bits than others (ZipCache, arXiv:2405.14256, section 4).

    The prompt is a segment, and so is every `window` tokens that are decoded. When a segment ends, each of its tokens
    is encoded once: a share of them, those of the largest attention that an average query pays, with `high` bits, the
    others with `low` bits. Until then they are exact. Keys are coded per channel of a segment's tier, values per
    token, each channel divided by the root of its largest number in the prompt.

    Args:
      high: bits of a code of the high tier, 1 to 8.
      low: bits of a code of the low tier, 1 to 8.
      ratio: the share of a segment's tokens that go to the high tier, above 0 and at most 1.
      window: the number of decoded tokens of a segment.

    Raises:
      StorageError: an argument out of range.
    """
    ratio = number_argument("storage zipcache: ratio", ratio, minimum=MIN_RATIO, maximum=1, error=StorageError)
    window = count_argument("storage zipcache: window", window, minimum=1, error=StorageError)
    for tier_name, bits in (("high", high), ("low", low)):
        count_argument(f"storage zipcache: {tier_name}", bits, minimum=1, maximum=MAX_BITS, error=StorageError)
    name = f"zipcache{high}_{low}"

    def tier(bits: int, best: Storage | None, label: str) -> Storage:
        value = Divided(Integer(bits, WHOLE), ChannelRoots())
        return Storage(key=Channels(bits, None), value=value, layout=Segments(best, ratio, window), name=label)

    return tier(low, tier(high, None, f"{name} high"), name)
