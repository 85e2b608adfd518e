"""Random keys of slots, which depend only on the seed, the layer, the head and the position."""

import jax
import jax.numpy as jnp

from kvjax.policies.components import View

Array = jax.Array
LARGEST_SEED = 2**32 - 1  # jax.random.key uses 32 bits


def slot_keys(seed: int, view: View) -> Array:
    """Returns a random key for each slot, [B, K, S], into which layer, head and position are folded.

    The key does not depend on the slot's index, on the row's index in the batch, or on other slots.

    Args:
      seed: 0 to 2³² - 1.
      view: the slots.
    """
    key = jax.random.fold_in(jax.random.key(seed), view.layer)

    def fold(head: Array, position: Array) -> Array:
        return jax.random.fold_in(jax.random.fold_in(key, head), position)

    # [K]: the model's indices
    head = jnp.arange(view.position.shape[1]) if view.heads is None else jnp.asarray(view.heads)
    return jax.vmap(jax.vmap(jax.vmap(fold, (None, 0)), (0, 0)), (None, 0))(
        jnp.asarray(head, jnp.int32), jnp.maximum(view.position, 0)
    )
