"""A plot of every benchmark's rows, labelled with units."""

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from experiments.peers import PEERS
from experiments.reports.plots import COLORS, FULL_COLOR, Row, label_lines, new_figure, png, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def draw(task: str, rows: Sequence[Row]) -> bytes:
    """A PNG of a task's rows."""
    return png(PLOTS[task](rows))


def _bars(axes: "Axes", rows: Sequence[Row], name: str, value: str, form: str = ".1f") -> None:
    """A bar a row, its value at the end: kvjax, its peers in a second colour, yardsticks grey."""
    values = [row[value] for row in rows]
    axes.barh(range(len(rows)), values, color=[_color(row[name]) for row in rows], height=0.6)
    for place, each in enumerate(values):
        axes.text(each + 0.01 * max(values), place, f"{each:,{form}}", va="center", fontsize=9)
    axes.set_yticks(range(len(rows)), [row[name] for row in rows])
    axes.set_xlim(0, 1.15 * (max(values) or 1))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)


def _color(side: str) -> str:
    if side.startswith(("limit", "copy")):
        return FULL_COLOR
    return COLORS[1] if side.startswith(tuple(PEERS)) else COLORS[0]


def _settings(rows: Sequence[Row], value: str, title: str, unit: str) -> "Figure":
    """Bars, a panel for every batch and context."""
    settings = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    count = max(sum((row["batch"], row["context"]) == each for row in rows) for each in settings)
    figure, panels = new_figure(len(settings), figsize=(7 * len(settings), 1.2 + 0.32 * count))
    for axes, setting in zip(panels[0], settings, strict=True):
        _bars(axes, [row for row in rows if (row["batch"], row["context"]) == setting], "side", value)
        style(axes, f"{title}, batch {setting[0]:,}, context {setting[1]:,}", unit)
    return figure


def _decode(rows: Sequence[Row]) -> "Figure":
    return _settings(rows, "ms/step", "Decoding", "milliseconds a step (median)")


def _prefill(rows: Sequence[Row]) -> "Figure":
    return _settings(rows, "ms/prompt", "Prefill", "milliseconds a prompt (median)")


def _first_use(rows: Sequence[Row]) -> "Figure":
    named = [{**row, "name": f"{row['side']}: {row['work']}"} for row in rows]
    figure, panels = new_figure(1, figsize=(9, 1.2 + 0.32 * len(rows)))
    _bars(panels[0, 0], named, "name", "process cpu s")
    style(panels[0, 0], "First use", "CPU seconds of a process")
    return figure


def _policies(rows: Sequence[Row]) -> "Figure":
    figure, panels = new_figure(1, figsize=(7, 1.2 + 0.32 * len(rows)))
    _bars(panels[0, 0], rows, "policy", "times h2o", ".2f")
    style(panels[0, 0], f"A decoding step on {rows[0]['slots']:,} slots", "time, h2o = 1")
    return figure


def _storages(rows: Sequence[Row]) -> "Figure":
    figure, panels = new_figure(1, figsize=(7, 1.2 + 0.32 * len(rows)))
    _bars(panels[0, 0], rows, "cache", "times dense", ".2f")
    style(panels[0, 0], "A decoding step", "time, dense slots read whole = 1")
    return figure


def _stream(rows: Sequence[Row]) -> "Figure":
    tenths = [row for row in rows if row["perplexity of the text"] is not None]
    x = [int(row["tokens"].split(" to ")[1].replace(",", "")) for row in tenths]
    figure, panels = new_figure(2, figsize=(10, 3.6))
    for axes, column, title, unit in (
        (panels[0, 0], "ms/token", f"Time a token in {rows[0]['slots']:,} slots", "milliseconds a token"),
        (panels[0, 1], "perplexity of the text", "The text, scored", "perplexity of a tenth"),
    ):
        y = [row[column] for row in tenths]
        axes.plot(x, y, "o-", color=COLORS[0])
        axes.set_ylim(0, 1.15 * max(y))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
        style(axes, title, "tokens so far", unit)
    return figure


