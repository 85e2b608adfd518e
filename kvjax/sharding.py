"""Sharding of parameters and caches over a mesh, by one table of logical axes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.errors import ConfigError

Array = jax.Array
Axes = Sequence[str | None]
Params = Mapping[str, Any]  # nested dict of parameters, whose leaves are arrays, shapes or shardings
PyTree = Any  # a tree of arrays
R = TypeVar("R")

#: Logical axis -> mesh axis, or None for a replicated axis. Heads, MLP features and the vocabulary are divided over
#: ``model`` (tensor parallelism), the rows of a batch over ``data``.
RULES: Mapping[str, str | None] = {
    "batch": "data",
    "kv_heads": "model",
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
    "embed": None,
}

#: The last two names of a parameter's path -> the logical axes of its last dimensions ([in, out] for a projection).
#: Dimensions before these, such as one of experts, are not divided.
PARAMETERS: Mapping[tuple[str, ...], tuple[str | None, ...]] = {
    ("embed", "tokens"): ("vocab", "embed"),
    ("head", "kernel"): ("embed", "vocab"),
    ("head", "bias"): ("vocab",),
    ("query", "kernel"): ("embed", "heads"),
    ("query", "bias"): ("heads",),
    ("key", "kernel"): ("embed", "kv_heads"),
    ("key", "bias"): ("kv_heads",),
    ("value", "kernel"): ("embed", "kv_heads"),
    ("value", "bias"): ("kv_heads",),
    ("out", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("gate", "bias"): ("mlp",),
    ("up", "kernel"): ("embed", "mlp"),
    ("up", "bias"): ("mlp",),
    ("down", "kernel"): ("mlp", "embed"),
}

#: The parts of a quantised matrix, see `kvjax.products.quantized`. They are divided as the matrix is.
QUANTIZED = ("codes", "scale", "zero", "order")


def make_mesh(axes: str | Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh over the first devices that it needs.

    Args:
      axes: the size of each axis, as ``"data:2,model:4"`` or ``{"data": 2, "model": 4}``. A missing axis has size 1.
      devices: the devices to choose from; None for all devices of the process.

    Returns:
      A mesh with the axes ``data`` and ``model``.

    Raises:
      ConfigError: if an axis is neither ``data`` nor ``model``, a size is not a whole number of at least 1, or there
        are too few devices.
    """
    sizes = _parse(axes) if isinstance(axes, str) else dict(axes)
    known = sorted({axis for axis in RULES.values() if axis})
    if unknown := sorted(set(sizes) - set(known)):
        raise ConfigError(
            f"mesh axis {unknown[0]!r} is unknown; valid axes: {', '.join(known)}, as in 'data:2,model:4'."
        )
    devices = list(jax.devices() if devices is None else devices)
    needed = math.prod(sizes.values())
    if needed > len(devices):
        raise ConfigError(f"mesh {axes!r} needs {needed} devices, but there are {len(devices)}.")
    sizes = {axis: sizes.get(axis, 1) for axis in known}
    shape, names, kinds = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
    if needed < len(devices):
        # jax.make_mesh arranges devices along the interconnect, which it knows for whole machines only.
        return Mesh(np.asarray(devices[:needed]).reshape(shape), names, axis_types=kinds)
    return jax.make_mesh(shape, names, kinds, devices=devices)


def one_device_mesh() -> Mesh:
    """Returns the mesh of this process's default device alone: shapes need one to say that they are in host memory."""
    axes = sorted({axis for axis in RULES.values() if axis})
    return Mesh(
        np.asarray(jax.local_devices()[:1]).reshape((1,) * len(axes)), axes, axis_types=(AxisType.Auto,) * len(axes)
    )


def _parse(text: str) -> dict[str, int]:
    """Parses ``"data:2,model:4"``."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition(":")
        if not size.strip().isdigit() or int(size) < 1:
            raise ConfigError(f"mesh {text!r} is not of the form 'data:2,model:4' (each size a whole number from 1).")
        sizes[axis.strip()] = int(size)
    return sizes


def spec(axes: Axes, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the partition of an array with the given logical axes.

    A dimension that the size of its mesh axis does not divide is replicated. For example, one KV head on four devices
    or a vocabulary of 50,257 is held whole by each device.

    Args:
      axes: the logical axis of each dimension, a key of `RULES` or None.
      shape: the size of each dimension.
      mesh: the mesh.
    """
    names = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES[axis] if axis else None
        names.append(name if name in mesh.shape and size % mesh.shape[name] == 0 else None)
    return PartitionSpec(*names)


