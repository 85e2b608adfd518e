"""What a storage is: the form in which slots hold keys and values, apart from the policy that says which tokens stay.

Codecs and storages are frozen dataclasses: equal by value, hashable, picklable, and `repr` evaluates to an equal
object.
"""

import dataclasses
import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import StorageError
from kvjax.storage.rounding import as_stored

Array = jax.Array
Parts = Mapping[str, Array]  # part -> [..., *shape]
Shapes = dict[str, tuple[tuple[int, ...], Any]]  # part -> shape and dtype of one vector

P = ParamSpec("P")
R = TypeVar("R")

slots = "slots"  # the layout in which each vector is held by itself

LAYOUTS = (slots,)
FRAMES = ("any",)
MEMORIES = ("device",)


class Codec:
    """The form in which one vector is held.

    Either a call, ``Codec(parts, encode, decode)`` with three functions, or a frozen dataclass that inherits from this
    class, whose fields are its parameters and which defines the three as methods.

    Attributes:
      parts: (dim, dtype) -> {name: (shape, dtype)} of one vector; every byte that is held is counted here.
      encode: (x [..., dim] float32, side, dtype) -> {name: [..., *shape]}; `dtype` is the model's.
      decode: (parts, side, dim) -> [..., dim] float32; finite where all parts are 0.
    """

    parts: Callable[[int, Any], Shapes]
    encode: Callable[[Array, Any, Any], Parts]
    decode: Callable[[Parts, Any, int], Array]

    def __new__(cls, *args: Any, **kwargs: Any) -> "Codec":
        return super().__new__(CodecFunctions if cls is Codec else cls)

    def bytes(self, dim: int, dtype: DTypeLike) -> int:
        """The number of bytes of one vector of `dim` numbers."""
        return sum(math.prod(shape) * jnp.dtype(each).itemsize for shape, each in self.parts(dim, dtype).values())


@dataclasses.dataclass(frozen=True)
class CodecFunctions(Codec):
    """A codec made of functions; what ``Codec(parts, encode, decode)`` returns."""

    parts: Callable[[int, Any], Shapes]
    encode: Callable[[Array, Any, Any], Parts]
    decode: Callable[[Parts, Any, int], Array]

    def __post_init__(self) -> None:
        for field in ("parts", "encode", "decode"):
            if not callable(given := getattr(self, field)):
                raise StorageError(f"Codec: {field}={given!r} must be a function; see kvjax.storage.Codec.")


@dataclasses.dataclass(frozen=True)
class Exact(Codec):
    """The vector itself, in the model's dtype."""

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {"exact": ((dim,), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Any, dtype: DTypeLike) -> Parts:
        # A vector that has the model's dtype already is held as it is.
        return {"exact": x if x.dtype == dtype else as_stored(x.astype(jnp.float32), dtype)}

    def decode(self, parts: Parts, side: Any, dim: int) -> Array:
        return parts["exact"].astype(jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """How the slots of a cache hold keys and values.

    Attributes:
      key: the codec of keys.
      value: the codec of values.
      layout: ``slots`` holds each vector by itself.
      residual: the number of newest positions that stay exact.
      frame: ``any`` holds keys as the policy's positions say: rotated by RoPE, or unrotated.
      memory: ``device`` holds everything in the accelerator's memory.
      name: shown in reports; not part of what two storages are compared by.

    Raises:
      StorageError: a field that is not valid.
    """

    key: Codec
    value: Codec
    layout: str = slots
    residual: int = 0
    frame: str = "any"
    memory: str = "device"
    name: str = dataclasses.field(default="storage", compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.key, Codec) or not isinstance(self.value, Codec):
            raise StorageError(
                f"storage {self.name}: key={self.key!r} and value={self.value!r} must be codecs, such as "
                "kvjax.storage.Integer(4) or kvjax.storage.Exact()."
            )
        for field, valid in (("layout", LAYOUTS), ("frame", FRAMES), ("memory", MEMORIES)):
            if (given := getattr(self, field)) not in valid:
                raise StorageError(
                    f"storage {self.name}: {field}={given!r} is not valid; use {' or '.join(map(repr, valid))}."
                )
        object.__setattr__(self, "residual", count_argument("residual", self.residual))

    @property
    def exact(self) -> bool:
        """Whether keys and values are held in the model's dtype."""
        return isinstance(self.key, Exact) and isinstance(self.value, Exact)

    def bytes_per_slot(self, dim: int, dtype: DTypeLike) -> int:
        """The number of bytes of a key and a value of `dim` numbers each."""
        return self.key.bytes(dim, dtype) + self.value.bytes(dim, dtype)


def round_trip(codec: Codec, x: Array, side: Any, dtype: DTypeLike) -> Array:
    """Encodes and decodes; the gradient passes straight through.

    Args:
      codec: see `Codec`.
      x: [..., dim] float.
      side: what vectors share, a constant; None for codecs without.
      dtype: the model's dtype.

    Returns:
      [..., dim] float32.
    """
    x = x.astype(jnp.float32)
    parts = codec.encode(jax.lax.stop_gradient(x), side, dtype)
    return _straight_through(x, jax.lax.stop_gradient(codec.decode(parts, side, x.shape[-1])))


@jax.custom_jvp
def _straight_through(x: Array, decoded: Array) -> Array:
    return decoded


@_straight_through.defjvp
def _straight_through_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return primals[1], tangents[0]


def factory(function: Callable[P, R]) -> Callable[P, R]:
    """Turns a call with wrong arguments into a `StorageError` that lists the arguments that are accepted."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            signature.bind(*args, **kwargs)
        except TypeError as error:
            accepted = ", ".join(signature.parameters) or "no arguments"
            raise StorageError(f"{function.__name__}(): {error}; it accepts {accepted}.") from None
        return function(*args, **kwargs)

    return call


def count_argument(name: str, value: Any, *, minimum: int = 0, maximum: int | None = None) -> int:
    """A whole number from `minimum` to `maximum`, or a StorageError that names the argument."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or value < minimum or (maximum is not None and value > maximum):
        valid = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise StorageError(f"{name} must be a whole number {valid}; got {value!r}.")
    return int(value)


def number_argument(name: str, value: Any, *, minimum: float, maximum: float) -> float:
    """A number from `minimum` to `maximum`, or a StorageError that names the argument."""
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not minimum <= value <= maximum:  # NaN fails this too
        raise StorageError(f"{name} must be a number from {minimum:g} to {maximum:g}; got {value!r}.")
    return float(value)