def _memory(rows: Sequence[Row]) -> "Figure":
    columns = {
        "cache MB": "Cache held while decoding",
        "prefill MB": "Needed for a prompt, weights left out",
        "seen MB": "The process grew by",
    }
    names = [column for column in columns if any(row[column] is not None for row in rows)]
    sides = list(dict.fromkeys(row["side"] for row in rows))
    color = dict(zip(sides, itertools.cycle(COLORS), strict=False))
    figure, panels = new_figure(len(names), figsize=(5.5 * len(names), 3.8))
    figure.get_layout_engine().set(wspace=0.1)
    for axes, column in zip(panels[0], names, strict=True):
        ends = []
        for side in sides:
            line = [(row["context"], row[column]) for row in rows if row["side"] == side and row[column] is not None]
            if line:
                x, y = zip(*line, strict=True)
                axes.plot(x, y, "o-", color=color[side], ms=4)
                ends.append((x[-1], y[-1], side, color[side]))
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#e5e5e5", lw=0.8)
        axes.xaxis.set_major_formatter(lambda value, place: f"{value:,.0f}")
        style(axes, columns[column], "tokens of context", "MB")
        label_lines(axes, ends)
    return figure


def _kernels(rows: Sequence[Row]) -> "Figure":
    """Bytes a second of every shape."""
    shapes = list(dict.fromkeys((row["batch*heads"], row["slots"], row["head dim"]) for row in rows))
    figure, panels = new_figure(len(shapes), figsize=(5 * len(shapes), 2.8))
    for axes, shape in zip(panels[0], shapes, strict=True):
        own = [row for row in rows if (row["batch*heads"], row["slots"], row["head dim"]) == shape and row["GB/s"]]
        shown = [{"name": row["implementation"] + _with(row["statistics"]), "GB/s": row["GB/s"]} for row in own]
        _bars(axes, shown, "name", "GB/s")
        style(axes, f"{shape[0]:,} heads x {shape[1]:,} slots x {shape[2]}, {rows[0]['dtype']}", "GB/s (median)")
    return figure


def _with(statistics: str | None) -> str:
    return "" if statistics is None else ", no statistics" if statistics == "none" else f", {statistics}"


def _selections(rows: Sequence[Row]) -> "Figure":
    """Time against the context, a line for every cache."""
    figure, panels = new_figure(1, figsize=(7, 4))
    sides = list(dict.fromkeys(row["cache"] for row in rows))
    color = dict(zip(sides, itertools.cycle((FULL_COLOR, *COLORS)), strict=False))
    for side in sides:
        own = [(row["context"], row["ms/step"]) for row in rows if row["cache"] == side]
        form = "o--" if "host" in side else "o-"
        panels[0, 0].plot(*zip(*own, strict=True), form, color=color[side], ms=4, label=side)
    panels[0, 0].set_xscale("log", base=2)
    panels[0, 0].set_ylim(bottom=0)
    panels[0, 0].set_xticks([row["context"] for row in rows], [f"{row['context']:,}" for row in rows])
    panels[0, 0].legend(frameon=False, fontsize=8)
    style(panels[0, 0], f"Decoding, batch {rows[0]['batch']}", "tokens of context", "milliseconds a step (median)")
    return figure


def _products(rows: Sequence[Row]) -> "Figure":
    """Bytes a second, a panel for every kind of matrix and number of rows."""
    kinds = list(dict.fromkeys(row["matrices"] for row in rows))
    counts = list(dict.fromkeys(row["rows"] for row in rows))
    figure, panels = new_figure(len(kinds), figsize=(5 * len(kinds), 1.2 + 1.1 * len(counts)))
    for axes, kind in zip(panels[0], kinds, strict=True):
        own = [row for row in rows if row["matrices"] == kind]
        shown = [{"name": f"{row['side']}, {row['rows']}", "GB/s": row["GB/s"]} for row in own]
        _bars(axes, shown, "name", "GB/s")
        style(axes, kind, "GB/s (median), by form and rows")
    return figure


def _forms(rows: Sequence[Row]) -> "Figure":
    named = [row | {"side": f"{row['policy']}, {row['products']}"} for row in rows]
    return _settings(named, "ms/step", "Decoding, by form of products", "milliseconds a step (median)")


