"""Tables, plots and Markdown that runs and sweeps share."""

import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from tabulate import tabulate

from experiments.measure import Measurement

Row = dict[str, Any]
FULL_COLOR = "#555555"
#: Okabe and Ito's colours, told apart by colour-blind readers too.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
NONE = "-"


def show_budget(row: Row) -> str:
    """The budget and the slots that heads hold: ``20 % (51)``, ``256``, ``51 to 895``, ``all (895)``.

    A policy that keeps every token and lets a query read some of them has ``all (895), 20 % read``.
    """
    least, most, budget = row["least_slots"], row["slots"], row["budget"]
    slots = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    share = f"{100 * budget:g} %" if isinstance(budget, float) else None
    if row["keeps_all"]:
        read = share or (f"{budget:,}" if isinstance(budget, int) else "part")
        return f"all ({slots})" if budget is None else f"all ({slots}), {read} read"
    return f"{share} ({slots})" if share else slots


def show_bytes(count: float) -> str:
    """A number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def cells(row: Row) -> dict[str, str]:
    """One measurement as a person reads it."""
    until = row["same_until"]
    return {
        "policy": row["policy"],
        "budget (slots)": show_budget(row),
        "perplexity": _number(row["perplexity"], ",.2f" if (row["perplexity"] or 0) < 1000 else ",.0f"),
        **{task: f"{100 * share:.0f} %" for task, share in row.get("recall", {}).items()},
        "agrees with full": NONE if row["agreement"] is None else f"{100 * row['agreement']:.1f} %",
        "first differs after": NONE if until is None else f"{until:.1f} of {row['new_tokens']}",
        "prefill tok/s": _number(row["prefill_tokens_per_second"], ",.0f"),
        "decode tok/s": _number(row["decode_tokens_per_second"], ",.0f"),
        "KV held": show_bytes(row["kv_bytes"]),
        "of full": f"{100 * row['kv_bytes'] / row['full_kv_bytes']:.1f} %",
    }


def table(rows: Sequence[dict[str, str]], style: str = "simple") -> str:
    """Text columns left, numbers right. Styles: tabulate's, e.g. ``simple`` or ``github``."""
    if not rows:
        return "(nothing)"
    text = {"policy", "error", "model"}
    align = ["left" if name in text else "right" for name in rows[0]]
    return tabulate(rows, headers="keys", tablefmt=style, colalign=align, disable_numparse=True)


def colors(names: Sequence[str]) -> dict[str, str]:
    """A colour for each policy; the full cache is grey."""
    others = [name for name in dict.fromkeys(names) if name != "full"]
    return {"full": FULL_COLOR} | {name: COLORS[i % len(COLORS)] for i, name in enumerate(others)}


def new_figure(columns: int, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes [1, columns], drawn without a screen; matplotlib loads only when something is drawn."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width_ratios = options.pop("width_ratios", None)
    figure = Figure(layout="constrained", **options)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns, squeeze=False, width_ratios=width_ratios)


def style(axes: Any, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=11, pad=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)


def png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    # No date and no version in the file: equal results are equal bytes.
    figure.savefig(buffer, format="png", dpi=150, metadata={"Software": None})
    return buffer.getvalue()


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Moves ascending places apart until each is `gap` from the next, as little as possible in the mean."""
    groups: list[list[float]] = []  # each [mean of its places, how many]

    def top_and_bottom(below: list[float], above: list[float]) -> tuple[float, float]:
        return below[0] + (below[1] - 1) * gap / 2, above[0] - (above[1] - 1) * gap / 2

    for place in places:
        groups.append([place, 1])
        while len(groups) > 1:
            top, bottom = top_and_bottom(groups[-2], groups[-1])
            if bottom - top >= gap:
                break
            mean, count = groups.pop()
            total = groups[-1][1] + count
            groups[-1] = [(groups[-1][0] * groups[-1][1] + mean * count) / total, total]
    return [mean + (i - (count - 1) / 2) * gap for mean, count in groups for i in range(int(count))]


def label_lines(axes: Any, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names each line at its right end instead of in a legend, moved apart where they would touch.

    Args:
      ends: x, y, text and colour of each.
    """
    axes.figure.canvas.draw()
    to_pixels, gap = axes.transData.transform, 11 * axes.figure.dpi / 72
    ordered = sorted(ends, key=lambda end: end[1])
    heights = spread([to_pixels((x, y))[1] for x, y, *_ in ordered], gap)
    for (x, y, text, color), height in zip(ordered, heights, strict=True):
        offset = (height - to_pixels((x, y))[1]) * 72 / axes.figure.dpi
        axes.annotate(
            text, (x, y), (6, offset), textcoords="offset points", va="center", color=color, fontsize=9, clip_on=False,
            annotation_clip=False,
        )  # fmt: skip


def run_plot(measurements: Sequence[Measurement]) -> bytes:
    """A PNG: what a policy costs in perplexity as the continuation grows, and the cache that each one holds.

    Perplexities of one text under two policies differ far less than those of two lengths of it, so they are shown
    relative to the full cache's where that was measured.
    """
    scored = {m.policy: np.asarray(m.logprobs, np.float64) for m in measurements if m.logprobs is not None}
    color = colors([m.policy for m in measurements])
    recalled = [m for m in measurements if m.recall]
    ratios = [1.5] * bool(scored) + [1.3] * bool(recalled) + [1.0]
    figure, panels = new_figure(len(ratios), figsize=(1.2 + 3.3 * sum(ratios), 3.6), width_ratios=ratios)
    figure.get_layout_engine().set(wspace=0.08)
    if scored:
        _loss_panel(panels[0, 0], scored, color)
    if recalled:
        _recall_panel(panels[0, -2], recalled, color)
    axes = panels[0, -1]
    labels = [m.policy for m in measurements]
    share = [100 * m.kv_bytes / m.full_kv_bytes for m in measurements]
    style(axes, "Keys and values held while decoding", "% of the full cache")
    axes.barh(range(len(share)), share, color=[color[label] for label in labels], height=0.6)
    for i, (value, measurement) in enumerate(zip(share, measurements, strict=True)):
        axes.text(value + 2, i, f"{value:.0f} %  ({show_bytes(measurement.kv_bytes)})", va="center", fontsize=9)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlim(0, 100)
    axes.set_ylim(len(share) - 0.4, -0.6)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    return png(figure)


