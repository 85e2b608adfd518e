"""Q-Filters: ranks keys by their projection on the main direction of queries (arXiv:2503.02812)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.policies.base import Evict, compress_or_evict, factory
from kvjax.policies.budget import BudgetLike
from kvjax.policies.components import Importance, Stats, View
from kvjax.policies.h2o import Newest
from kvjax.policies.parameters import ModelSizes, Parameters, TextSamples

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class QueryDirection(Parameters):
    """The main direction of the rotated queries of each KV head (arXiv:2503.02812, section 3).

    Arrays of a layer: ``direction`` [K, D]. It is the first right singular vector of a query head's queries, not
    centred, averaged over the query heads of a KV head. Its sign is the one for which most projections are positive.
    """

    name = "qfilters"

    def parts(self, sizes: ModelSizes) -> dict[str, tuple[int, ...]]:
        return {"direction": (sizes.kv_heads, sizes.dim)}

    def prepare(self, samples: TextSamples, sizes: ModelSizes) -> dict[str, np.ndarray]:
        # [H, n, D]
        query = np.swapaxes(samples.rotated_query.astype(np.float64), 0, 1)
        # [H, D]: the eigenvector of the largest eigenvalue of QᵀQ, which are in ascending order
        vector = np.linalg.eigh(np.swapaxes(query, 1, 2) @ query)[1][..., -1]
        # [H, n]
        projection = np.einsum("hnd,hd->hn", query, vector)
        positive, half = np.sum(projection > 0, axis=1), projection.shape[1] / 2
        same = (positive > half) | ((positive == half) & (projection.sum(axis=1) > 0))
        vector *= np.where(same, 1.0, -1.0)[:, None]
        return {"direction": vector.reshape(sizes.kv_heads, -1, sizes.dim).mean(axis=1)}


@dataclasses.dataclass(frozen=True)
class Projection(Importance):
    """Ranks a slot by the projection of its rotated key on a calibrated direction (Q-Filters, arXiv:2503.02812)."""

    needs = frozenset()
    signed = True
    reads = frozenset({"key"})

    @property
    def params(self) -> tuple[Parameters, ...]:
        return (QueryDirection(),)

    def score(self, stats: Stats, view: View) -> Array:
        direction = view.params[QueryDirection.name]["direction"]
        key = view.rotated().astype(jnp.float32)
        return jnp.einsum("kd,bksd->bks", direction, key, precision=jax.lax.Precision.HIGHEST)


@factory
def qfilters(budget: BudgetLike, *, every: int | None = None, recent: int = 0, positions: str = "original") -> Evict:
    """Keeps the keys with the largest projection on the main direction of queries (Q-Filters, arXiv:2503.02812).

    Importance reads only keys. Make the calibration with ``kvjax.calibrate(model, tokens, policy)`` and pass it as
    ``calibration=``.

    Args:
      budget: see `evict`.
      every: see `lagkv`.
      recent: the number of newest positions that are protected.
      positions: see `evict`.

    The filters that the authors publish have the opposite sign, and their code ranks by the negative projection.
    """
    return compress_or_evict(
        every, importance=Projection(), scope=Newest(recent) if recent else None, budget=budget, positions=positions,
        name="qfilters",
    )  # fmt: skip