def _link(rows: Sequence[Row]) -> "Figure":
    """Time of the link, a panel for every figure."""
    names = [name for name in dict.fromkeys(row["figure"] for row in rows) if name]
    figure, panels = new_figure(len(names), figsize=(5 * len(names), 3.6))
    sides = list(dict.fromkeys(row["cache"] for row in rows))
    for axes, name in zip(panels[0], names, strict=True):
        own = [row for row in rows if row["figure"] == name]
        settings = list(dict.fromkeys((row["model"], row["batch"], row["tokens"]) for row in own))
        for place, side in enumerate(sides):
            at = [i + 0.2 * (place - 1.5) for i in range(len(settings))]
            times = [row["PCIe 3 ms"] for row in own if row["cache"] == side]
            axes.bar(at, times, width=0.18, color=COLORS[place], label=side)
        varied = [i for i in range(3) if len({setting[i] for setting in settings}) > 1] or [0]
        axes.set_xticks(
            range(len(settings)), ["\n".join(str(each[i]) for i in varied) for each in settings], fontsize=8
        )
        about = ", ".join(("model", "batch", "prompt + new tokens")[i] for i in varied)
        style(axes, f"Figure {name}", about, "milliseconds a step over PCIe 3 x16")
    panels[0, 0].legend(frameon=False, fontsize=8)
    return figure


def _device(rows: Sequence[Row]) -> "Figure":
    """Draws measurements, a panel for bytes and one for FLOPs; published ones in grey."""
    units = list(dict.fromkeys(row["unit"] for row in rows))
    figure, panels = new_figure(len(units), figsize=(6 * len(units), 2.4))
    for axes, unit in zip(panels[0], units, strict=True):
        own = [row for row in rows if row["unit"] == unit]
        shown = [{"name": row["work"], "rate": row["measured"]} for row in own]
        if own[0]["published"]:
            shown.append({"name": "limit, published", "rate": own[0]["published"]})
        _bars(axes, shown, "name", "rate")
        style(axes, "The device", f"{unit} (median)")
    return figure


def _transfers(rows: Sequence[Row]) -> "Figure":
    figure, panels = new_figure(1, figsize=(7, 1.2 + 0.32 * len(rows)))
    shown = [{"name": f"{row['direction']}, {row['MB']:,.0f} MB", "GB/s": row["GB/s"]} for row in rows]
    _bars(panels[0, 0], shown, "name", "GB/s")
    style(panels[0, 0], "Between device and host", "GB/s (median)")
    return figure


def _swap(rows: Sequence[Row]) -> "Figure":
    shown = [
        {"name": f"{row['policy']}, {row['context']:,} tokens, {way}", "GB/s": row[f"{way} GB/s"]}
        for row in rows
        for way in ("out", "in")
    ]
    figure, panels = new_figure(1, figsize=(8, 1.2 + 0.32 * len(shown)))
    _bars(panels[0, 0], shown, "name", "GB/s", ".2f")
    style(panels[0, 0], "A row to host memory and back", "GB/s (median)")
    return figure


def _shared(rows: Sequence[Row]) -> "Figure":
    sides = [
        {"name": f"{side}, {row['rows']} rows behind {row['text']:,} tokens", "ms": row[f"ms a step, {side}"]}
        for row in rows
        for side in ("copies", "shared")
    ]
    figure, panels = new_figure(1, figsize=(8, 1.2 + 0.32 * len(sides)))
    _bars(panels[0, 0], sides, "name", "ms")
    style(panels[0, 0], "Rows that follow one text", "milliseconds a step")
    return figure


def _speculate(rows: Sequence[Row]) -> "Figure":
    columns = {"speed-up": "measured", "speed-up by steps": "by its steps", "speed-up, planned": "planned"}
    shown = [
        {"name": f"{row['draft']}, γ={row['γ']}, {row['context']:,} tokens, {about}", "times": row[column]}
        for row in rows
        for column, about in columns.items()
    ]
    figure, panels = new_figure(1, figsize=(8, 1.2 + 0.32 * len(shown)))
    _bars(panels[0, 0], shown, "name", "times", ".2f")
    style(panels[0, 0], "Rounds of drafts", "times as fast as plain decoding")
    return figure