def _loss_panel(axes: Any, scored: dict[str, np.ndarray], color: dict[str, str]) -> None:
    """Perplexity of the first 1, 2, ... tokens of the continuation."""
    count = next(iter(scored.values())).shape[1]
    x = np.arange(1, count + 1)
    mean = {name: np.cumsum(-logprobs.mean(axis=0)) / x for name, logprobs in scored.items()}
    relative = "full" in mean and len(mean) > 1
    if relative:
        style(axes, "Perplexity so far, against the full cache", "tokens after the prompt", "% above the full cache's")
        lines = {name: 100 * np.expm1(loss - mean["full"]) for name, loss in mean.items()}
    else:
        style(axes, "Perplexity so far", "tokens after the prompt", "perplexity")
        lines = {name: np.exp(loss) for name, loss in mean.items()}
    for name, y in lines.items():
        dashes = (0, (4, 3)) if relative and name == "full" else "-"
        axes.plot(x, y, color=color[name], lw=1.2 if name == "full" else 1.8, ls=dashes, zorder=2 + (name != "full"))
    axes.set_xlim(1, max(count, 2))
    axes.margins(y=0.1)
    axes.grid(axis="y", color="#e5e5e5", lw=0.8)
    label_lines(axes, [(x[-1], y[-1], name, color[name]) for name, y in lines.items()])


def _recall_panel(axes: Any, measurements: Sequence[Measurement], color: dict[str, str]) -> None:
    """Exact matches by task, a bar a policy."""
    tasks = list(measurements[0].recall)
    height = 0.8 / len(measurements)
    style(axes, "Recalled from far back", "% answered exactly")
    for i, measurement in enumerate(measurements):
        for place, share in enumerate(measurement.recall.values()):
            y = place + (i - (len(measurements) - 1) / 2) * height
            axes.barh(y, 100 * share, height=0.92 * height, color=color[measurement.policy])
            axes.text(100 * share + 1.5, y, f"{measurement.policy} {100 * share:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(tasks)), [task.replace("_", " ") for task in tasks])
    axes.set_xlim(0, 118)
    axes.set_xticks(range(0, 101, 25))
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def sweep_plot(points: Sequence[Row], quality: str) -> bytes:
    """A PNG of quality against budget, a line a policy, the full cache dashed.

    Args:
      points: each with ``label`` (its line), ``x``, ``y``, ``full`` (the full cache's quality or None), and in the
        first one ``x_name`` (the axis).
      quality: ``perplexity`` or ``agreement``.
    """
    figure, panels = new_figure(1, figsize=(7, 4.2))
    axes = panels[0, 0]
    title, unit = {
        "perplexity": ("Perplexity against budget", "perplexity (lower is better)"),
        "agreement": ("Agreement with the full cache against budget", "greedy tokens equal, %"),
    }[quality]
    style(axes, title, points[0]["x_name"], unit)
    labels = list(dict.fromkeys(point["label"] for point in points))
    color, ends = colors(labels), []
    for label in labels:
        line = sorted((point["x"], point["y"]) for point in points if point["label"] == label)
        xs, ys = zip(*line, strict=True)
        axes.plot(xs, ys, "o-", color=color[label], lw=1.8, ms=5.5, mec="white", mew=0.8, clip_on=False, zorder=3)
        ends.append((xs[-1], ys[-1], label, color[label]))
    full = {point["full"] for point in points if point["full"] is not None}
    for value in full:
        axes.axhline(value, color=FULL_COLOR, lw=1.2, ls=(0, (4, 3)), zorder=1)
    axes.margins(y=0.12)
    axes.grid(axis="y", color="#e5e5e5", lw=0.8)
    right = max(point["x"] for point in points)
    axes.set_xlim(0, right)
    if quality == "perplexity" and max(point["y"] for point in points) > 3 * min(point["y"] for point in points):
        axes.set_yscale("log")
        for set_formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            set_formatter(lambda value, place: f"{value:g}")
    ends += [(right, value, "full cache", FULL_COLOR) for value in full]
    label_lines(axes, ends)
    return png(figure)


def markdown(title: str, paragraphs: Sequence[str], rows: Sequence[dict[str, str]], plot: str | None = None) -> str:
    """A short report: title, what was done, the table, the plot."""
    parts = [f"# {title}", *paragraphs, table(rows, "github")]
    return "\n\n".join(parts + ([f"![{title}]({plot})"] if plot else [])) + "\n"


#: What the columns mean, for reports.
LEGEND = (
    "*Perplexity*: of the text after the prompt, by teacher forcing, the cache evolving as in generation. *Agrees with "
    "full*: greedy tokens equal to the full cache's at the same place; *first differs after*: the mean number before "
    "the first that is not. *Slots*: live ones of a KV head at the end, the fewest to the most where heads or layers "
    "differ. *tok/s*: over all rows, the fastest repetition, compilation left out. *KV held*: keys and values "
    "allocated while decoding: the budget, and one slot for the newest token where slots are dense; *of full*: their "
    "share of the full cache's. A recall task's column: prompts of it that greedy generation answers exactly."
)
