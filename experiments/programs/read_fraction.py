"""Measures recall and perplexity of selections and policies, and draws them; see `experiments.read_fraction`."""

import collections
import dataclasses
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import results
from experiments.config import DataConfig, RecallConfig
from experiments.runs import data, machine
from experiments.tasks.prompts import Prompt
from experiments.tasks.score import SPARE_TOKENS, exact_matches, make_prompts
from kvjax import policies, selection
from kvjax.cache import CacheSpec, Limits
from kvjax.checkpoint.skew import load_skew
from kvjax.errors import ConfigError
from kvjax.generation.generate import Generation
from kvjax.models.model import Model
from kvjax.models.skew import skewed
from kvjax.selection.quest import RECENT, SINKS
from kvjax.typing import JsonObject

TASKS = ("passkey", "associative")
DISTANCES = (700 / 984, 900 / 984)  # from the end of a prompt to its fact, in prompts
FIRST = 2  # the first layer that selects
PAGE = 4  # tokens of a page or chunk: three pages of 16 would be 5 % of these prompts
LEAST = SINKS + RECENT  # tokens that a block of queries of a prompt always reads
CHUNK = 256  # tokens
SKEWED = "infinigen_skewed"  # the method of a model with a skew


class Sizes(NamedTuple):
    """Tokens of a page, and queries of a block, where prompts are read by pages."""

    page: int
    queries: int


def _pages(slots: int) -> int:
    """The nearest number of tokens in whole pages, of which Quest reads three at the least."""
    return max(3, round(slots / PAGE)) * PAGE


def _shadowkv(slots: int, model: Model, _: Sizes) -> CacheSpec:
    rank = model.config.num_kv_heads * model.config.head_dim // 2
    chunks = max(1, round(slots / PAGE)) * PAGE
    return CacheSpec(
        policies.full(), selection=selection.shadowkv(rank, PAGE, chunks, local=1, outliers=0, first_layer=FIRST)
    )


def _prompt_pages(slots: int, sizes: Sizes, **prompt: Any) -> CacheSpec:
    """Quest's pages, of at least what is always read of a prompt."""
    if prompt:
        prompt["query_block"] = max(sizes.queries, sizes.page)
    look = selection.quest(sizes.page, max(slots, LEAST), first_layer=FIRST, **prompt)
    return CacheSpec(policies.full(), selection=look)


