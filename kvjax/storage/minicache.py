"""Keys and values of two neighbouring layers, merged into one direction with two lengths (MiniCache, arXiv:2405.14366).

Neighbouring layers of the second half of a model hold vectors that point almost the same way. A pair of layers then
holds one direction a token, and each layer its own length. Tokens whose vectors differ most stay as they are.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import number_argument
from kvjax.errors import StorageError
from kvjax.numerics.top_k import largest
from kvjax.parallel.host_memory import write
from kvjax.storage.base import Codec, Parts, Shapes, Storage, factory, straight_through
from kvjax.storage.layouts import LOWER, UPPER, Pairs
from kvjax.storage.rounding import as_stored
from kvjax.storage.side import PROMPT, Side
from kvjax.summary import one_line

Array = jax.Array

DIRECTION, LENGTH, SLOT, EXACT = "direction", "length", "slot", "exact"
DECODED = "decoded"  # of a gradient, the part that holds what is decoded
SMALLEST_SINE = 1e-4  # below it directions are interpolated along the chord
SMALLEST_NORM = 1e-6  # of an interpolated direction; below it the upper layer's is taken
ROUNDING = 1e-9  # of a share of tokens


class MergedVectors(NamedTuple):
    """The vectors of two layers as `merged_vectors` holds them; float32.

    Attributes:
      direction: [..., D], of length 1; 0 where both vectors are 0.
      lower: [...], lengths of the vectors of the lower layer.
      upper: [...], lengths of the vectors of the upper layer.
      angle: [...], between the two vectors, in radians.
    """

    direction: Array
    lower: Array
    upper: Array
    angle: Array

    def __repr__(self) -> str:
        return one_line(self)


def merged_vectors(lower: Array, upper: Array, t: float) -> MergedVectors:
    """Interpolates between the directions of two vectors on the sphere (MiniCache, equations 2 and 3).

    Args:
      lower: [..., D] float32, of the lower layer.
      upper: [..., D] float32, of the upper layer.
      t: where between the lower direction, 0, and the upper one, 1.
    """
    # [...] and [..., D]
    (first, low), (second, up) = _polar(lower), _polar(upper)
    # [...]
    angle = _angle(low, up)
    sine = jnp.sin(angle)
    chord = sine < SMALLEST_SINE
    divisor = jnp.where(chord, 1.0, sine)

    def weighed(unit: Array, share: float) -> Array:
        """Returns one of the two directions times its weight, [..., D]."""
        return jnp.where(chord, share, jnp.sin(share * angle) / divisor)[..., None] * unit

    size, unit = _polar(weighed(low, 1 - t) + weighed(up, t))
    return MergedVectors(jnp.where(size[..., None] <= SMALLEST_NORM, up, unit), first, second, angle)


def _angle(one: Array, other: Array) -> Array:
    """Returns the angle [...] between directions [..., D], in radians; π/2 where one of them is 0."""
    # The arc cosine of a float32 number cannot tell angles below 3e-4 from 0, nor those near π from it.
    across, along = (jnp.sqrt(jnp.sum(jnp.square(x), axis=-1)) for x in (one - other, one + other))
    known = jnp.any(one != 0, axis=-1) & jnp.any(other != 0, axis=-1)
    return jnp.where(known, 2 * jnp.arctan2(across, along), jnp.pi / 2)


def _polar(x: Array) -> tuple[Array, Array]:
    """Returns the lengths [...] and the directions [..., D] of vectors [..., D]; 0 for vectors of zeros."""
    # Scaled, so that no square of a finite number is too large or too small.
    maximum = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
    scaled = x / jnp.where(maximum > 0, maximum, 1.0)
    # [..., 1], from 1 to √D
    size = jnp.sqrt(jnp.sum(jnp.square(scaled), axis=-1, keepdims=True))
    return (maximum * size)[..., 0], scaled / jnp.where(maximum > 0, size, 1.0)


@dataclasses.dataclass(frozen=True)
class Originals(Side):
    """The tokens of a prompt that stay as they are in both layers: their slots, and the vectors of the layer itself.

    Attributes:
      count: the most tokens.
      half: whether of the ``lower`` or of the ``upper`` layer; the lower one holds the slots for both.
    """

    count: int
    half: str | None
    when = PROMPT

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        own: Shapes = {EXACT: ((self.count, dim), jnp.dtype(dtype))}
        return own if self.half == UPPER else own | {SLOT: ((self.count,), jnp.dtype(jnp.int32))}


@dataclasses.dataclass(frozen=True)
class Merged(Codec):
    """Holds the vectors of two layers as one direction and a length for each layer; for the layout `Pairs`.

    The direction lies between those of the two layers. The tokens between whose vectors the angle is largest, of equal
    ones the newer, also keep both vectors. Lowering says which layer a codec is of, and how many tokens its arrays have
    room for.

    Attributes:
      t: where the direction lies between that of the lower layer, 0, and that of the upper one, 1.
      retained: the share of the tokens that keep both vectors, rounded up.
      half: ``lower`` or ``upper``; None = not known yet.
      count: the most tokens that keep both vectors.
      straight: whether what is decoded is held, so that a gradient passes straight through.

    Raises:
      StorageError: an attribute that is not valid.
    """

    t: float = 0.6
    retained: float = 0.05
    half: str | None = None
    count: int = 0
    straight: bool = False
    of_pairs = True

    def __post_init__(self) -> None:
        for field in ("t", "retained"):
            name, given = f"storage minicache: {field}", getattr(self, field)
            object.__setattr__(self, field, number_argument(name, given, minimum=0, maximum=1, error=StorageError))

    def kept(self, tokens: int) -> int:
        """Returns the number of tokens that keep both vectors, of `tokens`."""
        return max(math.ceil(self.retained * tokens - ROUNDING), 0)

    @property
    def side(self) -> Side | None:
        return None if self.straight else Originals(self.count, self.half)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        if self.straight:
            return {DECODED: ((dim,), jnp.dtype(dtype))}
        length: Shapes = {LENGTH: ((), jnp.dtype(dtype))}
        return length if self.half == UPPER else {DIRECTION: ((dim,), jnp.dtype(dtype)), **length}

    def bytes(self, dim: int, dtype: DTypeLike) -> int:
        """Returns half of the bytes that a pair of layers holds of a token, rounded up."""
        both = (dataclasses.replace(self, half=half).parts(dim, dtype).values() for half in (LOWER, UPPER))
        pair = sum(math.prod(shape) * jnp.dtype(each).itemsize for own in both for shape, each in own)
        return -(-pair // 2)

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        raise StorageError(
            f"{self!r} holds the vectors of two layers, which are encoded together; see Merged.encode_pair."
        )

    def encode_pair(
        self, lower: Array, upper: Array, position: Array, dtype: DTypeLike
    ) -> tuple[tuple[Parts, Parts], tuple[Parts, Parts]]:
        """Encodes the vectors of two layers.

        Args:
          lower: [B, K, n, D] float32, of the lower layer.
          upper: [B, K, n, D] float32, of the upper layer.
          position: [B, K, n] int32 of the tokens in both layers, -1 = none.
          dtype: the model's.

        Returns:
          Of each layer, the parts [B, K, n, ...] and the side [B, K, ...].
        """
        if self.straight:
            plain = dataclasses.replace(self, straight=False)
            (parts, side), (others, also) = plain.encode_pair(*jax.lax.stop_gradient((lower, upper)), position, dtype)
            given = ((lower, parts, side), (upper, {**parts, **others}, {**side, **also}))
            decoded = [
                plain.decode(own, Originals(self.count, None).aligned(each, x.ndim), x.shape[-1])
                for x, own, each in given
            ]
            held = [{DECODED: straight_through(x, y).astype(dtype)} for (x, *_), y in zip(given, decoded, strict=True)]
            return (held[0], {}), (held[1], {})
        made = merged_vectors(lower, upper, self.t)
        live = position >= 0
        # Shares are counted on the host, in float64.
        maximum = jnp.asarray([self.kept(tokens) for tokens in range(position.shape[2] + 1)], jnp.int32)
        keeps = largest(made.angle, position, maximum[jnp.sum(live, axis=2, keepdims=True, dtype=jnp.int32)]) & live
        # [B, K, count]: the slots of these tokens; out of bounds beyond the last of them
        order = jnp.argsort(~keeps, axis=2, stable=True)[:, :, : self.count].astype(jnp.int32)
        slot = jnp.where(jnp.take_along_axis(keeps, order, axis=2), order, position.shape[2])
        # [B, K, count, D] each
        first, second = (
            {EXACT: as_stored(jnp.take_along_axis(x, order[..., None], axis=2), dtype)} for x in (lower, upper)
        )
        shared = {DIRECTION: as_stored(made.direction, dtype), LENGTH: as_stored(made.lower, dtype)}
        return (shared, {SLOT: slot, **first}), ({LENGTH: as_stored(made.upper, dtype)}, second)

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        """Decodes vectors [B, K, n, dim]; of the upper layer with the direction and the slots of the lower one."""
        if self.straight:
            return parts[DECODED].astype(jnp.float32)
        assert side is not None
        # [B, K, n, D]
        whole = parts[DIRECTION].astype(jnp.float32) * parts[LENGTH].astype(jnp.float32)[..., None]
        # An aligned side has an axis of size 1 for slots: [B, K, 1, count] and [B, K, 1, count, D].
        return write(whole, side[SLOT][:, :, 0], side[EXACT][:, :, 0]) if side[SLOT].shape[3] else whole


@factory
def minicache(start: int | None = None, t: float = 0.6, retained: float = 0.05) -> Storage:
    """Holds prompts of pairs of layers as one direction and two lengths (MiniCache, arXiv:2405.14366, section 4).

    Layers from `start` on are taken in pairs, each with the next one; a last one without a partner holds its tokens as
    they are, and so do all earlier ones. When a prompt ends, the keys of a pair are merged as they are held, and so are
    its values. Tokens that follow stay exact in both layers.

    Args:
      start: the first layer of the first pair; None = half of the layers.
      t: where a direction lies between that of the lower layer, 0, and that of the upper one, 1.
      retained: the share of a prompt's tokens that stay as they are: those between whose vectors the angle is largest.

    Raises:
      StorageError: an argument out of range.

    The paper keeps the tokens beyond a threshold of the distance; here their number is fixed, since arrays are.
    """
    codec = Merged(t, retained)
    return Storage(key=codec, value=codec, layout=Pairs(start), name="minicache")
