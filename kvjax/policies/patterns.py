"""Policies that look at positions alone: Sparse Transformers' strided and fixed patterns, and chance.

The patterns are H2O's baselines (arXiv:2306.14048, Table 1; Child et al., arXiv:1904.10509), chance is RoCo's
(arXiv:2402.06262, section 4.1).
"""

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import PolicyError
from kvjax.policies.base import Budget, Importance, Merge, Policy, Scope, View, count_argument, evict, memoized
from kvjax.policies.h2o import protect_newest

Array = jax.Array


def _in_two_classes(first_to_go: Array, view: View) -> Array:
    """One class before the other, each oldest first. Below zero for the first: exact up to 2^24 tokens."""
    position = view.position
    return (position - jnp.where(first_to_go, (view.newest + 1)[:, None, None], 0)).astype(jnp.float32)


@memoized
def strided(
    budget: Budget, *, stride: int, local: int | None = None, positions: str = "original", merge: Merge | None = None
) -> Policy:
    """The newest positions and every `stride`-th of the rest, as long as they fit (H2O, Table 1; Child et al.).

    {p > newest - local} protected; first those with p mod stride ≠ 0 go, then the others, each oldest first. The
    papers' pattern is relative to the query, which a cache cannot be: what is evicted does not come back.

    Args:
      budget: see `evict`.
      stride: positions divisible by it go last.
      local: how many newest positions are protected; None = ⌊b/2⌋.
      positions, merge: see `evict`.
    """
    stride = count_argument("stride", stride, minimum=1)
    importance = Importance(
        frozenset(),
        lambda stats, view: _in_two_classes(view.position % stride != 0, view),
        amount=False,
        in_kernel=True,
    )
    return evict(
        importance=importance,
        scope=protect_newest(None if local is None else count_argument("local", local)),
        budget=budget,
        positions=positions,
        merge=merge,
        name="strided",
    )


@memoized
def fixed(
    budget: Budget, *, block: int, columns: int, positions: str = "original", merge: Merge | None = None
) -> Policy:
    """The newest token's own block, and the last `columns` of those before, as long as they fit (H2O, Table 1).

    {p // block = newest // block} protected; first those with p mod block < block - columns go, then the others, each
    oldest first. The paper's pattern keeps every block's columns however many they are; a budget does not.

    Args:
      budget: see `evict`; at least `block`.
      block: positions of a block; columns: of these, the last so many go last; at most `block`.
      positions, merge: see `evict`.
    """
    block = count_argument("block", block, minimum=1)
    columns = count_argument("columns", columns)
    if columns > block:
        raise PolicyError(f"fixed: columns={columns} of a block of {block} positions; give at most {block}.")
    importance = Importance(
        frozenset(),
        lambda stats, view: _in_two_classes(view.position % block < block - columns, view),
        amount=False,
        in_kernel=True,
    )
    own = Scope(
        frozenset(),
        lambda stats, view: view.position // block == (view.newest // block)[:, None, None],
        lambda _: block,
        in_kernel=True,
    )
    return evict(importance=importance, scope=own, budget=budget, positions=positions, merge=merge, name="fixed")


@memoized
def random(budget: Budget, *, seed: int = 0, positions: str = "original", merge: Merge | None = None) -> Policy:
    """Chance: importance u ~ U[0, 1), drawn once a token from the key folded by layer, head, position (RoCo, sec. 4.1).

    Args:
      budget: see `evict`.
      seed: of the key, 0 to 2³² - 1; a row's place in its batch has no part in it.
      positions, merge: see `evict`.

    What was drawn is drawn again at every step rather than stored.
    """
    seed = count_argument("seed", seed)
    if seed >= 2**32:
        raise PolicyError(f"random: seed={seed} has no key of its own; give one below {2**32}.")

    def score(stats: object, view: View) -> Array:
        key = jax.random.fold_in(jax.random.key(seed), view.layer)

        def draw(head: Array, position: Array) -> Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, head), position))

        head = jnp.arange(view.position.shape[1]) if view.heads is None else np.asarray(view.heads)
        drawn = jax.vmap(jax.vmap(jax.vmap(draw, (None, 0)), (0, 0)), (None, 0))(
            jnp.asarray(head, jnp.int32), jnp.maximum(view.position, 0)
        )
        return drawn

    return evict(
        importance=Importance(frozenset(), score),
        budget=budget,
        positions=positions,
        merge=merge,
        name="random",
    )
