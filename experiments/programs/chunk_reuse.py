"""Measures caches of chunks that are reused in another order, and draws the results; see `experiments.chunk_reuse`."""

import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import flags
from tabulate import tabulate

import kvjax
from experiments import results
from experiments.progress import counted
from experiments.reports import chunk_plots, plots
from experiments.runs import identity, machine
from experiments.tasks.chunked_facts import KINDS, ChunkQuestion, make_questions
from kvjax import contexts, policies, reuse
from kvjax.errors import ConfigError
from kvjax.generation.context import Context
from kvjax.generation.options import CacheOptions
from kvjax.models.model import Model
from kvjax.reuse.blending import Blended, recompute
from kvjax.reuse.cache import ChunkCache, Text
from kvjax.typing import JsonObject

PROGRAM = "python -m experiments.chunk_reuse"
#: Flags that do not change a result, or name a file of this machine.
SILENT = ("--output", "--plot", "--alpha_plot", "--text")
NEW_TOKENS = 8  # of an answer, of which the digits are the beginning
#: The labels of methods in a plot, where these are not their names.
LABELS = {"prefill": "whole prefill, 95 %", "reused": "nothing recomputed"}
STEEPEST = 1.5  # of `gradual`, the share of its first layer relative to the mean
POINT_OFFSET = 0.5  # percent of tokens between the points of two methods that recompute as much


class Request(NamedTuple):
    """A request, and the caches of its chunks.

    Attributes:
      asked: the request.
      caches: of each chunk, behind the prefix alone.
      store: the chunks in another order.
      seed: of what is drawn.
    """

    asked: ChunkQuestion
    caches: list[ChunkCache]
    store: reuse.ChunkStore
    seed: int


class Made(NamedTuple):
    """A context, and the share of tokens that were computed.

    Attributes:
      context: after the question.
      blended: of caches of chunks; None for a prefill, and where chunks share positions.
    """

    context: Context
    blended: Blended | None


@dataclasses.dataclass
class Tally:
    """The results of a method.

    Attributes:
      name: the method, with its share.
      method: the method.
      setting: the share, or craft's factor; None = it has none.
      shares: of each request, the share of the chunks' tokens that went through the layers, as a mean over layers.
      right: kind -> of each request, whether it was answered.
      distances: of some requests, name -> the mean over layers.
      seconds: of each request, from its caches to the first token, the first one of a method left out.
    """

    name: str
    method: str
    setting: float | None
    shares: list[float] = dataclasses.field(default_factory=list)
    right: dict[str, list[bool]] = dataclasses.field(default_factory=lambda: {kind: [] for kind in KINDS})
    distances: dict[str, list[float]] = dataclasses.field(
        default_factory=lambda: {"key": [], "value": [], "attention": [], "rank_correlation": []}
    )
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def answers(self) -> list[bool]:
        """Whether each request was answered, kind by kind."""
        return [each for own in self.right.values() for each in own]

    def row(self) -> JsonObject:
        """Returns what the table shows."""
        found = {
            f"{kind} facts, %": f"{100 * np.mean(own):.0f} ({low:.0f} to {high:.0f})"
            for kind, own in self.right.items()
            if own
            for low, high in [_interval(own)]
        }
        far = {f"{name} distance": f"{np.mean(own):.3f}" for name, own in self.distances.items()
               if own and name != "rank_correlation"}  # fmt: skip
        seconds = f"{np.median(self.seconds):.2f}" if self.seconds else ""
        return {"method": self.name, "recomputed, %": f"{100 * np.mean(self.shares):.0f}", **found, **far,
                "s to the first token": seconds}  # fmt: skip


def _interval(right: Sequence[bool]) -> tuple[float, float]:
    """Returns Wilson's 95 % interval of a share, in percent."""
    import scipy.stats

    made = scipy.stats.binomtest(sum(right), len(right)).proportion_ci(method="wilson")
    return 100 * made.low, 100 * made.high


def _prefill(model: Model, request: Request, setting: float) -> Made:
    (prefix,) = {id(each.prefix): each.prefix for each in request.caches}.values()
    before = [] if prefix is None else [prefix.tokens]
    tokens = np.concatenate([*before, *request.asked.chunks, request.asked.question])
    return Made(contexts.prefill(model, tokens, policies.full()), None)


def _blend(model: Model, request: Request, **options: Any) -> Made:
    made = reuse.blend(model, request.caches, request.asked.question, **options)
    return Made(made.context, made)


def _random(model: Model, request: Request, setting: float) -> Made:
    text = Text.of(model, request.caches, request.caches[0].prefix)
    begun = text.starts[0]
    count = int(setting * (len(text) - begun))
    chosen = np.random.default_rng(request.seed).choice(len(text) - begun, count, replace=False)
    made = recompute(
        model, request.caches, text, request.asked.question, None, np.sort(begun + chosen).astype(np.int32), None,
        room=None, options=CacheOptions(),
    )  # fmt: skip
    return Made(made.context, made)


