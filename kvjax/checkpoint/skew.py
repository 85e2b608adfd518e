"""Saves and loads the matrices of `kvjax.models.skew`, with the sample and the model that they were made from."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.errors import CheckpointError
from kvjax.summary import one_line

TENSOR = "skew"


class Skew(NamedTuple):
    """A skew that was loaded.

    Attributes:
      matrices: [L, K, D, D] float32, for `kvjax.models.skew.skewed`.
      model: the name of the checkpoint that it was made for.
      sample: SHA-256 of the sample's token ids (int32, little-endian).
      tokens: the number of tokens of the sample.
    """

    matrices: np.ndarray
    model: str
    sample: str
    tokens: int

    def __repr__(self) -> str:
        return one_line(self)


def save_skew(path: str | Path, matrices: ArrayLike, *, model: str, sample: ArrayLike) -> None:
    """Saves a skew as a safetensors file.

    Args:
      path: of the file; it is replaced if it exists.
      matrices: [L, K, D, D], from `kvjax.models.skew.find_skew`.
      model: the name of the checkpoint.
      sample: the token ids of the sample.

    Raises:
      CheckpointError: if the file cannot be written.
    """
    ids = np.ascontiguousarray(np.asarray(sample), "<i4")
    about = {"model": model, "sample": hashlib.sha256(ids.tobytes()).hexdigest(), "tokens": str(ids.size)}
    try:
        save_file({TENSOR: np.asarray(matrices, np.float32)}, path, metadata=about)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}.") from None


def load_skew(path: str | Path) -> Skew:
    """Loads a skew that `save_skew` has saved.

    Args:
      path: of the file.

    Raises:
      CheckpointError: if there is no such file, or it is not a skew.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"{path} does not exist; make it with python -m experiments.skew.")
    try:
        with safe_open(path, "numpy") as file:
            about = file.metadata() or {}
            return Skew(file.get_tensor(TENSOR), about["model"], about["sample"], int(about["tokens"]))
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a skew of python -m experiments.skew: {error}.") from None
