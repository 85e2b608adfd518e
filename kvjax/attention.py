"""Attention over a cache, as two ops and a monoid.

`attend` is a softmax over the slots of one `Problem`, `combine` joins several by their log-sum-exps, and `column_sums`
reports what a policy asked for under the final one. `attend_and_reduce` does the first and the last in one pass over
the keys, where all slots are one part.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import chex
import jax
import jax.numpy as jnp

from kvjax import sharding
from kvjax.errors import ConfigError
from kvjax.kernels import registry
from kvjax.kernels.decode import xla as decode_xla
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.kernels.problem import Attended, Problem
from kvjax.statistics import Statistic

Array = jax.Array
Columns = dict[str, Array]  # statistic name -> [B, K, S] or [B, K, S, words] float32
Implementation = Literal["auto", "xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS = get_args(Implementation)

__all__ = [
    "IMPLEMENTATIONS", "Attended", "Columns", "Implementation", "Problem", "attend", "attend_and_reduce",
    "attend_parts", "column_sums", "combine", "count_queries", "count_seen", "problem", "resolve", "ungroup",
]  # fmt: skip


def resolve(implementation: Implementation, platform: str) -> Implementation:
    """The implementation that ``auto`` means on a platform: kernels on TPUs, whose compiler takes them; XLA elsewhere.

    Raises:
      ConfigError: an implementation that is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation {implementation!r} is unknown; use {', '.join(IMPLEMENTATIONS)}.")
    return ("pallas_tpu" if platform == "tpu" else "xla") if implementation == "auto" else implementation


