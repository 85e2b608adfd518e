"""Attention of a layer under learned retention, for training its gate."""

import flax.struct
import jax
import jax.numpy as jnp

from kvjax.analysis.gates import LayerInputs
from kvjax.cache.state import Block
from kvjax.cache.step.interface import LayerArgs
from kvjax.errors import PolicyError
from kvjax.numerics.soft_cap import soft_capped
from kvjax.policies.gates import Gate
from kvjax.policies.parameters import Parts
from kvjax.policies.written import Token
from kvjax.training.retention import Retention, decayed_weights, gated_weights, masked_weights

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST
DECAY, MASK = "decay", "mask"


class GatedAttention(flax.struct.PyTreeNode):
    """The attention of a layer with the weights that its gate determines.

    Attributes:
      params: the layer's parameters of the gate, [K or 1, ...] each; see `kvjax.policies.Gate`.
      temperature: [] float32 or a number, the temperature of soft gates; see `kvjax.training.soft_gates`.
      noise: [B, K, n] float32, added to the scores before their output function, under ``mask``; None = 0.
      gate: scores the tokens.
      retention: the slots that stay.
      relax: ``st`` or ``soft``, see `kvjax.training.gated_weights`; ``decay``, see `kvjax.training.decayed_weights`; or
        ``mask``, see `kvjax.training.masked_weights`, for gates of output ``sigmoid``.
    """

    params: Parts
    temperature: Array | float
    noise: Array | None = None
    gate: Gate = flax.struct.field(pytree_node=False, kw_only=True)
    retention: Retention = flax.struct.field(pytree_node=False, kw_only=True)
    relax: str = flax.struct.field(pytree_node=False, default="st")

    def blend(self, output: Array, query: Array, key: Array, value: Array, block: Block, args: LayerArgs) -> Array:
        """Returns the output of attention with these weights, [B, H, n, D].

        Args:
          output: [B, H, n, D], the output of attention over all tokens; not used.
          query: [B, H, n, D], not rotated.
          key: [B, K, n, D], not rotated.
          value: [B, K, n, D].
          block: the whole prompt.
          args: of the layer, with its hidden states.

        Raises:
          PolicyError: a text that is longer than the layer's sliding window.
        """
        assert args.hidden is not None
        batch, kv_heads, n, dim = key.shape
        if args.window is not None and args.window < n:
            raise PolicyError(
                f"a text of {n} tokens is longer than the sliding window of {args.window} of a layer, outside of which "
                "slots are evicted too; train on texts of at most that length."
            )
        # [B, K, 1, n]
        inputs, raw = LayerInputs(args.hidden, query, key, value), self.relax == MASK
        position = of_prompt(block.position, self.retention)
        score = scores(self.gate, self.params, inputs, position, raw=raw)[:, :, None]
        if args.rope is not None:
            frequencies = args.rope.frequencies(block.total)
            query, key = (args.rope.rotate(x, block.position, frequencies) for x in (query, key))
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
        scale = dim**-0.5 if args.scale is None else args.scale
        # [B, K, G, n, n]
        grouped = query.reshape(batch, kv_heads, -1, n, dim)
        logits = scale * jnp.einsum("bkgtd,bkjd->bkgtj", grouped, key, precision=HIGHEST)
        logits = soft_capped(logits, args.soft_cap)
        # Tokens are in order, and padding is at the end: no real query sees it.
        if self.relax == DECAY:
            weights = decayed_weights(logits, score)
        elif self.relax == MASK:
            noise = 0.0 if self.noise is None else self.noise[:, :, None]
            weights = masked_weights(logits, jax.nn.log_sigmoid((score + noise) / self.temperature), self.retention)
        else:
            weights = gated_weights(logits, score, self.retention, temperature=self.temperature, relax=self.relax)
        made = jnp.einsum("bkgtj,bkjd->bkgtd", weights, value, precision=HIGHEST)
        return made.reshape(output.shape).astype(output.dtype)


def of_prompt(position: Array, retention: Retention) -> Array:
    """Returns the positions [B, n] that a gate sees: those of the prompt of a compressor, others become -1."""
    return position if retention.prompt is None else jnp.where(position < retention.prompt, position, -1)


def scores(gate: Gate, params: Parts, inputs: LayerInputs, position: Array, *, raw: bool = False) -> Array:
    """Returns the scores of all tokens of a text, [B, K, n] float32.

    Args:
      gate: scores the tokens.
      params: of the layer.
      inputs: of the layer's attention.
      position: [B, n] int32, -1 = padding.
      raw: whether the scores are those before the output function of the gate.
    """
    batch, kv_heads, n, dim = inputs.key.shape
    query = inputs.query.reshape(batch, kv_heads, -1, n, dim)
    # Gates do not read the output of attention.
    token = Token(inputs.hidden, query, inputs.key, inputs.value, query, position, None)
    return gate.raw(params, token) if raw else gate(params, token)
