"""Sweeps over storages: quality against the bytes that a cache holds."""

from collections.abc import Sequence

from experiments import plots, report, seeds
from experiments.config import JOINED

#: One for each storage of a plot, from the largest to the smallest; a policy has a marker.
STORAGE_COLORS = (
    "#000000", "#0072B2", "#56B4E9", "#009E73", "#8FBC3F", "#E69F00", "#D55E00", "#A0522D", "#CC79A7", "#9467BD",
    "#7F7F7F", "#17BECF",
)  # fmt: skip
MARKERS = "os^Dv<>pX*P"


def points(found: Sequence[report.Row], quality: str) -> list[report.Row]:
    """What the plot shows.

    Args:
      found: results of a sweep that were measured; of each the last row is that of the combination's own policy.
      quality: ``perplexity`` or ``agreement``.

    Returns:
      ``storage``, ``policy``, ``bytes`` and ``y`` of each, which is the mean over seeds, and ``error``, the standard
      deviation of y or None.
    """
    rows = [(group[0], [result["rows"][-1] for result in group]) for group in seeds.groups(found)]
    done = [(result, seeds.mean(own), [row[quality] for row in own]) for result, own in rows]
    many = len({row["budget"] for _, row, _ in done if row["budget"] is not None}) > 1
    factor, shown = 100 if quality == "agreement" else 1, []
    for result, row, values in done:
        if row[quality] is None:
            continue
        storage = result["config"]["storage"]
        name = result.get("label", result["config"]["policy"]["name"]).partition(JOINED)[0]
        policy = f"{name}, {report.show_budget(row)}" if many and row["budget"] is not None else name
        error = seeds.deviation(values)
        shown.append({
            "storage": storage, "policy": policy, "bytes": row["kv_bytes"], "y": factor * row[quality],
            "error": None if error is None else factor * error,
        })  # fmt: skip
    return shown


def plot(points: Sequence[report.Row], quality: str) -> bytes:
    """A PNG of quality against the bytes held: a colour a storage, a marker a policy.

    A line joins the caches that no other one beats in both.

    Args:
      points: each with ``storage``, ``policy``, ``bytes``, ``y`` and ``error``.
      quality: ``perplexity`` or ``agreement``.
    """
    held: dict[str, list[float]] = {}
    for point in points:
        held.setdefault(point["storage"], []).append(point["bytes"])
    storages = sorted(held, key=lambda name: -max(held[name]))
    policies = list(dict.fromkeys(point["policy"] for point in points))
    color = {name: STORAGE_COLORS[i % len(STORAGE_COLORS)] for i, name in enumerate(storages)}
    marker = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(policies)}
    figure, panels = plots.new_figure(1, figsize=(8.5, 5.5))
    axes = panels[0, 0]
    unit = {"perplexity": "perplexity (lower is better)", "agreement": "greedy tokens equal, %"}[quality]
    plots.style(axes, f"{unit.split(' (')[0].capitalize()} against bytes", "keys and values held (MB)", unit)
    for point in points:
        if point["error"]:
            axes.errorbar(
                point["bytes"] / 1e6, point["y"], point["error"], fmt="none", color=color[point["storage"]], lw=1,
                capsize=2, zorder=2,
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
        bbox_to_anchor=(1.01, 1),
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
