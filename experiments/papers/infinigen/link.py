"""InfiniGen, Figures 14 and 15: what the link between host and device carries: bytes, and their times."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, moved, plan, speculation
from experiments.papers.recipes.moved import FULL, H2O, INFINIGEN, INT4
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table
from kvjax.devices import PCIE_3
from kvjax.models import shapes

SYSTEMS = (FULL, INT4, H2O, INFINIGEN)
SHAPE, PROMPT, NEW = "opt-13b", 1920, 128
NEEDS = "a GPU with a host link: `experiments.bench transfers` measures the link, `bench accelerator` all of it."


def measured(settings: Settings) -> Part:
    """The share of the slots that the guess reads, on the small model."""
    return speculation.read(settings)


def moved_bytes(settings: Settings, found: Found, part: moved.Moved) -> dict[str, float]:
    """Bytes of a step of each system; InfiniGen's from the measured share, with whole first layers."""
    found_moved = found[part]
    every = dict(zip(SYSTEMS, (float(each) for each in found_moved["moved"]), strict=True))
    whole = speculation.FIRST / shapes.by_name(part.shape).num_layers
    share = whole + (1 - whole) * speculation.share(found[measured(settings)])
    return every | {INFINIGEN: every[FULL] * share}


def seconds(found: Found, part: moved.Moved, size: float) -> float:
    """A step that moves as many bytes and reads all weights; nothing overlaps, nothing else takes time."""
    bandwidth = plan.PLATFORMS["A6000"].bandwidth
    assert bandwidth is not None
    return (size + float(found[part]["offloaded"])) / PCIE_3 + float(found[part]["weights"]) / bandwidth


# Figure 14
CACHES = {FULL: "full", INT4: "full + int4", H2O: "h2o"}


def _fig14_parts(settings: Settings) -> Iterable[Part]:
    yield from (lm.lm(settings, cache, 0.2) for cache in CACHES.values())
    yield from (measured(settings), moved.own(settings, speculation.RATIO), moved.moved(SHAPE, 20, PROMPT, NEW))


def _fig14(settings: Settings, found: Found) -> Judgement:
    guess, own = found[measured(settings)], found[moved.own(settings, speculation.RATIO)]
    results = {name: found[lm.lm(settings, cache, 0.2)] for name, cache in CACHES.items()} | {INFINIGEN: guess}
    # [4, L]
    slots = own["slots"].copy()
    slots[3] = np.where(np.isnan(guess["number"]), slots[3], guess["number"])
    sizes = slots * own["bytes"][:, None]
    later = dict(zip(SYSTEMS, sizes[:, speculation.FIRST :].sum(axis=1), strict=True))
    every = dict(zip(SYSTEMS, sizes.sum(axis=1), strict=True))
    partial = float(own["partial"]) * own["slots"][3].mean() * (sizes.shape[1] - speculation.FIRST)
    rows = [
        {"system": name, **lm.cells(results[name], results[FULL]),
         "kB a step, layers that choose": f"{later[name] / 1e3:.1f}",
         "of full": f"{100 * later[name] / later[FULL]:.1f} %", "kB, all layers": f"{every[name] / 1e3:.1f}",
         "of full ": f"{100 * every[name] / every[FULL]:.1f} %",
         "more on the device, kB": f"{partial / 1e3:.1f}" if name == INFINIGEN else "0"}
        for name in SYSTEMS
    ]  # fmt: skip
    part = moved.moved(SHAPE, 20, PROMPT, NEW)
    large = moved_bytes(settings, found, part)
    table = [
        {"system": name, "GB a step": f"{large[name] / 1e9:.2f}", "s over PCIe 3": f"{large[name] / PCIE_3:.2f}",
         "FlexGen's, times": f"{seconds(found, part, large[FULL]) / seconds(found, part, large[name]):.2f}x"}
        for name in SYSTEMS
    ]  # fmt: skip
    made = lm.compare("infinigen against h2o", results[INFINIGEN], results[H2O], settings)
    order = [later[name] for name in (INFINIGEN, H2O, INT4, FULL)]
    shown = " < ".join(f"{name} {later[name] / 1e3:.1f}" for name in sorted(SYSTEMS, key=lambda each: later[each]))
    return Judgement(
        tables=[
            Table("The small model, a row: perplexity, and bytes that a step moves from the host", rows),
            Table(f"OPT-13B, {PROMPT} + {NEW}, batch 20, with the small model's share of slots", table),
        ],
        confirm=[
            Claim("bytes of a step: InfiniGen < H2O < INT4 < full, in the layers that choose",
                  order == sorted(order) and len(set(order)) == 4, f"{shown} kB"),
            Claim("InfiniGen's perplexity is no worse than H2O's", not made.higher, made.result),
        ],
        comparisons=[made],
        notes=[
            "The first two layers are read whole: a third of this model, a twentieth of OPT-13B. Partial keys stay on "
            "the device. UVM is not modelled. Seconds are what bytes take if nothing overlaps.",
        ],
    )  # fmt: skip


