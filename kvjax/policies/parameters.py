"""Parameters of policies: arrays that an importance or a written score reads, calibrated from a text or trained.

A policy is static and only names its parameters. The arrays are kept in the model's parameters (`kvjax.calibrated`), so
that different arrays share one compiled program, and gradients reach them.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.errors import PolicyError

Array = jax.Array
Parts = Mapping[str, Array]  # part -> [K or 1, ...]
NAMES = frozenset({"key", "value"})  # reserved for the calibration of storages


class ModelSizes(NamedTuple):
    """The sizes of a model that determine the shapes of parameters.

    Attributes:
      kv_heads: K, KV heads of a layer.
      queries: G, query heads of a KV head.
      dim: D, features of a head.
      hidden: E, features of the residual stream.
      rotary: features of a head that are rotated; None = the model has no rotary embedding.
    """

    kv_heads: int
    queries: int
    dim: int
    hidden: int
    rotary: int | None


class TextSamples(NamedTuple):
    """The queries of one layer for a calibration text under full attention; rows are concatenated, without padding.

    Attributes:
      query: [n, H, D] float32, not rotated.
      rotated_query: [n, H, D] float32, rotated to their positions.
    """

    query: np.ndarray
    rotated_query: np.ndarray


class Parameters:
    """The description of a policy's parameters. Write a frozen dataclass that inherits from this class.

    Attributes:
      name: key of the parameters in `View.params`, of letters, digits and underscores; equal parameters share it.
      trained: whether the arrays are trained; otherwise `prepare` computes them.
    """

    name: str
    trained: bool = False

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of one layer's arrays, float32: [K, ...] with an entry per KV head, or [1, ...].

        Raises:
          PolicyError: a model that the policy does not run on.
        """
        raise NotImplementedError

    def initial(self, key: Array, sizes: ModelSizes) -> dict[str, Array]:
        """Returns one layer's arrays before training, [K or 1, ...] float32, if they are trained.

        Args:
          key: [] random key.
          sizes: of the model.
        """
        raise NotImplementedError

    def prepare(self, samples: TextSamples, sizes: ModelSizes) -> dict[str, np.ndarray]:
        """Computes one layer's arrays, [K or 1, ...] as `parts` says, from a text.

        Args:
          samples: of the layer.
          sizes: of the model.
        """
        raise NotImplementedError

    @property
    def kind(self) -> str:
        """A description of the parameters without their shapes, for messages and files."""
        return repr(self)


def distinct(parameters: Iterable[Parameters]) -> tuple[Parameters, ...]:
    """Returns the different parameters, each once.

    Raises:
      PolicyError: different parameters have the same name, or one has a name that storages use.
    """
    known: dict[str, Parameters] = {}
    for each in parameters:
        if not isinstance(each, Parameters) or not dataclasses.is_dataclass(each):
            raise PolicyError(f"{each!r} does not describe parameters; give a frozen dataclass of Parameters.")
        if each.name in NAMES or known.setdefault(each.name, each) != each:
            other = known.get(each.name, "those of a storage")
            raise PolicyError(f"parameters {each!r} and {other!r} have the same name; rename one of them.")
    return tuple(known.values())


def expected(parameters: Iterable[Parameters], sizes: ModelSizes) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
    """Returns the shapes and dtypes of one layer's arrays: name -> part -> (shape, dtype)."""
    return {each.name: {part: (shape, "float32") for part, shape in each.parts(sizes).items()} for each in parameters}


def empty(parameters: Iterable[Parameters], sizes: ModelSizes) -> dict[str, dict[str, Any]]:
    """Returns one layer's arrays as `jax.ShapeDtypeStruct`."""
    return {
        name: {part: jax.ShapeDtypeStruct(shape, np.dtype(dtype)) for part, (shape, dtype) in parts.items()}
        for name, parts in expected(parameters, sizes).items()
    }
