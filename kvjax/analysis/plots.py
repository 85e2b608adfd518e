"""One figure for each measure of `kvjax.analysis`; matplotlib is imported only when something is drawn.

Every function takes its measure's result and returns a matplotlib Figure: ``figure.savefig("sparsity.png")``. Where a
measure compares a policy with the full cache, a dict of results by policy name draws one line per policy, the mean over
layers, rows and heads; a single result draws one line per layer.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvjax.analysis.compare import MissRate, Retained
from kvjax.analysis.drawing import Results, draw_lines, line_means, make_figure, ordered_colors, side_legend, thinned
from kvjax.analysis.full_cache import AccumulatedAttention, AttentionStd
from kvjax.analysis.heads import RetrievalScores
from kvjax.analysis.reading_plots import plot_input_cosine as plot_input_cosine
from kvjax.analysis.reading_plots import plot_selected as plot_selected
from kvjax.analysis.reading_plots import plot_skew_effect as plot_skew_effect

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PIXELS = 400  # of a retained-position map, at most


def plot_sparsity(sparsity: np.ndarray, *, threshold: float = 0.01) -> "Figure":
    """Sparsity by layer (H2O, Fig. 2 a): the mean over heads and rows, and their range.

    Args:
      sparsity: [L, B, H], the result of `sparsity`.
      threshold: the threshold of the measurement.
    """
    figure, axes = make_figure()
    layers = np.arange(len(sparsity))
    heads = 100 * sparsity.reshape(len(sparsity), -1)
    mean = heads.mean(axis=1)
    reach = np.abs(np.stack([heads.min(axis=1), heads.max(axis=1)]) - mean)
    axes.errorbar(layers, mean, reach, fmt="o-", capsize=3, label="mean, range over heads and texts")
    axes.set(ylim=(0, 100), xlabel="layer", ylabel=f"attention below {100 * threshold:g} % of its row's maximum (%)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right", frameon=False)
    return figure


def plot_accumulated_attention(result: AccumulatedAttention) -> "Figure":
    """Accumulated attention by rank on logarithmic axes, one line per layer (H2O, Fig. 2 b); a power law is a line."""
    figure, axes = make_figure()
    rank = np.arange(1, result.mass.shape[-1] + 1)
    for layer, color in enumerate(ordered_colors(len(result.mass))):
        # [B, H, T]; a rank counts the rows that are long enough
        mass = np.where(result.mass[layer] > 0, result.mass[layer], np.nan)
        exponent = float(np.nanmean(result.exponent[layer]))
        axes.plot(rank, line_means(mass[None])[0], color=color, label=f"{layer} (a = {exponent:.2f})")
    axes.set(xscale="log", yscale="log", xlabel="rank of the token", ylabel="accumulated attention (probability)")
    side_legend(axes, "layer, mass ~ rank$^{-a}$")
    return figure


def plot_keys_for_mass(counts: np.ndarray, *, layers: Iterable[int] | None = None, share: float = 0.9) -> "Figure":
    """Histogram of the number of keys that hold the share, over queries and heads (InfiniGen, Fig. 5).

    Args:
      counts: [L, B, H, T], the result of `keys_for_mass`.
      layers: the layers to draw; None = first, middle and last.
      share: the share of the measurement.
    """
    last = len(counts) - 1
    shown = sorted({0, last // 2, last}) if layers is None else list(layers)
    figure, panels = make_figure(len(shown))
    # Bins of whole keys, of equal width.
    width = -(-int(counts.max()) // 40)
    edges = np.arange(0.5, counts.max() + 0.5 + width, width)
    for axes, layer in zip(np.atleast_1d(panels), shown, strict=True):
        needed = counts[layer][counts[layer] > 0]
        axes.hist(needed, edges, weights=np.full(needed.shape, 100 / needed.size), color="C0")
        axes.axvline(
            np.median(needed), color="black", linewidth=1, linestyle="--", label=f"median {np.median(needed):g}"
        )
        axes.set(title=f"layer {layer}", xlabel=f"keys for {share:g} of the attention")
        axes.legend(frameon=False)
    np.atleast_1d(panels)[0].set_ylabel("queries (%)")
    return figure


def plot_retrieval_scores(scores: RetrievalScores) -> "Figure":
    """Induction and echo scores of every query head, one layer per line: which heads look far back (RazorAttention)."""
    figure, panels = make_figure(2)
    for axes, name in zip(panels, ("induction", "echo"), strict=True):
        image = axes.imshow(getattr(scores, name), vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set(title=name, xlabel="query head")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("layer")
    figure.colorbar(image, ax=panels, label="share of attention")
    return figure


def plot_attention_std(result: AttentionStd, *, layer: int = 0, row: int = 0) -> "Figure":
    """Standard deviation of the followed tokens by query, the mean over a layer's heads (RoCo, Fig. 3)."""
    figure, axes = make_figure()
    for index, color in enumerate(ordered_colors(len(result.positions))):
        std = result.trajectory[layer, row, :, index]
        x, y = thinned(line_means(std[None])[0])
        axes.plot(x, y, color=color, label=str(result.positions[index]))
    axes.set(
        title=f"layer {layer}", xlabel="position of the query (tokens)",
        ylabel="standard deviation of attention\nso far (probability)", ylim=(0, None),
    )  # fmt: skip
    side_legend(axes, "token")
    return figure


