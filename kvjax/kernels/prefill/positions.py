"""Which queries see which slots, as lines of float32 that the kernels of both kinds compare."""

import jax
import jax.numpy as jnp

from kvjax.kernels.problem import Problem

Array = jax.Array
FAR = 1 << 30  # beyond any difference of two positions


def lines(problem: Problem, log_base: float = 1.0) -> tuple[Array, Array]:
    """Positions as float32, relative to the first query of a row: exact for blocks below 2²⁴ tokens.

    Args:
      problem: without a band.
      log_base: factor of the weights that are added to logits, for logits to another base.

    Returns:
      [B, 1, n] positions of the queries, -inf for padding; and [B·K, lines, S]: the first position that sees a slot,
      +inf for an empty one; with a window, the last position that does, +inf = no limit; and `log_weight`, if given.
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
    """The last dimension padded to a length."""
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, length - x.shape[-1])), constant_values=fill)
