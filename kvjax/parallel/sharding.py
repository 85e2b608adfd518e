"""Sharding of parameters and caches over a mesh, by the rules in force; see `kvjax.parallel.rules.Rules`."""

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyPath

from kvjax.numerics.slices import Slice, is_slice
from kvjax.parallel.meshes import abstract_mesh, fit, fit_sizes, make_mesh, on_mesh, one_device_mesh, padded_rows
from kvjax.parallel.rules import Rules, rules

Array = jax.Array
Axes = Sequence[str | None]
Params = Mapping[str, Any]  # nested dict of parameters, whose leaves are arrays, shapes or shardings
PyTree = Any  # a tree of arrays
R = TypeVar("R")

#: The last two names of a parameter's path -> the logical axes of its last dimensions ([in, out] for a projection).
#: Dimensions before these, such as one of experts, are not divided.
PARAMETERS: Mapping[tuple[str, ...], tuple[str | None, ...]] = {
    ("embed", "tokens"): ("vocab", "embed"),
    ("position_embed", "table"): (None, "embed"),
    ("head", "kernel"): ("embed", "vocab"),
    ("head", "bias"): ("vocab",),
    ("query", "kernel"): ("embed", "heads"),
    ("query", "bias"): ("heads",),
    ("key", "kernel"): ("embed", "heads"),
    ("key", "bias"): ("heads",),
    ("value", "kernel"): ("embed", "heads"),
    ("value", "bias"): ("heads",),
    ("out", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("gate", "bias"): ("mlp",),
    ("up", "kernel"): ("embed", "mlp"),
    ("up", "bias"): ("mlp",),
    ("down", "kernel"): ("mlp", "embed"),
}

LAYERS = "layers"  # the name of parameters of layers in stacks; see `kvjax.models.stacked_params`
EMBEDDING = ("embed", "tokens")  # a table [out, in]; as a quantised matrix [in, out]
#: The parts of a quantised matrix, see `kvjax.products.quantized`. They are divided as the matrix is.
QUANTIZED = ("codes", "scale", "zero", "order")

#: The weights' dimension that is divided last, over what is left.
LAST = "embed"
#: Of the even share of the weights: norms and biases are held whole.
MAX_UNEVEN = 1.03


def spec(axes: Axes, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the partition of an array with the given logical axes, by the rules in force.

    A dimension is divided over those of its mesh axes that no dimension before it uses and whose sizes divide it; of
    several such choices, into the most parts. For example, one KV head on four devices is held whole by each device.
    The width of the model, ``embed``, is divided last, so that a matrix whose other dimension does not divide, such as
    a vocabulary of 50,257, is divided along its width.

    Args:
      axes: the logical axis of each dimension, a field of `Rules` or None.
      shape: the size of each dimension.
      mesh: the mesh.
    """
    names: list[tuple[str, ...]] = [()] * len(shape)
    used: set[str] = set()
    for number in sorted(range(len(shape)), key=lambda number: axes[number] == LAST):
        if (axis := axes[number]) is not None:
            open_axes = [name for name in rules().of(axis) if name in mesh.shape and name not in used]
            names[number] = _parts(open_axes, shape[number], mesh)
            used.update(names[number])
    return PartitionSpec(*((each if len(each) > 1 else each[0]) if each else None for each in names))


def _parts(axes: Sequence[str], size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns those of some mesh axes that divide a dimension of `size` into the most parts."""
    choices = [own for count in range(len(axes), -1, -1) for own in itertools.combinations(axes, count)]
    sizes = [math.prod(mesh.shape[axis] for axis in own) for own in choices]
    return choices[max(range(len(choices)), key=lambda i: sizes[i] if size % sizes[i] == 0 else 0)]


def constrain(x: Array, axes: Axes, *, free: bool = False) -> Array:
    """Constrains the sharding of an array on the current mesh (`jax.set_mesh`).

    Args:
      x: the array.
      axes: the logical axis of each dimension of x.
      free: whether XLA chooses how dimensions without an axis are divided; otherwise they are not.

    Returns:
      The array; unchanged if there is no current mesh.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    partition = spec(axes, x.shape, mesh)
    if free:
        chosen = zip(axes, partition, strict=True)
        partition = PartitionSpec(*(PartitionSpec.UNCONSTRAINED if axis is None else own for axis, own in chosen))
    return jax.lax.with_sharding_constraint(x, partition)


def divided(axis: str, size: int) -> int:
    """Returns the number of parts that a dimension is divided into on the current mesh.

    Args:
      axis: the logical axis of the dimension.
      size: its size.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[name] for name in mesh_axes(axis, size, mesh))


def mesh_axes(axis: str, size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Returns the mesh axes that a dimension is divided over.

    Args:
      axis: the logical axis of the dimension.
      size: its size.
      mesh: the mesh.
    """
    (names,) = spec((axis,), (size,), mesh)
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def left_over(axis: str, kv_heads: int) -> tuple[tuple[str, ...], int]:
    """Returns the axes of the current mesh that divide ``slots`` or ``tokens``, and the number of parts.

    Args:
      axis: the logical axis.
      kv_heads: KV heads of the arrays, which are divided first.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return (), 1
    used = {*mesh_axes("kv_heads", kv_heads, mesh), *rules().batch}
    axes = tuple(name for name in rules().of(axis) if mesh.shape.get(name, 1) > 1 and name not in used)
    return axes, math.prod(mesh.shape[name] for name in axes)


def constrain_heads(x: Array, heads: int, *, enters: bool = False) -> Array:
    """Constrains features of whole heads to where the cache has these heads.

    A projection may be divided inside a head. Its product is then gathered, instead of its weights.

    Args:
      x: [B, n, heads * D], the product of a projection, or what enters one.
      heads: the number of heads, of queries or of keys and values.
      enters: whether x enters a projection.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    of_weights = spec(("batch", None, "heads"), x.shape, mesh)
    of_heads = spec(("batch", None, "kv_heads"), (*x.shape[:2], heads), mesh)
    if of_weights == of_heads:
        return x
    first, then = (of_heads, of_weights) if enters else (of_weights, of_heads)
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, first), then)


def on_each_device(
    function: Callable[..., R], arguments: Sequence[PyTree], axes: Sequence[Axes], result_axes: Axes
) -> R:
    """Calls a function that the compiler cannot partition, such as a kernel, on each device's part of the arguments.

    Args:
      function: a function of arrays that treats every index of the sharded axes independently.
      arguments: its arguments, trees of arrays, or of slices of stacks, of which each device has its part of all.
      axes: for each argument, the logical axes of the leading dimensions of its leaves.
      result_axes: the logical axes of the leading dimensions of every leaf of the result.

    Returns:
      ``function(*arguments)``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return function(*arguments)

    def specs(tree: PyTree, axes: Axes) -> PyTree:
        def of_leaf(leaf: Array | Slice) -> PartitionSpec | Slice:
            found = spec(axes, leaf.shape[: len(axes)], mesh)
            return leaf.with_specs(found) if isinstance(leaf, Slice) else found

        return jax.tree.map(of_leaf, tree, is_leaf=is_slice)

    results = specs(jax.eval_shape(function, *arguments), result_axes)
    placed = tuple(specs(tree, each) for tree, each in zip(arguments, axes, strict=True))
    return jax.shard_map(function, mesh=mesh, in_specs=placed, out_specs=results, check_vma=False)(*arguments)


def parameter_spec(path: Sequence[str], shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """Returns the partition of a parameter.

    Args:
      path: the names from the root of the parameter tree, such as ``("layer_3", "attention", "query", "kernel")``. The
        last two determine the logical axes; see `PARAMETERS`. The parts of a quantised matrix have one name more.
      shape: the shape of the parameter.
      mesh: the mesh.
    """
    if path[0] == LAYERS:
        return PartitionSpec(None, *parameter_spec(path[1:], shape[1:], mesh))
    axes: tuple[str | None, ...]
    if (of_matrix := PARAMETERS.get(tuple(path[-3:-1]))) and path[-1] in QUANTIZED:
        if tuple(path[-3:-1]) == EMBEDDING:
            of_matrix = of_matrix[::-1]
        # [G, bytes, out], [G, out] or [in]: between groups, and between outputs.
        axes = {"codes": (of_matrix[0], None, of_matrix[1]), "order": (None,)}.get(path[-1], of_matrix)
    else:
        axes = PARAMETERS.get(tuple(path[-2:]), ())
    if more := len(shape) - len(axes):
        # Experts run on each device's part of their hidden features, see `kvjax.models.experts`.
        axes = (*(None,) * more, *(None if axis == LAST else axis for axis in axes))
    return spec(axes, shape, mesh)


def path_names(path: Sequence[Any]) -> tuple[str, ...]:
    """Returns the names of a path of `jax.tree_util`: keys of dicts, and fields of dataclasses."""
    return tuple(str(getattr(key, "key", getattr(key, "name", key))) for key in path)


def parameter_shardings(params: Params, mesh: Mesh | AbstractMesh) -> Params:
    """Returns the sharding of every parameter.

    Args:
      params: a parameter tree of arrays or of `jax.ShapeDtypeStruct`.
      mesh: the mesh.

    Returns:
      A tree of `NamedSharding` with the structure of `params`.
    """

    def place(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
        return NamedSharding(mesh, parameter_spec(path_names(path), leaf.shape, mesh))

    return jax.tree_util.tree_map_with_path(place, params)


def warn_of_copies(params: Params, mesh: Mesh | None, given: Rules | None = None) -> None:
    """Warns if a device holds more than `MAX_UNEVEN` times its even share of the weights.

    Args:
      params: the arrays, where they are on the mesh.
      mesh: the mesh, or None.
      given: the rules; None for the defaults.
    """
    if mesh is None:
        return
    parts = mesh.size // padded_rows(1, mesh, given)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    held = {path: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for path, x in leaves}
    even = sum(x.size * x.dtype.itemsize for _, x in leaves) / parts
    if sum(held.values()) > MAX_UNEVEN * even:
        whole = max((path for path, x in leaves if x.sharding.is_fully_replicated), key=held.__getitem__, default=())
        largest = f"; {'/'.join(path_names(whole))} is the largest that no axis divides" if whole else ""
        warnings.warn(
            f"a device of mesh {dict(mesh.shape)} holds {sum(held.values()) / even:.2f} times its even share of the "
            f"weights{largest}.",
            stacklevel=3,
        )


__all__ = [
    "EMBEDDING", "LAYERS", "PARAMETERS", "QUANTIZED", "Params", "PyTree", "abstract_mesh", "constrain",
    "constrain_heads", "divided", "fit", "fit_sizes", "left_over", "make_mesh", "mesh_axes", "on_each_device",
    "on_mesh", "one_device_mesh", "padded_rows", "parameter_shardings", "parameter_spec", "path_names", "spec",
    "warn_of_copies",
]  # fmt: skip
