"""Keys and values in a few principal directions of each head (MatryoshkaKV, arXiv:2410.14731; Palu, 2407.21118)."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import StorageError
from kvjax.storage.base import ROTATED, Codec, Storage, entry_of, factory
from kvjax.storage.dims import EXACT, Chain, Dims
from kvjax.storage.side import CALIBRATION, Parts, Samples, Shapes, Side

Array = jax.Array
Basis = Literal["keys", "weights"]
Rank = int | tuple[int | tuple[int, ...], ...]  # of all layers; or one for each, or one for each of its KV heads

BASES = ("keys", "weights")
DEPTH = 2  # of ranks: by layer, and by KV head
SMALLEST_INPUT = 1e-6  # added to the mean magnitude of a projection's input, whose root scales its columns


@dataclasses.dataclass(frozen=True)
class PrincipalDirections(Side):
    """The directions of each KV head in which calibration vectors are largest, [D, rank], and their mean, [D].

    Attributes:
      rank: the number of directions.
      center: whether the mean is subtracted.
      basis: ``keys``: eigenvectors of Σ (x - mean)(x - mean)ᵀ over the calibration vectors, by falling eigenvalue;
        ``weights``: left singular vectors of the projection, whose columns are scaled by the root of the mean magnitude
        of its inputs, by falling singular value. The largest entry of each direction is positive.
    """

    rank: Rank
    center: bool = True
    basis: Basis = "keys"
    when = CALIBRATION

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        basis: Shapes = {"basis": ((dim, _number(self.rank)), jnp.dtype(dtype))}
        return basis | {"mean": ((dim,), jnp.dtype(dtype))} if self.center else basis

    def prepare(self, samples: Samples) -> Mapping[str, np.ndarray]:
        # [n, K, D]
        x = samples.own.astype(np.float64)
        mean = x.mean(axis=0)
        from_vectors = self.basis == "keys"
        moment = second_moment(x - mean if self.center else x) if from_vectors else weight_moment(samples)
        basis = {"basis": directions(moment, _number(self.rank))}
        return basis | {"mean": mean} if self.center else basis


def _number(rank: Rank) -> int:
    """Returns a rank of one layer and KV head.

    Raises:
      StorageError: it is of several.
    """
    if isinstance(rank, int):
        return rank
    raise StorageError(
        f"storage low_rank: ranks {rank} are per layer or head; select one with Storage.of_layer and Storage.of_head."
    )


def _checked(rank: object, depth: int = 0) -> Rank:
    """Returns a rank, one for each layer, or one for each KV head of a layer, as whole numbers."""
    rank = rank.tolist() if isinstance(rank, np.ndarray) else rank
    if isinstance(rank, list | tuple) and len(rank) and depth < DEPTH:
        return tuple(_checked(each, depth + 1) for each in rank)  # type: ignore[misc]
    return count_argument("storage low_rank: rank", rank, minimum=1, error=StorageError)


def second_moment(x: np.ndarray) -> np.ndarray:
    """Returns Σ x xᵀ of each KV head, [K, D, D], for x [n, K, D]."""
    moment: np.ndarray = np.einsum("nkd,nke->kde", x, x)
    return moment


def weight_moment(samples: Samples) -> np.ndarray:
    """Returns W·diag(s)²·Wᵀ of each KV head, [K, D, D], for a projection W and s² the mean magnitude of its inputs.

    Raises:
      StorageError: samples without projections.
    """
    if samples.inputs is None or samples.name not in samples.kernels:
        raise StorageError("basis='weights' needs the projections of a model; calibrate with kvjax.calibrate.")
    # [hidden] and [hidden, K, D]
    size = np.abs(samples.inputs.astype(np.float64)).mean(axis=0) + SMALLEST_INPUT
    kernel = samples.kernels[samples.name].astype(np.float64)
    moment: np.ndarray = np.einsum("h,hkd,hke->kde", size, kernel, kernel)
    return moment


def directions(moment: np.ndarray, rank: int) -> np.ndarray:
    """Returns eigenvectors by falling eigenvalue, the largest entry of each (of equal ones the first) positive.

    Args:
      moment: [K, D, D] float64, symmetric.
      rank: the number of eigenvectors.

    Returns:
      [K, D, rank] float64.
    """
    _, vectors = np.linalg.eigh(moment)
    vectors = vectors[:, :, ::-1]
    largest = np.abs(vectors).argmax(axis=1)[:, None]
    vectors = vectors * np.where(np.take_along_axis(vectors, largest, axis=1) < 0, -1.0, 1.0)
    return vectors[:, :, :rank]


@dataclasses.dataclass(frozen=True)
class LowRank(Dims):
    """Holds Uᵀ(x - mean): the coordinates of a vector in a few directions, which are the columns of U.

    Attributes:
      rank: the number of directions, at least 1; a tuple with one for each layer, or with a tuple for each that has one
        for each of its KV heads.
      center: see `PrincipalDirections`.
      basis: see `PrincipalDirections`.
      known: the number of directions of the calibration, of which the first `rank` are used, of one layer whose KV
        heads differ; None = `rank`.

    Raises:
      StorageError: an attribute out of range.
    """

    rank: Rank
    center: bool = True
    basis: Basis = "keys"
    known: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", _checked(self.rank))
        choice_argument("storage low_rank: center", self.center, (False, True), error=StorageError)
        choice_argument("storage low_rank: basis", self.basis, BASES, error=StorageError)
        if self.basis == "weights" and self.center:
            raise StorageError("storage low_rank: basis='weights' has no mean to subtract; use center=False.")

    @property
    def side(self) -> Side:
        return PrincipalDirections(self.rank if self.known is None else self.known, self.center, self.basis)

    def of_layer(self, layer: int, layers: int | None = None) -> "LowRank":
        if isinstance(self.rank, int) or self.known is not None:
            return self
        rank = entry_of("low_rank", self.rank, layer, layers)
        # A calibration has as many directions of each head as the head that uses most of them.
        return dataclasses.replace(self, rank=rank, known=None if isinstance(rank, int) else max(rank))

    def of_head(self, head: int, kv_heads: int | None = None) -> "LowRank":
        if isinstance(self.rank, int) or self.known is None:
            return self
        return dataclasses.replace(self, rank=entry_of("low_rank", self.rank, head, kv_heads, "KV heads"))

    def dim(self, dim: int) -> int:
        return _number(self.rank)

    def forward(self, x: Array, side: Parts | None) -> Array:
        # [..., D] and [..., r]
        assert side is not None
        x = x - side["mean"].astype(jnp.float32) if self.center else x
        return self._product("...d,...dr->...r", x, side)

    def query(self, q: Array, side: Parts | None) -> tuple[Array, Array]:
        # [..., r] and [...]
        assert side is not None
        short = self._product("...d,...dr->...r", q, side)
        if not self.center:
            return short, jnp.zeros(q.shape[:-1], jnp.float32)
        return short, jnp.sum(q * side["mean"].astype(jnp.float32), axis=-1)

    def output(self, weighted: Array, total: Array, side: Parts | None) -> Array:
        # [..., D]
        assert side is not None
        full = self._product("...r,...dr->...d", weighted, side)
        return full + side["mean"].astype(jnp.float32) * total[..., None] if self.center else full

    def _product(self, subscripts: str, x: Array, side: Parts | None) -> Array:
        """Multiplies vectors by the basis [..., D, r], in full float32: GPUs and TPUs would multiply fewer bits."""
        assert side is not None
        basis = side["basis"] if self.known is None else side["basis"][..., : _number(self.rank)]
        return jnp.einsum(subscripts, x, basis.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


@factory
def low_rank(
    key_rank: Rank,
    value_rank: Rank,
    residual: int = 0,
    center: bool = True,
    basis: Basis = "keys",
    *,
    key_codec: Codec = EXACT,
    value_codec: Codec = EXACT,
) -> Storage:
    """Holds keys and values in a few principal directions of each head (MatryoshkaKV, arXiv:2410.14731, at its start).

    The directions come from a calibration (`kvjax.calibrate`), of which gradients reach the arrays. Attention runs on
    what is held, and nothing is expanded to all features of a head.

    Args:
      key_rank: directions of keys, at most the features of a head; a tuple with a number for each layer, or with a
        tuple for each that has a number for each KV head. Heads of different ranks have arrays of their own.
      value_rank: directions of values.
      residual: the number of newest positions that stay exact.
      center: whether the mean is subtracted.
      basis: ``keys``: directions of the calibration vectors; ``weights``: of the projections, scaled by their inputs.
      key_codec: holds the coordinates of keys.
      value_codec: holds the coordinates of values.

    Raises:
      StorageError: an argument that is not valid.
    """
    key = Chain(LowRank(key_rank, center, basis), key_codec)
    value = Chain(LowRank(value_rank, center, basis), value_codec)
    ranks = (str(rank).replace(" ", "") for rank in (_checked(key_rank), _checked(value_rank)))
    return Storage(
        key=key, value=value, residual=residual, frame=ROTATED, name="low_rank_k{}v{}".format(*ranks)
    )  # fmt: skip
