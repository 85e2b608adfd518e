"""The first row of a run: its text, and the tokens of it that each cache holds at the end."""

from collections.abc import Sequence

import numpy as np

from experiments.config import ExperimentConfig
from experiments.reports.tables import short
from experiments.runs import data
from experiments.runs.measure import Measurement
from kvjax.analysis.viewer import CacheView, Viewer
from kvjax.models.model import Model

#: The largest number of slots of all caches on a page: one bit each, and one byte for each that is held if the policy
#: keeps a statistic. With the full cache, a window and H2O at 20 %, the page is then 0.9 MB.
MOST_SLOTS = 4 << 20


def shown_layers(model: Model, length: int, caches: int) -> tuple[int, ...]:
    """Returns the layers that are shown: all, or as many evenly spread ones as a page has room for.

    Args:
      model: a model.
      length: tokens of a row.
      caches: their number.
    """
    layers = model.config.num_layers
    room = max(MOST_SLOTS // (model.config.num_kv_heads * length * caches), 1)
    return tuple(int(each) for each in np.linspace(0, layers - 1, min(room, layers)))


def viewer(
    model: Model, config: ExperimentConfig, prompt: np.ndarray, measurements: Sequence[Measurement]
) -> Viewer | None:
    """Returns a viewer of what caches hold of the first row; None if that is not known of all of them.

    Args:
      model: that was run.
      config: of the run.
      prompt: [T] int32, the first row's.
      measurements: one per cache.
    """
    views = []
    for each in measurements:
        if each.held is None:
            return None
        new = each.tokens[0][each.tokens[0] >= 0]
        views.append(CacheView(short(each.policy), each.held, data.token_texts(model, prompt, new)))
    answers = "Continuation" if config.data.prompt is None else "Answer"
    return Viewer(data.token_texts(model, prompt[:0], prompt), views, answers=answers)
