"""CPU: decoding steps of `experiments.bench selections`, a full cache beside what selections read of it."""

import dataclasses

import numpy as np

from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes.cpu import bench
from experiments.papers.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sides(Part):
    """Times decoding steps in turns, on a model of random weights whose caches are filled.

    The result has ``cache`` [n] names, ``milliseconds`` [n] and ``full`` [n] float64, the medians of a step of each and
    of the full cache beside it.

    Attributes:
      caches: of `experiments.bench.selections`.
      shape: of `kvjax.models.shapes`.
      batch: rows.
      context: tokens of the prompt.
      tokens: of a round.
      rounds: of which the median counts.
    """

    caches: tuple[str, ...]
    shape: str
    batch: int
    context: int
    tokens: int
    rounds: int

    def measure(self, lab: Lab) -> Result:
        options = {
            "shape": self.shape, "batch": self.batch, "context": self.context, "tokens": self.tokens,
            "rounds": self.rounds,
        }  # fmt: skip
        rows = bench(lab, "selections", options, *(f"--caches={cache}" for cache in self.caches))
        return {
            "cache": np.array([row["cache"] for row in rows]),
            "milliseconds": np.array([row["ms/step"] for row in rows], np.float64),
            "full": np.array([row["full ms/step"] for row in rows], np.float64),
        }


def sides(settings: Settings, batch: int, *, caches: tuple[str, ...] = ("infinigen",)) -> Sides:
    """A part at OPT-125M's shape and 2,048 tokens; in a trial at that of a model of four layers."""
    if settings.scale.trial:
        return Sides(caches=caches, shape="tiny", batch=batch, context=256, tokens=8, rounds=2)
    return Sides(caches=caches, shape="opt-125m", batch=batch, context=2048, tokens=16, rounds=3)
