"""Rotary position embeddings (RoFormer, arXiv:2104.09864) and the ways checkpoints stretch them.

Used by the cache, which rotates a key once at its true position or at every step to its rank among the live slots.
The two halves of the rotated features are paired (Hugging Face's ``rotate_half``), for every family.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Scaling = Literal["default", "linear", "dynamic", "llama3", "longrope", "yarn"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Static description of a rotary embedding.

    Attributes:
      dim: how many leading features of a head are rotated (all of them, or fewer under partial rotary).
      theta: base of the frequencies.
      scaling: ``default`` none; ``linear`` positions / factor; ``dynamic`` NTK-aware base from each row's current
        length; ``llama3`` per-wavelength interpolation; ``longrope`` per-feature factors, one set up to
        `original_max_positions` and one beyond; ``yarn`` (arXiv:2309.00071).
      factor: stretch of the context (not ``longrope``).
      original_max_positions: trained length before stretching.
      low_freq_factor, high_freq_factor: ``llama3`` band edges, in wavelengths per trained length.
      beta_fast, beta_slow: ``yarn`` band edges, in rotations over the trained length.
      truncate: whether ``yarn`` rounds those edges outwards to whole features.
      short_factor, long_factor: ``longrope`` divisors, one a frequency.
      attention_factor: multiplies cosine and sine (``longrope``, ``yarn``).
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
        """Radians per position.

        Args:
          length: [B] int32 tokens of each row including the current block; only ``dynamic`` and ``longrope``
            depend on it, and always per row, so that a row never depends on its neighbours.

        Returns:
          [B or 1, dim / 2] float32.
        """
        # [dim / 2]
        exponent = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        base = self.theta**-exponent
        match self.scaling:
            case "linear":
                base = base / self.factor
            case "llama3":
                base = _llama3(base, self)
            case "yarn":
                base = _yarn(base, self)
            case "dynamic":
                longest = jnp.maximum(length, self.original_max_positions).astype(jnp.float32)
                stretch = self.factor * longest / self.original_max_positions - (self.factor - 1)
                theta = self.theta * stretch ** (self.dim / (self.dim - 2))
                return theta[:, None] ** -jnp.asarray(exponent, jnp.float32)
            case "longrope":
                short = jnp.asarray(base / np.asarray(self.short_factor), jnp.float32)
                long = jnp.asarray(base / np.asarray(self.long_factor), jnp.float32)
                return jnp.where((length > self.original_max_positions)[:, None], long, short)
        return jnp.asarray(base, jnp.float32)[None]

    def rotate(self, x: Array, position: Array, frequencies: Array) -> Array:
        """Rotates features to positions.

        Args:
          x: [B, heads, n, D], D ≥ dim; features past `dim` are left alone.
          position: [B, n] or [B, heads, n] int32.
          frequencies: [B or 1, dim / 2] from `frequencies`.

        Returns:
          [B, heads, n, D] in x's dtype; computed in float32.
        """
        if position.ndim == 2:
            position = position[:, None]
        # [B, 1 or heads, n, dim / 2]
        angle = position[..., None].astype(jnp.float32) * frequencies[:, None, None]
        cos, sin = jnp.cos(angle) * self.attention_factor, jnp.sin(angle) * self.attention_factor
        half = self.dim // 2
        first, second = (x[..., i : i + half].astype(jnp.float32) for i in (0, half))
        rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)
        rotated = rotated.astype(x.dtype)
        return rotated if self.dim == x.shape[-1] else jnp.concatenate([rotated, x[..., self.dim :]], -1)


def _llama3(base: np.ndarray, rope: Rope) -> np.ndarray:
    """LLaMA 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    wavelength = 2 * np.pi / base
    blend = rope.original_max_positions / wavelength - rope.low_freq_factor
    blend = np.clip(blend / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return (1 - blend) * base / rope.factor + blend * base


def _yarn(base: np.ndarray, rope: Rope) -> np.ndarray:
    """YaRN (arXiv:2309.00071, eq. 23): as `_llama3`, with the ramp over feature index instead of wavelength."""

    def feature(rotations: float) -> float:
        turns = rope.original_max_positions / (rotations * 2 * math.pi)
        return rope.dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast), feature(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = np.clip((np.arange(rope.dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return base / rope.factor * ramp + base * (1 - ramp)
