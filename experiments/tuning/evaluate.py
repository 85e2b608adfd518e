"""The gap between a cache and the full cache on held-out windows, before and after training."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers.statistics import Comparison, paired_bootstrap
from experiments.reports.tables import Row
from experiments.runs import data
from experiments.runs.measure import measure
from experiments.runs.session import calibrated_for
from experiments.sweeps.intervals import LEAST, RESAMPLES
from experiments.tuning.config import TuneConfig
from kvjax.cache import CacheSpec
from kvjax.models.model import Model
from kvjax.policies import full
from kvjax.typing import JsonObject


def measured(model: Model, spec: CacheSpec, tokens: np.ndarray, config: TuneConfig) -> list[Row]:
    """Measures the full cache, then a spec, on held-out windows.

    Args:
      model: the model before or after training, without a calibration; if a storage needs one, it is computed from a
        generated story.
      spec: the cache.
      tokens: [windows, prompt + new tokens] int32.
      config: the sizes of prompts, blocks and continuations.

    Returns:
      The rows of both, as `Measurement.row` makes them, with the first window's greedy continuation.
    """
    exact = "highest" if model.dtype == jnp.float32 else None
    reference, rows = None, []
    for each in (CacheSpec(full()), spec):
        with jax.default_matmul_precision(exact):
            found = measure(
                calibrated_for(model, each, None), tokens, each, prompt_length=config.windows.prompt_length,
                new_tokens=config.evaluation.new_tokens, prefill_block=config.windows.prefill_block, repeats=0,
            )  # fmt: skip
        reference = reference or found
        shown = found.tokens[0][found.tokens[0] >= 0]
        text = data.decode(model, shown, tokens[0][: config.windows.prompt_length])
        rows.append({**found.row(reference), "continuation": text})
    return rows


class Gap(NamedTuple):
    """The loss under a cache less that under the full cache, in nats per token on the same windows.

    Attributes:
      before: the gap before training.
      after: the gap after training, to the full cache with the same weights.
      closed: the difference of the two.
      gained: the loss under the cache before training minus the one after it.
      gained_full: the same for the full cache.
    """

    before: Comparison
    after: Comparison
    closed: Comparison
    gained: Comparison
    gained_full: Comparison

    @property
    def share(self) -> float | None:
        """The share of the gap that training closed; None if there was no gap."""
        before, low = self.before.difference, self.before.low
        return self.closed.difference / before if low is not None and low > 0 else None

    def to_json(self) -> JsonObject:
        """Returns the differences with their 95 % intervals, in nats per token, and the share that was closed."""
        found: JsonObject = {
            name: {"nats": each.difference, "low": each.low, "high": each.high, "windows": each.number}
            for name, each in zip(self._fields, self, strict=True)
        }
        return found | {"closed_share": self.share}

    def sentence(self) -> str:
        """Returns the gap in words."""
        before, after, closed, gained, gained_full = (
            f"{each.difference:.4f} ({each.low:.4f} to {each.high:.4f})" for each in self
        )
        share = "" if self.share is None else f", {100 * self.share:.0f} % of it"
        return (
            f"Nats per token above the full cache with the same weights: {before} before, {after} after; closed: "
            f"{closed}{share}. The loss fell by {gained} under the cache, and by {gained_full} under the full cache."
        )


def gap_of(before: list[Row], after: list[Row]) -> Gap | None:
    """Returns the gap from the rows of `measured`; None if there are too few windows for an interval."""
    # [windows]: the full cache and the spec before, then both after
    nats = [np.asarray(row["nats_by_row"], np.float64) for row in (*before, *after)]
    if nats[0].size < LEAST:
        return None
    full_before, own_before, full_after, own_after = nats
    pairs = {
        "before": (own_before, full_before),
        "after": (own_after, full_after),
        "closed": (own_before - full_before, own_after - full_after),
        "gained": (own_before, own_after),
        "gained_full": (full_before, full_after),
    }
    return Gap(*(paired_bootstrap(what, *pair, seed=0, resamples=RESAMPLES) for what, pair in pairs.items()))
