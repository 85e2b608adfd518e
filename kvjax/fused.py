"""A decoding step of a layer as one kernel: append, attend, observe, evict; what `cache.step` does, where it can.

A policy is traced into the kernel as it is. Only one that looks at a head's positions and statistics can be
(`in_kernel` of its importance and scope); any other goes through `cache.step`, with a kernel for its attention alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import cache, sharding
from kvjax.attention import Implementation
from kvjax.cache import Block, LayerKV
from kvjax.policies.base import Policy, View
from kvjax.rope import Rope
from kvjax.statistics import Observation

Array = jax.Array
GROUP_BYTES = 32  # of one feature: slots that share a tile of a TPU's memory, which is written whole
HELD_BYTES = 16 << 20  # that a kernel may have of a TPU core's memory
GPU_SLOTS = 8  # that a GPU's copies into shared memory move together


def capacity_multiple(implementation: Implementation, itemsize: int) -> int:
    """Slots are allocated in multiples of this, so that kernels can read and write them where they lie."""
    if implementation == "pallas_tpu":
        return max(GROUP_BYTES // itemsize, 1)
    return GPU_SLOTS if implementation == "pallas_gpu" else 1


def covers(block: Block, layer: LayerKV | None, tokens: int, kv_heads: int, group: int) -> bool:
    """Whether `step` can take this step: so many tokens a row, of a policy and a shape that the kernel has room for.

    Any other goes through `cache.step`, whose attention kernel holds less: more slots and, on a GPU, too few rows and
    heads for one program each.
    """
    if layer is None or tokens > 1 or not block.decoding:
        return False
    match block.implementation:
        case "pallas_tpu":
            # Heads that share a ranking must be in one place.
            together = sharding.divided("kv_heads", kv_heads) == 1
            return _in_kernel(block.policy, together) and _held_bytes(block.policy, layer, group) <= HELD_BYTES
        case "pallas_gpu":
            return _in_kernel(block.policy, together=kv_heads == 1) and _is_one_program(block.policy, layer, group)
    return False


def _held_bytes(policy: Policy, layer: LayerKV, group: int) -> int:
    """Bytes of a TPU core's memory that the kernel holds for a row, in tiles of 8 or more rows by 128 lanes."""
    from kvjax.kernels.decode import step_tpu

    _, kv_heads, slots, dim = layer.key.shape
    heads = kv_heads // sharding.divided("kv_heads", kv_heads)
    tile = step_tpu.tile_slots(heads, slots, dim, layer.key.dtype.itemsize)
    slots, dim = (-(-x // 128) * 128 for x in (slots, dim))
    rows, group = -(-heads // 8) * 8, group if group == 1 else -(-group // 8) * 8
    # Logits, and probabilities while they are added up; what is visible; positions and statistics, on their way in and
    # out, two of each; and what the compiler keeps of the policy's own arithmetic (up to 11 measured, for roco).
    lines = 2 * heads * group + rows * (1 + 4 * (1 + len(policy.needs)) + 12)
    # Keys and values that pass through, two tiles of each.
    tiles = 4 * tile * heads * dim * layer.key.dtype.itemsize
    # Query, output and sums of every query head; the new pair, and the group of slots that is written.
    small = heads * dim * (4 * 6 * group + 4 * 32 * 4 + 2 * 32)
    return 4 * slots * lines + tiles + small


def _is_one_program(policy: Policy, layer: LayerKV, group: int) -> bool:
    """Whether a GPU's program takes all slots of a (row, KV head), and there are enough of these to fill the GPU."""
    from kvjax.kernels.decode import step_gpu

    batch, kv_heads, slots, dim = layer.key.shape
    pairs = batch * kv_heads // sharding.divided("batch", batch) // sharding.divided("kv_heads", kv_heads)
    return step_gpu.plan_of(pairs, group, slots, dim, layer.key.dtype, len(policy.needs)) is not None


def _in_kernel(policy: Policy, together: bool) -> bool:
    """Whether a kernel can trace it; together: one sees all KV heads of a row."""
    importance, scope = policy.importance, policy.scope
    if importance is None or scope is None or not (importance.in_kernel and scope.in_kernel):
        return False
    plain = policy.merge is None and policy.mask is None and policy.limits is None and policy.then is None
    counted = all(not s.words and s.tail is None for s in policy.needs)
    return (together or not importance.aligned) and plain and counted and policy.positions == "original"


def step(
    layer: Any,
    query: Array,
    key: Array,
    value: Array,
    *,
    block: Block,
    index: int,
    rope: Rope | None = None,
    scale: float | None = None,
    window: int | None = None,
    heads: tuple[int, ...] | None = None,
) -> tuple[Array, LayerKV]:
    """As `cache.step`, for one token a row."""
    policy = block.policy
    batch, query_heads, _, dim = query.shape
    kv_heads = key.shape[1]
    newest = block.position[:, 0]
    if rope is not None:
        query, key = (rope.rotate(x, block.position, rope.frequencies(newest + 1)) for x in (query, key))
    kernel = functools.partial(
        _kernel(block.implementation),
        settle=functools.partial(settle, policy, index, heads),
        transforms=tuple(sorted({s.transform for s in policy.needs})),
        scale=dim**-0.5 if scale is None else scale,
        window=window,
        group_reduce=policy.group_reduce,
    )

    def run(query, key, value, layer, newest, budget):
        key, value = key.astype(layer.key.dtype), value.astype(layer.value.dtype)
        output, key, value, position, stats = kernel(
            query, key, value, layer.key, layer.value, layer.position, layer.stats, newest=newest, budget=budget
        )
        return output, LayerKV(key, value, position, stats)

    by_head, by_row = ("batch", "kv_heads"), ("batch",)
    budget = block.budget[index] if policy.budget is not None else jnp.zeros_like(newest)
    arguments = (query.reshape(batch, kv_heads, -1, dim), key, value, layer, newest, budget)
    output, layer = sharding.on_each_device(run, arguments, (by_head,) * 4 + (by_row,) * 2, by_head)
    return output.reshape(batch, query_heads, 1, dim), layer


def _kernel(implementation: Implementation) -> Callable[..., Any]:
    """Pallas takes a while to import, and only these need it."""
    if implementation == "pallas_gpu":
        from kvjax.kernels.decode import step_gpu

        return step_gpu.step
    from kvjax.kernels.decode import step_tpu

    return step_tpu.step


def settle(
    policy: Policy,
    index: int,
    heads: tuple[int, ...] | None,
    stats: dict[str, Array],
    position: Array,
    columns: dict[str, Array],
    newest: Array,
    budget: Array,
) -> tuple[dict[str, Array], Array]:
    """What comes after attention: statistics and positions [1, K, S] of one row, as the policy leaves them."""
    # The one query of a row is its newest.
    weight = {s.name: 1 - s.gamma if s.accumulate == "decay" else 1.0 for s in policy.needs}
    seen = {s.name: columns[s.transform] * weight[s.name] for s in policy.needs}
    unseen: Any = None  # keys and values are no matter of a policy in a kernel
    layer = LayerKV(unseen, unseen, position, stats)
    layer = cache.observe(layer, policy, Observation(seen, (newest >= 0).astype(jnp.int32)))
    if policy.budget is not None:
        view = View(position, unseen, unseen, newest, budget, newest + 1, index, True, heads)
        layer = cache.evict(layer, policy, view, tokens=1)
    return cache.forget(layer.stats, layer.position), layer.position
