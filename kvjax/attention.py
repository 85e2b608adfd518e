"""Attention over the slots of a cache, and the column statistics that policies need.

`attend` computes attention over one part of the slots, `combine` joins parts by their log-sum-exps, and `column_sums`
computes the statistics of a part from the joined log-sum-exps. If all slots are one part, `attend_and_reduce` computes
attention and statistics in one pass over the keys.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError
from kvjax.kernels import registry
from kvjax.kernels.coded import Coded
from kvjax.kernels.decode import xla as decode_xla
from kvjax.kernels.prefill import sharded
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.kernels.problem import Attended, Problem, check
from kvjax.numerics.statistics import COUNT, Statistic, by_name
from kvjax.parallel import sharding
from kvjax.typing import IMPLEMENTATIONS, Implementation, JsonObject

Array = jax.Array
Columns = dict[str, Array]  # statistic name -> [B, K, S, ...] float32

__all__ = [
    "IMPLEMENTATIONS", "Attended", "Columns", "Implementation", "Mapped", "Problem", "attend", "attend_and_reduce",
    "attend_parts", "column_sums", "combine", "count_queries", "count_seen", "problem", "resolve", "ungroup",
]  # fmt: skip


def resolve(implementation: Implementation, platform: str) -> Implementation:
    """Returns the implementation that ``auto`` means on a platform: Pallas kernels on TPUs, XLA elsewhere.

    Args:
      implementation: a member of `IMPLEMENTATIONS`; any other than ``auto`` is returned unchanged.
      platform: name of a JAX backend, such as ``tpu``.

    Raises:
      ConfigError: if the implementation is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation {implementation!r} is unknown; use {', '.join(IMPLEMENTATIONS)}.")
    return ("pallas_tpu" if platform == "tpu" else "xla") if implementation == "auto" else implementation


