"""One table of logical axes says where parameters and the cache lie on a mesh."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.errors import ConfigError

Array = jax.Array
Axes = Sequence[str | None]

#: Logical axis -> mesh axis. Tensor parallel over heads, MLP and vocabulary; rows of a batch over `data`.
RULES: Mapping[str, str | None] = {
    "batch": "data",
    "kv_heads": "model",
    "heads": "model",
    "mlp": "model",
    "vocab": "model",
    "embed": None,
}

#: The path of a parameter, by its last two names, -> the logical axes of its dimensions ([in, out]).
PARAMETERS: Mapping[tuple[str, str], tuple[str | None, ...]] = {
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


def make_mesh(axes: str | Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh from ``"data:2,model:4"`` or ``{"data": 2, "model": 4}``, over the first devices that it needs.

    Raises:
      ConfigError: an axis other than data and model, a size that is no whole number, or too few devices.
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
        # Part of a machine has no wiring of its own that jax could lay the mesh along.
        return Mesh(np.asarray(devices[:needed]).reshape(shape), names, axis_types=kinds)
    return jax.make_mesh(shape, names, kinds, devices=devices)


def _parse(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition(":")
        if not size.strip().isdigit() or int(size) < 1:
            raise ConfigError(f"mesh {text!r} is not of the form 'data:2,model:4' (each size a whole number from 1).")
        sizes[axis.strip()] = int(size)
    return sizes


def spec(axes: Sequence[str | None], shape: Sequence[int], mesh: Any) -> PartitionSpec:
    """Where an array of these logical axes lies; a dimension that its mesh axis does not divide is replicated.

    (One KV head on four devices, or a vocabulary of 50,257, is legal: every device then holds it whole.)
    """
    names = []
    for axis, size in zip(axes, shape, strict=True):
        name = RULES[axis] if axis else None
        names.append(name if name in mesh.shape and size % mesh.shape[name] == 0 else None)
    return PartitionSpec(*names)


def constrain(x: Array, axes: Sequence[str | None]) -> Array:
    """Pins an array to its place on the mesh in force (`jax.set_mesh`); nothing without one."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def divided(axis: str, size: int) -> int:
    """Among how many devices of the mesh in force a dimension of this logical axis and size is divided."""
    mesh = jax.sharding.get_abstract_mesh()
    name = RULES[axis]
    return 1 if mesh.empty or spec((axis,), (size,), mesh)[0] is None else mesh.shape[name]


def on_each_device(
    function: Callable[..., Any], arguments: Sequence[Any], axes: Sequence[Axes], result_axes: Axes
) -> Any:
    """Calls a function that the compiler cannot divide, such as a kernel, on each device's part of its arguments.

    Args:
      arguments: trees of arrays; axes: of each, the logical axes of the first dimensions of every leaf.
      result_axes: of every leaf of the result. The function must treat every index of these axes by itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arguments)

    def specs(tree: Any, axes: Axes) -> Any:
        return jax.tree.map(lambda leaf: spec(axes, leaf.shape[: len(axes)], mesh), tree)

    results = specs(jax.eval_shape(function, *arguments), result_axes)
    placed = tuple(specs(tree, each) for tree, each in zip(arguments, axes, strict=True))
    return jax.shard_map(function, mesh=mesh, in_specs=placed, out_specs=results, check_vma=False)(*arguments)


def parameter_spec(path: Sequence[str], shape: Sequence[int], mesh: Any, head_counts: tuple[int, int]) -> PartitionSpec:
    """Where a parameter lies, from the last two names of its path.

    Args:
      path: names from the root of the tree, e.g. ("layer_3", "attention", "query", "kernel").
      head_counts: (query heads, KV heads): a projection is cut between heads, never inside one.
    """
    axes = PARAMETERS.get(tuple(path[-2:]), (None,) * len(shape))  # type: ignore[arg-type]
    counts = {"heads": head_counts[0], "kv_heads": head_counts[1]}
    return spec(axes, [counts.get(axis, size) for axis, size in zip(axes, shape, strict=True)], mesh)  # type: ignore[arg-type]


def parameter_shardings(params: Any, mesh: Mesh | AbstractMesh, head_counts: tuple[int, int]) -> Any:
    """A tree of `NamedSharding` in the shape of a parameter tree (arrays or shapes)."""

    def place(path, leaf):
        names = [key.key for key in path]
        return NamedSharding(mesh, parameter_spec(names, leaf.shape, mesh, head_counts))

    return jax.tree_util.tree_map_with_path(place, params)
