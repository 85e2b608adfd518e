"""A text that all rows follow, whose slots are held once: its part of attention.

A row has slots for the tokens after the prefix, whose positions count from 0. A query attends to the slots of its row
and, separately, to those of the prefix; the two outputs are combined by their log-sum-exps. For the prefix, the queries
of all rows are reshaped to one row, so that its keys and values are read once (as in BatchLLM, arXiv:2412.03594, and
Hydragen, arXiv:2402.05099). The result is that of rows that have copies of the prefix, except for rounding.
"""

from collections.abc import Mapping, Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from kvjax import attention
from kvjax.cache.layer_stack import LayerRuns, LayerStack, arranged, entries_of
from kvjax.cache.planning.limits import slots_bucket
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer, LayerKV
from kvjax.errors import InputError, PolicyError
from kvjax.kernels.problem import Attended, Problem
from kvjax.models.config import DecoderConfig
from kvjax.policies.window import full
from kvjax.typing import Implementation, PyTree

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


def refuse(params: Mapping[str, PyTree], name: str) -> None:
    """Refuses parameters with a shared prefix, for what would read texts without it.

    Args:
      params: of a decoder.
      name: of the function, for the message.

    Raises:
      InputError: they have one.
    """
    if PARAM in params:
        raise InputError(
            f"{name} cannot take a model from kvjax.contexts.with_prefix, and would ignore the text that its prompts "
            "follow; give the model without it."
        )


def length_of(params: Mapping[str, PyTree]) -> Array | int:
    """Returns the number of tokens of the prefix, [1] int32; 0 without one."""
    length: Array | int = params[PARAM].length if PARAM in params else 0
    return length


def tokens_of(params: Mapping[str, PyTree]) -> int:
    """Returns the number of tokens of the prefix on the host; 0 without one, and while parameters are traced."""
    length = length_of(params)
    return 0 if isinstance(length, jax.core.Tracer) else int(np.max(length))


def seen_of(params: Mapping[str, PyTree]) -> np.ndarray | bool:
    """Returns which tokens the prefix has, [V] bool on the host, for repetition penalties; False without one."""
    return np.asarray(params[PARAM].seen) if PARAM in params else False


def prefix_bytes(config: DecoderConfig, tokens: int, itemsize: int) -> int:
    """Returns the bytes of the keys and values of a prefix of `tokens` tokens, which all rows have in common.

    Args:
      config: the decoder.
      tokens: of the prefix.
      itemsize: bytes of a number.
    """
    return 2 * config.num_layers * config.num_kv_heads * slots_bucket(tokens) * config.head_dim * itemsize


def implementation_for(params: Mapping[str, PyTree], asked: Implementation) -> Implementation:
    """Returns the implementation for rows that may follow a prefix, which no kernel reads."""
    return "xla" if asked == "auto" and PARAM in params else asked


class LayerPrefix(flax.struct.PyTreeNode):
    """The prefix in one layer, or in those of a run.

    Attributes:
      slots: the prefix's slots, of one row: exact keys, which are rotated, and values, [1, K, S, D]; of a run, arrays
        [1, L, ...].
      length: [1] int32, the number of its tokens.
    """

    slots: LayerKV
    length: Array


class SharedPrefix(flax.struct.PyTreeNode):
    """A text that all rows follow.

    Attributes:
      layers: its slots, as of a state of one row, with one group of heads in each layer.
      length: [1] int32, the number of its tokens.
      seen: [V] bool, which tokens it has.
    """

    layers: Sequence[Layer]
    length: Array
    seen: Array

    def entries(self, runs: LayerRuns) -> tuple[LayerPrefix, ...]:
        """Returns the prefix in single layers, and in those of each run."""
        every = entries_of(arranged(self.layers, runs))
        layers = (each.layer if isinstance(each, LayerStack) else each for each in every)
        return tuple(LayerPrefix(group, self.length) for (group,) in layers)


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
