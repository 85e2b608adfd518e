"""Attention over keys and values in their first directions, to train these (MatryoshkaKV, arXiv:2410.14731)."""

import flax.struct
import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.attention import Attended
from kvjax.cache.state import Block
from kvjax.cache.step.interface import LayerArgs
from kvjax.numerics.soft_cap import soft_capped

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST


class Directions(flax.struct.PyTreeNode):
    """The directions of the keys or values of a layer's heads.

    Attributes:
      basis: [K, D, D] float32, orthogonal; directions are columns, the most important first.
      mean: [K, D] float32, which is subtracted; None = 0.
      rank: [K] int32, the number of first directions that are kept.
    """

    basis: Array
    mean: Array | None
    rank: Array

    def shortened(self, x: Array) -> Array:
        """Returns the projections of vectors [B, K, n, D] on the kept directions, float32."""
        mean = 0.0 if self.mean is None else self.mean[:, None]
        # [B, K, n, D]
        held = jnp.einsum("bknd,kdr->bknr", x.astype(jnp.float32) - mean, self.basis, precision=HIGHEST)
        kept = jnp.arange(self.basis.shape[2]) < self.rank[:, None, None]
        return jnp.einsum("bknr,kdr->bknd", jnp.where(kept, held, 0.0), self.basis, precision=HIGHEST) + mean


class Nested(flax.struct.PyTreeNode):
    """The directions of a layer; a query reads its own token exactly, and older tokens in the kept directions.

    A cache with ``kvjax.storage.low_rank`` of these ranks computes the same, token by token.

    Attributes:
      key: the directions of rotated keys.
      value: the directions of values.
    """

    key: Directions
    value: Directions

    def blend(self, output: Array, query: Array, key: Array, value: Array, block: Block, args: LayerArgs) -> Array:
        """Returns the output of attention over shortened keys and values, [B, H, n, D].

        Args:
          output: [B, H, n, D], the output of exact attention; not used.
          query: [B, H, n, D], not rotated.
          key: [B, K, n, D], not rotated.
          value: [B, K, n, D].
          block: the whole prompt.
          args: of the layer.
        """
        batch, kv_heads, n, _ = key.shape
        if args.rope is not None:
            frequencies = args.rope.frequencies(block.total)
            query, key = (args.rope.rotate(x, block.position, frequencies) for x in (query, key))
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        # [B, K, n]: one later, so that a query sees the tokens before its own
        older_seen = (block.position >= 0) & (args.window != 1)
        position = jnp.where(older_seen, block.position + 1, -1)[:, None]
        problem = attention.problem(
            query, self.key.shortened(key), self.value.shortened(value), query_position=block.position,
            key_position=jnp.broadcast_to(position, (batch, kv_heads, n)), scale=args.scale, soft_cap=args.soft_cap,
            window=None if args.window is None else max(args.window - 1, 1),
        )  # fmt: skip
        older = attention.attend(problem, "xla")
        # [B, K, G, n]
        logits = jnp.einsum("bkgnd,bknd->bkgn", problem.query, key, precision=HIGHEST) * problem.scale
        own = Attended(
            jnp.broadcast_to(value[:, :, None], older.output.shape), soft_capped(logits, args.soft_cap)
        )  # fmt: skip
        return attention.combine(older, own).output.reshape(output.shape).astype(output.dtype)
