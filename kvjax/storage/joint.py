"""Joint heads: one latent of several KV heads (CSKV, arXiv:2409.10593; compression of KV heads, 2406.07056)."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import choice_argument, count_argument
from kvjax.errors import StorageError
from kvjax.storage.base import UNROTATED, Codec, Parts, Shapes, Storage, entry_of, factory
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.dims import EXACT, LATENT
from kvjax.storage.layouts import Blocks
from kvjax.storage.low_rank import BASES, Basis, directions, second_moment, weight_moment
from kvjax.storage.side import CALIBRATION, Samples, Side

Array = jax.Array
Heads = int | str  # KV heads of a group, or ``joint``
Rank = int | tuple[int, ...]  # of all layers, or one for each

JOINT = "joint"


@dataclasses.dataclass(frozen=True)
class JointDirections(Side):
    """The directions in which calibration vectors of the KV heads of a group are largest together.

    The columns of U [heads · D, rank] as `PrincipalDirections` has them, without a mean. A head has the rows that are
    its own, [D, rank].

    Attributes:
      rank: the number of directions; None = D.
      heads: KV heads of a group.
      basis: see `PrincipalDirections`.
    """

    rank: Rank | None
    heads: Heads
    basis: Basis = "keys"
    when = CALIBRATION

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {"basis": ((dim, _number(self.rank, dim)), jnp.dtype(dtype))}

    def prepare(self, samples: Samples) -> Mapping[str, np.ndarray]:
        n, kv_heads, dim = samples.own.shape
        heads = kv_heads if self.heads == JOINT else int(self.heads)
        shape = (kv_heads // heads, heads * dim)
        if self.basis == "keys":
            moment = second_moment(samples.own.astype(np.float64).reshape(n, *shape))
        else:
            kernel = {name: x.reshape(len(x), *shape) for name, x in samples.kernels.items()}
            moment = weight_moment(samples._replace(kernels=kernel))
        # [K / heads, heads · D, r]
        basis = directions(moment, _number(self.rank, dim))
        return {"basis": basis.reshape(kv_heads, dim, -1)}


@dataclasses.dataclass(frozen=True)
class Joint(Codec):
    """Holds one latent Uᵀx of the vectors x of a group of KV heads, each head an equal share of its numbers.

    The heads of a group hold the same positions in the same slots. Vectors are [B, K, ..., D].

    Attributes:
      rank: numbers of a latent, or a tuple with one for each layer; None = D.
      heads: KV heads of a group; ``joint`` = all of a layer.
      basis: see `JointDirections`.

    Raises:
      StorageError: an attribute that is not valid.
    """

    rank: Rank | None
    heads: Heads = JOINT
    basis: Basis = "keys"
    has_gradient = True

    def __post_init__(self) -> None:
        if self.rank is not None:
            object.__setattr__(self, "rank", _checked(self.rank))
        if isinstance(self.heads, str):
            choice_argument("storage joint: heads", self.heads, (JOINT,), error=StorageError)
        else:
            heads = count_argument("storage joint: heads", self.heads, minimum=1, error=StorageError)
            object.__setattr__(self, "heads", heads)
        choice_argument("storage joint: basis", self.basis, BASES, error=StorageError)

    @property
    def side(self) -> Side:
        return JointDirections(self.rank, self.heads, self.basis)

    def of_layer(self, layer: int, layers: int | None = None) -> "Joint":
        if not isinstance(self.rank, tuple):
            return self
        return dataclasses.replace(self, rank=entry_of("joint", self.rank, layer, layers))

    def bound(self, kv_heads: int) -> "Joint":
        heads = kv_heads if self.heads == JOINT else int(self.heads)
        if kv_heads % heads:
            raise StorageError(
                f"storage joint: groups of heads={heads} do not divide {kv_heads} KV heads; use a divisor of these."
            )
        return dataclasses.replace(self, heads=heads)

    @property
    def joint_heads(self) -> int:
        """KV heads of a group, once their number is known."""
        return 1 if self.heads == JOINT else int(self.heads)

    def share(self, dim: int) -> int:
        """Returns the number of a latent's numbers that each head holds.

        Raises:
          StorageError: the number of heads is not known yet, or a latent is longer than what it stands for.
        """
        if self.heads == JOINT:
            raise StorageError("storage joint: its parts depend on the number of KV heads; see Storage.bound.")
        rank = _number(self.rank, dim)
        heads = self.joint_heads
        if rank > heads * dim:
            raise StorageError(
                f"storage joint: rank={rank} exceeds the {heads * dim} features of {heads} heads of {dim}."
            )
        return -(-rank // heads)

    def parts(self, dim: int, dtype: DTypeLike) -> Shapes:
        return {LATENT: ((self.share(dim),), jnp.dtype(dtype))}

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        return {LATENT: EXACT.encode(self.shares(x, side), None, dtype)["exact"]}

    def decode(self, parts: Parts, side: Parts | None, dim: int) -> Array:
        return self.joined(parts[LATENT].astype(jnp.float32), side, dim)

    def shares(self, x: Array, side: Parts | None) -> Array:
        """Returns each head's share of the latents of vectors [B, K, ..., D], [B, K, ..., share]."""
        batch, kv_heads, *middle, dim = x.shape
        assert isinstance(self.heads, int)
        # [B, K, ..., r], then [B, K / heads, ..., r]
        latent = _product("...d,...dr->...r", x, side)
        latent = jnp.sum(latent.reshape(batch, kv_heads // self.heads, self.heads, *latent.shape[2:]), axis=2)
        share = self.share(dim)
        pad = ((0, 0),) * (latent.ndim - 1) + ((0, share * self.heads - latent.shape[-1]),)
        # [B, K / heads, heads, ..., share]
        split = jnp.moveaxis(jnp.pad(latent, pad).reshape(*latent.shape[:-1], self.heads, share), -2, 2)
        return split.reshape(batch, kv_heads, *middle, share)

    def joined(self, shares: Array, side: Parts | None, dim: int) -> Array:
        """Returns vectors [B, K, ..., D] of each head's share of their latents, [B, K, ..., share]."""
        batch, kv_heads, *middle, share = shares.shape
        assert isinstance(self.heads, int)
        split = shares.reshape(batch, kv_heads // self.heads, self.heads, *middle, share)
        # [B, K / heads, ..., heads · share]
        latent = jnp.moveaxis(split, 2, -2).reshape(batch, kv_heads // self.heads, *middle, -1)
        # [B, K, ..., r]
        latent = jnp.repeat(latent[..., : _number(self.rank, dim)], self.heads, axis=1)
        return _product("...r,...dr->...d", latent, side)


def _checked(rank: object) -> Rank:
    """Returns a rank, or one for each layer, as whole numbers."""
    if isinstance(rank, list | tuple | np.ndarray) and len(rank):
        return tuple(count_argument("storage joint: rank", each, minimum=1, error=StorageError) for each in rank)
    return count_argument("storage joint: rank", rank, minimum=1, error=StorageError)


def _number(rank: Rank | None, dim: int) -> int:
    """Returns the numbers of a latent of one layer.

    Raises:
      StorageError: ranks of several layers.
    """
    if isinstance(rank, tuple):
        raise StorageError(f"storage joint: ranks {rank} are per layer; select a layer with Storage.of_layer.")
    return dim if rank is None else rank


def _product(subscripts: str, x: Array, side: Parts | None) -> Array:
    assert side is not None
    return jnp.einsum(subscripts, x, side["basis"].astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class JointBlocks(BlockCodec):
    """Holds the latents of blocks of tokens; see `Joint`.

    Attributes:
      joint: makes latents.
      codec: holds each head's share of them, by token or, as a `BlockCodec`, by block; it has no side.
    """

    joint: Joint
    codec: Codec | BlockCodec = EXACT

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec | BlockCodec) or self.codec.side is not None or self.codec.dims is not None:
            raise StorageError(f"storage joint: codec={self.codec!r} must be a codec without a side, of latents.")

    @property
    def has_gradient(self) -> bool:
        """Whether a gradient passes through encoding and decoding."""
        return self.codec == EXACT

    @property
    def side(self) -> Side:
        return self.joint.side

    @property
    def joint_heads(self) -> int:
        """See `Joint`."""
        return self.joint.joint_heads

    @property
    def single(self) -> Joint | None:
        """The codec of one vector, whose latents are held by themselves; None for codes of them."""
        return self.joint if self.codec == EXACT else None

    def bound(self, kv_heads: int) -> "JointBlocks":
        """Returns the codec for a number of KV heads; see `Codec.bound`."""
        return dataclasses.replace(self, joint=self.joint.bound(kv_heads))

    def of_layer(self, layer: int, layers: int | None = None) -> "JointBlocks":
        """Returns the codec of one layer; see `Codec.of_layer`."""
        joint, codec = self.joint.of_layer(layer, layers), self.codec.of_layer(layer, layers)
        return dataclasses.replace(self, joint=joint, codec=codec)

    def check(self, size: int) -> None:
        if isinstance(self.codec, BlockCodec):
            self.codec.check(size)

    def parts(self, tokens: int, dim: int, dtype: DTypeLike) -> Shapes:
        share = self.joint.share(dim)
        if isinstance(self.codec, BlockCodec):
            return self.codec.parts(tokens, share, dtype)
        return {
            _renamed(name): ((tokens, *shape), each) for name, (shape, each) in self.codec.parts(share, dtype).items()
        }

    def encode(self, x: Array, side: Parts | None, dtype: DTypeLike) -> Parts:
        made = self.codec.encode(self.joint.shares(x, side), None, dtype)
        return {_renamed(name): x for name, x in made.items()}

    def decode(self, parts: Parts, side: Parts | None, tokens: int, dim: int) -> Array:
        share = self.joint.share(dim)
        if isinstance(self.codec, BlockCodec):
            return self.joint.joined(self.codec.decode(parts, None, tokens, share), side, dim)
        own = {"exact" if name == LATENT else name: x for name, x in parts.items()}
        return self.joint.joined(self.codec.decode(own, None, share), side, dim)


def _renamed(part: str) -> str:
    """Exact slots are those that hold a vector itself."""
    return LATENT if part == "exact" else part


@factory
def cskv(
    rank: Rank,
    window: int = 32,
    heads: Heads = JOINT,
    *,
    value_rank: Rank | None = None,
    key_codec: Codec | BlockCodec = EXACT,
    value_codec: Codec | BlockCodec = EXACT,
) -> Storage:
    """Holds one latent of all heads for keys and one for values, in blocks of a window (CSKV, arXiv:2409.10593).

    Keys are compressed as they are before RoPE, expanded, and rotated to their positions in each step. The newest
    tokens are exact until a window of them is full. The directions are those of the projections, scaled by their
    inputs, from a calibration (`kvjax.calibrate`), of which gradients reach the arrays; the paper trains them to
    reconstruct keys and values (`kvjax.training.train_reconstruction`). Under a policy that evicts while decoding,
    tokens are compressed one by one when they are no longer among the newest `window`.

    Args:
      rank: numbers of a latent of keys, or a tuple with one for each layer.
      window: tokens of a block.
      heads: KV heads that share a latent; ``joint`` = all of a layer.
      value_rank: numbers of a latent of values; None = `rank`.
      key_codec: holds the latents of keys, such as `Channels` of KIVI.
      value_codec: holds the latents of values.

    Raises:
      StorageError: an argument that is not valid.
    """
    window = count_argument("storage cskv: window", window, minimum=1, error=StorageError)
    key = JointBlocks(Joint(rank, heads, "weights"), key_codec)
    value = JointBlocks(Joint(rank if value_rank is None else value_rank, heads, "weights"), value_codec)
    return Storage(key=key, value=value, layout=Blocks(window), frame=UNROTATED, name="cskv")


@factory
def kv_heads(heads: int, rank: Rank | None = None, residual: int = 0) -> Storage:
    """Holds one latent vector for several KV heads, of the size of one head (arXiv:2406.07056).

    For models with RoPE, whose keys are expanded and rotated in each step; `kvjax.compress_kv_heads` folds it into the
    projections of others. The directions come from a calibration (`kvjax.calibrate`).

    Args:
      heads: KV heads that share a latent; a divisor of those of a layer.
      rank: numbers of a latent, or a tuple with one for each layer; None = those of one head.
      residual: the number of newest positions that stay exact.

    Raises:
      StorageError: an argument that is not valid.
    """
    codec = Joint(rank, heads)
    return Storage(key=codec, value=codec, residual=residual, frame=UNROTATED, name=f"kv_heads{heads}")
