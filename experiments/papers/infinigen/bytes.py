"""InfiniGen, Figure 2: when the cache outgrows the weights."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import plan
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

LENGTHS, ROWS = (256, 512, 1024, 2048, 4096, 8192), 16
BATCHES, LENGTH = (1, 4, 8, 16, 32, 64), 2048
NEW = 1  # a cache of exactly the length
DERIVED = {"length": 2720, "batch": 22}  # where the paper's formula crosses 59.9 GB of weights
NEAR = 0.05


def _one(cache: str, batch: int, length: int) -> plan.Plan:
    return plan.plan(cache, 0.2, shape="opt-30b", batch=batch, prompt=length, new=NEW, device="A6000")


def _points(by: str) -> list[tuple[int, int, int]]:
    """(what varies, batch, length) of each point."""
    return [(n, ROWS, n) for n in LENGTHS] if by == "length" else [(n, n, LENGTH) for n in BATCHES]


def _parts(settings: Settings) -> Iterable[Part]:
    for by in DERIVED:
        for _, batch, length in _points(by):
            yield from (_one(cache, batch, length) for cache in ("full", "h2o"))


def _judge(settings: Settings, found: Found) -> Judgement:
    tables, panels, crossing, slope = [], [], {}, {}
    for by in DERIVED:
        points = _points(by)
        weights = plan.value(found[_one("full", *points[0][1:])], "weights")
        full, h2o = ([plan.value(found[_one(c, batch, n)], "cache") for _, batch, n in points] for c in ("full", "h2o"))
        rows = [
            {by: str(x), "weights GB": f"{weights / 1e9:.1f}", "full cache GB": f"{f / 1e9:.1f}",
             "h2o (20 %) GB": f"{h / 1e9:.1f}"}
            for (x, *_), f, h in zip(points, full, h2o, strict=True)
        ]  # fmt: skip
        tables.append(Table(f"OPT-30B in two bytes per number, by {by}", rows))
        xs = [float(x) for x, *_ in points]
        crossing[by] = weights / ((full[-1] - full[0]) / (xs[-1] - xs[0]))
        slope[by] = (h2o[-1] - h2o[0]) / (full[-1] - full[0])
        lines = {"weights": [weights / 1e9] * len(xs), "full": [f / 1e9 for f in full], "h2o": [h / 1e9 for h in h2o]}
        fixed = f"batch {ROWS}" if by == "length" else f"length {LENGTH}"
        panels.append(figures.Panel(fixed, by, "GB", {name: (xs, ys) for name, ys in lines.items()}))
    near = {by: abs(crossing[by] / DERIVED[by] - 1) <= NEAR for by in DERIVED}
    return Judgement(
        tables=tables,
        confirm=[
            Claim(
                f"the cache outgrows the weights within 5 % of the derived {by} {DERIVED[by]:,}", near[by],
                f"at {crossing[by]:,.0f}",
            )
            for by in DERIVED
        ]
        + [
            Claim("h2o's line has a fifth of the slope (within 5 %)", abs(s / 0.2 - 1) <= NEAR, f"by {by}: {s:.3f}")
            for by, s in slope.items()
        ],
        contradict=[Claim("a crossing elsewhere", not all(near.values()))],
        notes=["This is arithmetic: a miss would be a bug."],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="infinigen_fig2",
        question="When does the cache outgrow the weights?",
        here="Bytes that kvjax would allocate, counted from shapes.",
        parts=_parts,
        judge=_judge,
        exact=True,
    ),
)
