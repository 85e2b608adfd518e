"""What one decode step must move and compute on each device of a mesh, counted from shapes; nothing is allocated.

A compiler's own cost model would not do: it knows neither which slots are live nor how often a loop runs.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from kvjax import layers, sharding
from kvjax.allocation import Allocation
from kvjax.cache import KVState
from kvjax.devices import Device
from kvjax.generate import Carry
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import parameter_shapes
from kvjax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least that one decode step costs one device, and the speed that this allows.

    The slots that are live at a step are averaged over the run's steps. Collectives are not counted.

    Attributes:
      cache: bytes of the KVState that the device holds.
      weights_moved: bytes of weights read; tables of which only a row is looked up are left out.
      cache_moved: bytes of live keys, values and positions read, statistics read and written, new slots written.
      flops: of the matrix products, a multiplication and an addition being two.
      tokens_per_second: of the whole batch on the whole mesh; None = the device's speed is unknown.
      limit: ``memory`` or ``compute``, whichever is slower; None = unknown.
    """

    cache: int
    weights_moved: int
    cache_moved: int
    flops: int
    tokens_per_second: float | None
    limit: str | None


class Shapes(NamedTuple):
    """Arguments of the decode loop as `jax.ShapeDtypeStruct`, each at its place on the mesh."""

    params: Any
    carry: Carry
    budget: tuple[Any, ...]


def decode_shapes(
    config: DecoderConfig, policy: Policy, slots: Allocation, dtype: Any, batch: int, mesh: Mesh | AbstractMesh | None
) -> Shapes:
    """What `kvjax.generate` would hold when it decodes; nothing is allocated."""

    def shape(dims: tuple[int, ...], kind: Any, *axes: str | None) -> Any:
        place = mesh and NamedSharding(mesh, sharding.spec(axes, dims, mesh))
        return jax.ShapeDtypeStruct(dims, kind, sharding=place)

    made = jax.eval_shape(
        lambda: layers.empty(policy.then or policy, slots.capacity, batch, config.num_kv_heads, config.head_dim, dtype)
    )
    held = jax.tree.map(lambda x: shape(x.shape, x.dtype, "batch", "kv_heads", *(None,) * (len(x.shape) - 2)), made)
    params = parameter_shapes(config, dtype)
    if mesh is not None:
        places = sharding.parameter_shardings(params, mesh, (config.num_heads, config.num_kv_heads))
        params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, places)
    row = shape((batch,), jnp.int32, "batch")
    carry = Carry(
        state=KVState(held, row),
        token=row,
        active=shape((batch,), jnp.bool_, "batch"),
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )
    return Shapes(params, carry, jax.tree.map(lambda _: row, slots.decode_budget))


def live_slots(
    config: DecoderConfig, policy: Policy, slots: Allocation, prompt_length: int, new_tokens: int
) -> tuple[float, ...]:
    """Slots per head of each layer (and part of it) that a decode step attends to, averaged over the run's steps."""
    if policy.parts:
        by_part = [
            live_slots(config, part.policy, Allocation(*own), prompt_length, new_tokens)
            for part, own in zip(policy.parts, zip(*slots, strict=True), strict=True)
        ]
        return tuple(
            live[layer]
            for layer in range(config.num_layers)
            for part, live in zip(policy.parts, by_part, strict=True)
            if part.heads[layer]
        )
    # [steps]: tokens seen, the one being fed included
    seen = prompt_length + 1 + np.arange(max(new_tokens - 1, 1))
    kept = [int(rows.max()) for rows in slots.budget] or [prompt_length] * config.num_layers
    limits: list[int | None] = [int(rows.max()) for rows in slots.decode_budget] or [None] * config.num_layers
    live = []
    for left, limit, window in zip(kept, limits, config.windows, strict=True):
        # What a prompt leaves, and what was decoded since.
        held = seen - prompt_length + min(left, prompt_length)
        held = held if limit is None else np.minimum(held, limit + 1)
        live.append(float(np.mean(held if window is None else np.minimum(held, window))))
    return tuple(live)


def roofline(config: DecoderConfig, shapes: Shapes, live: tuple[float, ...], device: Device) -> Roofline:
    """Counts one decode step on one device; of no mesh, if the shapes have no place, on the whole machine."""
    state = shapes.carry.state
    batch = state.length.shape[0]
    matrices = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(shapes.params) if _is_read(config, path)]
    rows = _local(state.length)[0]
    flops = 2.0 * rows * sum(math.prod(_local(leaf)) for leaf in matrices if len(leaf.shape) == 2)
    moved = 0.0
    for (index, layer), slots in zip(layers.flat(state), live, strict=True):
        here, kv_heads, _, dim = _local(layer.key)
        query = shapes.params[f"layer_{index}"]["attention"]["query"]["kernel"]
        flops += 4.0 * here * _local(query)[1] * slots * layer.key.shape[1] / config.num_kv_heads
        statistics = sum(leaf.dtype.itemsize * math.prod(leaf.shape[3:]) for leaf in jax.tree.leaves(layer.stats))
        item = layer.key.dtype.itemsize
        # Read every live slot, write the new one; statistics go both ways.
        moved += here * kv_heads * (slots * (2 * dim * item + 4 + 2 * statistics) + 2 * dim * item + 4)
    weights = local_bytes(matrices)
    seconds = {
        "memory": device.bandwidth and (weights + moved) / device.bandwidth,
        "compute": device.flops and flops / device.flops,
    }
    known = {name: value for name, value in seconds.items() if value}
    limit = max(known, key=known.__getitem__) if "memory" in known else None
    speed = batch / known[limit] if limit else None
    return Roofline(local_bytes(state), weights, round(moved), round(flops), speed, limit)


def _is_read(config: DecoderConfig, path: tuple[Any, ...]) -> bool:
    """Whether a step reads a parameter whole; of an embedding that is not the output head it looks up one row."""
    name = tuple(key.key for key in path[-2:])
    return name != ("position_embed", "table") and (config.tie_embeddings or name != ("embed", "tokens"))


def fewest_bytes(
    config: DecoderConfig,
    policy: Policy,
    slots: Allocation,
    dtype: Any,
    batch: int,
    live: tuple[float, ...],
    count: int,
) -> dict[str, int]:
    """Axis sizes of a mesh over `count` devices under which a device moves the fewest bytes a step."""
    unknown = Device("", None, None, None, "")

    def moved(model: int) -> int:
        mesh = AbstractMesh((count // model, model), ("data", "model"))
        step = roofline(config, decode_shapes(config, policy, slots, dtype, batch, mesh), live, unknown)
        return step.weights_moved + step.cache_moved

    sizes = [model for model in range(count, 0, -1) if count % model == 0]
    model = min(sizes, key=moved)  # of equals the first, which is the largest
    return {"data": count // model, "model": model}


def _local(leaf: Any) -> tuple[int, ...]:
    """Shape of an array's part on one device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def local_bytes(tree: Any) -> int:
    return sum(math.prod(_local(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
