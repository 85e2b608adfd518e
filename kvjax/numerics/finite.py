"""Log-probabilities that are not finite: which tokens end a row, and the error that says so.

A choice among logits that are NaN means nothing, and a row would go on for ever. The log-probability of the chosen
token depends on all logits and is computed anyway, so it is what is looked at; the host, which reads it with the token,
waits for nothing else. Log-probabilities are of the model's logits before any filter: a token that a sampler excludes,
or whose probability is 0 in float32, has a finite one. So one that is NaN or infinite is always an error.
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import NonFiniteError

Array = jax.Array
PAD = -1  # in place of a token, and of those that would follow a row's last one
WHY = (
    "The model's logits hold NaN or infinity: its weights or what is computed from them overflow. Load it with "
    "dtype='float32', or check its weights."
)


def only_finite(token: Array, logprob: Array) -> Array:
    """Replaces chosen tokens by `PAD` where their log-probability is not finite.

    Args:
      token: [B] int32.
      logprob: [B] float32.

    Returns:
      [B] int32.
    """
    return jnp.where(jnp.isfinite(logprob), token, PAD)


def check_finite(logprobs: np.ndarray, result: object, *, noun: str = "row") -> None:
    """Checks the log-probabilities of a batch.

    Args:
      logprobs: [B, n] float32.
      result: for the error.
      noun: what has a log-probability of each token.

    Raises:
      NonFiniteError: one is not finite.
    """
    finite = np.isfinite(logprobs)
    if not finite.all():
        rows = np.flatnonzero(~finite.all(axis=1)).tolist()
        raise error_of(rows, len(finite), result, noun=noun)


def error_of(rows: list[int], count: int, result: object = None, *, noun: str = "row") -> NonFiniteError:
    """Makes the error of rows whose log-probabilities are not finite.

    Args:
      rows: which.
      count: the number of rows of the batch.
      result: see `NonFiniteError`.
      noun: what a row is.
    """
    shown = ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")
    return NonFiniteError(
        f"the log-probability of a token is not finite in {len(rows)} of {count} {noun}s ({noun} {shown}). {WHY} "
        "The results of the others are the error's `result`.",
        rows=rows, result=result,
    )  # fmt: skip
