"""The problem that every attention kernel solves: queries, slots, and the statistics to report."""

import chex
import flax.struct
import jax
import jax.numpy as jnp

from kvjax.kernels.coded import Coded, as_array
from kvjax.numerics.statistics import Statistic
from kvjax.typing import PyTree

Array = jax.Array


class Problem(flax.struct.PyTreeNode, kw_only=True):
    """A block of n queries per head, the slots it attends to, and the statistics to report.

    B rows, K KV heads, G query heads per KV head, S slots, D features. `kvjax.attention.problem` builds one.

    Attributes:
      query: [B, K, G, n, D], rotated.
      key: [B, K, S, D], rotated; an array, or `Coded` where the kernel reads codes.
      value: [B, K, S, D], as `key`; XLA takes values of another number of features than keys.
      query_position: [B, n] int32 absolute positions, ascending; -1 = padding, at the end of a row.
      key_position: [B, K, S] int32; -1 = a slot that no query sees.
      weights: the weight of each query, [B, n] or [B, n, words] float32, one array per statistic.
      band: [B] int32, the number of newest positions that a query of each row sees, itself included; None = all.
      exempt: [B, K, S] bool, whether a slot is seen beyond the window and the band too; None = no slot is.
      log_weight: [B, K, S] float32 added to the logits, after their soft-cap; None = 0.
      offset: [B, K, G, n] float32 added to the logits of every slot, before their soft-cap; None = 0.
      statistics: the statistics that need attention, sorted by name.
      counts: the statistics that count queries, which depend on positions only, sorted by name.
      scale: factor of the logits.
      soft_cap: c, where logits x become c · tanh(x / c); None = they stay as they are.
      window: the number of newest positions that a query sees, itself included; None = all.
      group_reduce: ``mean`` or ``max`` over the G query heads of a KV head.
      causal: whether the slots are exactly this block in order (S = n), so that no query sees a later slot.
      grows: whether slots are never freed, so that rows may use a small part of what is allocated, the first slots.
    """

    query: Array
    key: Array | Coded
    value: Array | Coded
    query_position: Array
    key_position: Array
    weights: tuple[Array, ...] = ()
    band: Array | None = None
    exempt: Array | None = None
    log_weight: Array | None = None
    offset: Array | None = None
    statistics: tuple[Statistic, ...] = flax.struct.field(pytree_node=False, default=())
    counts: tuple[Statistic, ...] = flax.struct.field(pytree_node=False, default=())
    scale: float = flax.struct.field(pytree_node=False)
    soft_cap: float | None = flax.struct.field(pytree_node=False, default=None)
    window: int | None = flax.struct.field(pytree_node=False, default=None)
    group_reduce: str = flax.struct.field(pytree_node=False, default="mean")
    causal: bool = flax.struct.field(pytree_node=False, default=False)
    grows: bool = flax.struct.field(pytree_node=False, default=False)

    @property
    def slots(self) -> int:
        """The number of slots S."""
        return self.key.shape[2]

    @property
    def newest(self) -> Array:
        """[B] int32 position of the newest query; -1 in a row without queries."""
        return jnp.max(self.query_position, axis=1)

    @property
    def num_queries(self) -> Array:
        """[B] int32 number of queries that are not padding."""
        return jnp.sum(self.query_position >= 0, axis=1, dtype=jnp.int32)

    @property
    def needs_seen(self) -> bool:
        """Whether a statistic depends on the number of slots that a query sees."""
        return any(statistic.transform == "above" for statistic in self.statistics)

    def by_head(self) -> dict[str, PyTree]:
        """Returns the arrays [B, K, ...], for `replace`."""
        names = ("query", "key", "value", "key_position", "exempt", "log_weight", "offset")
        return {name: getattr(self, name) for name in names}

    def by_row(self) -> dict[str, PyTree]:
        """Returns the arrays [B, ...] that the heads share, for `replace`."""
        return {name: getattr(self, name) for name in ("query_position", "weights", "band")}

    def without_statistics(self) -> "Problem":
        """Returns the same problem without statistics."""
        return self.replace(weights=(), statistics=(), counts=())

    def arrays(self) -> tuple[Array, Array]:
        """Returns keys and values as arrays."""
        return as_array(self.key), as_array(self.value)

    def decoded(self) -> "Problem":
        """Returns the same problem with keys and values as arrays."""
        return self.replace(key=as_array(self.key), value=as_array(self.value))

    def only_queries(self, start: int, stop: int) -> "Problem":
        """Returns the problem of the queries from `start` to before `stop`."""
        return self.replace(
            query=self.query[:, :, :, start:stop],
            query_position=self.query_position[:, start:stop],
            weights=tuple(weight[:, start:stop] for weight in self.weights),
            offset=None if self.offset is None else self.offset[:, :, :, start:stop],
            causal=False,
        )

    def only_slots(self, stop: int) -> "Problem":
        """Returns the problem of the slots before `stop`."""
        of_queries = ("query", "offset")
        arrays = {name: x for name, x in self.by_head().items() if name not in of_queries and x is not None}
        return self.replace(**{name: x[:, :, :stop] for name, x in arrays.items()}, causal=False)


def check(problem: Problem, *, shorter_values: bool = False) -> None:
    """Checks ranks, shapes and dtypes against the attributes of `Problem`.

    This happens while a program is traced and adds nothing to it.

    Args:
      problem: shapes suffice.
      shorter_values: whether values may have another number of features than keys.

    Raises:
      AssertionError: if an array has a different rank, shape or dtype (chex).
    """
    chex.assert_rank([problem.query, problem.key], [5, 4])
    batch, kv_heads, group, n, dim = problem.query.shape
    slots = problem.slots
    chex.assert_shape(problem.key, (batch, kv_heads, slots, dim))
    chex.assert_shape(problem.value, (batch, kv_heads, slots, None if shorter_values else dim))
    chex.assert_type([problem.query, problem.key, problem.value], float)
    chex.assert_shape(problem.query_position, (batch, n))
    chex.assert_shape(problem.key_position, (batch, kv_heads, slots))
    chex.assert_type([problem.query_position, problem.key_position], jnp.int32)
    for optional, shape, dtype in (
        (problem.band, (batch,), jnp.int32),
        (problem.exempt, (batch, kv_heads, slots), bool),
        (problem.log_weight, (batch, kv_heads, slots), jnp.float32),
        (problem.offset, (batch, kv_heads, group, n), jnp.float32),
    ):
        if optional is not None:
            chex.assert_shape(optional, shape)
            chex.assert_type(optional, dtype)
    chex.assert_equal(len(problem.weights), len(problem.statistics))
    for weight, statistic in zip(problem.weights, problem.statistics, strict=True):
        chex.assert_shape(weight, (batch, n, *statistic.words))
        chex.assert_type(weight, jnp.float32)
    if problem.causal:
        chex.assert_equal(slots, n)


class Attended(flax.struct.PyTreeNode):
    """Attention over some slots: a softmax over these alone.

    Attributes:
      output: [B, K, G, n, D]; 0 for a query that sees none of the slots.
      lse: [B, K, G, n] float32 logarithm of the sum of the exponentials of the logits; -inf for a query that sees none
        of the slots. None where a kernel does not report it.
    """

    output: Array
    lse: Array | None