def constrain(x: Array, axes: Axes) -> Array:
    """Constrains the sharding of an array on the current mesh (`jax.set_mesh`).

    Args:
      x: the array.
      axes: the logical axis of each dimension of x.

    Returns:
      The array; unchanged if there is no current mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def divided(axis: str, size: int) -> int:
    """Returns the number of parts that a dimension is divided into on the current mesh.

    Args:
      axis: the logical axis of the dimension.
      size: its size.
    """
    mesh = jax.sharding.get_abstract_mesh()
    name = RULES[axis]
    return 1 if mesh.empty or spec((axis,), (size,), mesh)[0] is None else mesh.shape[name]


def on_each_device(
    function: Callable[..., R], arguments: Sequence[PyTree], axes: Sequence[Axes], result_axes: Axes
) -> R:
    """Calls a function that the compiler cannot partition, such as a kernel, on each device's part of the arguments.

    Args:
      function: a function of arrays that treats every index of the sharded axes independently.
      arguments: its arguments, trees of arrays.
      axes: for each argument, the logical axes of the leading dimensions of its leaves.
      result_axes: the logical axes of the leading dimensions of every leaf of the result.

    Returns:
      ``function(*arguments)``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arguments)

    def specs(tree: PyTree, axes: Axes) -> PyTree:
        return jax.tree.map(lambda leaf: spec(axes, leaf.shape[: len(axes)], mesh), tree)

    results = specs(jax.eval_shape(function, *arguments), result_axes)
    placed = tuple(specs(tree, each) for tree, each in zip(arguments, axes, strict=True))
    return jax.shard_map(function, mesh=mesh, in_specs=placed, out_specs=results, check_vma=False)(*arguments)


def parameter_spec(
    path: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh, head_counts: tuple[int, int]
) -> PartitionSpec:
    """Returns the partition of a parameter.

    Args:
      path: the names from the root of the parameter tree, such as ``("layer_3", "attention", "query", "kernel")``. The
        last two determine the logical axes; see `PARAMETERS`. The parts of a quantised matrix have one name more.
      shape: the shape of the parameter.
      mesh: the mesh.
      head_counts: the number of query heads and of KV heads. A projection is divided between heads, never inside one.
    """
    counts: dict[str | None, int] = {"heads": head_counts[0], "kv_heads": head_counts[1]}
    if (axes := PARAMETERS.get(tuple(path[-3:-1]))) and path[-1] in QUANTIZED:
        # [G, bytes, out], [G, out] or [in]: between heads, and between groups.
        own = {"codes": (axes[0], None, axes[1]), "order": (None,)}.get(path[-1], axes)
        axes = (*(None,) * (len(shape) - len(own)), *own)
        sizes = [math.gcd(counts.get(axis, size), size) for axis, size in zip(axes, shape, strict=True)]
        return spec(axes, sizes, mesh)
    axes = PARAMETERS.get(tuple(path[-2:]), ())
    axes = (*(None,) * (len(shape) - len(axes)), *axes)
    return spec(axes, [counts.get(axis, size) for axis, size in zip(axes, shape, strict=True)], mesh)


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of a path of `jax.tree_util`: keys of dicts, and fields of dataclasses."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def parameter_shardings(params: Params, mesh: Mesh | AbstractMesh, head_counts: tuple[int, int]) -> Params:
    """Returns the sharding of every parameter.

    Args:
      params: a parameter tree of arrays or of `jax.ShapeDtypeStruct`.
      mesh: the mesh.
      head_counts: see `parameter_spec`.

    Returns:
      A tree of `NamedSharding` with the structure of `params`.
    """

    def place(path: tuple[Any, ...], leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(path_names(path), leaf.shape, mesh, head_counts))

    return jax.tree_util.tree_map_with_path(place, params)
