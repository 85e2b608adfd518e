"""Soft-caps of logits (Gemma 2, arXiv:2408.00118, section 2)."""

import jax
import jax.numpy as jnp

Array = jax.Array


def soft_capped(logits: Array, cap: float | None) -> Array:
    """Returns cap · tanh(logits / cap), which lies within (-cap, cap) and has the order of the logits.

    Args:
      logits: [...] float.
      cap: above 0; None = the logits stay as they are.
    """
    return logits if cap is None else jnp.tanh(logits / cap) * cap
