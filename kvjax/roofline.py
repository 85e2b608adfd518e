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

from kvjax import sharding
from kvjax.cache.convert import empty_layers
from kvjax.cache.layout import CacheLayout
from kvjax.cache.lowering import Lowered
from kvjax.cache.state import KVState, LayerKV, layers_of
from kvjax.devices import Device
from kvjax.generate import Carry
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import parameter_shapes


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
    """Arguments of the decode loop as `jax.ShapeDtypeStruct`, each at its place on the mesh.

    Attributes:
      params: of the decoder.
      carry: see `kvjax.generate.Carry`.
    """

    params: Any
    carry: Carry


def decode_shapes(
    config: DecoderConfig, layout: CacheLayout, dtype: Any, batch: int, mesh: Mesh | AbstractMesh | None
) -> Shapes:
    """What `kvjax.generate` would hold when it decodes; nothing is allocated."""

    def shape(dims: tuple[int, ...], kind: Any, *axes: str | None) -> Any:
        place = mesh and NamedSharding(mesh, sharding.spec(axes, dims, mesh))
        return jax.ShapeDtypeStruct(dims, kind, sharding=place)

    made = jax.eval_shape(
        lambda: empty_layers(layout.decode, batch, config.num_kv_heads, config.head_dim, dtype)
    )
    held = jax.tree.map(lambda x: shape(x.shape, x.dtype, "batch", "kv_heads", *(None,) * (len(x.shape) - 2)), made)
    params = parameter_shapes(config, dtype)
    if mesh is not None:
        places = sharding.parameter_shardings(params, mesh, (config.num_heads, config.num_kv_heads))
        params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, places)
    row = shape((batch,), jnp.int32, "batch")
    budget = tuple(tuple(row if group.has_budget else None for group in layer) for layer in layout.decode)
    carry = Carry(
        state=KVState(held, length=row, prompt=row, total=row, budget=budget),
        token=row,
        active=shape((batch,), jnp.bool_, "batch"),
        request=row,
        key=jax.eval_shape(lambda: jax.random.key(0)),
    )
    return Shapes(params, carry)


def live_slots(config: DecoderConfig, lowered: Lowered, prompt_length: int, new_tokens: int) -> tuple[float, ...]:
    """Slots per head that a decode step reads, for each group of heads of each layer, averaged over the run's steps."""
    # [steps]: tokens seen, the one being fed included
    seen = prompt_length + 1 + np.arange(max(new_tokens - 1, 1))
    live = []
    for layer, groups in enumerate(lowered.layout.decode):
        window = config.windows[layer]
        for number, group in enumerate(groups):
            kept, limit = lowered.budgets.prompt[layer][number], lowered.budgets.decode[layer][number]
            if group.selection.budget is not None:  # hides slots and frees none
                kept = limit = None
            left = prompt_length if kept is None else min(int(kept.max()), prompt_length)
            # What a prompt leaves, and what was decoded since.
            held = seen - prompt_length + left
            held = held if limit is None else np.minimum(held, int(limit.max()) + 1)
            width = group.selection.width(group.capacity)
            held = held if width is None else np.minimum(held, width)
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
    for (index, layer), slots in zip(layers_of(state), live, strict=True):
        here, kv_heads, _ = _local(layer.position)
        query = shapes.params[f"layer_{index}"]["attention"]["query"]["kernel"]
        flops += 4.0 * here * _local(query)[1] * slots * layer.position.shape[1] / config.num_kv_heads
        statistics = sum(leaf.dtype.itemsize * math.prod(leaf.shape[3:]) for leaf in jax.tree.leaves(layer.stats))
        slot = _slot_bytes(layer)
        # Read every live slot, write the new one; statistics go both ways.
        moved += here * kv_heads * (slots * (slot + 4 + 2 * statistics) + slot + 4)
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


def _slot_bytes(layer: LayerKV) -> float:
    """Bytes of a key and a value, on average over the stores."""
    leaves = jax.tree.leaves(layer.stores)
    held = sum(leaf.shape[2] * math.prod(leaf.shape[3:]) * leaf.dtype.itemsize for leaf in leaves)
    return held / max(layer.position.shape[2], 1)


def fewest_bytes(
    config: DecoderConfig,
    layout: CacheLayout,
    dtype: Any,
    batch: int,
    live: tuple[float, ...],
    count: int,
) -> dict[str, int]:
    """Axis sizes of a mesh over `count` devices under which a device moves the fewest bytes a step."""
    unknown = Device("", None, None, None, "")

    def moved(model: int) -> int:
        mesh = AbstractMesh((count // model, model), ("data", "model"))
        step = roofline(config, decode_shapes(config, layout, dtype, batch, mesh), live, unknown)
        return step.weights_moved + step.cache_moved

    sizes = [model for model in range(count, 0, -1) if count % model == 0]
    model = min(sizes, key=moved)  # of equals the first, which is the largest
    return {"data": count // model, "model": model}


def _local(leaf: Any) -> tuple[int, ...]:
    """Shape of an array's part on one device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def local_bytes(tree: Any) -> int:
    return sum(math.prod(_local(leaf)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
