"""Measures recall and perplexity of selections and policies, and draws them; see `experiments.read_fraction`."""

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import results
from experiments.config import DataConfig, RecallConfig
from experiments.runs import data, machine
from experiments.tasks.prompts import Prompt
from experiments.tasks.score import exact_matches, make_prompts
from kvjax import policies, selection
from kvjax.cache import CacheSpec, Limits
from kvjax.errors import ConfigError
from kvjax.generation.generate import Generation
from kvjax.models.model import Model
from kvjax.typing import JsonObject

TASKS = ("passkey", "associative")
DISTANCES = (700 / 984, 900 / 984)  # from the end of a prompt to its fact, in prompts
FIRST = 2  # the first layer that selects
PAGE = 4  # tokens of a page or chunk: three pages of 16 would be 5 % of these prompts
STORY_PROMPT, CHUNK = 256, 256  # tokens


def _pages(slots: int) -> int:
    """The nearest number of tokens in whole pages, of which Quest reads three at the least."""
    return max(3, round(slots / PAGE)) * PAGE


def _shadowkv(slots: int, model: Model) -> CacheSpec:
    rank = model.config.num_kv_heads * model.config.head_dim // 2
    chunks = max(1, round(slots / PAGE)) * PAGE
    return CacheSpec(
        policies.full(), selection=selection.shadowkv(rank, PAGE, chunks, local=1, outliers=0, first_layer=FIRST)
    )


