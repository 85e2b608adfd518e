"""Saves and restores parameters and caches with Orbax, which writes every device's part and finishes atomically."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from kvjax import sharding
from kvjax.cache import KVState, LayerKV
from kvjax.errors import CheckpointError
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import parameter_shapes


def save_params(folder: str | Path, params: Any) -> None:
    """Writes a parameter tree; see `restore_params`.

    Raises:
      CheckpointError: the folder exists.
    """
    _save(folder, params)


def restore_params(folder: str | Path, config: DecoderConfig, *, dtype: Any = None, mesh: Mesh | None = None) -> Any:
    """The parameters of a decoder that `save_params` wrote, placed on `mesh` as `kvjax.load` places them.

    Args:
      dtype: of the result; None = as saved.

    Raises:
      CheckpointError: not there, damaged, or other parameters than the config has.
    """
    target = parameter_shapes(config)
    saved = _metadata(folder)
    _same_shapes(folder, target, saved)
    leaves = jax.tree.leaves(saved)
    types = jax.tree.unflatten(jax.tree.structure(target), [dtype or leaf.dtype for leaf in leaves])
    if mesh is None:
        here = SingleDeviceSharding(jax.devices()[0])
        places = jax.tree.map(lambda leaf: here, target)
    else:
        places = sharding.parameter_shardings(target, mesh, (config.num_heads, config.num_kv_heads))
    target = jax.tree.map(
        lambda leaf, kind, place: jax.ShapeDtypeStruct(leaf.shape, kind, sharding=place), target, types, places
    )
    return _restore(folder, target)


def save_state(folder: str | Path, state: KVState) -> None:
    """Writes a cache: slots, positions, statistics and lengths.

    Raises:
      CheckpointError: the folder exists.
    """
    _save(folder, state)


def restore_state(folder: str | Path, target: KVState | None = None, *, mesh: Mesh | None = None) -> KVState:
    """A cache that `save_state` wrote.

    Args:
      target: a KVState of the same shape (arrays or `jax.ShapeDtypeStruct`), which says what pytree the policy's
        statistics are; None = a dict of arrays, which is what kvjax's own policies have.
      mesh: where it goes, rows over `data` and KV heads over `model`; None = the default device.

    Raises:
      CheckpointError: not there, damaged, no cache, or not of the target's shape.
    """
    saved = _metadata(folder)
    if not isinstance(saved, dict) or set(saved) != {"layers", "length"}:
        raise CheckpointError(f"{folder} holds no KVState: a cache was saved with save_state().")
    if target is None:
        target = KVState(
            layers=tuple(LayerKV(**{"stats": {}, **layer}) for layer in saved["layers"]), length=saved["length"]
        )
    else:
        _same_shapes(folder, target, saved)

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        where: Any = SingleDeviceSharding(jax.devices()[0])
        if mesh is not None:
            axes = ("batch", "kv_heads", *(None,) * (len(leaf.shape) - 2))[: len(leaf.shape)]
            where = NamedSharding(mesh, sharding.spec(axes, leaf.shape, mesh))
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    return _restore(folder, jax.tree.map(place, target))


def _save(folder: str | Path, tree: Any) -> None:
    path = Path(folder).expanduser().resolve()
    if path.exists():
        raise CheckpointError(f"{path} exists already; save to a new folder.")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


def _metadata(folder: str | Path) -> Any:
    """The saved tree, with shapes and dtypes for leaves."""
    path = Path(folder).expanduser().resolve()
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}.")
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            found = checkpointer.metadata(path).item_metadata
        tree = getattr(found, "tree", found)
    except Exception as error:  # Orbax raises all sorts for a damaged folder
        raise _damaged(path, error) from None
    if tree is None:
        raise CheckpointError(f"{path} is no finished Orbax checkpoint.")
    return tree


def _restore(folder: str | Path, target: Any) -> Any:
    path = Path(folder).expanduser().resolve()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return jax.block_until_ready(checkpointer.restore(path, target))
    except Exception as error:  # as above
        raise _damaged(path, error) from None


def _damaged(path: Path, error: Exception) -> CheckpointError:
    reason = str(error).strip().split("\n")[0][:200]
    return CheckpointError(f"{path} is no whole Orbax checkpoint ({type(error).__name__}: {reason}).")


def _same_shapes(folder: str | Path, target: Any, saved: Any) -> None:
    """Names every leaf that the folder and the target do not share."""

    def shapes(tree: Any) -> dict[str, tuple[int, ...]]:
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf.shape) for path, leaf in leaves}

    wanted, found = shapes(target), shapes(saved)
    wrong = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if wrong:
        first = [f"{name} is {found.get(name, 'missing')}, expected {wanted.get(name, 'none')}" for name in wrong[:8]]
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise CheckpointError(f"{folder} does not hold what was expected: {'; '.join(first)}{more}.")


__all__ = ["restore_params", "restore_state", "save_params", "save_state"]
