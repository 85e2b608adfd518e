"""Presets: published systems that are a product of a policy, a storage and a selection."""

from typing import Any

from kvjax.arguments import Registry, checked_call, choice_argument
from kvjax.cache.spec import CacheSpec
from kvjax.errors import SelectionError
from kvjax.policies.base import Policy
from kvjax.policies.budget import FromLayer, TextFraction, single
from kvjax.policies.pools import ONE_BYTE, counter, fifo, lru
from kvjax.policies.window import full
from kvjax.selection import speculate
from kvjax.storage.base import Storage
from kvjax.storage.dense import dense

POOLS = ("fifo", "lru", "counter")


@checked_call(SelectionError)
def infinigen(
    alpha: float = 4.0,
    *,
    ratio: float = 0.3,
    cap: float | int = 0.2,
    first_layer: int = 2,
    columns: speculate.Columns = "sum",
    sinks: int = 0,
    recent: int = 0,
    pool_limit: int | float | None = None,
    pool: str = "counter",
    saturate: int | None = ONE_BYTE,
    storage: Storage | None = None,
) -> CacheSpec:
    """Keeps every token, or a limited pool of them, and reads those that a guess chooses (InfiniGen, arXiv:2406.19707).

    Layers before `first_layer` read everything and keep every token.

    Args:
      alpha: see `kvjax.selection.InfiniGen`.
      ratio: see `kvjax.selection.InfiniGen`.
      cap: see `kvjax.selection.InfiniGen`.
      first_layer: see `kvjax.selection.InfiniGen`.
      columns: see `kvjax.selection.InfiniGen`.
      sinks: see `kvjax.selection.InfiniGen`.
      recent: see `kvjax.selection.InfiniGen`.
      pool_limit: slots per KV head of the pool, or as a float in (0, 1] a fraction of each row's whole text; None = no
        limit.
      pool: ``fifo``, ``lru`` or ``counter``, the policy of a limited pool (section 4.4).
      saturate: see `kvjax.policies.counter`.
      storage: how slots are held; None = in the model's dtype.

    Raises:
      SelectionError: an argument that is not valid.
      PolicyError: a limit that is not valid.
    """
    choice_argument("pool", pool, POOLS, error=SelectionError)
    look = speculate.infinigen(
        alpha, ratio=ratio, cap=cap, first_layer=first_layer, columns=columns, sinks=sinks, recent=recent
    )
    return CacheSpec(_pool(pool, pool_limit, first_layer, saturate), storage or dense(), look)


def _pool(name: str, limit: int | float | None, first_layer: int, saturate: int | None) -> Policy:
    if limit is None:
        return full()
    budget: Any = FromLayer(TextFraction(limit) if isinstance(limit, float) else single(limit), first_layer)
    return {"fifo": fifo, "lru": lru}[name](budget) if name != "counter" else counter(budget, saturate=saturate)


#: Every named system.
PRESETS: Registry[CacheSpec] = Registry("preset", "presets", SelectionError, {"infinigen": infinigen})
by_name, accepts, names = PRESETS.by_name, PRESETS.accepts, PRESETS.names
