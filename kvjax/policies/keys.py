"""Prompt-phase compressors that look at keys alone, as they are stored: no attention is needed."""

import jax
import jax.numpy as jnp

from kvjax.policies.base import Budget, Importance, Policy, Stats, View, compress, memoized

Array = jax.Array


def _norm(x: Array) -> Array:
    return jnp.sqrt(jnp.sum(jnp.square(x), axis=-1))


def _low_norm(stats: Stats, view: View) -> Array:
    return -_norm(view.key.astype(jnp.float32))


def _unlike_the_others(stats: Stats, view: View) -> Array:
    key = view.key.astype(jnp.float32)
    live = view.live[..., None]
    # [B, K, S, D]; a key of zeros has no direction
    direction = key / jnp.maximum(_norm(key), jnp.finfo(jnp.float32).tiny)[..., None]
    count = jnp.maximum(jnp.sum(live, axis=2, keepdims=True), 1).astype(jnp.float32)
    mean = jnp.sum(jnp.where(live, direction, 0.0), axis=2, keepdims=True) / count
    length = jnp.maximum(_norm(mean), jnp.finfo(jnp.float32).tiny)
    return -jnp.sum(direction * mean, axis=-1) / length


#: A slot is worth the more, the shorter its key: -‖k‖.
low_norm = Importance(frozenset(), _low_norm)
#: A slot is worth the more, the less its key points where the average key does: -cos(k, mean of k / ‖k‖).
unlike = Importance(frozenset(), _unlike_the_others)


@memoized
def knorm(budget: Budget, *, positions: str = "original") -> Policy:
    """Keeps the keys of smallest norm: importance -‖k‖ (Devoto et al., arXiv:2406.11430).

    The authors' code can skip layers; here that is a budget a layer, such as ``(1.0, 1.0, 0.2, ...)``.

    Args:
      budget: slots per KV head that a prompt leaves; see `snapkv`.
      positions: see `evict`.
    """
    return compress(importance=low_norm, budget=budget, positions=positions, name="knorm")


@memoized
def keydiff(budget: Budget, *, positions: str = "original") -> Policy:
    """Keeps the keys that differ most from the average one (KeyDiff, arXiv:2504.15364).

    Importance -cos(k, mean of k / ‖k‖ over the live slots). The paper evicts so at every block of a prompt, this once.

    Args:
      budget: slots per KV head that a prompt leaves; see `snapkv`.
      positions: see `evict`.
    """
    return compress(importance=unlike, budget=budget, positions=positions, name="keydiff")
