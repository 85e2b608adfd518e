"""Sweeps over storages: quality against the bytes that a cache holds, and what each costs against exact slots."""

import math
import statistics
from collections.abc import Sequence

from experiments.config import DENSE, JOINED
from experiments.reports import plots, tables
from experiments.sweeps import seeds, table

#: One for each storage of a plot, from the largest to the smallest; a policy has a marker.
STORAGE_COLORS = (
    "#000000", "#0072B2", "#56B4E9", "#009E73", "#8FBC3F", "#E69F00", "#D55E00", "#A0522D", "#CC79A7", "#9467BD",
    "#7F7F7F", "#17BECF", "#1A3A5C", "#5B2A86", "#B8860B", "#2E8B57", "#FF9896", "#AEC7E8", "#98DF8A", "#C5B0D5",
    "#8C1C13", "#BCBD22", "#556B2F", "#F0A0FF", "#3DDC97", "#4B5320", "#FFD166", "#A3A3C2",
)  # fmt: skip
MARKERS = "os^Dv<>pX*P"
LEGEND_ROWS = 20  # of a column


def points(found: Sequence[tables.Row], quality: str) -> list[tables.Row]:
    """Returns the points of the plot.

    Args:
      found: results of a sweep that were measured.
      quality: ``perplexity`` or ``agreement``.

    Returns:
      ``storage``, ``policy`` and ``bytes`` of each, and ``y``, ``error`` and ``interval``, see
      `experiments.sweeps.table.height`.
    """
    rows = [(group, [tables.own_row(result) for result in group]) for group in seeds.groups(found)]
    done = [(group, own, seeds.mean(own)) for group, own in rows]
    many = len({row["budget"] for *_, row in done if row["budget"] is not None}) > 1
    shown = []
    for group, own, row in done:
        if row[quality] is None:
            continue
        result = group[0]
        name = result.get("label", result["config"]["policy"]["name"]).partition(JOINED)[0]
        policy = f"{name}, {tables.show_budget(row)}" if many and row["budget"] is not None else name
        place = {"storage": result["config"]["storage"], "policy": policy, "bytes": row["kv_bytes"]}
        shown.append(place | table.height(group, own, quality))
    return shown


def costs(found: Sequence[tables.Row]) -> list[tables.Row]:
    """Returns the costs of storages against exact slots on the same texts, where `dense` was swept too.

    Differences are taken text by text (seed by seed), so that what texts differ in does not count.

    Args:
      found: results of a sweep that were measured.

    Returns:
      For each storage and whatever else was swept but seeds: ``swept``; ``texts``, their number; ``kv_bytes``, and
      ``of_exact``, the share of the exact slots' bytes; and by what quality changes, {"mean", "error"} each:
      ``perplexity``, as a share, and for each task of ``recall``, and ``all`` of them, the share of prompts. ``mean``
      of perplexity is that over all tokens; ``error`` is the standard error over texts, None of one text.
    """
    found = [result for result in found if "storage" in result["swept"]]
    dense = {repr(_but_storage(each)): tables.own_row(each) for each in found if each["swept"]["storage"] == DENSE}
    made = []
    for group in seeds.groups(found):
        pairs = [
            (tables.own_row(result), dense[repr(_but_storage(result))])
            for result in group
            if result["swept"]["storage"] != DENSE and repr(_but_storage(result)) in dense
        ]
        if not pairs:
            continue
        swept = {path: value for path, value in group[0]["swept"].items() if path != seeds.SEED}
        held, exact = pairs[0]
        row: tables.Row = {"swept": swept, "texts": len(pairs), "kv_bytes": held["kv_bytes"]}
        row["of_exact"] = held["kv_bytes"] / exact["kv_bytes"]
        if held["perplexity"] is not None:
            change = _mean([math.log(held["perplexity"] / exact["perplexity"]) for held, exact in pairs])
            row["perplexity"] = change | {"mean": math.expm1(change["mean"])}
        if held.get("recall"):
            changes = [
                {task: share - exact["recall"][task] for task, share in held["recall"].items()} for held, exact in pairs
            ]
            changes = [each | {"all": statistics.fmean(each.values())} for each in changes]
            row["recall"] = {task: _mean([each[task] for each in changes]) for task in changes[0]}
        made.append(row)
    return made


