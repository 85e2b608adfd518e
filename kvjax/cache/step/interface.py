"""The inputs of a step of a layer, and its outputs besides the cache."""

from typing import NamedTuple

import jax
import numpy as np

from kvjax.cache.groups import Group
from kvjax.cache.state import Block
from kvjax.cache.step.pool import KeyRotation
from kvjax.numerics.rope import Rope
from kvjax.policies.parameters import Parts
from kvjax.selection.base import Selection
from kvjax.storage.base import UNROTATED
from kvjax.storage.side import Sides, rows_of

Array = jax.Array


class LayerArgs(NamedTuple):
    """The arguments of a layer's steps besides queries, keys and values.

    Attributes:
      rope: the layer's rotary embedding.
      scale: factor of the logits; None for D ** -0.5.
      soft_cap: of the logits, see `kvjax.attention.Problem`.
      window: the layer's sliding window.
      guess: [B, H, n, D] the query that selections choose by if they look ahead, not rotated; None if none does.
      skew: [K, D, D], see `kvjax.models.skew`; None = the identity.
      sides: of a calibration, leaves [K, ...] or [1, ...]; None = the storage has none.
      output_gram: [H, D, D] float32, W Wᵀ for each query head's part W [D, hidden] of the output projection; None
        unless a replay multiplies by the norm of outputs.
      hidden_norm: [B, n] float32, the norms of the input of the projections of queries, keys and values; None unless
        a replay divides by them.
      params: name of a policy's `Parameters` -> part -> [K or 1, ...]; None = the policies have none.
      hidden: [B, n, E], the input of the projections of queries, keys and values; None where no score is written.
      out_kernel: [H * D, E], the projection of attention's output; None where no written score reads it.
    """

    rope: Rope | None = None
    scale: float | None = None
    soft_cap: float | None = None
    window: int | None = None
    guess: Array | None = None
    skew: Array | None = None
    sides: Sides | None = None
    output_gram: Array | None = None
    hidden_norm: Array | None = None
    params: dict[str, Parts] | None = None
    hidden: Array | None = None
    out_kernel: Array | None = None

    def of_heads(self, heads: tuple[int, ...], kv_heads: int) -> "LayerArgs":
        """Returns the arguments of some of the model's `kv_heads` KV heads."""
        return self._replace(
            guess=None if self.guess is None else query_heads(self.guess, heads, kv_heads),
            skew=None if self.skew is None else self.skew[np.asarray(heads)],
            sides=rows_of(self.sides, heads),
            output_gram=None if self.output_gram is None else query_heads(self.output_gram[None], heads, kv_heads)[0],
            params=rows_of(self.params, heads),
            out_kernel=None if self.out_kernel is None else _rows_of_heads(self.out_kernel, heads, kv_heads),
        )


class StepInputs(NamedTuple):
    """The queries, keys and values of a step's own tokens.

    Attributes:
      query: [B, H, n, D], rotated, unless ``positions="cache"``.
      key: [B, K, n, D], as it is held.
      value: [B, K, n, D].
      unrotated: the query [B, H, n, D] and the key [B, K, n, D] before rotation.
      rotated_key: [B, K, n, D], as selections look at it.
      guess: `LayerArgs.guess`, rotated.
      scale: factor of the logits.
      frequencies: of the rows, see `Rope.frequencies`; None if keys are not rotated to their positions.
      rotation: of keys that are held as they are before it; None = keys are held as attention takes them.
    """

    query: Array
    key: Array
    value: Array
    unrotated: tuple[Array, Array]
    rotated_key: Array
    guess: Array | None
    scale: float
    frequencies: Array | None
    rotation: KeyRotation | None


class AttentionOperands(NamedTuple):
    """The operands of attention in a step, for `kvjax.analysis`.

    Attributes:
      query: [B, H, n, D], rotated.
      key: [B, K, S, D], rotated; None for slots on several devices, and for a pool in host memory, whose keys XLA would
        move even if they are not used.
      position: [B, K, S] int32; -1 for a slot that is empty or not read.
      log_weight: [B, K, S] float32 added to the logits, or None.
      held: [B, K, S] int32; -1 for a slot that is empty.
      choice: [B, K, S] bool, whether a selection chose the slot; None if everything is read.
    """

    query: Array
    key: Array | None
    position: Array
    log_weight: Array | None
    held: Array
    choice: Array | None = None


def rotated(
    query: Array,
    key: Array,
    value: Array,
    block: Block,
    group: Group,
    args: LayerArgs,
    shift: Array | None = None,
) -> StepInputs:
    """Rotates a step's queries and keys to their positions.

    Args:
      query: [B, H, n, D], not rotated.
      key: [B, K, n, D], not rotated.
      value: [B, K, n, D].
      block: the tokens of the step.
      group: the policy and the storage.
      args: of the layer.
      shift: [B] int32, by how much positions exceed those that the tokens are rotated to; None = 0.
    """
    rope, scale = args.rope, query.shape[-1] ** -0.5 if args.scale is None else args.scale
    if rope is None or group.policy.positions == "cache":
        return StepInputs(query, key, value, (query, key), key, args.guess, scale, None, None)
    frequencies = rope.frequencies(block.total)
    before = query, key
    position = block.position if shift is None else block.position - shift[:, None]
    query, turned = (rope.rotate(x, position, frequencies) for x in before)
    guess = None if args.guess is None else rope.rotate(args.guess, block.position, frequencies)
    if group.storage.frame == UNROTATED:
        # Keys are rotated to their positions in each step.
        return StepInputs(query, key, value, before, turned, guess, scale, frequencies, KeyRotation(rope, frequencies))
    return StepInputs(query, turned, value, before, turned, guess, scale, frequencies, None)


def _rows_of_heads(kernel: Array, heads: tuple[int, ...], kv_heads: int) -> Array:
    """Returns the rows [H' * D, E] of the query heads of some of `kv_heads` KV heads; `kernel` is [H * D, E]."""
    return kernel.reshape(kv_heads, -1, kernel.shape[1])[np.asarray(heads)].reshape(-1, kernel.shape[1])


def query_heads(x: Array, heads: tuple[int, ...], kv_heads: int) -> Array:
    """Returns the query heads [B, H', n, D] of some of `kv_heads` KV heads; `x` is [B, H, n, D]."""
    batch, _, n, dim = x.shape
    return x.reshape(batch, kv_heads, -1, n, dim)[:, np.asarray(heads)].reshape(batch, -1, n, dim)


def add_to_prompt_index(
    index: dict[str, Array], selection: Selection, inputs: StepInputs, block: Block, skew: Array | None
) -> dict[str, Array]:
    """Adds a block of the prompt to the sums that a selection needs when the prompt ends.

    Args:
      index: the sums so far; {} before the first block.
      selection: of the decoding phase.
      inputs: the block's tokens.
      block: their positions.
      skew: [K, D, D] or None.
    """
    query, key = (inputs.query, inputs.rotated_key) if selection.rotated else inputs.unrotated
    batch, kv_heads, n, dim = key.shape
    sums = index or selection.start((batch, kv_heads), dim)
    # [B, K, G, n, D]
    grouped = query.reshape(batch, kv_heads, -1, n, dim)
    return selection.watch(sums, *jax.lax.stop_gradient((grouped, key)), block.position >= 0, skew)