# Figure 15
BATCHES = (4, 8, 12, 16, 20)


def _batches(settings: Settings) -> list[moved.Moved]:
    return [moved.moved(SHAPE, batch, PROMPT, NEW) for batch in settings.scale.some(BATCHES, (4, 20))]


def _fig15_parts(settings: Settings) -> Iterable[Part]:
    yield from (*_batches(settings), measured(settings))


def _fig15(settings: Settings, found: Found) -> Judgement:
    parts = _batches(settings)
    batches = [part.batch for part in parts]
    size = {name: [moved_bytes(settings, found, part)[name] for part in parts] for name in SYSTEMS}
    speed = {
        name: [part.batch / seconds(found, part, each) for part, each in zip(parts, size[name], strict=True)]
        for name in SYSTEMS
    }  # fmt: skip
    rows = [
        {"system": name} | {f"batch {b}": f"{each:.1f}" for b, each in zip(batches, speed[name], strict=True)}
        for name in SYSTEMS
    ]
    ratio = {name: [a / b for a, b in zip(speed[INFINIGEN], speed[name], strict=True)] for name in SYSTEMS[:-1]}
    lead = [
        {"InfiniGen over": name} | {f"batch {b}": f"{each:.2f}x" for b, each in zip(batches, ratio[name], strict=True)}
        for name in SYSTEMS[:-1]
    ]  # fmt: skip
    linear = max(
        abs(each / batch / (values[0] / batches[0]) - 1) for values in size.values() for each, batch in zip(values,
                                                                                                            batches,
                                                                                                            strict=True)
    )  # fmt: skip
    grows = {name: each[-1] > each[0] for name, each in ratio.items()}
    shown = ", ".join(f"{name} {each[0]:.2f}x to {each[-1]:.2f}x" for name, each in ratio.items())
    return Judgement(
        tables=[
            Table("tokens/s that PCIe 3 and an A6000's memory allow, decoding alone, nothing overlapping", rows),
            Table("Ratios of these", lead),
        ],
        confirm=[
            Claim("bytes a step are linear in the batch for all systems (within 1 %)", linear < 0.01,
                  f"{100 * linear:.2f} % off"),
            Claim("InfiniGen's lead grows with the batch", all(grows.values()), shown),
        ],
        contradict=[Claim("its lead over H2O shrinks", ratio[H2O][-1] < ratio[H2O][0], shown)],
        notes=[
            "Arithmetic, with the share of slots that the small model's guesses read; in the paper 1.28x over H2O at "
            "batch 4 and 1.63x at 20 (derived).",
        ],
        draw=lambda: figures.curves([
            figures.Panel("OPT-13B, 1920 + 128", "batch", "tokens/s (bound)", {n: (batches, speed[n]) for n in SYSTEMS})
        ]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig14",
        question="What is the latency from end to end, against five systems?",
        here="Bytes that each system moves from the host in a step, and the perplexity that it has for them.",
        parts=_fig14_parts,
        judge=_fig14,
        needs=NEEDS,
    ),
    Entry(
        name="infinigen_fig15",
        question="Does the lead grow with the batch?",
        here="What bytes and bandwidths allow.",
        parts=_fig15_parts,
        judge=_fig15,
        needs=NEEDS,
    ),
)
