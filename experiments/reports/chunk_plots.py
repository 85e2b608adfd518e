"""The plot of Cache-Craft's factors: answers, distances from a whole prefill, and recomputed tokens."""

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.reports import plots

ANSWERS, VALUES, SHARE = "answers relative to the prefill's", "1 - distance of values", "tokens recomputed"


def alpha_plot(
    alphas: Sequence[float],
    curves: Mapping[str, Sequence[float]],
    *,
    target: float,
    chosen: Mapping[str, float | None],
    weights: str,
) -> bytes:
    """Draws what changes with the factor of Cache-Craft's repair.

    Args:
      alphas: [A], ascending.
      curves: `ANSWERS`, `VALUES` or `SHARE` -> [A], in shares of 1.
      target: of a curve, in shares of 1.
      chosen: of some curves, the smallest factor that reaches the target; None if none does.
      weights: the digest of the model's weights.
    """
    figure, axes = plots.new_figure(1, figsize=(7, 4.5))
    own = axes[0][0]
    colors = plots.colors([*curves])
    for name, values in curves.items():
        own.plot(alphas, 100 * np.asarray(values, np.float64), marker="o", color=colors[name], label=name)
    own.axhline(100 * target, color=plots.FULL_COLOR, ls="--", label=f"target, {100 * target:g} %")
    for name, alpha in chosen.items():
        if alpha is not None:
            own.axvline(alpha, color=colors[name], ls=":", label=f"smallest that reaches it, {alpha:g}")
    own.set_ylim(bottom=0)
    plots.style(own, "Repair of chunks by its factor", "factor of the share of tokens, alpha", "%")
    own.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return plots.png(figure, weights)
