"""InfiniGen, Figures 12 and 19: along a text, and by its length."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part, Result
from experiments.papers.recipes import lm, speculation
from experiments.papers.settings import Settings
from experiments.papers.statistics import paired_bootstrap
from experiments.papers.verdict import Claim, Judgement, Table

# Figure 12
TEXTS = ("book", "wiki")
PROMPT, CHUNK, LENGTH = 64, 64, 512
SMALL, LARGE = 19, 51  # slots: the authors' 1.875 % + 1.875 %, and a tenth
DRIFT, FLAT = 0.02, 0.01


def chunks(result: Result, settings: Settings) -> np.ndarray:
    """Nats per token of each row and chunk of a text after its prompt, [rows, chunks]."""
    size = settings.scale.tokens(CHUNK)
    parts = np.split(-result["logprobs"].astype(np.float64), range(size, result["logprobs"].shape[1], size), axis=1)
    return np.stack([part.mean(axis=1) for part in parts], axis=1)


def _along(settings: Settings, cache: str, slots: int, text: str) -> Part:
    scale = settings.scale
    prompt, slots = scale.tokens(PROMPT), scale.tokens(slots)
    spec = speculation.infinigen(cap=slots) if cache == "infinigen" else cache
    of = lm.lm(settings, spec, slots, text=text, prompt=prompt, new=scale.tokens(LENGTH) - prompt)
    return speculation.with_skew(settings, of) if cache == "infinigen" else of


def _fig12_caches(settings: Settings) -> dict[str, tuple[str, int]]:
    every = {
        f"h2o, {SMALL}": ("h2o", SMALL), f"infinigen, {SMALL}": ("infinigen", SMALL), f"h2o, {LARGE}": ("h2o", LARGE)
    }  # fmt: skip
    return {name: every[name] for name in settings.scale.some(tuple(every), tuple(every)[:2])}


def _fig12_texts(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(TEXTS, ("book",))


def _fig12_parts(settings: Settings) -> Iterable[Part]:
    for text in _fig12_texts(settings):
        yield _along(settings, "full", SMALL, text)
        yield from (_along(settings, *cache, text) for cache in _fig12_caches(settings).values())


def _fig12(settings: Settings, found: Found) -> Judgement:
    tables, panels, comparisons, confirm, contradict = [], [], [], [], []
    for text in _fig12_texts(settings):
        full = chunks(found[_along(settings, "full", SMALL, text)], settings)
        # [rows, chunks]: logarithms of ratios of perplexities
        above = {name: chunks(found[_along(settings, *cache, text)], settings) - full
                 for name, cache in _fig12_caches(settings).items()}  # fmt: skip
        ratio = {name: np.exp(each.mean(axis=0)) for name, each in above.items()}
        size, count = settings.scale.tokens(CHUNK), full.shape[1]
        ends = [settings.scale.tokens(PROMPT) + size * (i + 1) for i in range(count)]
        rows = [
            {"cache": "full, perplexity"}
            | {f"to {end}": f"{np.exp(full[:, i].mean()):.1f}" for i, end in enumerate(ends)}
        ]
        rows += [
            {"cache": f"{name} slots, ratio"} | {f"to {end}": f"{own[i]:.3f}" for i, end in enumerate(ends)}
            for name, own in ratio.items()
        ]  # fmt: skip
        tables.append(
            Table(f"{text}: perplexity of the full cache, and ratios to it, by chunks of {size} tokens", rows)
        )
        panels.append(figures.Panel(text, "tokens so far", "perplexity, ratio to the full cache's",
                                    {name: (ends, own.tolist()) for name, own in ratio.items()}))  # fmt: skip
        third = min(2, count - 2)
        drift = {name: float(own[-1] - own[third]) for name, own in ratio.items()}
        h2o, guess = (drift[f"{name}, {SMALL}"] for name in ("h2o", "infinigen"))
        comparisons += [
            paired_bootstrap(f"{name} on {text}, last chunk against the third, nats above full", above[name][:, -1],
                             above[name][:, third], seed=settings.seed)
            for name in (f"h2o, {SMALL}", f"infinigen, {SMALL}")
        ]  # fmt: skip
        confirm += [
            Claim(
                f"{text}: h2o's ratio in the last chunk exceeds that in the third by over {DRIFT:.0%}",
                h2o > DRIFT,
                f"{h2o:+.1%}",
            ),
            Claim(f"{text}: infinigen's by under {FLAT:.0%}", guess < FLAT, f"{guess:+.1%}"),
        ]
        contradict.append(Claim(f"{text}: h2o's ratio is flat (within {FLAT:.0%})", abs(h2o) <= FLAT, f"{h2o:+.1%}"))
    return Judgement(
        tables=tables, confirm=confirm, contradict=contradict, comparisons=comparisons,
        notes=[
            f"h2o holds {SMALL} or {LARGE} slots; infinigen holds everything and reads at most {SMALL} slots and the "
            f"new one, but everything in the first {speculation.FIRST} layers.",
            f"The first chunk follows a prompt of {settings.scale.tokens(PROMPT)} tokens.",
        ],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


# Figure 19
LENGTHS, SLOTS, NEW = (256, 512, 1024), (16, 64), 128
KEPT = 64
CACHES = ("h2o", "infinigen")


def _points(settings: Settings) -> list[tuple[int, int]]:
    """(length, slots): the longest text by slots, and all lengths by the most slots."""
    lengths, slots = settings.scale.some(LENGTHS, (512, 1024)), settings.scale.some(SLOTS, (KEPT,))
    return [*((LENGTHS[-1], each) for each in slots), *((each, KEPT) for each in lengths[:-1])]


def _of_length(settings: Settings, cache: str, length: int, slots: int) -> Part:
    tokens = settings.scale.tokens
    spec = speculation.infinigen(cap=tokens(slots)) if cache == "infinigen" else cache
    of = lm.lm(settings, spec, tokens(slots), prompt=tokens(length) - tokens(NEW), new=tokens(NEW))
    return speculation.with_skew(settings, of) if cache == "infinigen" else of


def _fig19_parts(settings: Settings) -> Iterable[Part]:
    for point in _points(settings):
        yield from (_of_length(settings, cache, *point) for cache in ("full", *CACHES))


def _fig19(settings: Settings, found: Found) -> Judgement:
    points, tokens = _points(settings), settings.scale.tokens
    loss = {
        (cache, *point): lm.loss(found[_of_length(settings, cache, *point)], found[_of_length(settings, "full",
                                                                                              *point)])
        for cache in CACHES for point in points
    }  # fmt: skip
    lengths = sorted({length for length, _ in points})
    slots = sorted({each for _, each in points})
    rows, other = (
        [
            {"cache": cache} | {f"{tokens(x)} {unit}": f"{loss[key(cache, x)]:+.2%}" for x in xs}
            for cache in CACHES
        ]
        for xs, unit, key in (
            (slots, "slots", lambda cache, x: (cache, LENGTHS[-1], x)), (lengths, "tokens", lambda cache, x: (cache, x,
                                                                                                              KEPT))
        )
    )  # fmt: skip
    growth = {cache: loss[cache, lengths[-1], KEPT] - loss[cache, lengths[0], KEPT] for cache in CACHES}
    comparisons = [
        lm.compare(f"infinigen against h2o, {tokens(length)} tokens, {tokens(each)} slots",
                   found[_of_length(settings, "infinigen", length, each)],
                   found[_of_length(settings, "h2o", length, each)], settings)
        for length, each in points
    ]  # fmt: skip
    shown = ", ".join(f"{cache} {value:+.2%}" for cache, value in growth.items())
    panels = [
        figures.Panel(f"{tokens(LENGTHS[-1])} tokens", "slots", "perplexity above the full cache's, %", {
            cache: ([tokens(x) for x in slots], [100 * loss[cache, LENGTHS[-1], x] for x in slots])
            for cache in CACHES
        }),
        figures.Panel(f"{tokens(KEPT)} slots", "tokens of the text", "perplexity above the full cache's, %", {
            cache: ([tokens(x) for x in lengths], [100 * loss[cache, x, KEPT] for x in lengths])
            for cache in CACHES
        }),
    ]  # fmt: skip
    return Judgement(
        tables=[
            Table(f"(a) Perplexity above the full cache's at {tokens(LENGTHS[-1])} tokens, by slots", rows),
            Table(f"(b) By the length of the text, {tokens(KEPT)} slots", other),
        ],
        confirm=[
            Claim(f"h2o's ratio to full grows with the length at {tokens(KEPT)} slots (by over {FLAT:.0%})",
                  growth["h2o"] > FLAT, shown),
            Claim(f"infinigen's does not (by under {FLAT:.0%})", growth["infinigen"] < FLAT, shown),
        ],
        contradict=[Claim(f"h2o's ratio is flat (within {FLAT:.0%})", abs(growth["h2o"]) <= FLAT, shown)],
        comparisons=comparisons,
        notes=["Texts of different lengths are different rows: the last tokens of each are scored."],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig12",
        question="Does the loss grow along the sequence?",
        here="The same on two texts after short prompts, in smaller chunks.",
        parts=_fig12_parts,
        judge=_fig12,
    ),
    Entry(
        name="infinigen_fig19",
        question="Does it hold for long texts?",
        here="A book, at lengths up to those of the model.",
        parts=_fig19_parts,
        judge=_fig19,
        needs="a model of 32K positions; `experiments.bench stream` shows speed and bytes at any length.",
    ),
)
