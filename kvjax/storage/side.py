"""Sides: numbers that many vectors share, such as a scale for each channel, and what they are made from."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import choice_argument
from kvjax.errors import StorageError
from kvjax.storage.rounding import as_stored

Array = jax.Array
T = TypeVar("T")
Parts = Mapping[str, Array]  # part -> [..., *shape]
Shapes = dict[str, tuple[tuple[int, ...], Any]]  # part -> shape and dtype
Sides = Mapping[str, Parts]  # ``key`` and ``value``, where these have a side -> its parts

PROMPT, CALIBRATION = "prompt", "calibration"
WHEN = (PROMPT, CALIBRATION)


def rows_of(tree: T, heads: Sequence[int] | None) -> T:
    """Returns the rows of some KV heads of arrays [K, ...], None = all; arrays [1, ...], which heads share, stay."""
    if heads is None:
        return tree
    chosen = np.asarray(heads)
    return cast(T, jax.tree.map(lambda x: x if x.shape[0] == 1 else x[chosen], tree))


class PromptView(NamedTuple):
    """The prompts of a batch, from which a side with ``when="prompt"`` is made; float32, and constants to a gradient.

    Queries and keys are rotated, unless keys are held as they are before rotation.

    Attributes:
      own: [B, K, n, D], the vectors that the codec will hold: `key` or `value`.
      query: [B, K, G, n, D], of the query heads of each KV head.
      key: [B, K, n, D].
      value: [B, K, n, D].
      position: [B, n] int32, -1 = padding.
      live: [B, K, n] bool, whether a token is still held after the prompt's step.
    """

    own: Array
    query: Array
    key: Array
    value: Array
    position: Array
    live: Array

    @property
    def real(self) -> Array:
        """[B, n] bool: False for padding."""
        return self.position >= 0


class Samples(NamedTuple):
    """One layer of a calibration text under full attention, from which a side with ``when="calibration"`` is made.

    Tokens of all rows follow each other, without padding.

    Attributes:
      own: [n, K, D] float32, the vectors that the codec will hold, keys in the storage's frame.
      query: [n, H, D] float32 rotated; None if it is not known.
      key: [n, K, D] float32, in the storage's frame.
      value: [n, K, D] float32.
      inputs: [n, hidden] float32, what the projections of keys and values multiply; None if it is not known.
      kernels: projections [hidden, K, D] float32, ``key`` and ``value``; empty if they are not known.
      name: ``key`` or ``value``, which of them `own` is.
      gradients: of the loss of the text, with respect to ``key`` and ``value``, [n, K, D] float32; empty if they are
        not known.
    """

    own: np.ndarray
    query: np.ndarray | None
    key: np.ndarray
    value: np.ndarray
    inputs: np.ndarray | None = None
    kernels: Mapping[str, np.ndarray] = {}
    name: str = "key"
    gradients: Mapping[str, np.ndarray] = {}


class Side:
    """The part that the vectors of a KV head share.

    Write a frozen dataclass that inherits from this class, with `parts` and `prepare` as its methods, or call
    ``Side(prepare, parts, when="prompt")``.

    Attributes:
      prepare: (view) -> {name: array}. A side of prompts takes a `PromptView` and returns arrays [B, K, *shape]; one of
        a calibration takes `Samples` and returns NumPy arrays [K, *shape], or [1, *shape] of a part in `shared`. Both
        are rounded to the dtypes of `parts`.
      parts: (dim, dtype) -> {name: (shape, dtype)} of one KV head; `dtype` is the model's.
      when: ``prompt``: made per row and KV head when the row's prompt ends, and constant from then on;
        ``calibration``: made once from a text (`kvjax.calibrate`), per layer and KV head.
      shared: names of the parts that all KV heads of a layer share; only of a calibration.
      gradients: whether `prepare` looks at the gradients of a calibration.
    """

    prepare: Callable[[Any], Mapping[str, Any]]
    parts: Callable[[int, Any], Shapes]
    when: str = PROMPT
    shared: frozenset[str] = frozenset()
    gradients: Any = False

    def __new__(cls, *args: Any, **kwargs: Any) -> "Side":
        return super().__new__(SideFunctions if cls is Side else cls)

    @property
    def leading(self) -> int:
        """The number of axes before those of `parts`: [B, K] of a prompt, [K] of a calibration."""
        return 2 if self.when == PROMPT else 1

    def prepared(self, view: Any, dim: int, dtype: DTypeLike) -> dict[str, Array]:
        """Calls `prepare` and rounds its result to what is stored, leaves [B, K, *shape], [K, *shape] or [1, *shape].

        Raises:
          StorageError: the result does not have the names of `parts`, or arrays of other shapes.
        """
        expected = self.parts(dim, dtype)
        made = {name: jnp.asarray(x) for name, x in self.prepare(view).items()}
        heads = view.own.shape[1]
        lead = (view.own.shape[0], heads) if self.when == PROMPT else (heads,)
        shapes = {name: ((1,) if name in self.shared else lead) + tuple(shape) for name, (shape, _) in expected.items()}
        if {name: x.shape for name, x in made.items()} != shapes:
            raise StorageError(
                f"side {self!r}: prepare returned shapes { ({name: x.shape for name, x in made.items()}) }; its parts "
                f"are {shapes}."
            )
        return {
            name: as_stored(made[name].astype(jnp.float32), dtype)
            if jnp.issubdtype(dtype, jnp.floating)
            else made[name].astype(dtype)
            for name, (_, dtype) in expected.items()
        }

    def aligned(self, parts: Parts, ndim: int) -> dict[str, Array]:
        """Returns the parts with axes of size 1, so that they broadcast against vectors.

        Args:
          parts: [B, K, *shape] or [K, *shape] each.
          ndim: the number of axes of the vectors, [B, K, ..., dim].
        """
        axes = ndim - 3
        return {
            name: x.reshape(*x.shape[: self.leading], *(1,) * axes, *x.shape[self.leading :])
            for name, x in parts.items()
        }


@dataclasses.dataclass(frozen=True)
class SideFunctions(Side):
    """A side made of functions; ``Side(prepare, parts, when=...)`` returns one."""

    prepare: Callable[[Any], Mapping[str, Any]]
    parts: Callable[[int, Any], Shapes]
    when: str = PROMPT
    shared: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for field in ("prepare", "parts"):
            if not callable(given := getattr(self, field)):
                raise StorageError(f"Side: {field}={given!r} must be a function; see kvjax.storage.Side.")
        choice_argument("Side: when", self.when, WHEN, error=StorageError)
