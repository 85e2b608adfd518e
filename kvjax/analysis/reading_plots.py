"""The figures of `selected`, `input_cosine` and `skew_effect`; users find them in `kvjax.analysis.plots`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.analysis.drawing import draw_lines, make_figure
from kvjax.analysis.layer_inputs import InputCosine
from kvjax.analysis.selection_quality import Selected, SkewEffect, mean_by_layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Labels of the fields of `Selected`, and factors.
PANELS = {
    "number": ("slots chosen", 1),
    "share": ("slots read of those held (%)", 100),
    "overlap": ("chosen slots among the best (%)", 100),
    "mass": ("attention covered (%)", 100),
}
#: Labels of the fields of `InputCosine`.
STREAMS = {
    "attention_input": "attention input, with the next attention input",
    "block_input": "block input, with the next block input",
    "attention_output": "attention output, with the next block input",
    "mlp_output": "MLP output, with the next block input",
}


def plot_selected(results: Selected | Mapping[str, Selected]) -> "Figure":
    """The size of a choice and how good it is, by query; layers that read everything are left out.

    Args:
      results: of `selected`, one line per layer; or a dict of them, one line per spec.
    """
    figure, panels = make_figure(2, rows=2)
    for axes, (field, (label, factor)) in zip(panels.flat, PANELS.items(), strict=True):
        title = draw_lines(axes, _field(results, field, factor), label)
        axes.set_ylim(0, 103 if field in ("overlap", "mass") else 1.05 * axes.get_ylim()[1])
    for axes in panels[0]:
        axes.set_xlabel("")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(), title=title, loc="outside right center", frameon=False,
        fontsize="small",
    )  # fmt: skip
    return figure


def _field(results: object, field: str, factor: int) -> Any:
    """A field of a result, or of each result of a dict, as float32; NaN where there is none."""
    if isinstance(results, Mapping):
        return {name: _field(result, field, factor) for name, result in results.items()}
    values = getattr(results, field)
    return np.where(values < 0, np.nan, factor * values.astype(np.float32))


def plot_input_cosine(result: InputCosine) -> "Figure":
    """Cosine similarity of a layer's inputs with those of the layer before and what it added (InfiniGen, Table 1).

    Args:
      result: of `input_cosine`; lines are means over rows.
    """
    figure, axes = make_figure()
    for field, label in STREAMS.items():
        # [L - 1]
        line = getattr(result, field)[1:].mean(axis=1)
        axes.plot(np.arange(1, 1 + len(line)), line, "o-", label=label)
    axes.set(xlabel="layer", ylabel="cosine similarity with the layer before", ylim=(min(0, axes.get_ylim()[0]), 1.04))
    axes.xaxis.get_major_locator().set_params(integer=True)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize="small")
    return figure


def plot_skew_effect(result: SkewEffect) -> "Figure":
    """Overlap and covered attention by the share of columns, with and without a skew (InfiniGen, Fig. 13).

    Args:
      result: of `skew_effect`; bold lines are means over the layers that choose, thin ones are of single layers, which
        are named at their ends.
    """
    figure, panels = make_figure(2)
    for axes, field in zip(panels, ("overlap", "mass"), strict=True):
        for kind, (label, color) in enumerate((("without a skew", "C0"), ("with a skew", "C1"))):
            # [R, L]
            values = 100 * getattr(result, field)[:, kind]
            for layer in np.flatnonzero(~np.isnan(values).all(axis=0)):
                axes.plot(result.ratios, values[:, layer], color=color, alpha=0.4, linewidth=0.8)
                if kind:
                    axes.annotate(
                        f"layer {layer}", (result.ratios[-1], values[-1, layer]), (5, 0), textcoords="offset points",
                        va="center", fontsize="x-small", color="gray", annotation_clip=False,
                    )  # fmt: skip
            axes.plot(result.ratios, mean_by_layer(values), "o-", color=color, label=f"{label}, mean")
        axes.set(xlabel="share of the columns", ylabel=PANELS[field][0], ylim=(None, 100))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    return figure
