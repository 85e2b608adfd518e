"""Plots of learned reuse: perplexity by the FLOPs of prompts, and by the distance from the point of an augmentation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from experiments.reports import plots
from experiments.tuning.reuse_measures import ALONE, BASE, FEWER, PREDICTED, TRAINED, TRUNCATED, Point
from kvjax.typing import JsonObject

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABELS = {
    BASE: "whole prompt in the base", TRUNCATED: "newest part of the prompt", FEWER: "base without layers",
    ALONE: "auxiliary alone, trained", PREDICTED: "KV prediction",
}  # fmt: skip
MARKERS = {BASE: "*", TRUNCATED: "s", FEWER: "x", ALONE: "^", PREDICTED: "o"}
HIGHEST = 12  # times the base's perplexity; what is higher stands at this height, with its value
Curve = Sequence[tuple[int, dict[str, float]]]  # of each evaluation, the step and the losses by name


def prediction_plot(points: Sequence[Point], curve: Curve, variants: Sequence[str], weights: str) -> bytes:
    """Draws perplexity by the FLOPs of a prompt, and the held-out loss by step.

    Args:
      points: what was measured in the end.
      curve: what was measured on the way.
      variants: the auxiliary models.
      weights: the digest of the base's weights.
    """
    figure, axes = plots.new_figure(2, figsize=(11, 4.5), width_ratios=(1.4, 1))
    first, second = axes[0]
    kinds = [kind for kind in LABELS if any(each.kind == kind for each in points)]
    colors = plots.colors([kind for kind in kinds if kind != BASE]) | {BASE: plots.FULL_COLOR}
    base = next(each for each in points if each.kind == BASE)
    top = HIGHEST * float(np.exp(np.mean(base.nats_by_window)))
    for kind in kinds:
        own = sorted((each for each in points if each.kind == kind), key=lambda each: each.flops)
        x = [each.flops / 1e9 for each in own]
        y = [float(np.exp(np.mean(each.nats_by_window))) for each in own]
        # Models of different layers are no line.
        line, shown = "-" if kind == TRUNCATED else "", np.minimum(y, top)
        first.plot(x, shown, marker=MARKERS[kind], ls=line, color=colors[kind], label=LABELS[kind])
        for each, flops, height, perplexity in zip(own, x, shown, y, strict=True):
            text = each.name if perplexity <= top else f"{each.name}: {perplexity:,.0f}"
            offset = (0, -15) if kind == TRUNCATED else (4, 4)
            if kind != BASE:
                first.annotate(
                    text, (flops, height), offset, textcoords="offset points", fontsize=7, color=colors[kind],
                    ha="center" if kind == TRUNCATED else "left",
                )  # fmt: skip
    first.set_yscale("log")
    first.margins(0.1, 0.08)
    _plain_ticks(first)
    plots.style(first, "Perplexity of the tokens after the prompt", "GFLOPs of a prompt")
    first.legend(fontsize=8, frameon=False)
    _curves(second, curve, variants, float(np.mean(base.nats_by_window)), "base")
    return plots.png(figure, weights)


def augmentation_plot(cases: Sequence[JsonObject], curve: Curve, variants: Sequence[str], weights: str) -> bytes:
    """Draws perplexity by the distance from the point, and the held-out loss by step.

    Args:
      cases: from `experiments.tuning.reuse_measures.augmentation_points`.
      curve: what was measured on the way.
      variants: the numbers of input vectors.
      weights: the digest of the model's weights.
    """
    figure, axes = plots.new_figure(2, figsize=(11, 4.5), width_ratios=(1.4, 1))
    first, second = axes[0]
    colors = plots.colors(variants)
    for case in cases:
        nats = case["nats_by_distance"]
        color = colors.get(str(case["latents"]), plots.FULL_COLOR)
        style = "-" if case["how"] == TRAINED or not case["latents"] else ":"
        first.plot(range(1, len(nats) + 1), np.exp(nats), style, marker=".", color=color, label=case["name"])
    first.set_yscale("log")
    _plain_ticks(first)
    plots.style(first, "Perplexity by distance from the point", "tokens after the point")
    first.legend(fontsize=8, frameon=False)
    _curves(second, curve, variants, float(np.mean(cases[0]["nats_by_window"])), "unchanged")
    return plots.png(figure, weights)


def _plain_ticks(axes: "Axes") -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _curves(axes: "Axes", curve: Curve, variants: Sequence[str], level: float, label: str) -> None:
    colors = plots.colors(variants)
    for name in variants:
        axes.plot(
            [step for step, _ in curve], [own[name] for _, own in curve], marker=".", color=colors[name], label=name
        )
    ends = [curve[0][0], curve[-1][0]]
    axes.plot(ends, [level, level], color=plots.FULL_COLOR, ls="--", label=label)
    plots.style(axes, "Held-out loss in training, nats", "steps")
    axes.legend(fontsize=8, frameon=False)
