"""Which drafted tokens are accepted: pure functions of probabilities, tokens and random numbers.

A round drafts γ tokens. The target has probabilities of the token at each of their places, and at one more. Either
rule accepts the first drafts until one is refused, and one further token is chosen there.

`accept_shared` compares with the choices that the target makes of the same noise as plain generation, so that the text
is that of plain generation. `accept_ratio` is the rule of Leviathan et al. (arXiv:2211.17192, algorithm 1): the text
has the distribution of the target's samples.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Outcome(NamedTuple):
    """The outcome of `accept_ratio`.

    Attributes:
      accepted: [...] int32, the number of drafts that are accepted.
      probs: [..., V], the distribution of the token after them.
    """

    accepted: Array
    probs: Array


def count_leading_true(mask: Array) -> Array:
    """Counts the True values before the first False, [..., γ] bool -> [...] int32."""
    return jnp.sum(jnp.cumprod(mask.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


def accept_shared(draft: Array, choice: Array) -> tuple[Array, Array]:
    """Accepts drafts that are the target's own choices.

    Args:
      draft: [..., γ] int, the drafted tokens.
      choice: [..., γ + 1] int, the tokens that the target chooses at their places and at the next one.

    Returns:
      The number of accepted drafts, [...] int32, and the token after them, [...] int.
    """
    count = count_leading_true(draft == choice[..., :-1])
    return count, jnp.take_along_axis(choice, count[..., None], axis=-1)[..., 0]


def accept_ratio(p: Array, q: Array, draft: Array, u: Array) -> Outcome:
    """Accepts drafts while u q(d) < p(d), and returns the distribution of the token after them.

    A draft that the target cannot choose is refused, also where u is 0, and so is one whose probabilities are NaN.
    After a refusal it is that of `residual`, after γ accepted drafts the target's own.

    Args:
      p: [..., γ + 1, V], probabilities of the target.
      q: [..., γ, V], the probabilities that drafts were sampled from.
      draft: [..., γ] int.
      u: [..., γ], uniform in [0, 1).
    """
    # [..., γ] each
    target, drafted = (jnp.take_along_axis(x, draft[..., None], axis=-1)[..., 0] for x in (p[..., :-1, :], q))
    count = count_leading_true(u * drafted < target)
    # [..., γ + 1, V]
    probs = jnp.concatenate([residual(p[..., :-1, :], q), p[..., -1:, :]], axis=-2)
    return Outcome(count, jnp.take_along_axis(probs, count[..., None, None], axis=-2)[..., 0, :])


def acceptance_chance(p: Array, q: Array) -> Array:
    """Returns the chance that `accept_ratio` accepts each token, min(1, p / q), if it is drafted; [..., V]."""
    return jnp.where(q > 0, jnp.minimum(p / jnp.where(q > 0, q, 1), 1), (p > 0).astype(p.dtype))


def residual(p: Array, q: Array) -> Array:
    """Returns the distribution max(p - q, 0), normalised, [..., V]; p itself where that is 0."""
    more = jnp.maximum(p - jnp.where(jnp.isnan(q), 0, q), 0)
    total = jnp.sum(more, axis=-1, keepdims=True)
    return jnp.where(total > 0, more / jnp.where(total > 0, total, 1), p)


def sample_inverse_cdf(probs: Array, u: Array) -> Array:
    """Samples tokens: the first whose cumulative probability exceeds u, [...] int32.

    Args:
      probs: [..., V].
      u: [...], uniform in [0, 1).
    """
    # Rounding may leave the whole sum at or below u: the last token that can be chosen.
    sums = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0)
    tokens = jnp.arange(probs.shape[-1], dtype=jnp.int32)
    last = jnp.max(jnp.where(probs > 0, tokens, 0), axis=-1)
    return jnp.minimum(jnp.min(jnp.where(sums > u[..., None], tokens, probs.shape[-1]), axis=-1), last)


def total_variation(p: Array, q: Array) -> Array:
    """Returns δ = Σ |p - q| / 2, [...]; `accept_ratio` accepts a draft with probability 1 - δ."""
    return jnp.sum(jnp.abs(p - q), axis=-1) / 2


def shared_acceptance_chance(p: Array, q: Array) -> Array:
    """Returns the chance that two distributions choose the same token with the same Gumbel noise, [...].

    It is Σ_v 1 / Σ_w max(p_w / p_v, q_w / q_v), and at least (1 - δ) / (1 + δ); see `total_variation`.
    """
    # [..., V, V]: of w, for each v
    both = (p > 0) & (q > 0)
    ratios = [x[..., None, :] / jnp.where(both, x, 1)[..., :, None] for x in (p, q)]
    return jnp.sum(jnp.where(both, 1 / jnp.sum(jnp.maximum(*ratios), axis=-1), 0), axis=-1)


def mean_tokens_per_round(alpha: float, gamma: int) -> float:
    """Returns the mean number of tokens of a round, if each draft is accepted with an independent chance.

    It is (1 - α^(γ + 1)) / (1 - α) (Leviathan et al., equation 1).

    Args:
      alpha: the chance, from 0 to 1.
      gamma: the number of drafts of a round.
    """
    return float(sum(alpha**place for place in range(gamma + 1)))
