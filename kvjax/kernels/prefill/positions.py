"""Who sees whom, as lines of float32 that kernels of both kinds compare, and what else their hosts share."""

import jax
import jax.numpy as jnp

Array = jax.Array
FAR = 1 << 30  # beyond any difference of two positions
TIE = 1 - 2.0**-18  # m is recomputed: one that equals the uniform share may come out below it by rounding


def lines(
    query_position: Array,
    key_position: Array,
    window: int | Array | None,
    exempt: Array | None,
    log_weight: Array | None,
) -> tuple[Array, Array]:
    """Positions as float32, relative to a row's first query: exact where it matters for blocks below 2²⁴ tokens.

    Returns:
      [B, 1, n] positions of the queries, −inf = padding; [B·K, lines, S]: the first position that sees a slot, +inf =
      an empty one; the last that does, +inf = no limit, if there is a window; and `log_weight`, if there is one.
    """
    start = query_position[:, :1]
    query = jnp.where(query_position >= 0, (query_position - start).astype(jnp.float32), -jnp.inf)
    relative, live = key_position - start[:, None], key_position >= 0
    found = [jnp.where(live, relative.astype(jnp.float32), jnp.inf)]
    if window is not None:
        width = jnp.minimum(jnp.asarray(window, jnp.int32), FAR)
        last = (relative + (width.reshape(-1, 1, 1) - 1)).astype(jnp.float32)
        found.append(last if exempt is None else jnp.where(exempt, jnp.inf, last))
    if log_weight is not None:
        found.append(log_weight)
    stacked = jnp.stack(found, axis=2)
    return query[:, None], stacked.reshape(-1, *stacked.shape[2:])


def pad(x: Array, length: int, fill: float) -> Array:
    """The last dimension filled up to a length."""
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, length - x.shape[-1])), constant_values=fill)
