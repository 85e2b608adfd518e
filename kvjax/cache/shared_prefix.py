"""A text that all rows follow, whose slots are held once: its part of attention.

The rows have slots for their own tokens, at positions from 0 on. What a query attends to is divided into its row's
slots and those of the prefix, which the queries of all rows read together, as if they were one row's; the two outputs
are combined by their log-sum-exps (as in BatchLLM, arXiv:2412.03594, and Hydragen, arXiv:2402.05099). The result is
that of rows that have copies of the prefix, but for rounding.
"""

from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.cache.layer_stack import LayerRuns, LayerStack, arranged, entries_of
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer, LayerKV
from kvjax.errors import PolicyError
from kvjax.kernels.problem import Attended, Problem
from kvjax.policies.window import full
from kvjax.typing import PyTree

Array = jax.Array
PARAM = "shared_prefix"  # of a model's parameters: a `SharedPrefix`


def check_rows(params: Mapping[str, PyTree], spec: CacheSpec) -> None:
    """Checks the cache of rows that follow a shared prefix, if the parameters have one.

    Raises:
      PolicyError: it evicts, codes or selects.
    """
    if PARAM in params and spec != CacheSpec(full()):
        raise PolicyError(
            f"{spec.name} cannot be the cache of rows that share a prefix; valid is policies.full() with exact "
            "storage. For other caches give each row a copy, with kvjax.contexts.rows."
        )


def tokens_of(params: Mapping[str, PyTree]) -> int:
    """Returns the number of tokens of the prefix; 0 without one, and while parameters are traced."""
    length = params[PARAM].length if PARAM in params else 0
    return 0 if isinstance(length, jax.core.Tracer) else int(np.max(length))


class LayerPrefix(flax.struct.PyTreeNode):
    """The prefix in one layer.

    Attributes:
      slots: the prefix's slots, of one row: keys and values [1, K, S, D] as they are, keys rotated.
      length: [1] int32, the number of its tokens.
    """

    slots: LayerKV
    length: Array


class SharedPrefix(flax.struct.PyTreeNode):
    """A text that all rows follow.

    Attributes:
      layers: its slots, as of a state of one row, with one group of heads in each layer.
      length: [1] int32, the number of its tokens.
    """

    layers: Sequence[Layer]
    length: Array

    def entries(self, runs: LayerRuns) -> tuple["LayerPrefix | StackPrefix", ...]:
        """Returns the prefix in single layers, and in the stacks of runs."""
        return tuple(
            StackPrefix(each, self.length) if isinstance(each, LayerStack) else LayerPrefix(each[0], self.length)
            for each in entries_of(arranged(self.layers, runs))
        )


class StackPrefix(flax.struct.PyTreeNode):
    """The prefix in the layers of a run.

    Attributes:
      stack: its slots, arrays [1, L, ...].
      length: [1] int32, the number of its tokens.
    """

    stack: LayerStack
    length: Array


def attend(own: Problem, prefix: LayerPrefix) -> Array:
    """Attends to the slots of each row and to those of the prefix.

    Args:
      own: the queries, and the slots of their rows; without statistics. Positions are those after the prefix.
      prefix: the prefix in this layer.

    Returns:
      The output [B, K, G, n, D] in value's dtype.
    """
    batch, kv_heads, group, n, dim = own.query.shape
    # [1, K, G, B * n, D]
    query = jnp.moveaxis(own.query, 0, 2).reshape(1, kv_heads, group, batch * n, dim)
    at = own.query_position
    # [1, B * n]
    position = jnp.where(at >= 0, at + prefix.length, -1).reshape(1, batch * n)
    shared = own.replace(
        query=query, key=prefix.slots.key, value=prefix.slots.value, query_position=position,
        key_position=prefix.slots.position, causal=False,
    )  # fmt: skip
    of_prefix, of_rows = _attended(shared), _attended(own)
    assert of_prefix.lse is not None
    # [B, K, G, n, D] and [B, K, G, n]
    output = jnp.moveaxis(of_prefix.output.reshape(kv_heads, group, batch, n, dim), 2, 0)
    lse = jnp.moveaxis(of_prefix.lse.reshape(kv_heads, group, batch, n), 2, 0)
    return attention.combine(Attended(output, lse), of_rows).output.astype(own.value.dtype)


def _attended(problem: Problem) -> Attended:
    """Returns attention over one part, not rounded to a smaller dtype than float32."""
    if problem.value.dtype != jnp.float32:
        return attention.attend(problem, "xla")
    return attention.attend_and_reduce(problem, "xla")[0]