def _first(model: Model, request: Request, setting: float) -> Made:
    first = max(1, round(setting * len(request.caches[0])))
    return _blend(model, request, check=None, first=first)


def _gradual(model: Model, request: Request, setting: float) -> Made:
    # One share for each layer from layer 1 on, whose mean is the setting.
    falls = np.linspace(STEEPEST, 2 - STEEPEST, model.config.num_layers - 1)
    return _blend(model, request, ratio=[setting * float(each) for each in falls])


def _linked(model: Model, request: Request, setting: float) -> Made:
    first = round(setting / 2 * len(request.caches[0]))
    return _blend(model, request, ratio=setting - first / len(request.caches[0]), first=first)


def _craft(model: Model, request: Request, setting: float) -> Made:
    made = reuse.craft(request.store, request.asked.chunks, request.asked.question, alpha=setting).blended
    return Made(made.context, made)


Method = Callable[[Model, Request, float], Made]
METHODS: dict[str, Method] = {
    "prefill": _prefill,
    "reused": lambda model, request, _: _blend(model, request, check=None),
    "blend": lambda model, request, setting: _blend(model, request, ratio=setting),
    "random": _random,
    "first": _first,
    "gradual": _gradual,
    "both": lambda model, request, setting: _blend(model, request, ratio=setting, deviation="both"),
    "linked": _linked,
    "craft": _craft,
    "parallel": lambda model, request, _: Made(reuse.parallel(model, request.caches, request.asked.question), None),
}


