"""Positions as lines of float32, from which the TPU's and the GPU's prefill kernels compute which slots are seen."""

import jax
import jax.numpy as jnp

from kvjax.kernels.problem import Problem

Array = jax.Array
FAR = 1 << 30  # larger than any difference of two positions


def lines(problem: Problem, log_base: float = 1.0) -> tuple[Array, Array]:
    """Returns positions as float32, relative to the first query of each row: exact for blocks below 2²⁴ tokens.

    Args:
      problem: a problem without a band.
      log_base: factor of `log_weight`, for logits to another base.

    Returns:
      The positions of the queries, [B, 1, n], -inf for padding; and lines of the slots, [B·K, lines, S]. These are the
      first position that sees a slot, +inf if it is empty; with a window, the last position that sees it, +inf without
      a limit; and `log_weight`, if given.
    """
    # [B, 1]
    start = problem.query_position[:, :1]
    # [B, n]
    offset = (problem.query_position - start).astype(jnp.float32)
    query = jnp.where(problem.query_position >= 0, offset, -jnp.inf)
    # [B, K, S]
    relative = problem.key_position - start[:, None]
    found = [jnp.where(problem.key_position >= 0, relative.astype(jnp.float32), jnp.inf)]
    if problem.window is not None:
        last = (relative + (min(problem.window, FAR) - 1)).astype(jnp.float32)
        found.append(last if problem.exempt is None else jnp.where(problem.exempt, jnp.inf, last))
    if problem.log_weight is not None:
        found.append(problem.log_weight * log_base)
    # [B, K, lines, S]
    stacked = jnp.stack(found, axis=2)
    return query[:, None], stacked.reshape(-1, *stacked.shape[2:])


def pad(x: Array, length: int, fill: float) -> Array:
    """Pads the last dimension to a length."""
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, length - x.shape[-1])), constant_values=fill)
