"""Runs a decoding step of one group of heads as one kernel: append, attend, observe, evict.

The policy's own Python is traced into the kernel. Lowering has asked the registry whether the kernel takes the step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Group
from kvjax.cache.slots import forget
from kvjax.cache.state import EMPTY, Block, LayerKV, exact_store
from kvjax.cache.step import evict
from kvjax.cache.step.interface import LayerArgs, StepInputs
from kvjax.kernels import registry
from kvjax.kernels.coded import Coded
from kvjax.numerics import stack_slices
from kvjax.numerics.statistics import by_name
from kvjax.parallel import sharding
from kvjax.policies.base import View
from kvjax.storage.store import encode

Array = jax.Array


def step(
    layer: LayerKV, inputs: StepInputs, block: Block, group: Group, budget: Array | None, args: LayerArgs
) -> tuple[Array, LayerKV, None]:
    """Feeds one token per row.

    Args:
      layer: dense, or of codes that the kernel reads.
      inputs: the tokens.
      block: the tokens of the step.
      group: see `kvjax.cache.step.step.step`.
      budget: [B] int32 or None.
      args: of the layer.

    Returns:
      The output [B, H, 1, D], the layer afterwards, and None, since the operands of attention are in the kernel.
    """
    assert args.soft_cap is None, "kernels of whole steps refuse soft-caps; see `kvjax.kernels.registry`"
    query, key, value, newest = *inputs[:3], block.newest
    batch, query_heads, _, dim = query.shape
    assert group.step_implementation is not None
    kernel = functools.partial(
        registry.find("step", group.step_implementation).load(),
        observe_and_evict=functools.partial(observe_and_evict, group),
        transforms=tuple(sorted({s.transform for s in group.needs})),
        scale=inputs.scale,
        window=args.window,
        group_reduce=group.policy.group_reduce,
    )

    def run(query, key, value, layer, newest, budget):
        held: tuple[Any, Any]
        key_codec, value_codec = group.codecs
        if key_codec is not None and value_codec is not None:
            store, dtype = layer.stores[0], value.dtype
            held = (
                Coded(parts=store["key"], codec=key_codec, dim=dim, dtype=dtype),
                Coded(parts=store["value"], codec=value_codec, dim=dim, dtype=dtype),
            )
            made = encode(group.stores[0], key, value, dtype)
            encoded = made["key"], made["value"]
        else:
            held, encoded = (layer.key, layer.value), None
            key, value = key.astype(layer.key.dtype), value.astype(layer.value.dtype)
        output, key, value, position, stats = kernel(
            query, key, value, *held, layer.position, layer.stats, newest=newest, budget=budget, encoded=encoded
        )
        after = exact_store(key, value) if encoded is None else {"key": key.parts, "value": value.parts}
        return output, layer.replace(stores=(after,), position=position, stats=stats)

    by_head, by_row = ("batch", "kv_heads"), ("batch",)
    budget = jnp.zeros_like(newest) if budget is None else budget
    arguments = (query.reshape(batch, key.shape[1], -1, dim), key, value, layer, newest, budget)

    def on_devices(*arguments):
        return sharding.on_each_device(run, arguments, (by_head,) * 4 + (by_row,) * 2, by_head)

    # Kernels for GPUs take no slices.
    if group.step_implementation == "pallas_tpu":
        output, layer = stack_slices.call_with_slices(on_devices, *arguments)
    else:
        output, layer = on_devices(*arguments)
    return output.reshape(batch, query_heads, 1, dim), layer, None


class _Outside:
    """Stands for keys, values and the layer's index, which a kernel does not pass to the policy."""

    message = "keys, values and the index of the layer are outside of the kernel"

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self.message)

    def __jax_array__(self) -> Array:
        raise TypeError(self.message)


def observe_and_evict(
    group: Group, stats: dict[str, Array], position: Array, columns: dict[str, Array], newest: Array, budget: Array
) -> tuple[dict[str, Array], Array]:
    """Observes and evicts after attention, for one row.

    Args:
      group: the policy.
      stats: statistic name -> [1, K, S].
      position: [1, K, S] int32.
      columns: transform of a statistic -> [1, K, S], of the row's one query.
      newest: [1] int32.
      budget: [1] int32.

    Returns:
      The statistics and positions afterwards.
    """
    # The one query of a row is its newest.
    weight = {s.name: 1 - s.gamma if s.accumulate == "decay" else 1.0 for s in by_name(group.needs)}
    seen = {s.name: columns[s.transform] * weight[s.name] for s in by_name(group.needs)}
    stats = evict.observe(stats, group.needs, seen, (newest >= 0).astype(jnp.int32))
    if group.policy.budget is not None:
        outside: Any = _Outside()
        view = View(position, outside, outside, newest, budget, newest + 1, outside, True, group.heads)
        victim = evict.victims(group.policy, stats, view, one=group.evicts_one)
        position = jnp.where(victim, EMPTY, position)
    return forget(stats, position), position
