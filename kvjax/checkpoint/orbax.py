"""Saves and restores parameters and caches with Orbax: each device writes its part, and a save is atomic."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.state import KVState, Layer, LayerKV
from kvjax.errors import CheckpointError
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_shapes
from kvjax.models.stacked_params import unstacked
from kvjax.parallel import distributed, sharding
from kvjax.parallel.rules import Rules, using
from kvjax.parallel.sharding import QUANTIZED, Params, PyTree
from kvjax.products.quantized import BYTE, WIDTHS, QuantizedMatrix

MAX_LISTED = 8  # leaves that an error message lists
MAX_REASON = 200  # characters of Orbax's message that an error quotes
SLOTS = 2  # the dimension of an array of slots
#: Orbax saves no array without entries. Its shape is saved instead, and the place of its dtype in `KINDS`, as a vector
#: of a dtype that no vector of a cache has.
MARK = jnp.dtype(jnp.uint16)
KINDS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.uint8, jnp.int8, jnp.int32, jnp.bool_, MARK)))


def save_params(folder: str | Path, params: Params) -> None:
    """Saves parameters; see `restore_params`.

    Args:
      folder: a new folder.
      params: the parameter tree.

    Raises:
      CheckpointError: if the folder exists.
    """
    _save(folder, unstacked(params))


def restore_params(
    folder: str | Path, config: DecoderConfig, *, dtype: DTypeLike | None = None, mesh: Mesh | None = None
) -> Params:
    """Restores parameters that `save_params` has saved.

    Args:
      folder: the folder.
      config: the decoder.
      dtype: of the result; None for the dtypes that were saved.
      mesh: the mesh to shard the parameters over, as `kvjax.load` does; None for the default device.

    Raises:
      CheckpointError: if the folder is missing or damaged, or the parameters are not those of the decoder.
    """
    saved = _metadata(folder)
    target = _as_saved(parameter_shapes(config), saved)
    _same_shapes(folder, target, saved)
    types = jax.tree.map(
        lambda leaf: dtype if dtype and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype, target
    )
    if mesh is None:
        device = SingleDeviceSharding(jax.local_devices()[0])
        places = jax.tree.map(lambda leaf: device, target)
    else:
        places = sharding.parameter_shardings(target, mesh)
    target = jax.tree.map(
        lambda leaf, kind, place: jax.ShapeDtypeStruct(leaf.shape, kind, sharding=place), target, types, places
    )
    return _restore(folder, target)


def _as_saved(target: Params, saved: PyTree) -> Params:
    """Returns shapes of parameters in the dtypes that were saved, and quantised where the saved ones are.

    Args:
      target: shapes of exact parameters.
      saved: the saved tree. What it has not is returned as it is.
    """

    def form(path: KeyPath, leaf: jax.ShapeDtypeStruct) -> PyTree:
        found, names = saved, sharding.path_names(path)
        for name in names:
            found = found.get(name) if isinstance(found, dict) else None
        if hasattr(found, "dtype"):
            return jax.ShapeDtypeStruct(leaf.shape, found.dtype)
        codes = getattr(found.get("codes"), "shape", ()) if isinstance(found, dict) else ()
        # The number of bits is not saved: it is that with which the codes are those of the matrix's inputs.
        inputs = leaf.shape[-1] if names == sharding.EMBEDDING else leaf.shape[0]
        bits = BYTE * math.prod(codes[:2]) // inputs
        if found is None or len(codes) != 3 or bits not in WIDTHS:
            return leaf
        parts: dict[str, Any] = {
            name: jax.ShapeDtypeStruct(found[name].shape, found[name].dtype)
            for name in QUANTIZED
            if found.get(name) is not None
        }
        return QuantizedMatrix(bits=bits, **parts) if len(parts) >= len(QUANTIZED) - 1 else leaf

    found: Params = jax.tree_util.tree_map_with_path(form, target)
    return found


def save_state(folder: str | Path, state: KVState) -> None:
    """Saves a cache.

    Args:
      folder: a new folder.
      state: the cache.

    Raises:
      CheckpointError: if the folder exists.
    """
    _save(folder, jax.tree.map(lambda x: x if x.size else _mark(x), arranged_state(state, ())))


def _mark(x: jax.Array | jax.ShapeDtypeStruct) -> np.ndarray:
    """Returns what is saved of an array without entries; see `MARK`."""
    return np.array([*x.shape, KINDS.index(jnp.dtype(x.dtype))], MARK)


def _unmarked(x: jax.Array) -> jax.Array:
    """Returns the array without entries that a mark stands for, and any other array as it is."""
    if x.dtype != MARK or x.ndim != 1:
        return x
    *shape, kind = distributed.to_host(x).tolist()
    return jnp.zeros(shape, KINDS[kind])


def restore_state(
    folder: str | Path, target: KVState | None = None, *, mesh: Mesh | None = None, rules: Rules | None = None
) -> KVState:
    """Restores a cache that `save_state` has saved.

    Args:
      folder: the folder.
      target: a cache of the same structure and shapes, of arrays or of `jax.ShapeDtypeStruct`; needed if a layer holds
        all of its keys in a code. None for the structure that was saved.
      mesh: the mesh to shard the cache over; None for the default device. Arrays of a target on this mesh are divided
        as these are; others by the rules, their slots only if these were divided when the cache was saved.
      rules: see `kvjax.load`; None for the defaults.

    Raises:
      CheckpointError: if the folder is missing or damaged, does not hold a cache, or its shapes differ from the target.
    """
    # Layers are saved one by one; see `kvjax.cache.layer_stack`.
    runs = () if target is None else stacked_runs(target.layers)
    saved = _metadata(folder)
    if not isinstance(saved, dict) or set(saved) != {field.name for field in dataclasses.fields(KVState)}:
        raise CheckpointError(f"{folder} does not contain a KVState saved by save_state().")
    if target is None:
        target = KVState(
            layers=tuple(Layer(_saved_group(folder, group) for group in layer) for layer in saved["layers"]),
            length=saved["length"],
            prompt=saved["prompt"],
            total=saved["total"],
            budget=tuple(tuple(layer) for layer in saved["budget"]),
        )
    else:
        target = arranged_state(target, ())
        _same_parts(folder, target, saved)
        target = jax.tree.map(lambda x: x if math.prod(x.shape) else _mark(x), target)
        _same_shapes(folder, target, saved)

    by_slot = {name for name, leaf in _by_name(saved).items() if _slots_divided(leaf)}

    def place(path: KeyPath, leaf: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where: Sharding = SingleDeviceSharding(jax.local_devices()[0])
        given = getattr(leaf, "sharding", None)
        if mesh is not None and isinstance(given, NamedSharding) and given.mesh == mesh:
            where = NamedSharding(mesh, given.spec)
        elif mesh is not None:
            axes = ("batch", "kv_heads", "slots" if _name(path) in by_slot else None, *(None,) * len(leaf.shape))
            where = NamedSharding(mesh, sharding.spec(axes[: len(leaf.shape)], leaf.shape, mesh))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    with using(rules or Rules()):
        placed = jax.tree_util.tree_map_with_path(place, target)
    return arranged_state(jax.tree.map(_unmarked, _restore(folder, placed)), runs)


def _parts(saved: dict[str, PyTree]) -> int:
    """Returns `LayerKV.parts` of a saved group of heads."""
    place = saved["position"].sharding
    if len(saved["stores"]) == 1 or not _slots_divided(saved["position"]):
        return 1
    sizes, axes = dict(zip(place.axis_names, map(int, place.shape), strict=True)), place.partition_spec[SLOTS]
    return math.prod(sizes[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def _same_parts(folder: str | Path, target: KVState, saved: PyTree) -> None:
    """Raises a CheckpointError if the slots of several stores are arranged for another number of devices."""
    for layer, own in zip(saved["layers"], target.layers, strict=True):
        for group, wanted in zip(layer, own, strict=True):
            if (parts := _parts(group)) != wanted.parts:
                raise CheckpointError(
                    f"{folder} contains slots of several stores, divided over {parts} devices, expected "
                    f"{wanted.parts}; restore it without a target, or on the same number of devices."
                )


def _slots_divided(saved: PyTree) -> bool:
    """Returns whether the third dimension of an array, [B, K, S, ...], was divided when it was saved."""
    spec = getattr(saved.sharding, "partition_spec", None) or ()
    return len(spec) > SLOTS and spec[SLOTS] is not None


def _saved_group(folder: str | Path, saved: dict[str, PyTree]) -> LayerKV:
    """Returns the saved slots of one group of heads, with shapes for leaves.

    Orbax saves arrays only. The head size, which is not one, is read from the last store, if that is exact.
    """
    stores = tuple(saved["stores"])
    if "exact" not in stores[-1]["key"]:
        raise CheckpointError(f"{folder} contains quantized keys without their head size; give a target.")
    return LayerKV(
        position=saved["position"],
        stores=stores,
        stats=saved.get("stats", {}),
        index=saved.get("index", {}),
        marks=saved.get("marks", {}),
        memory=saved.get("memory", {}),
        sides=saved.get("sides", {}),
        dim=stores[-1]["key"]["exact"].shape[-1],
        parts=_parts(saved),
    )


def _save(folder: str | Path, tree: PyTree) -> None:
    """Saves a tree of arrays."""
    path = Path(folder).expanduser().resolve()
    # Another process may look when the first one has begun to write.
    if distributed.from_first(path.exists()):
        raise CheckpointError(f"{path} exists already; save to a new folder.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _metadata(folder: str | Path) -> PyTree:
    """Returns the saved tree, whose leaves have a shape and a dtype."""
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}.")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).item_metadata
        tree = getattr(found, "tree", found)
    except Exception as error:  # Orbax raises errors of many types for a damaged folder
        raise _damaged(path, error) from None
    if tree is None:
        raise CheckpointError(f"{path} is not a finished Orbax checkpoint.")
    return tree


def _restore(folder: str | Path, target: PyTree) -> PyTree:
    """Restores a tree with the structure, the dtypes and the shardings of `target`."""
    path = Path(folder).expanduser().resolve()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(path, target))
    except Exception as error:  # as above
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    """Converts an error of Orbax, in one line."""
    reason = str(error).strip().split("\n")[0][:MAX_REASON]
    return CheckpointError(f"{path} is not a complete Orbax checkpoint ({type(error).__name__}: {reason}).")


def _name(path: KeyPath) -> str:
    """Returns the name of a path of `jax.tree_util`, which a tree and its metadata have in common."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _by_name(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their names."""
    return {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _same_shapes(folder: str | Path, target: PyTree, saved: PyTree) -> None:
    """Raises a CheckpointError that lists the leaves in which two trees differ, if there are any."""

    wanted, found = ({name: tuple(leaf.shape) for name, leaf in _by_name(tree).items()} for tree in (target, saved))
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        first = [
            f"{name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'none')}"
            for name in wrong[:MAX_LISTED]
        ]
        more = f" and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
        raise CheckpointError(f"{folder} does not contain what was expected: {'; '.join(first)}{more}.")


__all__ = ["restore_params", "restore_state", "save_params", "save_state"]