def start(values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Measures the methods of a command line, or draws what was measured.

    Returns:
      The exit status.
    """
    if values.input:
        try:
            kept = json.loads(Path(values.input).read_text())
            tallies = [Tally(**each) for each in kept["methods"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--input={values.input!r} was not written by --output: {error}") from None
        _report(tallies, values, kept["weights"])
        return 0
    for flag in ("output", "plot", "alpha_plot"):
        if path := values[flag].value:
            results.make_file(path, flag)
    try:
        text = Path(values.text).read_text(encoding="utf-8")
        shares, alphas = ([float(each) for each in own] for own in (values.shares, values.alphas))
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text, --shares or --alphas is not valid: {error}") from None
    # A layer cannot compute more than all tokens, and with less in the first ones the mean would be below the share.
    if "gradual" in values.methods and (above := [each for each in shares if STEEPEST * each > 1]):
        raise ConfigError(
            f"--shares of gradual must be at most 2/3, since its first layer computes {STEEPEST:g} times the share; "
            f"got {', '.join(f'{each:g}' for each in above)}."
        )
    model = kvjax.load(values.model, dtype="float32")
    if model.tokenizer is None:
        raise ConfigError(f"{values.model} has no tokenizer.")
    encode = model.tokenizer.encode
    asked = make_questions(
        encode, text, count=values.requests, chunks=values.chunks, tokens=values.tokens, seed=values.seed
    )
    prefix = reuse.compute(model, encode(values.prefix))

    def asked_blend(model: Model, request: Request, setting: float) -> Made:
        return _blend(model, request, ratio=setting, by_question=values.by_question)

    methods = METHODS | {"asked": asked_blend}
    settings: dict[str, Sequence[float | None]] = {
        "craft": alphas,
        "prefill": [None],
        "reused": [None],
        "parallel": [None],
    }
    tallies = [
        Tally(method if setting is None else f"{method} {setting:g}", method, setting)
        for method in values.methods for setting in settings.get(method, shares)
    ]  # fmt: skip
    kept = {
        "model": values.model, "weights": identity.of_weights(values.model), "chunks": values.chunks,
        "tokens": values.tokens, "requests": values.requests, "text": Path(values.text).name,
        "command": shlex.join([*PROGRAM.split(), *(each for each in argv[1:] if not each.startswith(SILENT))]),
        "environment": machine.environment(),
    }  # fmt: skip
    with counted(len(asked), done=0, unit="request", name="chunks", show=None) as advance:
        for number, each in enumerate(asked):
            caches = [reuse.compute(model, own, prefix) for own in each.chunks]
            store = reuse.ChunkStore(model, prefix=prefix, max_bytes=1 << 40)
            if "craft" in values.methods:
                store.add(reuse.compute_variants(model, [each.chunks[place] for place in each.other_order], prefix))
            request = Request(each, caches, store, values.seed + number)
            for tally in tallies:
                method = methods[tally.method]
                _measure(model, request, tally, method, distances=number < values.distances, first=number == 0)
            if values.output:
                done = kept | {"methods": [dataclasses.asdict(own) for own in tallies]}
                results.write(Path(values.output), results.to_json(done))
            advance()
    _report(tallies, values, kept["weights"])
    return 0


def _measure(model: Model, request: Request, tally: Tally, method: Method, *, distances: bool, first: bool) -> None:
    began = time.perf_counter()
    made = method(model, request, 0.0 if tally.setting is None else tally.setting)
    made.context.logits.block_until_ready()
    if not first:
        tally.seconds.append(time.perf_counter() - began)
    answer = contexts.decode(model, made.context, max_new_tokens=NEW_TOKENS)
    assert model.tokenizer is not None
    text = model.tokenizer.decode(np.asarray(answer.tokens[0]))
    tally.right[request.asked.kind].append(text.strip().startswith(request.asked.answer))
    if made.blended is None:
        tally.shares.append(1.0 if tally.method == "prefill" else 0.0)
    else:
        chunked = slice(len(request.caches[0].prefix or ()), -len(request.asked.question))
        tally.shares.append(float(made.blended.active[:, chunked].mean()))
    if distances and tally.method != "prefill":
        if made.blended is None:
            far = reuse.distances(model, made.context, chunks=request.caches)
        else:
            far = reuse.distances(model, made.blended)
        for name, found in tally.distances.items():
            own = np.asarray(getattr(far, name))
            # Where caches are those of the prefill, or there is one chunk, nothing is correlated.
            if own.size and np.isfinite(own).all():
                found.append(float(own.mean()))


def _report(tallies: Sequence[Tally], values: flags.FlagValues, weights: str) -> None:
    print(tabulate([each.row() for each in tallies], headers="keys", tablefmt="github", disable_numparse=True))
    crafted = sorted((each for each in tallies if each.setting is not None and each.method == "craft"), key=_factor)
    whole = next((np.mean(each.answers) for each in tallies if each.method == "prefill"), None)
    # By answers relative to the prefill's, and by how near values are to its values.
    curves: dict[str, list[list[float]]] = {}
    if crafted and whole:
        curves[chunk_plots.ANSWERS] = [[right / float(whole) for right in each.answers] for each in crafted]
        if all(each.distances["value"] for each in crafted):
            curves[chunk_plots.VALUES] = [[1 - far for far in each.distances["value"]] for each in crafted]
    alphas = [_factor(each) for each in crafted]
    chosen = {name: reuse.smallest_alpha(dict(zip(alphas, own, strict=True)), values.target)
              for name, own in curves.items()}  # fmt: skip
    for name, alpha in chosen.items():
        found = "No factor of craft has" if alpha is None else f"The factor {alpha:g} of craft is the smallest with"
        print(f"\n{found} {name} of at least {100 * values.target:g} %.")
    if values.plot:
        results.write(Path(values.plot), _drawn(tallies, weights))
    if values.alpha_plot:
        if not curves:
            raise ConfigError("--alpha_plot needs answers of prefill and craft among --methods.")
        means = {name: [float(np.mean(each)) for each in own] for name, own in curves.items()}
        means[chunk_plots.SHARE] = [float(np.mean(each.shares)) for each in crafted]
        drawn = chunk_plots.alpha_plot(alphas, means, target=values.target, chosen=chosen, weights=weights)
        results.write(Path(values.alpha_plot), drawn)


def _factor(tally: Tally) -> float:
    return 0.0 if tally.setting is None else tally.setting


def _drawn(tallies: Sequence[Tally], weights: str) -> bytes:
    """Draws the answers of each method by the share that it recomputes."""
    methods = [*dict.fromkeys(each.method for each in tallies if each.method != "prefill")]
    colors = plots.colors(methods)
    figure, axes = plots.new_figure(len(KINDS), sharey=True, figsize=(10, 4.5))
    axes = axes[0]
    for kind, own in zip(KINDS, axes, strict=True):
        for whole in (each for each in tallies if each.method == "prefill" and each.right[kind]):
            low, high = _interval(whole.right[kind])
            own.axhspan(low, high, color="0.93", lw=0)
            own.axhline(100 * np.mean(whole.right[kind]), color="0.5", ls="--", label=LABELS["prefill"])
        for number, method in enumerate(methods):
            of = sorted((each for each in tallies if each.method == method), key=lambda each: np.mean(each.shares))
            # Beside each other, where several methods recompute as much.
            x = [100 * float(np.mean(each.shares)) + POINT_OFFSET * (number - len(methods) / 2) for each in of]
            y = [100 * float(np.mean(each.right[kind])) for each in of]
            lows, highs = zip(*(_interval(each.right[kind]) for each in of), strict=True)
            own.errorbar(
                x, y, [np.subtract(y, lows), np.subtract(highs, y)], marker="o", capsize=2, color=colors[method],
                label=LABELS.get(method, method),
            )  # fmt: skip
        plots.style(own, f"facts that are {kind}", "tokens recomputed, %", "answers that are right, %")
    axes[-1].legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return plots.png(figure, weights)
