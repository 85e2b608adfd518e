"""Blends attention over all tokens with attention over a window, per KV head (DuoAttention, arXiv:2410.10819)."""

import flax.struct
import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache.state import Block
from kvjax.cache.step.interface import LayerArgs

Array = jax.Array


class Gates(flax.struct.PyTreeNode):
    """The share of each KV head's attention that is over all tokens, in one layer.

    Attributes:
      share: [K] float32 in [0, 1]: 1 is attention over all tokens, 0 attention over the first and the newest tokens, as
        in a streaming head of `kvjax.policies.duo_attention`.
      sinks: the number of first positions that a streaming head sees.
      recent: the number of positions before the query's own that a streaming head sees too.
    """

    share: Array
    sinks: int = flax.struct.field(pytree_node=False)
    recent: int = flax.struct.field(pytree_node=False)

    def blend(self, output: Array, query: Array, key: Array, value: Array, block: Block, args: LayerArgs) -> Array:
        """Returns share · output + (1 - share) · the output of streaming attention, [B, H, n, D].

        Args:
          output: [B, H, n, D], of attention over all tokens.
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
        # [B, K, n]
        position = jnp.broadcast_to(block.position[:, None], (batch, kv_heads, n))
        first = min(self.sinks, n)
        recent = self.recent + 1
        parts = [
            (slice(None), jnp.where(position >= self.sinks, position, -1), min(recent, args.window or recent)),
            (slice(first), position[:, :, :first], args.window),
        ]
        attended = attention.combine(
            *(
                attention.attend(
                    attention.problem(
                        query, key[:, :, slots], value[:, :, slots], query_position=block.position, key_position=held,
                        scale=args.scale, soft_cap=args.soft_cap, window=window,
                    ),
                    "xla",
                )
                for slots, held, window in parts[: 2 if first else 1]
            )
        )  # fmt: skip
        # [B, K, G, n, D]
        whole, share = output.reshape(attended.output.shape), self.share[:, None, None, None]
        blended = share * whole.astype(jnp.float32) + (1 - share) * attended.output
        return blended.reshape(output.shape).astype(output.dtype)
