"""Arguments and results of the kernels of a whole decoding step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from kvjax.storage.side import Parts

Array = jax.Array
Stats = dict[str, Array]  # statistic name -> [B, K, S] float32
# (stats, positions including the new token [1, K, S], columns by transform, newest [1], budget [1]) of one row
# -> (stats, positions) after eviction
ObserveAndEvict = Callable[[Stats, Array, Stats, Array, Array], tuple[Stats, Array]]
Stepped = tuple[Array, Any, Any, Array, Stats]  # output [B, K, G, D]; key, value, position and stats afterwards


class Step(NamedTuple):
    """One token per row, the slots of one layer, and what follows attention.

    B rows, K KV heads, G query heads per KV head, S slots, D features.

    Attributes:
      query: [B, K, G, D], rotated.
      new_key: [B, K, 1, D], rotated.
      new_value: [B, K, 1, D].
      key: [B, K, S, D], donated; an array, or `Coded` where the kernel reads codes.
      value: [B, K, S, D], as `key`.
      position: [B, K, S] int32; -1 = empty.
      stats: statistic name -> [B, K, S] float32.
      newest: [B] int32 position of each row's token; -1 = a row that has ended, whose slots are unchanged.
      budget: [B] int32, passed to `observe_and_evict`.
      observe_and_evict: updates statistics and evicts slots after attention.
      transforms: the transforms whose columns `observe_and_evict` needs; see `Statistic`.
      scale: see `Problem`.
      window: see `Problem`.
      group_reduce: see `Problem`.
      encoded: the codes of `new_key` and of `new_value`, [B, K, 1, ...] each; None for arrays.
    """

    query: Array
    new_key: Array
    new_value: Array
    key: Any
    value: Any
    position: Array
    stats: Stats
    newest: Array
    budget: Array
    observe_and_evict: ObserveAndEvict
    transforms: tuple[str, ...]
    scale: float
    window: int | None
    group_reduce: str
    encoded: tuple[Parts, Parts] | None = None


def check(given: Step) -> None:
    """Checks ranks, shapes and dtypes against the attributes of `Step`.

    This happens while a program is traced and adds nothing to it.

    Raises:
      AssertionError: if an array has a different rank, shape or dtype (chex).
    """
    chex.assert_rank([given.query, given.key], 4)
    batch, kv_heads, _, dim = given.query.shape
    slots = given.key.shape[2]
    chex.assert_shape([given.new_key, given.new_value], (batch, kv_heads, 1, dim))
    chex.assert_shape([given.key, given.value], (batch, kv_heads, slots, dim))
    chex.assert_type([given.query, given.key], float)
    chex.assert_type([given.new_key, given.new_value, given.value], given.key.dtype)
    chex.assert_shape([given.position, *given.stats.values()], (batch, kv_heads, slots))
    chex.assert_type([*given.stats.values()], jnp.float32)
    chex.assert_shape([given.newest, given.budget], (batch,))
    chex.assert_type([given.position, given.newest, given.budget], jnp.int32)


def takes_step(kernel: Callable[[Step], Stepped]) -> Callable[..., Stepped]:
    """Turns a function of a `Step` into a function of its attributes, which are checked."""

    def call(*arguments: Any, **options: Any) -> Stepped:
        given = Step(*arguments, **options)
        check(given)
        return kernel(given)

    return call
