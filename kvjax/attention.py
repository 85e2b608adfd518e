"""Attention over a cache: one public op that returns the output and the column statistics a policy asked for."""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from kvjax import sharding
from kvjax.errors import ConfigError
from kvjax.kernels.decode import xla as decode_xla
from kvjax.kernels.prefill import xla as prefill_xla
from kvjax.statistics import Observation, Statistic

Array = jax.Array
Implementation = Literal["auto", "xla", "pallas_tpu", "pallas_gpu"]
IMPLEMENTATIONS = get_args(Implementation)


def resolve(implementation: Implementation, platform: str) -> Implementation:
    """What ``auto`` means on a platform: kernels on TPUs, whose compiler takes them; XLA elsewhere, GPUs included until
    one has run theirs.

    Raises:
      ConfigError: an implementation that is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ConfigError(f"implementation {implementation!r} is unknown; use {', '.join(IMPLEMENTATIONS)}.")
    return ("pallas_tpu" if platform == "tpu" else "xla") if implementation == "auto" else implementation


def attend(
    query: Array,
    key: Array,
    value: Array,
    *,
    query_position: Array,
    key_position: Array,
    scale: float | None = None,
    window: int | Array | None = None,
    exempt: Array | None = None,
    log_weight: Array | None = None,
    needs: frozenset[Statistic] = frozenset(),
    group_reduce: str = "mean",
    causal: bool = False,
    prompt: Array | None = None,
    implementation: Implementation = "auto",
) -> tuple[Array, Observation]:
    """Attends from a block of new tokens to the live slots at or before each of them.

    Args:
      query: [B, H, n, D], rotated; key, value: [B, K, S, D], H a multiple of K, the block's own tokens among them.
      query_position: [B, n] int32 absolute positions, ascending, -1 = padding (at a row's end): output 0.
      key_position: [B, K, S] int32, -1 = empty.
      scale: of the logits; None = D ** -0.5.
      window: how many newest positions a query sees, itself included, an int or [B] int32; None = all.
      exempt: [B, K, S] bool, slots that are seen beyond the window too.
      log_weight: [B, K, S] float32 added to the logits: log N for a slot that stands for N tokens.
      needs: statistics to report; the cost of the others is not paid.
      group_reduce: ``mean`` or ``max`` over the H / K query heads of a KV head.
      causal: the slots are exactly this block in order (one-shot prefill), which lets tiles skip the future.
      prompt: [B] int32 tokens of each row's prompt, for statistics of its end; None = it ends with this block.
      implementation: ``xla``, everywhere and with gradients; ``pallas_tpu``; ``pallas_gpu``, of Hopper GPUs, for head
        sizes of 64 to 256 that are multiples of 16; or ``auto``, see `resolve`. One that is asked for by name and
        cannot run raises.

    Returns:
      output [B, H, n, D] in value's dtype, and an `Observation` whose columns are [B, K, S] float32.
    """
    implementation = resolve(implementation, jax.default_backend())
    batch, heads, n, dim = query.shape
    kv_heads = key.shape[1]
    # [B]: the block's newest position and number of real queries
    newest = jnp.max(query_position, axis=1)
    queries = jnp.sum(query_position >= 0, axis=1, dtype=jnp.int32)
    # [B, n]
    real = query_position >= 0
    age = jnp.where(real, newest[:, None] - query_position, -1)
    left = jnp.where(real, (newest if prompt is None else prompt - 1)[:, None] - query_position, -1)
    statistics = tuple(sorted((s for s in needs if s.needs_attention), key=lambda s: s.name))
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, n, dim)
    weights = tuple(s.query_weights(age, left) for s in statistics)
    options: dict[str, Any] = {
        "scale": dim**-0.5 if scale is None else scale,
        "statistics": statistics,
        "group_reduce": group_reduce,
    }
    by_head = {
        "query": grouped, "key": key, "value": value, "key_position": key_position, "exempt": exempt,
        "log_weight": log_weight,
    }  # fmt: skip
    by_row = {"query_position": query_position, "weights": weights, "window": window}
    if implementation == "xla":
        run: Callable[..., Any] = decode_xla.attend if n == 1 else functools.partial(prefill_xla.attend, causal=causal)
        output, columns = run(**by_head, **by_row, **options)
    else:
        run = _kernel(implementation, n, causal)
        if not isinstance(window, jax.Array):
            options["window"] = by_row.pop("window")
        output, columns = sharding.on_each_device(
            lambda by_head, by_row: run(**by_head, **by_row, **options),
            (by_head, by_row), (("batch", "kv_heads"), ("batch",)), ("batch", "kv_heads"),
        )  # fmt: skip
    for statistic in needs:
        if not statistic.needs_attention:
            columns[statistic.name] = count_queries(newest, queries, key_position, window)
    return output.reshape(batch, heads, n, dim), Observation(columns, queries)


def _kernel(implementation: Implementation, queries: int, causal: bool) -> Callable[..., Any]:
    """The kernel for so many queries a head. Pallas takes a while to import, and only these need it."""
    if implementation == "pallas_gpu":
        if queries == 1:
            from kvjax.kernels.decode import pallas_gpu

            return pallas_gpu.attend
        from kvjax.kernels.prefill import pallas_gpu as prefill_gpu

        return functools.partial(prefill_gpu.attend, causal=causal)
    if queries == 1:
        from kvjax.kernels.decode import pallas_tpu

        return pallas_tpu.attend
    from kvjax.kernels.prefill import pallas_tpu as prefill_tpu

    return functools.partial(prefill_tpu.attend, causal=causal)


def count_queries(newest: Array, queries: Array, key_position: Array, window: int | Array | None) -> Array:
    """How many of a block's queries see each slot, from positions alone.

    Args:
      newest, queries: [B] int32 newest position and number of real queries of the block, which is contiguous.
      key_position: [B, K, S] int32, -1 = empty.

    Returns:
      [B, K, S] float32.
    """
    newest, queries = newest[:, None, None], queries[:, None, None]
    window = window[:, None, None] if isinstance(window, jax.Array) else window
    first = jnp.maximum(newest - queries + 1, key_position)
    last = newest if window is None else jnp.minimum(newest, key_position + window - 1)
    seen = jnp.where((key_position >= 0) & (queries > 0), last - first + 1, 0)
    return jnp.maximum(seen, 0).astype(jnp.float32)
