"""InfiniGen, Figures 16 and 18: important tokens by length, speed-ups, and where the time of a block goes."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.infinigen.link import NEEDS, NEW, PROMPT, SHAPE, SYSTEMS, measured, moved_bytes, seconds
from experiments.papers.parts import Part
from experiments.papers.recipes import moved, selection_speed, speculation, streams
from experiments.papers.recipes.moved import FULL
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table
from kvjax.devices import PCIE_3
from kvjax.models import shapes

# Figure 16
QUERIES = (128, 256, 512, 1023)
SLOW, PROPORTIONAL = 0.5, 0.9
PROMPTS = (384, 896, 1408, 1920)
MODELS = (("opt-6.7b", 0.0), ("opt-13b", 0.0), ("opt-30b", 0.3))
WINDOW = 8  # queries up to each


def _by_length(settings: Settings) -> list[moved.Moved]:
    return [moved.moved(SHAPE, 8, prompt, NEW) for prompt in settings.scale.some(PROMPTS, (384, 1920))]


def _by_model(settings: Settings) -> list[moved.Moved]:
    models = settings.scale.some(MODELS, MODELS[:1])
    return [moved.moved(shape, 4, PROMPT, NEW, host_weights=share) for shape, share in models]


def _fig16_parts(settings: Settings) -> Iterable[Part]:
    yield from (streams.important(settings), measured(settings), *_by_length(settings), *_by_model(settings))


def _fig16(settings: Settings, found: Found) -> Judgement:
    part = streams.important(settings)
    count = found[part]["count"]
    at = [settings.scale.tokens(query + 1) - 1 for query in QUERIES]
    tables, growth = [], {}
    for alpha, own in zip(part.alphas, count, strict=True):
        # [L] for each query
        near = {q: own[:, q - WINDOW + 1 : q + 1].mean(axis=1) for q in at}
        rows = [
            {"layer": str(i)} | {f"query {q}": f"{near[q][i]:.0f} ({100 * near[q][i] / (q + 1):.1f} %)" for q in at}
            for i in range(len(own))
        ]
        rows.append({"layer": "mean"} | {f"query {q}": f"{near[q].mean():.0f}" for q in at})
        tables.append(Table(f"Keys with a score above the largest - {alpha:g}, mean over rows and heads", rows))
        growth[alpha] = near[at[-1]].mean() / near[at[1]].mean()
    length = (at[-1] + 1) / (at[1] + 1)

    def gains(each: moved.Moved) -> dict[str, str]:
        size = moved_bytes(settings, found, each)
        full = seconds(found, each, size[FULL])
        return {name: f"{full / seconds(found, each, size[name]):.2f}x" for name in SYSTEMS[1:]}

    tables.append(Table("(a) OPT-13B, batch 8: over FlexGen, by bytes of a decoding step", [
        {"prompt + new": f"{each.prompt} + {each.new}", **gains(each)} for each in _by_length(settings)
    ]))  # fmt: skip
    tables.append(Table(f"(b) {PROMPT} + {NEW}, batch 4, 30 % of OPT-30B's weights offloaded: likewise", [
        {"model": each.shape, **gains(each)} for each in _by_model(settings)
    ]))  # fmt: skip
    shown = ", ".join(f"alpha {alpha:g}: {value:.2f}x" for alpha, value in growth.items())
    return Judgement(
        tables=tables,
        confirm=[
            Claim(f"the count grows under half as fast as the length from query {at[1]} to {at[-1]} ({length:.1f}x)",
                  max(growth.values()) < SLOW * length, shown),
        ],
        contradict=[
            Claim("it grows in proportion to the length (by 0.9 of it or more)",
                  min(growth.values()) >= PROPORTIONAL * length, shown),
        ],
        notes=["Bytes at the measured share of slots; the paper's speed-ups include prefill and what overlaps."],
        draw=lambda: figures.curves([
            figures.Panel("Important tokens", "query", "keys", {
                f"alpha {alpha:g}": (list(range(WINDOW, own.shape[1])), own.mean(axis=0)[WINDOW:].tolist())
                for alpha, own in zip(part.alphas, count, strict=True)
            })
        ]),
    )  # fmt: skip


# Figure 18
KEYS, WEIGHTS = 0.15, 0.025  # shares of the cache and of the parameters


def _timed(settings: Settings) -> list[selection_speed.Sides]:
    return [selection_speed.sides(settings, 1)]


def _fig18_parts(settings: Settings) -> Iterable[Part]:
    yield from (moved.own(settings, speculation.RATIO), moved.moved(SHAPE, 8, PROMPT, NEW), measured(settings))
    yield from _timed(settings)


def _fig18(settings: Settings, found: Found) -> Judgement:
    own, part = found[moved.own(settings, speculation.RATIO)], moved.moved(SHAPE, 8, PROMPT, NEW)
    size = moved_bytes(settings, found, part)
    keys = float(own["partial"]) / float(own["bytes"][0])
    # A layer's weights are 12 hidden_size**2, of which the queries' projection is one; the rest are embeddings.
    config = shapes.by_name(SHAPE)
    weights = 2 * speculation.RATIO * config.num_layers * config.hidden_size**2 / float(found[part]["weights"])
    ideal = seconds(found, part, 0.0)
    rows = [
        {"system": name, "MB a step": f"{size[name] / 1e6:,.0f}", "ms over PCIe 3": f"{1e3 * size[name] / PCIE_3:.0f}",
         "of the step": f"{100 * (1 - ideal / seconds(found, part, size[name])):.1f} %",
         "slower than ideal": f"{seconds(found, part, size[name]) / ideal:.2f}x"}
        for name in SYSTEMS
    ]  # fmt: skip
    rows.append(
        {
            "system": "Ideal",
            "MB a step": "0",
            "ms over PCIe 3": "0",
            "of the step": "0.0 %",
            "slower than ideal": "1.00x",
        }
    )
    shares = [
        {"what": "partial keys, of the cache", "here": f"{100 * keys:.1f} %", "paper": "15 %"},
        {"what": "partial query weights, of OPT-13B's parameters", "here": f"{100 * weights:.2f} %", "paper": "2.5 %"},
    ]
    steps = [
        {"batch": str(each.batch), "context": str(each.context), "cache": str(cache), "ms": f"{ms:.2f}",
         "full ms": f"{full:.2f}", "full / this": f"{full / ms:.2f}x"}
        for each in _timed(settings)
        for cache, ms, full in zip(*(found[each][name] for name in ("cache", "milliseconds", "full")), strict=True)
    ]  # fmt: skip
    return Judgement(
        tables=[
            Table("Bytes that InfiniGen adds", shares),
            Table("OPT-13B, 2,048 tokens, batch 8: bytes of a step at the measured share, nothing overlapping", rows),
            Table("This CPU, where nothing is transferred: a step with guess, choice and gather, and a full one",
                  steps),
        ],
        confirm=[
            Claim("partial keys are 15 % of the cache (within a point)", abs(keys - KEYS) < 0.01,
                  f"{100 * keys:.1f} %"),
            Claim("partial query weights are 2.5 % of the parameters (within 0.2 points)",
                  abs(weights - WEIGHTS) < 0.002,
                  f"{100 * weights:.2f} %"),
        ],
        contradict=[Claim("either is over twice that", keys > 2 * KEYS or weights > 2 * WEIGHTS)],
        notes=[
            "kvjax holds the numbers of the columns instead of copies of the weights, and takes columns of the whole "
            "query.",
            "Shares of the transfer's time need a GPU; those here are of bytes and bandwidths.",
        ],
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig16",
        question="How does the speed-up depend on length and model, and how does the number of important tokens grow?",
        here="The number of important tokens on a book; speed-ups from bytes.",
        parts=_fig16_parts,
        judge=_fig16,
        needs=NEEDS,
    ),
    Entry(
        name="infinigen_fig18",
        question="Where does a block's time go?",
        here="Bytes, the times that they take, and steps on this CPU.",
        parts=_fig18_parts,
        judge=_fig18,
        needs=NEEDS,
    ),
)
