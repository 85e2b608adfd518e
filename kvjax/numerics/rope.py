"""Rotary position embeddings (RoFormer, arXiv:2104.09864) and their context extensions.

The cache rotates a key either once, at the token's position, or at every step, to the key's rank among the live slots.
Feature i is paired with feature i + dim / 2 (``rotate_half`` in Hugging Face ``transformers``) for every model family.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Scaling = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn"]
MIN_RAMP = 1e-3  # narrowest ramp of YaRN in features, as in transformers; avoids a division by zero


@dataclasses.dataclass(frozen=True)
class Rope:
    """Static description of a rotary embedding.

    Attributes:
      dim: the number of leading features of a head that are rotated; smaller than the head size for partial rotary
        embeddings.
      theta: base of the frequencies.
      scaling: how the frequencies are changed to extend the context. ``default`` leaves them, ``linear`` divides
        positions by `factor`, ``dynamic`` (NTK-aware) raises the base with each row's length, ``llama3`` interpolates
        per wavelength, ``longrope`` (arXiv:2402.13753) divides each frequency by a factor of its own, and ``yarn``
        (arXiv:2309.00071) interpolates per feature.
      factor: ratio of the extended context to the trained one; not read by ``longrope``.
      original_max_positions: trained context length in tokens.
      low_freq_factor: lower band edge of ``llama3``, in wavelengths per trained length.
      high_freq_factor: upper band edge of ``llama3``, in wavelengths per trained length.
      beta_fast: band edge of ``yarn`` for high frequencies, in rotations over the trained length.
      beta_slow: band edge of ``yarn`` for low frequencies, in rotations over the trained length.
      truncate: whether ``yarn`` rounds its band edges outwards to whole features.
      short_factor: divisors of ``longrope`` for rows of up to `original_max_positions` tokens, one per frequency.
      long_factor: divisors of ``longrope`` for longer rows, one per frequency.
      attention_factor: factor on cosine and sine; used by ``longrope`` and ``yarn``.
    """

    dim: int
    theta: float = 10_000.0
    scaling: Scaling = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0

    def frequencies(self, length: Array) -> Array:
        """Returns the angular frequencies in radians per position.

        Only ``dynamic`` and ``longrope`` depend on `length`. They do so per row, so that a row does not depend on the
        other rows of its batch.

        Args:
          length: [B] int32, the number of tokens that each row will hold in all (`KVState.total`): its prompt and the
            tokens to come, as far as the caller knows. It is the same for a prompt in one shot and in blocks. Under
            ``positions="cache"`` it is the longest rank instead: the number of live slots of the row's fullest head.

        Returns:
          [B, dim / 2] float32, or [1, dim / 2] if the frequencies do not depend on the row.
        """
        if (constant := self.constant_frequencies()) is not None:
            # [1, dim / 2]
            return jnp.asarray(constant, jnp.float32)[None]
        # [dim / 2]
        exponent = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        match self.scaling:
            case "dynamic":
                # [B]
                longest = jnp.maximum(length, self.original_max_positions).astype(jnp.float32)
                stretch = self.factor * longest / self.original_max_positions - (self.factor - 1)
                theta = self.theta * stretch ** (self.dim / (self.dim - 2))
                # [B, dim / 2]
                return theta[:, None] ** -jnp.asarray(exponent, jnp.float32)
            case _:
                base = self.theta**-exponent
                # [dim / 2]
                short = jnp.asarray(base / np.asarray(self.short_factor), jnp.float32)
                long = jnp.asarray(base / np.asarray(self.long_factor), jnp.float32)
                # [B, dim / 2]
                return jnp.where((length > self.original_max_positions)[:, None], long, short)

    def constant_frequencies(self) -> np.ndarray | None:
        """Returns the frequencies before rounding, [dim / 2] float64, on the host; None if they depend on the row."""
        # [dim / 2]
        base = self.theta ** -(np.arange(0, self.dim, 2, dtype=np.float64) / self.dim)
        match self.scaling:
            case "default":
                return base
            case "linear":
                return base / self.factor
            case "llama3":
                return _llama3(base, self)
            case "yarn":
                return _yarn(base, self)
        return None

    def rotate(self, x: Array, position: Array, frequencies: Array) -> Array:
        """Rotates queries or keys to their positions, in float32.

        Args:
          x: [B, heads, n, D] with D ≥ dim. Features from `dim` on are returned unchanged.
          position: [B, n] or [B, heads, n] int32.
          frequencies: [B or 1, dim / 2] float32, from `frequencies`.

        Returns:
          [B, heads, n, D] in the dtype of x.
        """
        if position.ndim == 2:
            # [B, 1, n]
            position = position[:, None]
        # [B, 1 or heads, n, dim / 2]
        return self._rotated(x, *self._cos_sin(position, frequencies[:, None]))

    def rotate_to_ranks(self, x: Array, rank: Array, frequencies: Array, size: int) -> Array:
        """Returns what `rotate` does for positions below `size`, each of whose cosines is computed once on CPUs.

        Args:
          x: [B, heads, n, D].
          rank: [B, heads, n] int32; at least `size` or negative where the result does not matter.
          frequencies: see `rotate`.
          size: the number of ranks.
        """

        def from_table(x: Array, rank: Array, frequencies: Array) -> Array:
            # [B or 1, size, dim]: as two arrays, XLA would compute the cosine of every slot after all
            table = jnp.concatenate(self._cos_sin(jnp.arange(size, dtype=jnp.int32)[None], frequencies), axis=-1)

            def look_up(table: Array, rank: Array) -> Array:
                return jnp.take(table, rank, axis=0, mode="clip")

            # [B, heads, n, dim]
            rows = look_up(table[0], rank) if len(table) == 1 else jax.vmap(look_up)(table, rank)
            return self._rotated(x, rows[..., : self.dim // 2], rows[..., self.dim // 2 :])

        return jax.lax.platform_dependent(x, rank, frequencies, cpu=from_table, default=self.rotate)

    def _cos_sin(self, position: Array, frequencies: Array) -> tuple[Array, Array]:
        """Returns the cosines and sines [B, ..., n, dim / 2] of positions [B, ..., n].

        Args:
          position: int32.
          frequencies: [B or 1, ..., dim / 2] float32, without the axis of positions.
        """
        angle = position[..., None].astype(jnp.float32) * frequencies[..., None, :]
        return jnp.cos(angle) * self.attention_factor, jnp.sin(angle) * self.attention_factor

    def _rotated(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotates [B, heads, n, D] by cosines and sines [B, 1 or heads, n, dim / 2], in float32."""
        half = self.dim // 2
        # [B, heads, n, dim / 2]
        first, second = (x[..., i : i + half].astype(jnp.float32) for i in (0, half))
        # [B, heads, n, dim]
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        rotated = rotated.astype(x.dtype)
        # [B, heads, n, D]
        return rotated if self.dim == x.shape[-1] else jnp.concatenate([rotated, x[..., self.dim :]], -1)

    def unrotate(self, x: Array, position: Array, frequencies: Array) -> Array:
        """Inverts `rotate`, in float32.

        Args:
          x: [B, heads, n, D], rotated.
          position: see `rotate`.
          frequencies: see `rotate`.

        Returns:
          [B, heads, n, D] float32.
        """
        # [B, heads, n, D]
        back = self.rotate(x.astype(jnp.float32), -position, frequencies)
        if self.attention_factor == 1:
            return back
        # The factor on cosine and sine is in both rotations.
        rotated = jnp.arange(x.shape[-1]) < self.dim
        return jnp.where(rotated, back / self.attention_factor**2, back)


def _llama3(base: np.ndarray, rope: Rope) -> np.ndarray:
    """Divides low frequencies by `factor`, keeps high ones and interpolates between them (LLaMA 3.1).

    Args:
      base: [dim / 2] float64 frequencies.
      rope: the embedding.

    Returns:
      [dim / 2] float64.
    """
    # [dim / 2]
    wavelength = 2 * np.pi / base
    blend = rope.original_max_positions / wavelength - rope.low_freq_factor
    blend = np.clip(blend / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: np.ndarray, rope: Rope) -> np.ndarray:
    """Interpolates as `_llama3` does, with a ramp over the feature index (YaRN, arXiv:2309.00071, eq. 23).

    Args:
      base: [dim / 2] float64 frequencies.
      rope: the embedding.

    Returns:
      [dim / 2] float64.
    """

    def feature(rotations: float) -> float:
        """Returns the index of the feature that turns `rotations` times over the trained length."""
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    # [dim / 2]
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, MIN_RAMP), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)
