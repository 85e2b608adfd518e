"""Roofline of a decode step: the bytes and FLOPs per device of a mesh, counted from shapes without allocating anything.

The cost model of a compiler does not suffice here, since it knows neither the number of live slots nor how often a loop
runs.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from kvjax.cache.arrangements.base import Arrangement
from kvjax.cache.empty import empty_layers, memories
from kvjax.cache.groups import Group
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.planning.lowering import Lowered
from kvjax.cache.slots import axes_of, divided
from kvjax.cache.state import KVState, Layer, LayerKV, layers_of
from kvjax.devices import Device
from kvjax.generation.decoding import Carry
from kvjax.models import offload
from kvjax.models.config import DecoderConfig, model_sizes
from kvjax.models.decoder_layer import POLICY, SIDES
from kvjax.models.quantize import WeightCodes, held_shapes
from kvjax.parallel import sharding
from kvjax.parallel.host_memory import DEVICE, HOST, PINNED
from kvjax.parallel.rules import Rules, using
from kvjax.parallel.sharding import Params, PyTree
from kvjax.policies.parameters import distinct
from kvjax.policies.parameters import empty as empty_parameters
from kvjax.policies.traits import held_in_steps, left_of_prompt
from kvjax.products.quantized import MATRIX, QuantizedMatrix, is_quantized
from kvjax.storage.calibration import side_shapes

Array = jax.Array
POSITION_BYTES = 4  # of the int32 position of a slot


@dataclasses.dataclass(frozen=True)
class Roofline:
    """A lower bound on the cost of one decode step on one device, and the resulting upper bound on the speed.

    The number of slots is averaged over the steps of a run. Collectives are not counted.

    Attributes:
      cache: bytes of the KVState on the device.
      host: bytes in host memory: of weights and of keys and values.
      weights_moved: bytes of weights that a step reads. Tables from which it looks up single rows are not counted. Of
        routed experts, those count that the rows choose on average, if every choice is as likely as any other.
      cache_moved: bytes that a step reads (keys, values and positions of the slots that are read, what these share,
        their statistics, and the selection's index of all slots) and writes (statistics and new slots).
      link_moved: bytes that a step moves from host memory to the device: weights, and slots, in arrays of fixed shapes.
      flops: floating-point operations of the matrix products, where a multiply-add counts as two.
      tokens_per_second: of the whole batch on the whole mesh; None if the speed of the device is unknown.
      limit: the slowest of ``memory``, ``compute`` and ``host link``; None if unknown.
      experts: of each layer; 0 for a dense MLP.
      experts_read: those of a layer that the rows of a device choose, on average as above.
    """

    cache: int
    host: int
    weights_moved: int
    cache_moved: int
    link_moved: int
    flops: int
    tokens_per_second: float | None
    limit: str | None
    experts: int
    experts_read: float

    def seconds(self, device: Device) -> dict[str, float]:
        """Returns the least seconds of a step by ``memory``, ``compute`` and ``host link``, of those that it uses.

        Args:
          device: the device.
        """
        used = {
            "memory": (self.weights_moved + self.cache_moved, device.bandwidth),
            "compute": (self.flops, device.flops),
            "host link": (self.link_moved, device.link),
        }
        return {name: amount / speed for name, (amount, speed) in used.items() if amount and speed}


class Shapes(NamedTuple):
    """The arguments of the decode loop, as `jax.ShapeDtypeStruct` with shardings.

    Attributes:
      params: of the decoder.
      carry: see `kvjax.generation.decoding.Carry`.
    """

    params: Params
    carry: Carry


def decode_shapes(
    config: DecoderConfig,
    layout: CacheLayout,
    dtype: DTypeLike,
    batch: int,
    mesh: Mesh | AbstractMesh | None,
    host_weights: float = 0.0,
    weights: WeightCodes | None = None,
) -> Shapes:
    """Returns the shapes of what `kvjax.generate` holds while decoding, without allocating it.

    Args:
      config: the decoder.
      layout: the static description of the cache.
      dtype: of parameters and cache.
      batch: the number of rows.
      mesh: the mesh, or None for a single device.
      host_weights: see `kvjax.load`.
      weights: see `kvjax.load`.
    """

    def shape(dims: tuple[int, ...], kind: DTypeLike, *axes: str | None, memory: str = DEVICE) -> Array:
        """Returns a shape with its sharding, typed as an array so that it can be part of a `KVState`."""
        place: Sharding | None = NamedSharding(mesh, sharding.spec(axes, dims, mesh)) if mesh else None
        place = offload.in_host_memory(place) if memory == HOST else place
        return cast(Array, jax.ShapeDtypeStruct(dims, kind, sharding=place))

    made = jax.eval_shape(lambda: empty_layers(layout.decode, batch, config.num_kv_heads, config.head_dim, dtype))

    def of_group(group: Group, layer: LayerKV, where: LayerKV) -> LayerKV:
        counts = divided(layer, group.per_head) if group.slot_axes else jax.tree.map(lambda _: 2, layer)
        found: LayerKV = jax.tree.map(
            lambda x, count, memory: shape(x.shape, x.dtype, *axes_of(x, count), memory=memory), layer, counts, where
        )
        return found

    held = tuple(
        Layer(of_group(*each) for each in zip(*layers, strict=True))
        for layers in zip(layout.decode, made, memories(layout.decode, made), strict=True)
    )
    params = _calibrated(held_shapes(config, dtype, weights), config, layout, dtype)
    if mesh is not None:
        places = sharding.parameter_shardings(params, mesh)
        params = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, places)
    params = offload.shapes_with_host_layers(params, offload.host_layers(config.num_layers, host_weights))
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


def _calibrated(params: Params, config: DecoderConfig, layout: CacheLayout, dtype: DTypeLike) -> Params:
    """Adds the shapes of a calibration to the layers whose storage or policy needs one."""
    params = dict(params)
    for index, phases in enumerate(zip(layout.prompt, layout.decode, strict=True)):
        # A compressor reads its parameters at the end of the prompt. They are held while decoding, and counted as if
        # each step read them: some K D numbers of a layer.
        groups = [group for phase in phases for group in phase]
        # Groups of heads have one storage, or an exact one.
        found = [side_shapes(group.storage, config.num_kv_heads, config.head_dim, dtype) for group in groups]
        if sides := next(filter(None, found), None):
            layer = params[f"layer_{index}"]
            params[f"layer_{index}"] = {**layer, "attention": {**layer["attention"], SIDES: sides}}
        if own := distinct(each for group in groups for each in group.policy.params):
            layer = params[f"layer_{index}"]
            made = empty_parameters(own, model_sizes(config))
            params[f"layer_{index}"] = {**layer, "attention": {**layer["attention"], POLICY: made}}
    return params


class AverageSlots(NamedTuple):
    """Slots per KV head of one group of heads, averaged over the decode steps of a run.

    Attributes:
      held: the number of live slots.
      read: the number of slots that a step reads.
      fetched: the number of slots that a step moves from host memory, if they are there.
      lender: the arrangement, if a step also reads what the layer before it holds for both; otherwise None.
    """

    held: float
    read: float
    fetched: float = 0.0
    lender: Arrangement | None = None


def average_slots(
    config: DecoderConfig, lowered: Lowered, prompt_length: int, new_tokens: int
) -> tuple[AverageSlots, ...]:
    """Returns the number of slots per head that a decode step holds and reads.

    Args:
      config: the decoder.
      lowered: the layout and the budgets.
      prompt_length: the number of tokens of the prompt.
      new_tokens: the number of new tokens.

    Returns:
      One value for each group of heads of each layer, in the order of `CacheLayout.groups`.
    """
    # [steps]: the number of tokens so far, the one being fed included
    seen = prompt_length + 1 + np.arange(max(new_tokens - 1, 1))
    slots = []
    for layer, groups in enumerate(lowered.layout.decode):
        window = config.windows[layer]
        for number, group in enumerate(groups):
            kept, limit = lowered.budgets.prompt[layer][number], lowered.budgets.decode[layer][number]
            if group.selection.budget is not None:
                # It hides slots; all of them are kept.
                kept = limit = None
            if group.unranked:
                # What is evicted is held in a low tier, and read.
                kept = limit = None
            own = lowered.layout.prompt[layer][number].policy
            survivors = prompt_length if kept is None else left_of_prompt(own, int(kept.max()), prompt_length)
            # [steps]: the survivors of the prompt, and the tokens decoded since
            held = seen - prompt_length + survivors
            if limit is not None:
                held = held_in_steps(group.policy, int(limit.max()), survivors, seen - prompt_length, window)
            # A selection that ranks by the keys themselves reads them all.
            width = None if group.selection.ranks_by_keys else group.selection.width(group.capacity)
            read = held if width is None else np.minimum(held, width)
            read = read if window is None else np.minimum(read, window)
            lender = group.arrangement if group.arrangement.borrows(group) else None
            slots.append(AverageSlots(float(np.mean(held)), float(np.mean(read)), float(group.moved), lender))
    return tuple(slots)


def roofline(config: DecoderConfig, shapes: Shapes, slots: tuple[AverageSlots, ...], device: Device) -> Roofline:
    """Counts the bytes and FLOPs of one decode step on one device.

    Args:
      config: the decoder.
      shapes: from `decode_shapes`. If it has no shardings, the whole step is on one device.
      slots: from `average_slots`.
      device: the device.
    """
    state = shapes.carry.state
    batch = state.length.shape[0]
    leaves = jax.tree_util.tree_leaves_with_path(shapes.params, is_leaf=is_quantized)
    matrices = [leaf for path, leaf in leaves if _is_read(config, path)]
    experts = [leaf for leaf in matrices if len(leaf.shape) > MATRIX]
    rows = _local(state.length)[0]
    # The shares of the experts that one token goes through, and that are read for all rows.
    chosen = config.experts_per_token / max(config.num_experts, 1)
    hit = 1 - (1 - chosen) ** rows
    # A multiplication and an addition per row and matrix element; the decoding of codes is not counted.
    flops = 2.0 * rows * sum(math.prod(_local_matrix(leaf)) for leaf in matrices if len(leaf.shape) == MATRIX)
    flops += 2.0 * rows * chosen * sum(math.prod(_local_matrix(leaf)) for leaf in experts)
    moved, linked = 0.0, 0.0
    before: LayerKV | None = None
    for (index, layer), own in zip(layers_of(state), slots, strict=True):
        # What two layers share is held once, and read by both.
        read = layer if own.lender is None or before is None else own.lender.borrow(before, layer)
        before = layer
        local_rows, kv_heads, local_slots = _local(layer.position)
        # The share of the slots that is on a device.
        share = local_slots / max(layer.position.shape[2], 1)
        own = own._replace(held=own.held * share, read=own.read * share)
        query = shapes.params[f"layer_{index}"]["attention"]["query"]["kernel"]
        # Query features that attend on a device: all of its KV heads, where slots are divided.
        group = config.num_heads // config.num_kv_heads
        features = (
            kv_heads * group * config.head_dim
            if share < 1
            else _local_matrix(query)[1] * layer.position.shape[1] / config.num_kv_heads
        )
        # Two products, QKᵀ and PV, each with a multiplication and an addition per element.
        flops += 4.0 * local_rows * features * own.read
        statistics = sum(leaf.dtype.itemsize * math.prod(leaf.shape[3:]) for leaf in jax.tree.leaves(layer.stats))
        slot = _slot_bytes(read.stores, layer)
        # Every slot that is read, and the new one, which is written; statistics are read and written.
        attended = own.read * (slot + POSITION_BYTES + 2 * statistics) + slot + POSITION_BYTES
        # A selection looks at its index of all that is held.
        shared = sum(math.prod(leaf.shape[2:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(read.sides))
        moved += local_rows * kv_heads * (attended + shared + own.held * _slot_bytes(layer.index, layer))
        linked += local_rows * kv_heads * own.fetched * _fetched_slot_bytes(layer)
    weights = local_bytes(matrices) - round((1 - hit) * local_bytes(experts))
    link = round(linked) + local_bytes(shapes.params, HOST)
    host = local_bytes((shapes.params, state), HOST)
    step = Roofline(
        local_bytes(state, DEVICE), host, weights, round(moved), link, round(flops), None, None, config.num_experts,
        hit * config.num_experts,
    )  # fmt: skip
    known = step.seconds(device)
    if "memory" not in known:
        return step
    limit = max(known, key=known.__getitem__)
    return dataclasses.replace(step, tokens_per_second=batch / known[limit], limit=limit)


def _is_read(config: DecoderConfig, path: KeyPath) -> bool:
    """Returns whether a step reads the whole parameter.

    It looks up single rows of the position table, and of the token embedding if that is not the output head too.
    """
    name = sharding.path_names(path[-2:])
    return name != ("position_embed", "table") and (config.tie_embeddings or name != ("embed", "tokens"))


def _slot_bytes(tree: PyTree, layer: LayerKV) -> float:
    """Returns the bytes of a tree of arrays [B, K, ...] per slot of a KV head, averaged over the layer's slots."""
    held = sum(math.prod(leaf.shape[2:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    return held / max(layer.position.shape[2], 1)


def _fetched_slot_bytes(layer: LayerKV) -> float:
    """Returns the bytes of a slot of the first store that are in host memory."""
    leaves = [leaf for leaf in jax.tree.leaves(layer.stores[0]) if _on_host(leaf)]
    return sum(math.prod(leaf.shape[3:]) * leaf.dtype.itemsize for leaf in leaves)


def fewest_bytes(
    config: DecoderConfig,
    layout_on: Callable[[AbstractMesh], CacheLayout],
    dtype: DTypeLike,
    batch: int,
    slots: tuple[AverageSlots, ...],
    count: int,
    host_weights: float = 0.0,
    weights: WeightCodes | None = None,
    rules: Rules | None = None,
) -> dict[str, int]:
    """Chooses the mesh on which a device moves the fewest bytes per step, over the host link or else in its memory.

    Args:
      config: the decoder.
      layout_on: a mesh -> the static description of the cache.
      dtype: of parameters and cache.
      batch: the number of rows.
      slots: from `average_slots`.
      count: the number of devices.
      host_weights: see `kvjax.load`.
      weights: see `kvjax.load`.
      rules: see `kvjax.load`.

    Returns:
      The sizes of the axes, ``data``, ``model`` and where it is needed ``context``, see
      `kvjax.parallel.sharding.fit_sizes`; among equal ones those with the smaller ``data``.
    """
    unknown = Device("", None, None, None, "")

    def axes_of(model: int) -> dict[str, int]:
        return sharding.fit_sizes({"data": count // model, "model": model}, config.num_kv_heads, rules)

    def moved(model: int) -> tuple[int, int]:
        sizes = axes_of(model)
        mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
        with using(rules or Rules()):
            rows = sharding.padded_rows(batch, mesh, rules)
            shapes = decode_shapes(config, layout_on(mesh), dtype, rows, mesh, host_weights, weights)
            step = roofline(config, shapes, slots, unknown)
        return step.link_moved, step.weights_moved + step.cache_moved

    return axes_of(min((model for model in range(count, 0, -1) if count % model == 0), key=moved))


def _local(leaf: jax.Array | jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Returns the shape of an array's part on one device."""
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _local_matrix(leaf: jax.Array | jax.ShapeDtypeStruct | QuantizedMatrix) -> tuple[int, ...]:
    """Returns the shape [in, out] of a matrix's part on one device, or that of another parameter's part."""
    if not isinstance(leaf, QuantizedMatrix):
        return _local(leaf)
    *experts, groups, _, outputs = _local(leaf.codes)
    return *experts, groups * leaf.group, outputs


def local_bytes(tree: PyTree, memory: str | None = None) -> int:
    """Returns the bytes of one device's part of a tree of arrays or shapes.

    Args:
      tree: the tree.
      memory: ``device`` or ``host``, to count only what is there; None = all.
    """
    leaves = [leaf for leaf in jax.tree.leaves(tree) if memory in (None, HOST if _on_host(leaf) else DEVICE)]
    return sum(math.prod(_local(leaf)) * leaf.dtype.itemsize for leaf in leaves)


def _on_host(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return leaf.sharding is not None and leaf.sharding.memory_kind == PINNED
