"""Compactor: leverage of keys, and non-causal attention within chunks of the prompt (arXiv:2507.08143)."""

import dataclasses

import jax
import jax.numpy as jnp

from kvjax.arguments import count_argument, number_argument
from kvjax.numerics.group_reductions import mean_over_group
from kvjax.policies.base import Evict, compress, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.draws import LARGEST_SEED
from kvjax.policies.h2o import Newest
from kvjax.policies.leverage import leverage_scores
from kvjax.policies.query_window import softmax_over
from kvjax.policies.row_memory import PromptQueries, RowMemory
from kvjax.policies.union import protect_any
from kvjax.policies.window import First

Array = jax.Array
NEIGHBOURS = 3  # slots whose attention is averaged
SMALLEST_DEVIATION = 1e-6
QUERIES = PromptQueries(2**31 - 1)  # all of them

# ([T, ...] zeros, [S] places, [S, ...] x) -> x at its places; a place beyond the end is left out
_place = jax.vmap(jax.vmap(lambda into, place, x: into.at[place].set(x, mode="drop", unique_indices=True)))


def noncausal_mass(query: Array, key: Array, counted: Array, scale: float) -> Array:
    """Returns the attention that each token receives from all queries of its chunk, earlier and later ones.

    The softmax is over the tokens of the chunk. The result is the mean over the query heads that share a KV head
    (Compactor, arXiv:2507.08143).

    Args:
      query: [B, K, G, C, t, D], rotated; C chunks of t tokens.
      key: [B, K, C, t, D], rotated.
      counted: [B, K, C, t] bool, False where a chunk has no token.
      scale: factor of the logits.

    Returns:
      [B, K, C, t] float32, 0 for tokens that are not counted.
    """

    def of_chunk(chunk: tuple[Array, Array, Array]) -> Array:
        query, key, counted = chunk
        # [B, K, G, t, t]
        logits = scale * jnp.einsum("bkgid,bkjd->bkgij", query, key, precision=jax.lax.Precision.HIGHEST)
        paid = softmax_over(logits, jnp.broadcast_to(counted[:, :, None, None], logits.shape))
        return jnp.sum(mean_over_group(jnp.where(counted[:, :, None, :, None], paid, 0.0)), axis=2)

    chunks = jnp.moveaxis(query, 3, 0), jnp.moveaxis(key, 2, 0), jnp.moveaxis(counted, 2, 0)
    return jnp.moveaxis(jax.lax.map(of_chunk, chunks), 0, 2)


def standardised(x: Array, counted: Array) -> Array:
    """Returns x [B, K, S] with mean 0 and deviation 1 over the counted slots of all heads of a row; 0 elsewhere."""
    # [B, 1, 1]
    number = jnp.sum(counted, axis=(1, 2), keepdims=True).astype(jnp.float32)
    mean = jnp.sum(jnp.where(counted, x, 0.0), axis=(1, 2), keepdims=True) / jnp.maximum(number, 1.0)
    off = jnp.where(counted, x - mean, 0.0)
    variance = jnp.sum(jnp.square(off), axis=(1, 2), keepdims=True) / jnp.maximum(number - 1, 1.0)
    return off / jnp.maximum(jnp.sqrt(variance), SMALLEST_DEVIATION)


