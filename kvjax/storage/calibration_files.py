"""Files of calibrations: arrays and their names, a header that describes them, and a hash of both."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from kvjax.arguments import check_path
from kvjax.errors import StorageError
from kvjax.storage.side import Sides

Array = jax.Array

FORMAT = "kvjax calibration 2"
PRETRAINED = Path(__file__).resolve().parent.parent / "pretrained"
FILE = "gate.safetensors"  # of a trained gate that kvjax contains, in a folder of its name


def calibration_file(path_or_name: str | Path) -> Path:
    """Returns the file of a calibration, which need not exist.

    Args:
      path_or_name: a file, or the name of a gate that kvjax contains; an existing file has precedence.
    """
    check_path("the path of a calibration", path_or_name, error=StorageError)
    path = Path(path_or_name)
    own = PRETRAINED / path / FILE
    return own if len(path.parts) == 1 and not path.exists() and own.is_file() else path


def digest(layers: Sequence[Sides], about: Mapping[str, str]) -> str:
    """Returns the SHA-256 hash of arrays, their names and the header that `write` makes.

    Args:
      layers: of the calibration.
      about: the description of the arrays.
    """
    tensors = _named(layers)
    return _hash(tensors, _header(tensors, about))


def write(path: str | Path, layers: Sequence[Sides], about: Mapping[str, str]) -> None:
    """Writes a file of a calibration.

    Args:
      path: of the file; it is replaced if it exists.
      layers: of the calibration.
      about: the description of the arrays; the header has the format, the shapes and `digest` too.

    Raises:
      StorageError: if the file cannot be written.
    """
    tensors = {name: jnp.asarray(x) for name, x in _named(layers).items()}
    header = _header(tensors, about)
    try:
        save_file(tensors, str(path), metadata=header | {"hash": _hash(tensors, header)})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"calibration {path} cannot be written: {error}.") from None


def read(path: str | Path) -> tuple[tuple[Sides, ...], dict[str, str]]:
    """Reads a file that `write` wrote, or the gate of a name; see `calibration_file`.

    Returns:
      The layers, and the header, which has at least ``method`` and ``rope``.

    Raises:
      StorageError: there is no such file, it is damaged or was changed, it is of an older format, or no calibration.
    """
    path = calibration_file(path)
    if Path(path).is_dir():
        raise StorageError(f"calibration {path} is a folder; give the file that kvjax.calibrate(...).save(path) made.")
    if not Path(path).is_file():
        raise StorageError(f"calibration {path} does not exist; make it with kvjax.calibrate(...).save(path).{_own()}")
    try:
        with safe_open(str(path), "flax") as file:
            about = file.metadata() or {}
            tensors = {name: jnp.asarray(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        if about.get("format") != FORMAT:
            raise StorageError(
                f"calibration {path}: its format is {about.get('format')!r}, not {FORMAT!r}; make it again with "
                "kvjax.calibrate."
            )
        if missing := [name for name in ("method", "rope", "hash", "shapes") if name not in about]:
            raise ValueError(f"its header has no {missing[0]!r}")
        layers = _layers(tensors)
        shapes = {name: list(x.shape) for name, x in tensors.items()}
        if shapes != json.loads(about["shapes"]):
            raise StorageError(f"calibration {path}: its arrays have shapes {shapes}, its header {about['shapes']}.")
        said = about.pop("hash")
        if (own := _hash(tensors, about)) != said:
            raise StorageError(
                f"calibration {path} is damaged or was changed: its arrays and its header have the hash {own}, but the "
                f"stored hash is {said}; make it again with kvjax.calibrate."
            )
        if reason := _not_finite(tensors):
            raise StorageError(f"calibration {path} is not finite: {reason}; make it again with kvjax.calibrate.")
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        if isinstance(error, StorageError):
            raise
        raise invalid(path, error) from None
    return layers, about


def invalid(path: Path, error: Exception) -> StorageError:
    """Returns the error of a file that is not one of a calibration."""
    return StorageError(f"calibration {path} is not a file of kvjax.calibrate(...).save(path): {error}.")


def _header(tensors: Mapping[str, Array], about: Mapping[str, str]) -> dict[str, str]:
    """Returns the header of a file, without the hash."""
    shapes = {name: list(x.shape) for name, x in tensors.items()}
    return {**about, "format": FORMAT, "shapes": json.dumps(shapes, sort_keys=True)}


def _own() -> str:
    """Names the gates that kvjax contains, for a message."""
    names = sorted(path.parent.name for path in PRETRAINED.glob(f"*/{FILE}"))
    return f" Gates that kvjax contains: {', '.join(names)}." if names else ""


def _named(layers: Sequence[Sides]) -> dict[str, Array]:
    """The arrays by names such as ``layer_0.key.basis``."""
    return {
        f"layer_{index}.{name}.{part}": x
        for index, layer in enumerate(layers)
        for name, parts in layer.items()
        for part, x in parts.items()
    }


def _hash(tensors: dict[str, Array], about: dict[str, str]) -> str:
    """SHA-256 of arrays with their names, and of what a file says of them."""
    found = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {x.shape}".encode())
        found.update(np.asarray(x).tobytes())
    return found.hexdigest()


def _layers(tensors: dict[str, Array]) -> tuple[Sides, ...]:
    """The inverse of `_named`."""
    layers: dict[int, dict[str, dict[str, Array]]] = {}
    for full, x in tensors.items():
        if not re.fullmatch(r"layer_\d+\.\w+\.\w+", full):
            raise ValueError(f"array {full!r} is not named layer_N.key.PART or layer_N.value.PART")
        layer, name, part = full.split(".")
        layers.setdefault(int(layer.removeprefix("layer_")), {}).setdefault(name, {})[part] = x
    if missing := set(range(max(layers, default=-1) + 1)) - set(layers):
        raise ValueError(f"layer_{min(missing)} is missing")
    return tuple(layers[index] for index in range(len(layers)))


def _not_finite(tensors: dict[str, Array]) -> str | None:
    """Returns which array has a number that is infinite or NaN, as text; None if none has."""
    for name, x in tensors.items():
        if not isinstance(x, jax.core.Tracer) and not bool(jnp.all(jnp.isfinite(x))):
            return f"{name} has numbers that are infinite or NaN"
    return None