def problem(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_position: Array,
    key_position: Array,
    scale: float | None = None,
    window: int | None = None,
    band: Array | None = None,
    exempt: Array | None = None,
    log_weight: Array | None = None,
    needs: frozenset[Statistic] = frozenset(),
    group_reduce: str = "mean",
    causal: bool = False,
    prompt: Array | None = None,
) -> Problem:
    """The problem of a block of new tokens that attends to the live slots at or before each of them.

    Args:
      query: [B, H, n, D], rotated; H is a multiple of K.
      key: [B, K, S, D], rotated, the block's own tokens among them unless they are another part.
      value: [B, K, S, D].
      query_position: [B, n] int32 absolute positions, ascending; -1 = padding, at the end of a row: output 0.
      key_position: [B, K, S] int32; -1 = a slot that is empty or not read.
      scale: factor of the logits; None = D ** -0.5.
      window: the number of newest positions that a query sees, itself included; None = all.
      band: [B] int32, a window per row; a query then sees the smaller number of both.
      exempt: [B, K, S] bool, slots that are seen beyond window and band too.
      log_weight: [B, K, S] float32 added to the logits: log N for a slot that stands for N tokens.
      needs: statistics to report; the cost of the others is not paid.
      group_reduce: ``mean`` or ``max`` over the H / K query heads of a KV head.
      causal: whether the slots are exactly this block in order (one-shot prefill), which lets tiles skip the future.
      prompt: [B] int32 tokens of each row's prompt, for statistics of its end; None = it ends with this block.

    Raises:
      AssertionError: a shape or a dtype that differs from these (chex).
    """
    chex.assert_rank([query, key, value], 4)
    chex.assert_type([query, key, value], float)
    batch, heads, n, dim = query.shape
    kv_heads, slots = key.shape[1:3]
    chex.assert_is_divisible(heads, kv_heads)
    chex.assert_shape([key, value], (batch, kv_heads, slots, dim))
    chex.assert_shape(query_position, (batch, n))
    chex.assert_shape(key_position, (batch, kv_heads, slots))
    chex.assert_type([query_position, key_position], jnp.int32)
    for per_slot, dtype in ((exempt, bool), (log_weight, jnp.float32)):
        if per_slot is not None:
            chex.assert_shape(per_slot, (batch, kv_heads, slots))
            chex.assert_type(per_slot, dtype)
    for per_row in (band, prompt):
        if per_row is not None:
            chex.assert_shape(per_row, (batch,))
            chex.assert_type(per_row, jnp.int32)
    if causal:
        chex.assert_equal(slots, n)
    real = query_position >= 0
    # [B, 1]
    newest = jnp.max(query_position, axis=1, keepdims=True)
    last = newest if prompt is None else prompt[:, None] - 1
    # [B, n]
    age = jnp.where(real, newest - query_position, -1)
    left = jnp.where(real, last - query_position, -1)
    statistics = tuple(sorted((s for s in needs if s.needs_attention), key=lambda s: s.name))
    return Problem(
        # [B, K, G, n, D]
        query=query.reshape(batch, kv_heads, heads // kv_heads, n, dim),
        key=key,
        value=value,
        query_position=query_position,
        key_position=key_position,
        weights=tuple(statistic.query_weights(age, left) for statistic in statistics),
        band=band,
        exempt=exempt,
        log_weight=log_weight,
        statistics=statistics,
        counts=tuple(sorted(s.name for s in needs if not s.needs_attention)),
        scale=dim**-0.5 if scale is None else scale,
        window=window,
        group_reduce=group_reduce,
        causal=causal,
    )


def ungroup(output: Array) -> Array:
    """[B, K, G, n, D] -> [B, H, n, D]."""
    batch, kv_heads, group, n, dim = output.shape
    return output.reshape(batch, kv_heads * group, n, dim)


def attend(problem: Problem, implementation: Implementation = "auto") -> Attended:
    """Attention over the slots of a problem alone: a part, to be combined with others.

    Args:
      problem: whose statistics are not reported; see `column_sums`.
      implementation: ``auto`` or ``xla``; kernels attend to one part only, by `attend_and_reduce`.

    Returns:
      The output [B, K, G, n, D] in float32, 0 for a query that sees no slot, and the log-sum-exps [B, K, G, n], then
      -inf.

    Raises:
      ConfigError: any other implementation.
    """
    return _reference(problem, implementation).attend(problem)


def combine(*attended: Attended) -> Attended:
    """Attention over the slots of all parts, from attention over each; exact, in any order and grouping.

    A part of which a query sees no slot changes nothing for that query.
    """
    if len(attended) == 1:
        return attended[0]
    # [parts, B, K, G, n]
    lse = jnp.stack([_lse_of(each) for each in attended])
    # [B, K, G, n]; 0 where no part has a slot that is seen, since -inf - -inf is not a number
    top = jax.lax.stop_gradient(jnp.max(lse, axis=0))
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    # [parts, B, K, G, n]
    weight = jnp.exp(lse - top)
    total = jnp.sum(weight, axis=0)
    known = jnp.where(total > 0, total, 1.0)
    share = (weight / known)[..., None]
    # [B, K, G, n, D]
    output = sum((part * each.output for part, each in zip(share, attended, strict=True)), start=jnp.float32(0))
    return Attended(output, jnp.where(total > 0, top + jnp.log(known), -jnp.inf))


def column_sums(
    problem: Problem, lse: Array, seen: Array | None = None, implementation: Implementation = "auto"
) -> Columns:
    """The statistics of a part's slots, under log-sum-exps over all parts.

    Args:
      problem: the part.
      lse: [B, K, G, n] float32, of `combine`.
      seen: [B, K, n] float32 number of slots that each query sees in all parts, of `count_seen`; None = in this part.
        Only statistics with ``above`` look at it.
      implementation: see `attend`.

    Returns:
      Statistic name -> [B, K, S] or [B, K, S, words] float32.
    """
    sums = _reference(problem, implementation).column_sums(problem, lse, seen) if problem.statistics else {}
    return sums | _counts(problem)


def count_seen(problem: Problem) -> Array:
    """The number of slots of a part that each query sees, [B, K, n] float32."""
    return _reference(problem, "xla").count_seen(problem)


def attend_and_reduce(problem: Problem, implementation: Implementation = "auto") -> tuple[Attended, Columns]:
    """Attention over all slots, and its statistics, in one pass.

    Args:
      problem: the only part.
      implementation: ``xla``, everywhere and with gradients; ``pallas_tpu``; ``pallas_gpu``, of Hopper GPUs; or
        ``auto``, see `resolve`. One that is asked for by name and cannot run raises.

    Returns:
      As of `attend`, but rounded to value's dtype, and without log-sum-exps (None) where a kernel does not report them;
      and as of `column_sums`.

    Raises:
      ConfigError: with the reason why the implementation cannot run; see `kvjax.kernels.registry`.
    """
    implementation = resolve(implementation, jax.default_backend())
    kernel = registry.find("decode" if problem.query.shape[3] == 1 else "prefill", implementation).load()
    if implementation == "xla":
        attended, sums = kernel(problem)
    else:

        def run(by_head: dict[str, Any], by_row: dict[str, Any]) -> tuple[Attended, Columns]:
            return kernel(problem.replace(**by_head, **by_row))

        attended, sums = sharding.on_each_device(
            run, (problem.by_head(), problem.by_row()), (("batch", "kv_heads"), ("batch",)), ("batch", "kv_heads")
        )
    return Attended(attended.output.astype(jnp.float32), attended.lse), sums | _counts(problem)


def attend_parts(
    problems: Sequence[Problem], implementation: Implementation = "auto"
) -> tuple[Array, tuple[Columns, ...]]:
    """Attention of one block over all parts together, and the statistics of each part's slots.

    Args:
      problems: the same queries and statistics over different slots; values of one dtype.
      implementation: see `attend_and_reduce`; several parts need ``auto`` or ``xla``.

    Returns:
      The output [B, K, G, n, D] in value's dtype, and for each part what `column_sums` returns.
    """
    dtype = problems[0].value.dtype
    chex.assert_type([each.value for each in problems], dtype)
    if len(problems) == 1:
        attended, columns = attend_and_reduce(problems[0], implementation)
        return attended.output.astype(dtype), (columns,)
    combined = combine(*(attend(each, implementation) for each in problems))
    seen = None
    if problems[0].needs_seen:
        # [B, K, n]
        seen = sum((count_seen(each) for each in problems[1:]), start=count_seen(problems[0]))
    lse = _lse_of(combined)
    columns_of = tuple(column_sums(each, lse, seen, implementation) for each in problems)
    return combined.output.astype(dtype), columns_of


def count_queries(problem: Problem) -> Array:
    """The number of queries that see each slot, [B, K, S] float32, from positions alone.

    The real queries of each row must have consecutive positions.
    """
    # [B, 1, 1]
    newest, queries = problem.newest[:, None, None], problem.num_queries[:, None, None]
    # [B, K, S] first and last position of a query that sees the slot
    first = jnp.maximum(newest - queries + 1, problem.key_position)
    last = newest
    for reach in (problem.window, None if problem.band is None else problem.band[:, None, None]):
        if reach is not None:
            last = jnp.minimum(last, problem.key_position + reach - 1)
    if problem.exempt is not None:
        last = jnp.where(problem.exempt, newest, last)
    seen = jnp.where((problem.key_position >= 0) & (queries > 0), last - first + 1, 0)
    return jnp.maximum(seen, 0).astype(jnp.float32)


def _counts(problem: Problem) -> Columns:
    return {name: count_queries(problem) for name in problem.counts}


def _lse_of(attended: Attended) -> Array:
    if attended.lse is None:
        raise ConfigError("attention by a kernel that reports no log-sum-exps cannot be combined; use 'xla'.")
    return attended.lse


def _reference(problem: Problem, implementation: Implementation) -> Any:
    """The module of the implementation in XLA, the only one whose ops are separate."""
    if implementation not in ("auto", "xla"):
        resolve(implementation, "cpu")
        raise ConfigError(
            f"implementation {implementation!r} attends to one part, not to several parts; use 'xla' for these."
        )
    return decode_xla if problem.query.shape[3] == 1 else prefill_xla
