"""Non-negative least squares, for a static number of columns, in float32."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array

ROUNDS = 60  # the largest number of exchanges of columns
PATIENCE = 3  # full exchanges that may fail to reduce the number of infeasible columns, before single exchanges
REFINEMENTS = 3
RELATIVE_SHIFT = 2e-6  # added to the unit diagonal of the normal equations, so that float32 can factorize them
TOLERANCE = 1e-6  # relative to the largest coefficient, and to the norm of the target
HIGHEST = jax.lax.Precision.HIGHEST


class _Search(NamedTuple):
    """The state of the search.

    Attributes:
      passive: [n] bool, the columns whose coefficient may be positive.
      x: [n] float32, the solution for the passive columns, 0 elsewhere.
      infeasible: [n] bool, the columns with a negative coefficient, or with a negative gradient at 0.
      fewest: the smallest number of infeasible columns so far.
      patience: the number of full exchanges that may still fail to reduce it.
      rounds: the number of exchanges.
    """

    passive: Array
    x: Array
    infeasible: Array
    fewest: Array
    patience: Array
    rounds: Array


def nnls(matrix: Array, target: Array, start: Array) -> Array:
    """Returns x >= 0 that minimises ‖matrix x - target‖₂, by block principal pivoting (Kim and Park, SISC 2011).

    Each round solves the unconstrained problem of the passive columns by Cholesky, on columns scaled to norm 1, and
    refines the solution with residuals of the matrix itself: the normal equations alone would lose half of the digits.
    Then all infeasible columns are exchanged. When their number no longer falls, only the last one is exchanged, which
    ends after finitely many rounds. Columns of zeros get the coefficient 0.

    Args:
      matrix: [m, n] float32.
      target: [m] float32.
      start: [n] bool, the columns that are passive at first.
    """
    norm = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=0))
    real = norm > 0
    inverse = jnp.where(real, 1.0 / jnp.where(real, norm, 1.0), 0.0)
    # [m, n], columns of norm 1 or 0
    unit = matrix * inverse
    # [n, n]
    gram = jnp.matmul(unit.T, unit, precision=HIGHEST)
    size = jnp.sqrt(jnp.sum(jnp.square(target)))
    number = jnp.arange(gram.shape[0], dtype=jnp.int32)

    def solved(passive: Array) -> tuple[Array, Array]:
        """Returns the solution of some columns, and the gradient of all."""
        both = passive[:, None] & passive
        factor = jnp.linalg.cholesky(jnp.where(both, gram, 0.0) + jnp.diag(jnp.where(passive, RELATIVE_SHIFT, 1.0)))

        def refined(_: int, x: Array) -> Array:
            # [m], then [n]
            residual = target - jnp.matmul(unit, x, precision=HIGHEST)
            descent = jnp.where(passive, jnp.matmul(residual, unit, precision=HIGHEST), 0.0)
            return x + jax.scipy.linalg.cho_solve((factor, True), descent)

        x = jax.lax.fori_loop(0, 1 + REFINEMENTS, refined, jnp.zeros(gram.shape[0], jnp.float32))
        return x, -jnp.matmul(target - jnp.matmul(unit, x, precision=HIGHEST), unit, precision=HIGHEST)

    def checked(passive: Array) -> tuple[Array, Array]:
        x, gradient = solved(passive)
        negative = passive & (x < -TOLERANCE * jnp.max(jnp.abs(x)))
        return x, negative | (~passive & real & (gradient < -TOLERANCE * size))

    def exchange(search: _Search) -> _Search:
        count = jnp.sum(search.infeasible)
        fewer = count < search.fewest
        whole = fewer | (search.patience > 0)
        last = jnp.max(jnp.where(search.infeasible, number, -1))
        passive = search.passive ^ jnp.where(whole, search.infeasible, number == last)
        patience = jnp.where(fewer, PATIENCE, jnp.maximum(search.patience - 1, 0))
        x, infeasible = checked(passive)
        return _Search(passive, x, infeasible, jnp.minimum(count, search.fewest), patience, search.rounds + 1)

    def more(search: _Search) -> Array:
        return jnp.any(search.infeasible) & (search.rounds < ROUNDS)

    passive = start & real
    zero = jnp.int32(0)
    first = _Search(passive, *checked(passive), number[-1] + 2, zero + PATIENCE, zero)
    found = jax.lax.while_loop(more, exchange, first)
    return jnp.maximum(found.x, 0.0) * inverse
