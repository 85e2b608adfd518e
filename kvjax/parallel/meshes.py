"""Meshes: their axes and sizes, and the context in which a mesh and its rules are in force."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from kvjax.arguments import check_type, count_argument
from kvjax.errors import ConfigError
from kvjax.parallel.rules import AXES, Rules, using


def make_mesh(axes: str | Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes a mesh of the first devices, as many as its axes need.

    Args:
      axes: the size of each axis, as ``"data:2,model:4"`` or ``{"data": 2, "model": 4}``. A missing axis has size 1.
      devices: the devices to choose from; None for all devices of the process.

    Returns:
      A mesh with the axes ``data`` and ``model``, and ``context`` if it is given; see `kvjax.parallel.rules.Rules`.

    Raises:
      ConfigError: if an axis is unknown, a size is not a whole number of at least 1, or there are too few devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = _sizes(axes, len(devices))
    needed = math.prod(sizes.values())
    shape, names, kinds = tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes)
    if needed < len(devices):
        # jax.make_mesh arranges devices along the interconnect, which it knows for whole machines only.
        return Mesh(np.asarray(devices[:needed]).reshape(shape), names, axis_types=kinds)
    return jax.make_mesh(shape, names, kinds, devices=devices)


def abstract_mesh(axes: str | Mapping[str, int], count: int, kv_heads: int, given: Rules | None = None) -> AbstractMesh:
    """Makes a mesh of devices that are not here, for shapes alone, on which a cache is divided evenly.

    Args:
      axes: see `make_mesh`.
      count: the number of devices.
      kv_heads: see `fit_sizes`.
      given: see `fit_sizes`.

    Raises:
      ConfigError: see `make_mesh`.
    """
    sizes = fit_sizes(_sizes(axes, count), kv_heads, given)
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def one_device_mesh() -> Mesh:
    """Returns the mesh of this process's default device alone: shapes need one to say that they are in host memory."""
    return Mesh(np.asarray(jax.local_devices()[:1]).reshape(1, 1), AXES[:2], axis_types=(AxisType.Auto,) * 2)


def fit(mesh: Mesh, kv_heads: int, given: Rules | None = None) -> Mesh:
    """Returns a mesh of the same devices on which a cache is divided evenly.

    Args:
      mesh: from `make_mesh`.
      kv_heads: see `fit_sizes`.
      given: see `fit_sizes`.
    """
    before = dict(mesh.shape)
    sizes = fit_sizes(before, kv_heads, given)
    if sizes == before:
        return mesh
    names = tuple(sizes)
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), names, axis_types=(AxisType.Auto,) * len(names))


def fit_sizes(sizes: Mapping[str, int], kv_heads: int, given: Rules | None = None) -> dict[str, int]:
    """Returns the sizes of the axes of a mesh on which a cache is divided evenly.

    Where the axis ``model`` does not divide the KV heads, it is split in two: of 16 devices and 8 KV heads, 8 parts
    become the new axis ``model`` and divide the heads, and 2 become ``context`` and divide the slots of each head.
    Weights are divided over both.

    Args:
      sizes: of ``data``, ``model`` and, if there is one, ``context``.
      kv_heads: the number of KV heads of the model.
      given: the rules; None for the defaults. Sizes are returned unchanged if they divide heads or slots otherwise.
    """
    given = given or Rules()
    if given.kv_heads != ("model",) or "context" not in given.slots:
        return dict(sizes)
    heads = math.gcd(kv_heads, sizes["model"])
    if heads == sizes["model"]:
        return dict(sizes)
    return {**sizes, "model": heads, "context": sizes["model"] // heads * sizes.get("context", 1)}


def padded_rows(rows: int, mesh: Mesh | AbstractMesh | None, given: Rules | None = None) -> int:
    """Returns the number of rows of arrays for `rows` rows: so many that the mesh divides them.

    Seven rows on eight devices would otherwise be computed by each.

    Args:
      rows: the number of rows of a batch.
      mesh: the mesh, or None.
      given: the rules; None for the defaults.
    """
    if mesh is None:
        return rows
    parts = math.prod(mesh.shape.get(axis, 1) for axis in (given or Rules()).batch)
    return -(-rows // parts) * parts


@contextlib.contextmanager
def on_mesh(mesh: Mesh | AbstractMesh | None, given: Rules | None = None) -> Iterator[None]:
    """Returns a context in which a mesh and rules are in force; one that does nothing if there is no mesh.

    Args:
      mesh: the mesh, or None.
      given: the rules; None for the defaults.
    """
    if mesh is None:
        yield
        return
    current = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with using(given or Rules()), current:
        yield


def _sizes(axes: str | Mapping[str, int], count: int) -> dict[str, int]:
    """Returns the size of each axis of a mesh of at most `count` devices."""
    valid = "the axes of a mesh, such as 'data:2,model:4' or {'data': 2}"
    check_type("axes", axes, (str, Mapping), valid, error=ConfigError)
    sizes = _parse(axes) if isinstance(axes, str) else dict(axes)
    if unknown := sorted(set(sizes) - set(AXES)):
        raise ConfigError(
            f"mesh axis {unknown[0]!r} is unknown; valid axes: {', '.join(AXES)}, as in 'data:2,model:4'."
        )
    sizes = {
        axis: count_argument(f"mesh axis {axis!r}", size, minimum=1, error=ConfigError) for axis, size in sizes.items()
    }
    needed = math.prod(sizes.values())
    if needed > count:
        raise ConfigError(f"mesh {axes!r} needs {needed} devices, but there are {count}.")
    return {axis: sizes.get(axis, 1) for axis in AXES if axis != "context" or axis in sizes}


def _parse(text: str) -> dict[str, int]:
    """Parses ``"data:2,model:4"``."""
    sizes = {}
    for part in text.split(","):
        axis, _, size = part.partition(":")
        if not size.strip().isdigit() or int(size) < 1:
            raise ConfigError(f"mesh {text!r} is not of the form 'data:2,model:4' (each size a whole number from 1).")
        sizes[axis.strip()] = int(size)
    return sizes