@dataclasses.dataclass(frozen=True)
class LeverageAndMass(Importance):
    """Ranks a slot by the leverage of its key and the attention within its chunk, blend·ℓ + n (arXiv:2507.08143).

    ℓ is the leverage of the key before rotation, see `leverage_scores`. n is the attention of all queries of the chunk,
    see `noncausal_mass`, times ‖v‖₂, averaged over a slot and its two neighbours. Inner slots are those between the
    first `sinks` and the last `recent` of the prompt. ℓ and n are standardised over the inner slots of all KV heads
    that are ranked together.

    Attributes:
      sinks: the number of first positions that are left out.
      recent: the number of last positions of the prompt that are left out.
      chunk: the number of inner slots of a chunk; the last one may have fewer.
      blend: the weight of leverage; None = 1 - b / n, for a budget of b slots and a prompt of n tokens.
      ridge: see `kvjax.policies.leverage.Leverage`.
      sketch: the number of Gaussian directions that keys are projected to before leverage is computed; None = no
        projection.
      seed: the random seed of the directions, which are the same for all heads of a layer.
    """

    sinks: int
    recent: int
    chunk: int
    blend: float | None = None
    ridge: float = 0.01
    sketch: int | None = None
    seed: int = 0
    needs = frozenset()
    signed = True
    reads = frozenset({"key", "value"})

    def __post_init__(self) -> None:
        for name, least in (("sinks", 0), ("recent", 0), ("chunk", 1)):
            object.__setattr__(self, name, count_argument(name, getattr(self, name), minimum=least))
        if self.blend is not None:
            object.__setattr__(self, "blend", number_argument("blend", self.blend, minimum=0.0, maximum=1e6))
        object.__setattr__(self, "ridge", number_argument("ridge", self.ridge, minimum=1e-6, maximum=1e6))
        if self.sketch is not None:
            object.__setattr__(self, "sketch", count_argument("sketch", self.sketch, minimum=1))
        object.__setattr__(self, "seed", count_argument("seed", self.seed, maximum=LARGEST_SEED))

    @property
    def memory(self) -> tuple[RowMemory, ...]:
        return (QUERIES,)

    def score(self, stats: Stats, view: View) -> Array:
        # [B, 1, 1]
        prompt = view.prompt[:, None, None]
        # [B, K, S]
        inner = (view.position >= self.sinks) & (view.position < prompt - self.recent)
        leverage = leverage_scores(view.unrotated(), inner, self.ridge, self._directions(view))
        kept = view.budget[:, None, None].astype(jnp.float32) / jnp.maximum(prompt, 1).astype(jnp.float32)
        blend = 1 - kept if self.blend is None else self.blend
        return blend * standardised(leverage, inner) + standardised(self._attention(view, inner), inner)

    def _directions(self, view: View) -> Array | None:
        """Returns the Gaussian directions of a layer, [D, sketch] float32, or None."""
        if self.sketch is None:
            return None
        key = jax.random.fold_in(jax.random.key(self.seed), view.layer)
        return jax.random.normal(key, (view.key.shape[3], self.sketch), jnp.float32) / self.sketch**0.5

    def _attention(self, view: View, inner: Array) -> Array:
        """Returns n of the inner slots before standardisation, [B, K, S]."""
        # [B, K, G, P, D], the query of each position of the prompt; no slot has been evicted yet
        query = view.memory[QUERIES.name]["query"][:, :, :, : view.position.shape[2]]
        batch, kv_heads, group, length, dim = query.shape
        chunks = max(-(-(length - self.sinks - self.recent) // self.chunk), 1)
        size = chunks * self.chunk
        query = jnp.pad(query, ((0, 0), (0, 0), (0, 0), (0, max(self.sinks + size - length, 0)), (0, 0)))
        query = query[:, :, :, self.sinks : self.sinks + size].reshape(batch, kv_heads, group, chunks, self.chunk, dim)
        # [B, K, S]: the place among the inner slots, beyond the end for others
        place = jnp.where(inner, view.position - self.sinks, size)
        key = view.rotated().astype(jnp.float32)
        length_of_value = jnp.sqrt(jnp.sum(jnp.square(view.value.astype(jnp.float32)), axis=3))
        # [B, K, T, D], [B, K, T] and [B, K, T], T = C * chunk
        keys = _place(jnp.zeros((batch, kv_heads, size, dim), jnp.float32), place, key)
        lengths = _place(jnp.zeros((batch, kv_heads, size), jnp.float32), place, length_of_value)
        counted = _place(jnp.zeros((batch, kv_heads, size), bool), place, inner)
        keys = keys.reshape(batch, kv_heads, chunks, self.chunk, dim)
        mass = noncausal_mass(query, keys, counted.reshape(keys.shape[:-1]), view.scale)
        weighted = mass.reshape(lengths.shape) * lengths
        side = NEIGHBOURS // 2
        pooled = jax.lax.reduce_window(
            weighted, 0.0, jax.lax.add, (1, 1, NEIGHBOURS), (1, 1, 1), ((0, 0), (0, 0), (side, side))
        )
        return jnp.take_along_axis(pooled, jnp.clip(place, 0, size - 1), axis=2) / NEIGHBOURS


@factory
def compactor(
    budget: BudgetLike,
    *,
    sinks: int = 8,
    recent: int = 4,
    chunk: int = 256,
    blend: float | None = None,
    ridge: float = 0.01,
    sketch: int | None = None,
    seed: int = 0,
    positions: str = "original",
) -> Evict:
    """Keeps slots of large leverage, and of large attention within their chunk (Compactor, arXiv:2507.08143).

    The queries of each chunk attend to all of its slots, later ones included, so that the prompt need not end with a
    question. See `LeverageAndMass`. The first `sinks` and the last `recent` positions of the prompt are protected.

    Args:
      budget: slots per KV head that remain of a prompt; see `snapkv`.
      sinks: the number of first positions that are protected.
      recent: the number of last positions that are protected.
      chunk: the number of slots of a chunk.
      blend: the weight of leverage; None = 1 - b / n, the share of the prompt that is evicted.
      ridge: see `leverage`.
      sketch: see `LeverageAndMass`.
      seed: the random seed of the sketch.
      positions: see `evict`.

    The queries of the prompt are held in float32 until it ends, one vector per token and query head. A prompt in blocks
    therefore gives the same result as in one shot.

    kvpress does not scale the logits, counts the padding of the last chunk, and standardises over the batch.
    """
    return compress(
        importance=LeverageAndMass(sinks, recent, chunk, blend, ridge, sketch, seed),
        scope=protect_any(First(sinks), Newest(recent)), budget=budget, positions=positions, name="compactor",
    )  # fmt: skip
