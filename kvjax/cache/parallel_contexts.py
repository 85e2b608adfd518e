"""Contexts that share positions and do not see each other: their part of attention (APE, arXiv:2502.05431).

A query that follows such contexts attends to them and to all other slots separately. With the log-sum-exps L_c of the
contexts, whose logits are divided by the temperature T, and L_o of the others, the two outputs have the weights
exp(s·T·L_c) and exp(L_o): the contexts' whole part is raised to a power, so that they must be one part.
"""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.attention import Attended, Columns
from kvjax.cache.state import CONTEXTS_START, CONTEXTS_STOP, EMPTY, SHIFT, LayerKV
from kvjax.kernels.problem import Problem

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ParallelContexts:
    """How the contexts' part of attention is weighted.

    Attributes:
      temperature: T, of the logits of the contexts.
      exponent: s·T, of the contexts' part.
    """

    temperature: float
    exponent: float


def shift_of(layer: LayerKV) -> Array:
    """Returns the difference of running and rotated positions of new tokens, [B] int32."""
    shift: Array = layer.marks[SHIFT][:, 0]
    return shift


def attend(problem: Problem, layer: LayerKV, how: ParallelContexts) -> tuple[Array, Columns]:
    """Attends to the contexts and to the other slots.

    Args:
      problem: over all slots.
      layer: whose marks say which slots are of contexts.
      how: the weights of the parts.

    Returns:
      The output [B, K, G, n, D] in value's dtype, and the columns of the statistics of all slots, of a slot's
      probability in its part times the part's weight.
    """
    at = problem.key_position
    # [B, K, S]
    inside = (at >= layer.marks[CONTEXTS_START][..., None]) & (at < layer.marks[CONTEXTS_STOP][..., None])
    contexts = problem.replace(
        key_position=jnp.where(inside, at, EMPTY), scale=problem.scale / how.temperature, causal=False
    )
    others = problem.replace(key_position=jnp.where(inside, EMPTY, at), causal=False)
    first, second = (attention.attend(each, "xla") for each in (contexts, others))
    assert first.lse is not None
    seen_any = jnp.isfinite(first.lse)
    # [B, K, G, n]; -inf for a query that sees no context
    power = jnp.where(seen_any, how.exponent * first.lse, -jnp.inf)
    whole = attention.combine(Attended(first.output, power), second)
    assert whole.lse is not None
    seen = None
    if problem.needs_seen:
        seen = attention.count_seen(contexts) + attention.count_seen(others)
    # A probability is exp(logit - lse) times the weight of the part, exp(power - whole).
    of_contexts = jnp.where(seen_any, whole.lse + first.lse - power, whole.lse)
    columns = [
        attention.column_sums(contexts, of_contexts, seen, "xla"), attention.column_sums(others, whole.lse, seen, "xla")
    ]  # fmt: skip

    def joined(one: Array, two: Array) -> Array:
        return jnp.where(inside.reshape(*inside.shape, *(1,) * (one.ndim - 3)), one, two)

    return whole.output.astype(problem.value.dtype), {
        name: joined(columns[0][name], columns[1][name]) for name in columns[0]
    }