def problem(
    query: Array,
    key: Array | Coded,
    value: Array | Coded,
    *,
    query_position: Array,
    key_position: Array,
    scale: float | None = None,
    soft_cap: float | None = None,
    window: int | None = None,
    band: Array | None = None,
    exempt: Array | None = None,
    log_weight: Array | None = None,
    offset: Array | None = None,
    needs: frozenset[Statistic] = frozenset(),
    group_reduce: str = "mean",
    causal: bool = False,
    grows: bool = False,
    prompt: Array | None = None,
) -> Problem:
    """Builds the problem of a block of new tokens, each of which attends to the live slots at or before its position.

    Args:
      query: [B, H, n, D], rotated; H is a multiple of K.
      key: [B, K, S, D], rotated; includes the block's own tokens unless they are another part. XLA takes `Coded` too.
      value: [B, K, S, D'], as `key`; D' is D unless values are held shorter.
      query_position: [B, n] int32 absolute positions, ascending; -1 = padding at the end of a row, whose output is 0.
      key_position: [B, K, S] int32; -1 = a slot that is empty or not read.
      scale: factor of the logits; None = D ** -0.5.
      soft_cap: c, where logits x become c · tanh(x / c); None = they stay as they are.
      window: the number of newest positions that a query sees, itself included; None = all.
      band: [B] int32, a window per row; the smaller of `window` and `band` applies.
      exempt: [B, K, S] bool, whether a slot is seen beyond window and band too.
      log_weight: [B, K, S] float32 added to the logits after their soft-cap: log N for a slot that stands for N tokens.
      offset: [B, K, G, n] float32 added to the logits of every slot, before their soft-cap.
      needs: statistics to report; others are not computed.
      group_reduce: ``mean`` or ``max`` over the H / K query heads of a KV head.
      causal: whether the slots are exactly this block in order (one-shot prefill), so that later tiles can be skipped.
      grows: whether rows may use a small part of the slots; see `Problem`.
      prompt: [B] int32 tokens of each row's prompt, for statistics of its end; None = it ends with this block.

    Raises:
      AssertionError: if an array has a different rank, shape or dtype (chex).
    """
    chex.assert_rank([query, key], 4)
    batch, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    chex.assert_is_divisible(heads, kv_heads)
    made = Problem(
        # [B, K, G, n, D]
        query=query.reshape(batch, kv_heads, heads // kv_heads, n, dim),
        key=key,
        value=value,
        query_position=query_position,
        key_position=key_position,
        band=band,
        exempt=exempt,
        log_weight=log_weight,
        offset=offset,
        counts=tuple(s for s in by_name(needs) if s.transform == "one"),
        scale=dim**-0.5 if scale is None else scale,
        soft_cap=soft_cap,
        grows=grows,
        window=window,
        group_reduce=group_reduce,
        causal=causal,
    )
    check(made, shorter_values=True)
    if prompt is not None:
        chex.assert_shape(prompt, (batch,))
        chex.assert_type(prompt, jnp.int32)
    # [B, n]
    real = query_position >= 0
    # [B, 1]
    newest = jnp.max(query_position, axis=1, keepdims=True)
    last = newest if prompt is None else prompt[:, None] - 1
    # [B, n]
    age = jnp.where(real, newest - query_position, -1)
    left = jnp.where(real, last - query_position, -1)
    statistics = tuple(s for s in by_name(needs) if s.needs_attention)
    weights = tuple(statistic.query_weights(age, left) for statistic in statistics)
    return made.replace(statistics=statistics, weights=weights)


def ungroup(output: Array) -> Array:
    """Joins the query heads of all KV heads: [B, K, G, n, D] -> [B, H, n, D]."""
    batch, kv_heads, group, n, dim = output.shape
    return output.reshape(batch, kv_heads * group, n, dim)


def attend(problem: Problem, implementation: Implementation = "auto") -> Attended:
    """Computes attention over the slots of one part, to be combined with others.

    Args:
      problem: the part. Its statistics are not computed; see `column_sums`.
      implementation: ``auto`` or ``xla``; Pallas kernels need all slots in one part, see `attend_and_reduce`.

    Returns:
      The output [B, K, G, n, D] in float32 and the log-sum-exps [B, K, G, n]; 0 and -inf for a query that sees no slot.

    Raises:
      ConfigError: if the implementation is another one.
    """
    check(problem, shorter_values=True)
    return _reference(problem, implementation).attend(problem)


def combine(*attended: Attended) -> Attended:
    """Computes attention over the slots of all parts from attention over each.

    The result is exact and does not depend on order and grouping. A part in which a query sees no slot does not change
    that query's result.
    """
    if len(attended) == 1:
        return attended[0]
    lines = [_lse_of(each) for each in attended]
    chex.assert_equal_shape([each.output for each in attended])
    chex.assert_equal_shape(lines)
    # [parts, B, K, G, n]
    lse = jnp.stack(lines)
    # [B, K, G, n]: 0 where no slot of any part is seen, since -inf - -inf is not a number
    top = jax.lax.stop_gradient(jnp.max(lse, axis=0))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    # [parts, B, K, G, n]
    weight = jnp.exp(lse - top)
    # [B, K, G, n]
    total = jnp.sum(weight, axis=0)
    known = jnp.where(total > 0, total, 1.0)
    # [parts, B, K, G, n, 1]
    share = (weight / known)[..., None]
    # [B, K, G, n, D]
    output = sum((part * each.output for part, each in zip(share, attended, strict=True)), start=jnp.float32(0))
    return Attended(output, jnp.where(total > 0, top + jnp.log(known), -jnp.inf))


def column_sums(
    problem: Problem, lse: Array, seen: Array | None = None, implementation: Implementation = "auto"
) -> Columns:
    """Computes the statistics of a part's slots from the log-sum-exps over all parts.

    Args:
      problem: the part.
      lse: [B, K, G, n] float32, from `combine`.
      seen: [B, K, n] float32, the number of slots that each query sees in all parts, from `count_seen`; None = in this
        part only. Only statistics with transform ``above`` depend on it.
      implementation: see `attend`.

    Returns:
      Statistic name -> [B, K, S, ...] float32, see `Statistic.reported`.
    """
    check(problem, shorter_values=True)
    batch, kv_heads, group, n, _ = problem.query.shape
    chex.assert_shape(lse, (batch, kv_heads, group, n))
    if seen is not None:
        chex.assert_shape(seen, (batch, kv_heads, n))
    sums = _reference(problem, implementation).column_sums(problem, lse, seen) if problem.statistics else {}
    return sums | _counts(problem)


def count_seen(problem: Problem) -> Array:
    """Counts the slots of a part that each query sees: [B, K, n] float32."""
    check(problem, shorter_values=True)
    return _reference(problem, "xla").count_seen(problem)


def attend_and_reduce(problem: Problem, implementation: Implementation = "auto") -> tuple[Attended, Columns]:
    """Computes attention over all slots, and its statistics, in one pass.

    Args:
      problem: the only part.
      implementation: ``xla``, which runs everywhere and has gradients; ``pallas_tpu``; ``pallas_gpu``, for Hopper GPUs;
        or ``auto``, see `resolve`.

    Returns:
      What `attend` returns, but rounded to value's dtype, and with None instead of log-sum-exps if a kernel does not
      report them; and what `column_sums` returns.

    Raises:
      ConfigError: if the implementation cannot run, with the reason; see `kvjax.kernels.registry`.
    """
    check(problem, shorter_values=True)
    return _by_kernel(problem, resolve(implementation, jax.default_backend()))


def _by_kernel(
    problem: Problem, implementation: Implementation, lse: Array | None = None, seen: Array | None = None
) -> tuple[Attended, Columns]:
    """Calls a kernel, where all slots are one part, or given the log-sum-exps and counts of slots of the others."""
    kernel = registry.find("decode" if problem.query.shape[3] == 1 else "prefill", implementation).load()
    if implementation == "xla":
        attended, sums = sharded.attend_and_reduce(problem, kernel)
    else:

        def run(by_head: JsonObject, by_row: JsonObject, others: JsonObject) -> tuple[Attended, Columns]:
            return kernel(problem.replace(**by_head, **by_row), **others)

        heads = ("batch", "kv_heads")
        others = {} if lse is None else {"lse": lse, "seen": seen}
        attended, sums = sharding.on_each_device(
            run, (problem.by_head(), problem.by_row(), others), (heads, ("batch",), heads), heads
        )
    return Attended(attended.output.astype(jnp.float32), attended.lse), sums | _counts(problem)


def _by_kernel_and_xla(
    problems: Sequence[Problem], implementation: Implementation
) -> tuple[Array, tuple[Columns, ...]]:
    """Attends to the first part by a kernel and to the others, which have few slots, by XLA; see `attend_parts`."""
    first, *rest = problems
    # [B, K, G, n, D] and [B, K, G, n], over the other parts
    others = combine(*(attend(each, "xla") for each in rest))
    counts = [count_seen(each) for each in rest]
    # [B, K, n]
    seen = sum(counts[1:], start=counts[0])
    attended, columns = _by_kernel(first, implementation, _lse_of(others), seen)
    # [B, K, G, n], over all parts
    lse = _lse_of(attended)
    # [B, K, G, n, 1]; 0 for a query that sees no slot at all
    share = jnp.where(jnp.isfinite(_lse_of(others)), jnp.exp(_lse_of(others) - lse), 0.0)[..., None]
    if first.needs_seen or any(each.needs_seen for each in rest):
        seen = seen + count_seen(first)
    own = tuple(column_sums(each, lse, seen, "xla") for each in rest)
    return attended.output + share * others.output, (columns, *own)


class Mapped(NamedTuple):
    """A part whose values are held as vectors of other dimensions.

    Attributes:
      output: what attention over the part returns, [B, K, G, n, D'] float32, and the sum of its probabilities
        [B, K, G, n] -> [B, K, G, n, D]; None = values are not mapped.
    """

    output: Callable[[Array, Array], Array] | None = None

    def mapped(self, attended: Attended) -> Attended:
        """Returns attention over the part as that over vectors of D features."""
        output, lse = attended.output, _lse_of(attended)
        if self.output is not None:
            output = self.output(output, jnp.isfinite(lse).astype(jnp.float32))
        return Attended(output, lse)


def attend_parts(
    problems: Sequence[Problem], implementation: Implementation = "auto", maps: Sequence[Mapped] | None = None
) -> tuple[Array, tuple[Columns, ...]]:
    """Computes attention of one block over all parts, and the statistics of each part's slots.

    Args:
      problems: the same queries and statistics over different slots; all values have the same dtype.
      implementation: see `attend_and_reduce`; of several parts, only the first may be for a kernel, if it is coded.
      maps: one per part, whose queries, keys and values may have other dimensions; None = no part is mapped.

    Returns:
      The output [B, K, G, n, D] in value's dtype, and for each part what `column_sums` returns.

    Raises:
      ConfigError: if the implementation cannot run, with the reason.
    """
    chex.assert_equal_shape_prefix([each.query for each in problems], 4)
    dtype = problems[0].value.dtype
    chex.assert_type([each.value for each in problems], dtype)
    if len(problems) == 1 and maps is None:
        attended, columns = attend_and_reduce(problems[0], implementation)
        return attended.output.astype(dtype), (columns,)
    if maps is None and isinstance(problems[0].key, Coded) and implementation not in ("auto", "xla"):
        output, each = _by_kernel_and_xla(problems, implementation)
        return output.astype(dtype), each
    maps = (Mapped(),) * len(problems) if maps is None else maps
    combined = combine(*(of.mapped(attend(each, implementation)) for each, of in zip(problems, maps, strict=True)))
    seen = None
    if any(each.needs_seen for each in problems):
        # [B, K, n]
        seen = sum((count_seen(each) for each in problems[1:]), start=count_seen(problems[0]))
    lse = _lse_of(combined)
    columns_of = tuple(column_sums(each, lse, seen, implementation) for each in problems)
    return combined.output.astype(dtype), columns_of


def count_queries(problem: Problem, statistic: Statistic = COUNT) -> Array:
    """Computes a statistic that counts queries, from positions only: [B, K, S] float32.

    The queries of each row that are not padding must have consecutive positions.

    Args:
      problem: the queries and slots.
      statistic: one with transform ``one``.
    """
    check(problem, shorter_values=True)
    # [B, 1, 1]
    newest, queries = problem.newest[:, None, None], problem.num_queries[:, None, None]
    # [B, K, S]: the first and the last position of a query that sees the slot
    first = jnp.maximum(newest - queries + 1, problem.key_position)
    last = newest
    for reach in (problem.window, None if problem.band is None else problem.band[:, None, None]):
        if reach is not None:
            last = jnp.minimum(last, problem.key_position + reach - 1)
    if problem.exempt is not None:
        last = jnp.where(problem.exempt, newest, last)
    # [B, K, S]: none sees an empty slot
    last = jnp.where((problem.key_position >= 0) & (queries > 0), last, first - 1)
    return statistic.counted(first, last, newest)


def _counts(problem: Problem) -> Columns:
    return {statistic.name: count_queries(problem, statistic) for statistic in problem.counts}


def _lse_of(attended: Attended) -> Array:
    if attended.lse is None:
        raise ConfigError("attention from a kernel that reports no log-sum-exps cannot be combined; use 'xla'.")
    return attended.lse


def _reference(problem: Problem, implementation: Implementation) -> Any:
    """Returns the XLA module for the problem; only XLA implements the ops separately."""
    if implementation not in ("auto", "xla"):
        resolve(implementation, "cpu")
        raise ConfigError(
            f"implementation {implementation!r} attends to one part, not to several parts; use 'xla' for these."
        )
    return decode_xla if problem.query.shape[3] == 1 else prefill_xla