def cost_cells(row: tables.Row) -> dict[str, str]:
    """A row of `costs` as a person reads it: +1.35 ± 0.71 %."""

    def cell(change: tables.Row, form: str) -> str:
        error = "" if change["error"] is None else f" ± {100 * change['error']:{form}}"
        return f"{100 * change['mean']:+{form}}{error} %"

    shown = {path.removesuffix(".name").split(".")[-1]: str(value) for path, value in row["swept"].items()}
    shown |= {"texts": str(row["texts"]), "bytes, of exact": f"{100 * row['of_exact']:.1f} %"}
    if "perplexity" in row:
        shown["perplexity"] = cell(row["perplexity"], ".2f")
    return shown | {task: cell(change, ".1f") for task, change in row.get("recall", {}).items()}


def _but_storage(result: tables.Row) -> list[tuple[str, object]]:
    """Returns the other fields that were swept, seeds too."""
    return [item for item in result["swept"].items() if item[0] != "storage"]


def _mean(values: Sequence[float]) -> tables.Row:
    spread = seeds.deviation(values)
    return {"mean": statistics.fmean(values), "error": None if spread is None else spread / math.sqrt(len(values))}


def plot(points: Sequence[tables.Row], quality: str) -> bytes:
    """A PNG of quality against the bytes held: a colour a storage, a marker a policy.

    A line joins the caches that no other one beats in both.

    Args:
      points: see `points`.
      quality: ``perplexity`` or ``agreement``.
    """
    held: dict[str, list[float]] = {}
    for point in points:
        held.setdefault(point["storage"], []).append(point["bytes"])
    storages = sorted(held, key=lambda name: -max(held[name]))
    policies = list(dict.fromkeys(point["policy"] for point in points))
    color = {name: STORAGE_COLORS[i % len(STORAGE_COLORS)] for i, name in enumerate(storages)}
    marker = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(policies)}
    columns = 1 + (len(storages) + len(policies)) // LEGEND_ROWS
    figure, panels = plots.new_figure(1, figsize=(6.5 + 2 * columns, 5.5))
    axes = panels[0, 0]
    unit = {"perplexity": "perplexity (lower is better)", "agreement": "greedy tokens equal, %"}[quality]
    plots.style(axes, f"{unit.split(' (')[0].capitalize()} against bytes", "keys and values held (MB)", unit)
    for point in points:
        if (bar := plots.error_bar(point)) is not None:
            axes.errorbar(
                point["bytes"] / 1e6, point["y"], bar, fmt="none", color=color[point["storage"]], lw=1, capsize=2,
                zorder=2,
            )  # fmt: skip
        axes.plot(
            point["bytes"] / 1e6, point["y"], marker[point["policy"]], color=color[point["storage"]], ms=7,
            mec="white", mew=0.8, zorder=3,
        )  # fmt: skip
    front = frontier([(point["bytes"] / 1e6, point["y"]) for point in points], smaller=quality == "perplexity")
    axes.plot(*zip(*front, strict=True), "-", color=plots.FULL_COLOR, lw=1, zorder=2)
    axes.set_xscale("log")
    if quality == "perplexity" and max(point["y"] for point in points) > 3 * min(point["y"] for point in points):
        axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, place: f"{value:g}")
        axis.set_minor_formatter(lambda value, place: f"{value:g}")
    axes.tick_params(axis="both", which="minor", labelsize=7)
    axes.grid(color="#e5e5e5", lw=0.8)
    of_storages = [axes.plot([], [], "o", color=color[name], label=name)[0] for name in storages]
    of_policies = [axes.plot([], [], marker[name], color=plots.FULL_COLOR, label=name)[0] for name in policies]
    front_label = axes.plot([], [], "-", color=plots.FULL_COLOR, lw=1, label="not beaten in both")[0]
    axes.legend(
        handles=[*of_policies, front_label, *of_storages], frameon=False, fontsize=8.5, loc="upper left",
        bbox_to_anchor=(1.01, 1), ncols=columns,
    )  # fmt: skip
    return plots.png(figure)


def frontier(points: Sequence[tuple[float, float]], *, smaller: bool) -> list[tuple[float, float]]:
    """The points (cost, quality) that no other one beats in both, by rising cost.

    Args:
      smaller: whether the smaller quality is the better.
    """
    found: list[tuple[float, float]] = []
    for cost, quality in sorted(points, key=lambda point: (point[0], point[1] if smaller else -point[1])):
        if not found or (quality < found[-1][1] if smaller else quality > found[-1][1]):
            found.append((cost, quality))
    return found
