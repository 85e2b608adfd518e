"""H2O, Table 3: latency with long sequences; here plans, and ratios on this machine's CPU."""

from collections.abc import Iterable

from experiments.papers.entry import Entry, Found
from experiments.papers.h2o.hardware import COMMAND, both, timed
from experiments.papers.parts import Part
from experiments.papers.recipes import cpu, plan
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

LONG = (
    (7000, 1024, "opt-30b", 1),
    (5000, 5000, "opt-13b", 4),
    (2048, 2048, "opt-6.7b", 24),
    (2048, 2048, "opt-6.7b", 64),
)
GRID = tuple((batch, context) for context in (512, 2048) for batch in (1, 8, 24))


def _grid(settings: Settings) -> tuple[tuple[int, int], ...]:
    return settings.scale.some(GRID, ((1, 2048),))


def _table3_parts(settings: Settings) -> Iterable[Part]:
    for prompt, new, shape, batch in LONG:
        yield from both(shape, batch, prompt, new, "A100").values()
    yield from (cpu.decode(settings, batch, context) for batch, context in _grid(settings))


def _table3(settings: Settings, found: Found) -> Judgement:
    memory = plan.PLATFORMS["A100"].memory
    assert memory is not None
    rows = []
    for prompt, new, shape, batch in LONG:
        results = {cache: found[part] for cache, part in both(shape, batch, prompt, new, "A100").items()}
        speed = {cache: plan.value(result, "speed") for cache, result in results.items()}
        total = {c: plan.value(r, "weights") + plan.value(r, "cache") for c, r in results.items()}
        row = {"prompt + new": f"{prompt} + {new}", "model": shape, "batch": str(batch)}
        for cache in results:
            fits = "" if total[cache] <= memory else ", does not fit"
            row[f"{cache} GB"] = f"{total[cache] / 1e9:.0f}{fits}"
            row[f"{cache} s"] = f"{new * batch / speed[cache]:.1f}"
        rows.append(row | {"ratio": f"{speed['h2o'] / speed['full']:.2f}x"})
    grid = [cpu.decode(settings, batch, context) for batch, context in _grid(settings)]
    steps, faster = timed(found, grid)
    longest = max(part.context for part in grid)
    # By batch, which ascends.
    at_longest = [ratio for part, ratio in zip(grid, faster, strict=True) if part.context == longest]
    shown = ", ".join(f"{ratio:.2f}x" for ratio in at_longest)
    return Judgement(
        tables=[
            Table("An A100 (80 GB): memory, and the least seconds for the new tokens by its bandwidth", rows),
            Table("This CPU: milliseconds a decoding step", steps),
        ],
        confirm=[
            Claim("a step is over 1.1 times as fast at batch 1 and the longest context", at_longest[0] > 1.1, shown),
            Claim("the ratio grows with the batch at the longest context", at_longest == sorted(at_longest), shown),
        ],
        contradict=[Claim("h2o's step is no faster somewhere at 2,048 tokens", min(at_longest) <= 1, shown)],
        notes=["Weights dominate a step at batch 1, the cache at batch 24."],
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_table3",
        question="What are latency and throughput with long sequences where everything fits on the GPU?",
        here="What an A100's memory bandwidth allows at these sizes, and the ratio of steps on this CPU.",
        parts=_table3_parts,
        judge=_table3,
        needs=f"a GPU of 80 GB for latencies: {COMMAND} --batch=24 --context=2048 --tokens=2048.",
    ),
)
