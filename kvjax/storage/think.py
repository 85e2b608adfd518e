"""ThinK: keys without the channels that the end of the prompt needs least (arXiv:2407.21018)."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument, number_argument
from kvjax.errors import StorageError
from kvjax.numerics.top_k import indices_of_largest
from kvjax.storage.base import ROTATED, Codec, Storage, factory
from kvjax.storage.dims import EXACT, Chain, Dims
from kvjax.storage.side import PROMPT, Parts, PromptView, Shapes, Side

Array = jax.Array

CHANNELS = "channels"
BYTE = 256  # head sizes up to this have channels that fit into a byte
ROUNDING = 1e-9  # of a product of two floats that is a whole number on paper


def channel_dtype(dim: int) -> jnp.dtype:
    """Returns the smallest unsigned type that can count the channels of a vector from 0 to `dim` - 1."""
    return jnp.dtype(jnp.uint8 if dim <= BYTE else jnp.uint16)


def _kept(dim: int, ratio: float) -> int:
    return dim - math.floor(ratio * dim + ROUNDING)


@dataclasses.dataclass(frozen=True)
class QueryDrivenChannels(Side):
    """The channels of each KV head that are kept, ascending: those of highest score.

    The score of a channel is the mean of q² over the last queries of the prompt and the query heads of the group, times
    the mean of k² over the tokens that are still held after the prompt's step. Of equal channels the lower is kept
    (ThinK, section 3.2: the Frobenius norm of q·k of each channel, which orders channels alike).

    Attributes:
      ratio: the share of the channels that are dropped.
      window: the number of last queries; all of a shorter prompt.
    """

    ratio: float
    window: int
    when = PROMPT

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {CHANNELS: ((_kept(dim, self.ratio),), channel_dtype(dim))}

    def prepare(self, view: PromptView) -> Mapping[str, Array]:
        # [B, 1]
        length = jnp.sum(view.real, axis=1, keepdims=True)
        # [B, 1, 1, n, 1]
        last = (view.real & (view.position >= length - self.window))[:, None, None, :, None]
        # [B, K, n, 1]
        live = view.live[..., None]
        # [B, K, D]; a sum over queries orders channels as the mean does
        asked = jnp.sum(jnp.where(last, jnp.square(view.query), 0.0), axis=(2, 3))
        held = jnp.sum(jnp.where(live, jnp.square(view.key), 0.0), axis=2)
        # [B, K, D']: of equal ones, the lower channel comes first
        channels = indices_of_largest(asked * held, _kept(view.key.shape[-1], self.ratio))
        return {CHANNELS: jnp.sort(channels, axis=-1)}


@dataclasses.dataclass(frozen=True)
class ThinK(Dims):
    """Keeps some channels of keys, the same ones for every token of a row and KV head; for keys only.

    Attributes:
      ratio: the share of the channels that are dropped, in [0, 1); rounded down to whole channels.
      window: the number of last queries of the prompt that choose, at least 1.

    Raises:
      StorageError: an attribute out of range.
    """

    ratio: float = 0.4
    window: int = 32

    def __post_init__(self) -> None:
        ratio = number_argument("storage think: ratio", self.ratio, minimum=0, maximum=1, error=StorageError)
        if ratio == 1:
            raise StorageError(
                f"storage think: ratio must be below 1, to keep at least one channel; got {self.ratio!r}."
            )
        object.__setattr__(self, "ratio", ratio)
        window = count_argument("storage think: window", self.window, minimum=1, error=StorageError)
        object.__setattr__(self, "window", window)

    @property
    def side(self) -> Side:
        return QueryDrivenChannels(self.ratio, self.window)

    def dim(self, dim: int) -> int:
        return _kept(dim, self.ratio)

    def forward(self, x: Array, side: Parts | None) -> Array:
        # [..., D']
        assert side is not None
        return _take(x, side[CHANNELS])

    def query(self, q: Array, side: Parts | None) -> tuple[Array, Array]:
        assert side is not None
        return _take(q, side[CHANNELS]), jnp.zeros(q.shape[:-1], jnp.float32)


def _take(x: Array, channels: Array) -> Array:
    """Takes channels of vectors [..., D]; all but the last axes broadcast."""
    shape = jnp.broadcast_shapes(x.shape[:-1], channels.shape[:-1])
    x = jnp.broadcast_to(x, (*shape, x.shape[-1]))
    channels = jnp.broadcast_to(channels, (*shape, channels.shape[-1])).astype(jnp.int32)
    return jnp.take_along_axis(x, channels, axis=-1, mode="promise_in_bounds")


@factory
def think(ratio: float = 0.4, window: int = 32, recent: int = 32, *, codec: Codec = EXACT) -> Storage:
    """Holds keys without the channels that the last queries of the prompt need least (ThinK, arXiv:2407.21018).

    Channels are chosen per row and KV head when the prompt ends, and are the same for later tokens. Values are whole,
    and so are the newest keys. The prompt goes in in one shot.

    Args:
      ratio: the share of the channels that are dropped, in [0, 1); rounded down to whole channels.
      window: the number of last queries of the prompt that choose.
      recent: the number of newest positions that stay exact.
      codec: holds the shorter keys.

    Raises:
      StorageError: an argument that is not valid.
    """
    key = Chain(ThinK(ratio, window), codec)
    name = "think" if codec == EXACT else f"think({codec!r})"
    return Storage(key=key, value=EXACT, residual=recent, frame=ROTATED, name=name)