#: Name -> (slots of a prompt, model) -> the cache that reads, or keeps, that many.
METHODS: Mapping[str, Callable[[int, Model], CacheSpec]] = {
    "infinigen": lambda n, _: CacheSpec(policies.full(), selection=selection.infinigen(5.0, cap=n, first_layer=FIRST)),
    # A guess of more columns, and four newest slots that are always read, of as many.
    "infinigen_half": lambda n, _: CacheSpec(
        policies.full(), selection=selection.infinigen(5.0, ratio=0.5, cap=n, first_layer=FIRST)
    ),
    "infinigen_recent": lambda n, _: CacheSpec(
        policies.full(), selection=selection.infinigen(5.0, cap=max(1, n - 4), recent=4, first_layer=FIRST)
    ),
    "optimal": lambda n, _: CacheSpec(policies.full(), selection=selection.optimal(n, first_layer=FIRST)),
    "quest": lambda n, _: CacheSpec(policies.full(), selection=selection.quest(PAGE, _pages(n), first_layer=FIRST)),
    "tokenselect": lambda n, _: CacheSpec(
        policies.full(), selection=selection.tokenselect(n, 0, 1, first_layer=FIRST, reuse=None)
    ),
    "shadowkv": _shadowkv,
    "h2o": lambda n, _: CacheSpec(policies.h2o(max(n, 2))),
    "snapkv": lambda n, _: CacheSpec(policies.snapkv(max(n, 5), window=4)),
    "window": lambda n, _: CacheSpec(policies.window(max(n, 2))),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A cache's results.

    Attributes:
      method: a key of `METHODS`, or ``full``.
      share: of the slots that are held, what a step reads; of a policy, what it keeps of the prompt.
      recall: task -> share of the prompts that are answered exactly.
      perplexity: of the story, in chunks of `CHUNK` tokens and of all of them.
      seconds: wall time of all this.
    """

    method: str
    share: float
    recall: dict[str, float]
    perplexity: list[float]
    seconds: float


def measure(
    method: str, spec: CacheSpec, slots: int, model: Model, asked: Mapping[str, Sequence[Prompt]], story: np.ndarray
) -> Point:
    """Asks every prompt and scores the story.

    Args:
      method: of the point.
      spec: the cache.
      slots: of the prompt that a policy keeps.
      model: from `kvjax.load`.
      asked: prompts of each task.
      story: [rows, tokens] int32.
    """
    start = time.perf_counter()
    read, live = 0, 0

    def count(generation: Generation) -> None:
        nonlocal read, live
        assert generation.record is not None
        read += int(generation.record.read[:, FIRST:].sum())
        live += int(generation.record.live[:, FIRST:].sum())

    selects = not spec.selection.reads_all
    found = exact_matches(model, asked, spec, watch=count if selects else None, record=selects)
    width = story.shape[1]
    limits = Limits(STORY_PROMPT, width - STORY_PROMPT, shortest=STORY_PROMPT)
    scored = kvjax.log_likelihood(model, story, spec, prompt_length=STORY_PROMPT, limits=limits).logprobs
    # [rows, decoded tokens]: entry t scores token t + 1
    decoded = np.asarray(scored)[:, STORY_PROMPT - 1 :]
    chunks = [*np.split(decoded, range(CHUNK, decoded.shape[1], CHUNK), axis=1), decoded]
    length = next(iter(asked.values()))[0].tokens.size
    return Point(
        method=method,
        share=read / live if selects else 1.0 if spec.policy.budget is None else slots / length,
        recall=found,
        perplexity=[math.exp(-float(np.mean(chunk, dtype=np.float64))) for chunk in chunks],
        seconds=time.perf_counter() - start,
    )


def draw(points: Sequence[Point]) -> bytes:
    """Draws recall of each task and perplexity against the share, and perplexity along the text, as a PNG."""
    from experiments.reports import plots

    names = list(dict.fromkeys(point.method for point in points))
    colors = plots.colors(names)
    # There are fewer colors than methods.
    markers = dict(zip(names, itertools.cycle("os^Dv<>pX*P"), strict=False))
    full = next(point for point in points if point.method == "full")
    figure, axes = plots.new_figure(len(full.recall) + 2, figsize=(4.2 * (len(full.recall) + 2), 4))
    evicting = {"h2o", "snapkv", "window"}
    panels = [*full.recall, "perplexity"]

    def value(point: Point, panel: str) -> float:
        return point.perplexity[-1] if panel == "perplexity" else 100 * point.recall[panel]

    for axis, panel in zip(axes[0], panels, strict=False):
        axis.axhline(value(full, panel), color=plots.FULL_COLOR, linewidth=1, linestyle=":", label="full cache")
        for name in names[1:]:
            curve = sorted((100 * point.share, value(point, panel)) for point in points if point.method == name)
            dashes = "--" if name in evicting else "-"
            axis.plot(
                *zip(*curve, strict=True), dashes, marker=markers[name], markersize=4, color=colors[name], label=name
            )
        axis.set_xscale("log")
        axis.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        axis.minorticks_off()
        title = "perplexity of a story" if panel == "perplexity" else f"{panel}, exact answers (%)"
        plots.style(axis, title, "% of the slots read; kept where dashed")
    axes[0][0].legend(frameon=False, fontsize=8)
    last = axes[0][-1]
    for name in names:
        mine = [point for point in points if point.method == name]
        # The point nearest to 2 % that reads, and the one that keeps 20 %.
        wanted = 0.2 if name in evicting else 0.02
        point = min(mine, key=lambda each: abs(math.log(each.share / wanted)))
        ends = [STORY_PROMPT + CHUNK * (i + 1) for i in range(len(point.perplexity) - 1)]
        label = name if name == "full" else f"{name}, {100 * point.share:.0f} %"
        dashes = "--" if name in evicting else "-"
        last.plot(
            ends, point.perplexity[:-1], dashes, marker=markers[name], markersize=4, color=colors[name], label=label
        )
    plots.style(last, "perplexity along the story", "tokens so far")
    last.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
    return plots.png(figure)


def start(values: flags.FlagValues, shares: Sequence[float], argv: Sequence[str]) -> int:
    """Measures the shares of a command line, or draws what was measured.

    Returns:
      The exit status.
    """
    if values.input:
        try:
            points = [Point(**point) for point in json.loads(Path(values.input).read_text())["points"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--input={values.input!r} is not a file of --output: {error}") from None
        if all(point.method != "full" for point in points):
            raise ConfigError(f"--input={values.input!r} has no point of the full cache.")
        return _report(points, values.plot)
    for flag in ("output", "plot"):
        if path := values[flag].value:
            results.make_file(path, flag)
    model = kvjax.load(values.model, dtype="float32")
    nearest, farthest = (int(part * values.length) for part in DISTANCES)
    recall = RecallConfig(
        tasks=TASKS, prompts=values.prompts, length=values.length, nearest=nearest, farthest=farthest
    )  # fmt: skip
    asked = make_prompts(recall, model, seed=0)
    width = min(model.config.max_positions, STORY_PROMPT + 3 * CHUNK)
    text = DataConfig(num_sequences=values.rows, prompt_length=STORY_PROMPT, new_tokens=width - STORY_PROMPT)
    story, _, _ = data.load(text, model, seed=0)

    points = []
    specs = {("full", values.length): CacheSpec(policies.full())}
    for name in values.methods:
        # Small shares may be the same number of pages.
        built = {METHODS[name](max(1, round(share * values.length)), model): share for share in sorted(shares)}
        specs |= {(name, max(1, round(share * values.length))): spec for spec, share in built.items()}
    for (name, slots), spec in specs.items():
        points.append(measure(name, spec, slots, model, asked, story))
        print(_row(points[-1]), flush=True)
        if values.output:
            made: dict[str, Any] = {"environment": machine.environment(), "command": " ".join(argv[1:])}
            made["points"] = [dataclasses.asdict(point) for point in points]
            results.write(Path(values.output), json.dumps(made, indent=1) + "\n")
    return _report(points, values.plot)


def _report(points: Sequence[Point], plot: str | None) -> int:
    """Prints the table and draws the plot, if a file is named."""
    print(tabulate([_row(point) for point in points], headers="keys", floatfmt=",.3g", tablefmt="github"))
    if plot:
        results.write(Path(plot), draw(points))
    return 0


def _row(point: Point) -> JsonObject:
    """The scalars of a point, for the table."""
    chunks = {f"perplexity {i + 1}": value for i, value in enumerate(point.perplexity[:-1])}
    recall = {f"{task} %": 100 * share for task, share in point.recall.items()}
    whole = {"perplexity": point.perplexity[-1], "seconds": point.seconds}
    return {"method": point.method, "% read": 100 * point.share, **recall, **chunks, **whole}