def _equality(rows: Sequence[Row]) -> "Figure":
    shown = []
    for draft, sampler in dict.fromkeys((row["draft"], row["sampler"]) for row in rows):
        own = [row for row in rows if (row["draft"], row["sampler"]) == (draft, sampler)]
        name = f"{draft}, {sampler.partition('(')[0]}"
        shown.append({"name": name, "differ": sum(row["rows that differ"] for row in own)})
    figure, panels = new_figure(1, figsize=(8, 1.2 + 0.32 * len(shown)))
    _bars(panels[0, 0], shown, "name", "differ", ".0f")
    style(panels[0, 0], "Rounds of drafts against plain decoding", "rows that differ, of all numbers of drafts")
    return figure


def _acceptance(rows: Sequence[Row]) -> "Figure":
    drafts = list(dict.fromkeys(row["draft"] for row in rows))
    color = dict(zip(drafts, itertools.cycle(COLORS), strict=False))
    figure, panels = new_figure(1, figsize=(7, 3.8))
    ends = []
    for draft in drafts:
        line = [(row["slots"], row["chance"]) for row in rows if row["draft"] == draft]
        panels[0, 0].plot(*zip(*line, strict=True), "o-", color=color[draft])
        ends.append((*line[-1], draft, color[draft]))
    panels[0, 0].set_xscale("log", base=2)
    style(panels[0, 0], f"Drafts after {rows[0]['context']:,} tokens", "slots", "chance that a draft is accepted")
    label_lines(panels[0, 0], ends)
    return figure


def _lm_eval(rows: Sequence[Row]) -> "Figure":
    named = [row | {"name": f"{row['task']}, {row['shots']} shots, {row['side']}"} for row in rows]
    value, unit = "times as fast", "times as fast as --model hf (median)"
    if value not in rows[0]:
        value, unit = "seconds", "seconds of an evaluation (median)"
    figure, panels = new_figure(1, figsize=(8, 1.2 + 0.32 * len(rows)))
    _bars(panels[0, 0], named, "name", value, ".2f")
    style(panels[0, 0], f"lm_eval, {rows[0]['documents']:,} questions, batch {rows[0]['batch']:,}", unit)
    return figure


def _answers(rows: Sequence[Row]) -> "Figure":
    value, unit = "answers equal", f"answers equal to kvpress's, of {rows[0]['questions']:,}"
    if value not in rows[0]:
        value, unit = "% right, kvjax", "% of answers right"
    figure, panels = new_figure(1, figsize=(8, 1.2 + 0.32 * len(rows)))
    _bars(panels[0, 0], rows, "cache", value, ".0f")
    style(panels[0, 0], f"Needles, {rows[0]['budget']:.0%} of the context", unit)
    return figure


def _gguf(rows: Sequence[Row]) -> "Figure":
    named = [row | {"side": f"{row['side']}, {row['work']}"} for row in rows]
    return _settings(named, "tokens/s", "A GGUF file", "tokens a second (median)")


def _serve(rows: Sequence[Row]) -> "Figure":
    figure, panels = new_figure(1, figsize=(7, 1.2 + 0.32 * len(rows)))
    _bars(panels[0, 0], rows, "side", "tokens/s")
    style(
        panels[0, 0], f"{rows[0]['requests']:,} requests, {rows[0]['rows']:,} rows", "useful tokens a second (median)"
    )
    return figure


PLOTS: dict[str, Callable[[Sequence[Row]], Any]] = {
    "decode": _decode,
    "policies": _policies,
    "storages": _storages,
    "selections": _selections,
    "products": _products,
    "first_use": _first_use,
    "forms": _forms,
    "link": _link,
    "stream": _stream,
    "prefill": _prefill,
    "memory": _memory,
    "kernels": _kernels,
    "device": _device,
    "transfers": _transfers,
    "swap": _swap,
    "gguf": _gguf,
    "lm_eval": _lm_eval,
    "serve": _serve,
    "prefixes": _serve,
    "shared": _shared,
    "speculate": _speculate,
    "equality": _equality,
    "acceptance": _acceptance,
    "answers": _answers,
}