def plot_attention_cosine(results: Results) -> "Figure":
    """Cosine similarity with the full cache, by query (InfiniGen, Fig. 4); [L, B, H, T] or a dict of them."""
    return _similarity(results, "cosine similarity with\nthe full cache's attention")


def plot_jaccard(results: Results) -> "Figure":
    """Jaccard similarity of top tokens by query (RoCo, Fig. 2); [L, B, K, T] or a dict of them."""
    return _similarity(results, "Jaccard similarity with\nthe full cache's top tokens")


def plot_miss_rate(results: MissRate | Mapping[str, MissRate]) -> "Figure":
    """Shares of the full cache's top tokens, and of its attention, that are missed, by query."""
    figure, panels = make_figure(2)
    for axes, field, label in zip(
        panels, MissRate._fields, ("top tokens missed (%)", "attention missed (%)"), strict=True
    ):
        if isinstance(results, Mapping):
            title = draw_lines(axes, {name: 100 * getattr(result, field) for name, result in results.items()}, label)
        else:
            title = draw_lines(axes, 100 * getattr(results, field), label)
        axes.set_ylim(bottom=0)
    side_legend(panels[1], title)
    return figure


def plot_retained(result: Retained, *, layer: int = 0, row: int = 0, head: int = 0) -> "Figure":
    """Which tokens (horizontal) each query (vertical) saw, in one layer, row and KV head."""
    figure, axes = make_figure()
    length, prompt = int(result.lengths[row]), int(result.prompt[row])
    last_seen = result.last_seen[layer, row, head, :length]
    # A pixel shows the token and the query at its centre.
    pixels = min(length, PIXELS)
    shown = (np.arange(pixels) + 0.5) * length / pixels
    token = query = shown.astype(int)
    seen = (token <= query[:, None]) & (query[:, None] <= last_seen[token])
    image = np.where(token > query[:, None], np.nan, seen.astype(float))
    axes.imshow(
        image, extent=(0, length, length, 0), cmap="Blues", vmin=0, vmax=1.25, interpolation="nearest", aspect="equal"
    )
    axes.axhline(prompt, color="black", linewidth=1, linestyle="--", label="end of the prompt")
    axes.set(
        title=f"layer {layer}, KV head {head}", xlabel="position of the token (tokens)",
        ylabel="position of the query (tokens)",
    )  # fmt: skip
    axes.legend(loc="upper right", frameon=False)
    return figure


def _similarity(results: Results, label: str) -> "Figure":
    figure, axes = make_figure()
    title = draw_lines(axes, results, label)
    axes.set_ylim(top=1.005)
    side_legend(axes, title)
    return figure
