"""Prompt-phase compressors that rank by keys as they are stored, without attention."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.policies.base import Evict, compress, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View

Array = jax.Array
SIGNIFICAND_BITS = 24  # of a float32, the implicit one included
NORM_BITS = 12  # of the rounded norm
TINY = jnp.finfo(jnp.float32).tiny  # a divisor for keys of zeros


def _norm(x: Array) -> Array:
    """[..., D] -> [...]"""
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))


def rounded(x: Array) -> Array:
    """Rounds to `NORM_BITS` significant bits, to the nearest and from halfway to the even neighbour.

    Adds half a unit of the last kept bit, less one if that bit is even, to the bits of the float, and clears the bits
    below. A carry may increment the exponent. This is exact, and unlike float arithmetic no compiler simplifies it.

    Args:
      x: [...] float32, at least 0 and not NaN; a subnormal number keeps fewer bits.

    Returns:
      [...] float32.
    """
    dropped = SIGNIFICAND_BITS - NORM_BITS
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    odd = (bits >> dropped) & 1
    bits = (bits + ((1 << (dropped - 1)) - 1) + odd) >> dropped << dropped
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(frozen=True)
class LowNorm(Importance):
    """Ranks a slot by -‖k‖: short keys stay. The norm is rounded to 12 significant bits.

    RoPE preserves norms: in the first layer, the keys of equal tokens differ in norm only by the rounding of their
    rotations. Without rounding, this noise would decide which of them is evicted, instead of their age.
    """

    needs = frozenset()
    signed = True
    reads = frozenset({"key"})

    def score(self, stats: Stats, view: View) -> Array:
        return -rounded(_norm(view.key.astype(jnp.float32)))


@dataclasses.dataclass(frozen=True)
class KeyDifference(Importance):
    """Ranks a slot by -cos(k, mean of k / ‖k‖): keys unlike the average key stay."""

    needs = frozenset()
    signed = True
    reads = frozenset({"key"})

    def score(self, stats: Stats, view: View) -> Array:
        key = view.key.astype(jnp.float32)
        live = view.live[..., None]
        # [B, K, S, D]; a key of zeros has no direction
        direction = key / jnp.maximum(_norm(key), TINY)[..., None]
        # [B, K, 1, 1]
        count = jnp.maximum(jnp.sum(live, axis=2, keepdims=True), 1).astype(jnp.float32)
        # [B, K, 1, D]
        mean = jnp.sum(jnp.where(live, direction, 0.0), axis=2, keepdims=True) / count
        # [B, K, 1]
        length = jnp.maximum(_norm(mean), TINY)
        return -jnp.sum(direction * mean, axis=-1) / length


low_norm = LowNorm()
key_difference = KeyDifference()


@factory
def knorm(budget: BudgetLike, *, positions: str = "original") -> Evict:
    """Keeps the keys of smallest norm: importance -‖k‖ (Devoto et al., arXiv:2406.11430).

    Args:
      budget: slots per KV head that remain of a prompt; see `snapkv`.
      positions: see `evict`.

    The authors' code can skip layers; give one budget per layer for that, such as ``(1.0, 1.0, 0.2, ...)``.
    """
    return compress(importance=low_norm, budget=budget, positions=positions, name="knorm")


@factory
def keydiff(budget: BudgetLike, *, positions: str = "original") -> Evict:
    """Keeps the keys that differ most from the average one (KeyDiff, arXiv:2504.15364).

    Importance -cos(k, mean of k / ‖k‖ over the live slots).

    Args:
      budget: slots per KV head that remain of a prompt; see `snapkv`.
      positions: see `evict`.

    The paper evicts so at every block of a prompt; this evicts once, at its end.
    """
    return compress(importance=key_difference, budget=budget, positions=positions, name="keydiff")
