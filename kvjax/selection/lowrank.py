"""ShadowKV: keys of the prompt are restored from a low-rank product instead of being read (arXiv:2410.21465)."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import SelectionError
from kvjax.policies.base import Policy
from kvjax.selection.base import Held, Index, Selection, SelectView
from kvjax.selection.checks import factory, keeps_all, merges, named, rotated_once
from kvjax.selection.choose import best, grouped_logits, rank

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class ShadowKV(Selection):
    """Chooses chunks of the prompt by their mean keys, and restores their keys (ShadowKV, section 4).

    When the prompt ends, the keys of all its tokens before rotation, all KV heads side by side, are approximated by a
    product of rank r. The last chunks of the prompt, the chunks whose keys are least like their mean, and all later
    tokens are always read, with exact keys.

    The index has the mean keys of chunks, [B, K, U, D], which chunks can be chosen, [B, K, U] bool, and the product's
    factors, [B, 1, S, r] and [B, K, r, D]. A token is in the slot of its position.

    Attributes:
      rank: the rank r.
      chunk: tokens of a chunk.
      chunks: the number of chunks that are chosen.
      local: the number of chunks at the prompt's end that are always read.
      outliers: the number of chunks least like their mean, which are always read.
      first_layer: layers before this one read everything.
      following: the most tokens that follow a prompt; set by `bound`. None = not known.

    Raises:
      SelectionError: an attribute that is too small.
    """

    rank: int
    chunk: int
    chunks: int
    local: int = 4
    outliers: int = 48
    first_layer: int = 0
    following: int | None = None
    name = "shadowkv"

    def __post_init__(self) -> None:
        with named(self.name):
            for field, minimum in (
                ("rank", 1), ("chunk", 1), ("chunks", 1), ("local", 0), ("outliers", 0), ("first_layer", 0),
            ):  # fmt: skip
                object.__setattr__(self, field, count_argument(field, getattr(self, field), minimum=minimum))

    @property
    def most(self) -> int:
        return self.chunks * self.chunk

    def width(self, capacity: int) -> int | None:
        if self.following is None:
            return None
        # Beyond whole chunks, a prompt has up to chunk - 1 tokens.
        slots = self.most + (self.local + self.outliers + 1) * self.chunk + self.following
        return slots if slots < capacity else None

    def bound(self, queries: int, following: int) -> ShadowKV:
        return dataclasses.replace(self, following=following)

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        if storage is not None and storage.divided:
            return (
                f"a token is in the slot of its position, and {storage!r} moves tokens to another store when they are "
                "no longer among its newest; use a storage with residual=0 and sinks=0."
            )
        return keeps_all(policy) or merges(policy) or rotated_once(positions)

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        batch, kv_heads, size = shape
        pages, rank = size // self.chunk, min(self.rank, size, kv_heads * dim)
        return {
            "landmark": jnp.zeros((batch, kv_heads, pages, dim), dtype),
            "ranked": jnp.zeros((batch, kv_heads, pages), bool),
            "left": jnp.zeros((batch, 1, size, rank), dtype),
            "right": jnp.zeros((batch, kv_heads, rank, dim), dtype),
        }

    def build(self, index: Index, sums: Index, held: Held) -> Index:
        batch, kv_heads, _, dim = held.key.shape
        pages = index["landmark"].shape[2]
        # [B, K, U, chunk, D]
        chunks = held.key[:, :, : pages * self.chunk].reshape(batch, kv_heads, pages, self.chunk, dim)
        chunks = chunks.astype(jnp.float32)
        # [B, K, U, D]
        mean = jnp.mean(chunks, axis=3)
        cosine = _cosine(chunks, mean[:, :, :, None])
        # [B, 1, U]: whole chunks of the prompt before the last ones
        whole = held.prompt // self.chunk - self.local
        old = (jnp.arange(pages) < whole[:, None])[:, None]
        old = jnp.broadcast_to(old, (batch, kv_heads, pages))
        number = jnp.broadcast_to(jnp.arange(pages, dtype=jnp.int32), old.shape)
        outlier = best(-jnp.min(cosine, axis=3), old, number, self.outliers)
        left, right = self._factors(held, index["right"].shape[2])
        made = {"landmark": mean, "ranked": old & ~outlier, "left": left, "right": right}
        return {name: leaf.astype(index[name].dtype) for name, leaf in made.items()}

    def _factors(self, held: Held, rank: int) -> tuple[Array, Array]:
        """Approximates the unrotated keys by a product of rank r: [B, 1, S, r] and [B, K, r, D] float32."""
        batch, kv_heads, size, dim = held.key.shape
        live = (held.position >= 0)[..., None]
        # [B, S, K * D]; 0 in empty slots
        keys = jnp.moveaxis(jnp.where(live, held.unrotate(held.key), 0.0), 1, 2).reshape(batch, size, -1)
        # [B, K * D, K * D]; the eigenvectors of the largest eigenvalues are the right singular vectors
        gram = jnp.einsum("bsc,bsd->bcd", keys, keys, precision=HIGHEST)
        _, vectors = jnp.linalg.eigh(gram)
        # [B, K * D, r]
        basis = vectors[:, :, ::-1][:, :, :rank]
        left = jnp.einsum("bsc,bcr->bsr", keys, basis, precision=HIGHEST)
        right = jnp.swapaxes(basis, 1, 2).reshape(batch, rank, kv_heads, dim)
        return left[:, None], jnp.moveaxis(right, 2, 1)

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        pages = index["landmark"].shape[2]
        # [B, K, U]
        candidate = index["ranked"] & view.active
        number = jnp.broadcast_to(jnp.arange(pages, dtype=jnp.int32), candidate.shape)
        # [B, K, G, U]
        score = grouped_logits(query, index["landmark"], view.scale, view.soft_cap)
        worth = rank(score, candidate, normalise="softmax", reduce="max")
        marks = best(jax.lax.stop_gradient(worth), candidate, number, self.chunks)
        return view.visible & self._by_slot(marks, view.position.shape[2])

    def always(self, index: Index, view: SelectView) -> Array:
        return view.visible & ~self._by_slot(index["ranked"], view.position.shape[2])

    def restore(self, index: Index, position: Array) -> Array:
        # [B, K, W]: slots are positions
        slot = jnp.maximum(position, 0)
        left = jnp.broadcast_to(index["left"], (*slot.shape[:2], *index["left"].shape[2:]))
        rows = jnp.take_along_axis(left, slot[..., None], axis=2).astype(jnp.float32)
        return jnp.einsum("bkwr,bkrd->bkwd", rows, index["right"].astype(jnp.float32), precision=HIGHEST)

    def _by_slot(self, marks: Array, size: int) -> Array:
        """Repeats marks of chunks [B, K, U] for their slots, [B, K, size]; False for slots beyond."""
        slots = jnp.repeat(marks, self.chunk, axis=2)
        return jnp.pad(slots, ((0, 0), (0, 0), (0, size - slots.shape[2])))


def _cosine(a: Array, b: Array) -> Array:
    """Computes the cosine of vectors [..., D]; 0 where one of them is 0."""
    norms = jnp.sqrt(jnp.sum(jnp.square(a), axis=-1) * jnp.sum(jnp.square(b), axis=-1))
    return jnp.sum(a * b, axis=-1) / jnp.where(norms > 0, norms, 1.0)


@factory
def shadowkv(
    rank: int = 160,
    chunk: int = 8,
    budget: int | None = None,
    *,
    local: int = 4,
    outliers: int = 48,
    first_layer: int = 0,
) -> ShadowKV:
    """Reads the values of some chunks of the prompt and restores their keys (ShadowKV, arXiv:2410.21465).

    Args:
      rank: of the product that approximates the keys of a layer.
      chunk: tokens of a chunk.
      budget: tokens to choose; a multiple of `chunk`; required.
      local: see `ShadowKV`.
      outliers: see `ShadowKV`.
      first_layer: see `ShadowKV`.

    Raises:
      SelectionError: a number that is too small, or a chunk that does not divide the budget.
    """
    with named("shadowkv"):
        chunk = count_argument("chunk", chunk, minimum=1)
        budget = count_argument("budget", budget, minimum=1)
        if budget < chunk or budget % chunk:
            raise SelectionError(f"chunk={chunk} does not divide budget={budget}; give a multiple of it.")
    return ShadowKV(rank, chunk, budget // chunk, local, outliers, first_layer)