def _without_sinks(slots: int, page: int) -> int:
    """The tokens of whole pages of `slots` that are left of the sinks."""
    return (max(slots, LEAST) // page - -(-SINKS // page)) * page


#: Name -> (slots of a prompt, model, sizes) -> the cache that reads, or keeps, that many.
METHODS: Mapping[str, Callable[[int, Model, Sizes], CacheSpec]] = {
    "infinigen": lambda n, *_: CacheSpec(policies.full(), selection=selection.infinigen(5.0, cap=n, first_layer=FIRST)),
    SKEWED: lambda n, *_: CacheSpec(policies.full(), selection=selection.infinigen(5.0, cap=n, first_layer=FIRST)),
    # A guess of more columns, and four newest slots that are always read, of as many.
    "infinigen_half": lambda n, *_: CacheSpec(
        policies.full(), selection=selection.infinigen(5.0, ratio=0.5, cap=n, first_layer=FIRST)
    ),
    "infinigen_recent": lambda n, *_: CacheSpec(
        policies.full(), selection=selection.infinigen(5.0, cap=max(1, n - 4), recent=4, first_layer=FIRST)
    ),
    "optimal": lambda n, *_: CacheSpec(policies.full(), selection=selection.optimal(n, first_layer=FIRST)),
    "quest": lambda n, *_: CacheSpec(policies.full(), selection=selection.quest(PAGE, _pages(n), first_layer=FIRST)),
    "quest_pages": lambda n, _, sizes: _prompt_pages(n, sizes),
    "quest_in_prompt": lambda n, _, sizes: _prompt_pages(n, sizes, in_prompt=True),
    "quest_a_shape": lambda n, _, sizes: _prompt_pages(n, sizes, in_prompt=True, recent=_without_sinks(n, sizes.page)),
    "tokenselect": lambda n, *_: CacheSpec(
        policies.full(), selection=selection.tokenselect(n, 0, 1, first_layer=FIRST, reuse=None)
    ),
    "shadowkv": _shadowkv,
    "h2o": lambda n, *_: CacheSpec(policies.h2o(max(n, 2))),
    "snapkv": lambda n, *_: CacheSpec(policies.snapkv(max(n, 5), window=4)),
    "window": lambda n, *_: CacheSpec(policies.window(max(n, 2))),
}


@dataclasses.dataclass(frozen=True)
class Point:
    """A cache's results.

    Attributes:
      method: a key of `METHODS`, or ``full``.
      share: of the slots that are held, what a step reads; of a policy, what it keeps of the prompt.
      recall: task -> share of the prompts that are answered exactly.
      perplexity: of the text, in chunks of `CHUNK` tokens and of all of them.
      seconds: wall time of all this; the prompts' count for the first cache.
      prompt_perplexity: of the prompt of the text, which selections read whole unless they read pages of prompts.
    """

    method: str
    share: float
    recall: dict[str, float]
    perplexity: list[float]
    seconds: float
    prompt_perplexity: float | None = None


@dataclasses.dataclass
class Tally:
    """The results of a cache so far, over batches.

    Attributes:
      right: task -> prompts that were answered exactly.
      asked: task -> prompts that were asked.
      read: slots that steps read, in layers that select.
      live: slots that these held.
      logprobs: of the decoded tokens of the text, [rows, tokens] each.
      prompts: of the tokens of its prompt, [rows, tokens] each.
      seconds: wall time.
    """

    right: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    asked: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    read: int = 0
    live: int = 0
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    prompts: list[np.ndarray] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def count(self, generation: Generation) -> None:
        """Adds what the steps of a batch read."""
        assert generation.record is not None
        self.read += int(generation.record.read[:, FIRST:].sum())
        self.live += int(generation.record.live[:, FIRST:].sum())


@dataclasses.dataclass(frozen=True)
class Contestant:
    """A cache, and the model that it is measured with.

    Attributes:
      method: see `Point`.
      slots: of the prompt that a policy keeps.
      spec: the cache.
      model: with or without a skew.
    """

    method: str
    slots: int
    spec: CacheSpec
    model: Model


def measure(
    contestants: Sequence[Contestant], asked: Mapping[str, Sequence[Prompt]], text: np.ndarray, prompt: int, rows: int
) -> Iterator[list[Point]]:
    """Scores a text and asks every prompt under every cache. A batch goes through the model once for all caches.

    Args:
      contestants: the caches.
      asked: prompts of each task.
      text: [rows, tokens] int32.
      prompt: tokens of each row that are its prompt.
      rows: prompts, and rows of the text, of a batch.

    Yields:
      The points of all caches, after each batch of questions.
    """
    every = [each for own in asked.values() for each in own]
    length = every[0].tokens.size
    answer = max(each.answer.size for each in every) + SPARE_TOKENS
    limits = Limits(length, answer, shortest=length)
    scored = Limits(prompt, text.shape[1] - prompt, shortest=prompt)
    tallies = [Tally() for _ in contestants]
    with kvjax.reuse_prompts(machine.prompt_room()):
        for start in range(0, len(text), rows):
            for each, tally in zip(contestants, tallies, strict=True):
                began = time.perf_counter()
                made = kvjax.log_likelihood(
                    each.model, text[start : start + rows], each.spec, prompt_length=prompt, limits=scored
                )
                # Entry t scores token t + 1.
                tally.logprobs.append(np.asarray(made.logprobs)[:, prompt - 1 :])
                tally.prompts.append(np.asarray(made.logprobs)[:, : prompt - 1])
                tally.seconds += time.perf_counter() - began
        batches = [
            (task, own[start : start + rows]) for task, own in asked.items() for start in range(0, len(own), rows)
        ]
        for task, batch in batches:
            for each, tally in zip(contestants, tallies, strict=True):
                selects, began = not each.spec.selection.reads_all, time.perf_counter()
                found = exact_matches(
                    each.model, {task: batch}, each.spec, watch=tally.count if selects else None, rows=rows,
                    limits=limits, record=selects,
                )  # fmt: skip
                tally.right[task] += round(found[task] * len(batch))
                tally.asked[task] += len(batch)
                tally.seconds += time.perf_counter() - began
            yield [_point(each, tally, length) for each, tally in zip(contestants, tallies, strict=True)]


def _point(each: Contestant, tally: Tally, length: int) -> Point:
    # [rows, decoded tokens]
    decoded = np.concatenate(tally.logprobs)
    chunks = [*np.split(decoded, range(CHUNK, decoded.shape[1], CHUNK), axis=1), decoded]
    kept = 1.0 if each.spec.policy.budget is None else each.slots / length
    return Point(
        method=each.method,
        share=kept if each.spec.selection.reads_all else tally.read / tally.live,
        recall={task: tally.right[task] / count for task, count in tally.asked.items()},
        perplexity=[math.exp(-float(np.mean(chunk, dtype=np.float64))) for chunk in chunks],
        seconds=tally.seconds,
        prompt_perplexity=math.exp(-float(np.mean(np.concatenate(tally.prompts), dtype=np.float64))),
    )


def draw(points: Sequence[Point]) -> bytes:
    """Draws recall of each task and perplexity against the share as a PNG, and perplexity along a text of chunks."""
    from experiments.reports import plots

    names = list(dict.fromkeys(point.method for point in points))
    colors = plots.colors(names)
    # There are fewer colors than methods.
    markers = dict(zip(names, itertools.cycle("os^Dv<>pX*P"), strict=False))
    full = next(point for point in points if point.method == "full")
    along = len(full.perplexity) > 2  # several chunks, and the whole text
    columns = len(full.recall) + 1 + along
    figure, axes = plots.new_figure(columns, figsize=(4.2 * columns, 4))
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
        title = "perplexity of a text" if panel == "perplexity" else f"{panel}, exact answers (%)"
        plots.style(axis, title, "% of the slots read; kept where dashed")
    if not along:
        axes[0][-1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.02, 1))
        return plots.png(figure)
    axes[0][0].legend(frameon=False, fontsize=8)
    last = axes[0][-1]
    for name in names:
        mine = [point for point in points if point.method == name]
        # The point nearest to 2 % that reads, and the one that keeps 20 %.
        wanted = 0.2 if name in evicting else 0.02
        point = min(mine, key=lambda each: abs(math.log(each.share / wanted)))
        ends = [CHUNK * (i + 1) for i in range(len(point.perplexity) - 1)]
        label = name if name == "full" else f"{name}, {100 * point.share:.0f} %"
        dashes = "--" if name in evicting else "-"
        last.plot(
            ends, point.perplexity[:-1], dashes, marker=markers[name], markersize=4, color=colors[name], label=label
        )
    plots.style(last, "perplexity along the text", "tokens after its prompt")
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
            raise ConfigError(f"--input={values.input!r} was not written by --output: {error}") from None
        if all(point.method != "full" for point in points):
            raise ConfigError(f"--input={values.input!r} has no result of the full cache.")
        return _report(points, values.plot)
    for flag in ("output", "plot"):
        if path := values[flag].value:
            results.make_file(path, flag)
    if SKEWED in values.methods and not values.skew:
        raise ConfigError(f"{SKEWED} needs --skew=FILE, a file of `python -m experiments.skew`.")
    model = kvjax.load(values.model, dtype="float32")
    skewed_model = skewed(model, load_skew(values.skew).matrices) if values.skew else None
    nearest, farthest = (int(part * values.length) for part in DISTANCES)
    recall = RecallConfig(
        tasks=TASKS, prompts=values.prompts, length=values.length, nearest=nearest, farthest=farthest
    )  # fmt: skip
    asked = make_prompts(recall, model, seed=0)
    width = min(model.config.max_positions, values.text_prompt + values.scored)
    if width <= values.text_prompt:
        raise ConfigError(
            f"--text_prompt={values.text_prompt} leaves nothing to score within the model's {width} positions."
        )
    settings = DataConfig(
        text=values.text, num_sequences=values.rows, prompt_length=values.text_prompt,
        new_tokens=width - values.text_prompt,
    )  # fmt: skip
    text, _, _ = data.load(settings, model, seed=0)

    sizes = Sizes(values.page, values.query_block)
    contestants = [Contestant("full", values.length, CacheSpec(policies.full()), model)]
    for name in values.methods:
        own = model if name != SKEWED else skewed_model
        assert own is not None
        # Small shares may be the same number of pages.
        built = {METHODS[name](max(1, round(share * values.length)), own, sizes): share for share in sorted(shares)}
        contestants += [
            Contestant(name, max(1, round(share * values.length)), spec, own) for spec, share in built.items()
        ]
    batches = len(TASKS) * -(-values.prompts // values.batch)
    points = []
    for number, points in enumerate(measure(contestants, asked, text, values.text_prompt, values.batch), start=1):
        print(f"{number} of {batches} batches of questions", file=sys.stderr, flush=True)
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
    whole = {"perplexity": point.perplexity[-1], "of the prompt": point.prompt_perplexity, "seconds": point.seconds}
    return {"method": point.method, "% read": 100 * point.share, **recall, **chunks, **whole}
