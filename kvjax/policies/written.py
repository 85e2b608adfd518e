"""Written scores: numbers that are computed once per token, when it enters the cache, and stored with its slot.

Statistics of attention change in every step. A written score depends only on the token and its attention output; it
moves with the slot, and is deleted with it.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kvjax.policies.parameters import Parameters, Parts

Array = jax.Array
NEAR = 2.0**-20  # relative to the largest score of a head: smaller differences are rounding


class Token(NamedTuple):
    """The new tokens of a step, of one layer and some KV heads.

    Attributes:
      hidden: [B, n, E], the input of the projections of queries, keys and values; E features of the residual stream.
      query: [B, K, G, n, D], not rotated.
      key: [B, K, n, D], not rotated.
      value: [B, K, n, D].
      output: [B, K, G, n, D], the output of attention before it is projected.
      position: [B, n] int32, -1 = padding.
      out_kernel: [K, G, D, E], the projection of the output; None unless a score `projects`.
    """

    hidden: Array
    query: Array
    key: Array
    value: Array
    output: Array
    position: Array
    out_kernel: Array | None


class Written:
    """A score that is computed once per token. Write a frozen dataclass that inherits from this class.

    Attributes:
      name: key of the score in the statistics of slots; equal scores share it.
      projects: whether `write` reads `Token.out_kernel`.
      whole_prompt: whether the score of a token depends on the whole prompt, which must then be run in one block, by a
        compressor.
    """

    projects: bool = False

    @property
    def whole_prompt(self) -> bool:
        return False

    @property
    def name(self) -> str:
        return repr(self)

    @property
    def reads(self) -> tuple[Parameters, ...]:
        """The parameters that `write` reads."""
        return ()

    def write(self, token: Token, params: Mapping[str, Parts]) -> Array:
        """Returns the scores of the new tokens, [B, K, n] float32; those of padding are ignored.

        Args:
          token: the new tokens.
          params: name of `Parameters` -> part -> [K or 1, ...].
        """
        raise NotImplementedError


def placed(old: Array, new: Array, position: Array, own: Array) -> Array:
    """Writes the scores of a step's own tokens to their slots.

    Equal tokens have equal hidden states in the first layer, and their scores must tie. A prompt and a decoding step
    compute them by different products, which differ in the last bits. A new score that differs from the score of a
    slot by rounding alone is therefore replaced by it.

    Args:
      old: [B, K, S] float32.
      new: [B, K, n] float32, of consecutive positions.
      position: [B, K, S] int32 of all slots, including those of the step's own tokens.
      own: [B, n] int32 positions of these tokens, -1 = padding, which is at a row's end.
    """
    first = own[:, :1, None]
    # [B, K, S]: the index of a slot's token in the step
    index = position - first
    live, here = position >= 0, (first >= 0) & (index >= 0)
    if old.shape[2] > new.shape[2]:
        known = live & ~here
        scale = jnp.max(jnp.abs(old), axis=2, keepdims=True, where=known, initial=0.0)
        # [B, K, n, S]
        same = known[:, :, None] & (jnp.abs(old[:, :, None] - new[..., None]) <= (NEAR * scale)[..., None])
        nearest = jnp.max(jnp.broadcast_to(old[:, :, None], same.shape), axis=3, where=same, initial=-jnp.inf)
        new = jnp.where(jnp.isfinite(nearest), nearest, new)
    if new.shape[2] == 1:
        return jnp.where(live & here, new, old)
    taken = jnp.take_along_axis(new, jnp.clip(index, 0, new.shape[2] - 1), axis=2)
    return jnp.where(live & here, taken, old)
