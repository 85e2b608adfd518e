"""H2O, Tables 2 and 7: throughput on a GPU; here bytes, plans and ratios on this machine's CPU."""

import itertools
from collections.abc import Iterable

from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import cpu, plan
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

SHARE = 0.2
SHAPES = ("opt-6.7b", "opt-30b")
WORK = ((512, 32), (512, 512), (512, 1024))  # prompt and new tokens
COMMAND = "python -m experiments.bench decode --against=none --shape=opt-6.7b --dtype=bfloat16 --policies=h2o,full"


def slots(prompt: int, new: int) -> int:
    """A fifth of the final length, which is the paper's budget here: its caches hold a fifth of all tokens."""
    return int(SHARE * (prompt + new))


def both(shape: str, batch: int, prompt: int, new: int, device: str) -> dict[str, plan.Plan]:
    """The plans of a setting."""
    budget = {"full": 1.0, "h2o": slots(prompt, new)}
    return {
        cache: plan.plan(cache, budget[cache], shape=shape, batch=batch, prompt=prompt, new=new, device=device)
        for cache in budget
    }


# Table 2
BATCHES = (1, 2, 4, 8, 16, 32, 64, 144, 416, 728)
CONTEXT, CPU_BATCHES = 2048, (1, 8)


def _steps(settings: Settings) -> list[cpu.Decode]:
    return [cpu.decode(settings, batch, CONTEXT) for batch in settings.scale.some(CPU_BATCHES, (1,))]


def _table2_parts(settings: Settings) -> Iterable[Part]:
    for shape, (prompt, new) in itertools.product(SHAPES, WORK):
        yield from both(shape, 1, prompt, new, "T4").values()
    for batch in BATCHES:
        yield from both("opt-6.7b", batch, 512, 512, "T4").values()
    yield from _steps(settings)


def _table2(settings: Settings, found: Found) -> Judgement:
    memory = plan.PLATFORMS["T4"].memory
    assert memory is not None
    rows, ratios = [], []
    for shape, (prompt, new) in itertools.product(SHAPES, WORK):
        one = {cache: found[part] for cache, part in both(shape, 1, prompt, new, "T4").items()}
        held = {cache: plan.value(result, "cache") for cache, result in one.items()}
        fits = {cache: plan.largest_batch(result, memory) for cache, result in one.items()}
        ratios.append(held["h2o"] / held["full"])
        rows.append(
            {"model": shape, "prompt + new": f"{prompt} + {new}", "full, MB a row": f"{held['full'] / 1e6:.0f}",
             "h2o, MB a row": f"{held['h2o'] / 1e6:.0f}", "of full": f"{100 * ratios[-1]:.1f} %",
             "rows at equal bytes": f"{held['full'] / held['h2o']:.2f}x",
             "rows that fit 16 GB, full": str(fits["full"]), "h2o": str(fits["h2o"])}
        )  # fmt: skip
    speeds: dict[str, dict[int, float]] = {"full": {}, "h2o": {}}
    planned = []
    for batch in BATCHES:
        row = {"batch": str(batch)}
        for cache, part in both("opt-6.7b", batch, 512, 512, "T4").items():
            total = plan.value(found[part], "weights") + plan.value(found[part], "cache")
            speed = plan.value(found[part], "speed")
            row |= {f"{cache} GB": f"{total / 1e9:.1f}", f"{cache} tokens/s": f"{speed:,.0f}"}
            if total <= memory:
                speeds[cache][batch] = speed
        planned.append(row)
    best = {cache: max(each.values(), default=0.0) for cache, each in speeds.items()}
    gain = best["h2o"] / best["full"] if best["full"] else float("inf")
    steps, faster = timed(found, _steps(settings))
    return Judgement(
        tables=[
            Table("Bytes of the cache at a fifth of the final length, and rows that fit beside the weights", rows),
            Table("OPT-6.7B, 512 + 512, on a T4: memory, and tokens/s that its bandwidth allows", planned),
            Table("This CPU: milliseconds a decoding step", steps),
        ],
        confirm=[
            Claim(
                "the cache falls to a fifth (one slot per head more)", all(abs(r / SHARE - 1) < 0.02 for r in ratios),
                f"{min(ratios):.3f} to {max(ratios):.3f}",
            ),
            Claim(
                "at the largest batch that fits, the plan has at least twice the tokens/s of the full cache", gain >= 2,
                f"{gain:.2f}x, at batches of {max(speeds['h2o'], default=0)} and {max(speeds['full'], default=0)}",
            ),
        ],
        contradict=[
            Claim(
                "h2o's step is slower than the full cache's at 2,048 tokens", min(faster) < 1,
                ", ".join(f"{ratio:.2f}x" for ratio in faster),
            )
        ],
        notes=[
            "In the paper the effective batches of H2O and FlexGen on OPT-30B have ratios of 5.1, 5.2 and 5.5; its 29x "
            "over DeepSpeed and Accelerate is 31.4x by its own entries.",
        ],
    )  # fmt: skip


def timed(found: Found, parts: Iterable[cpu.Decode]) -> tuple[list[dict[str, str]], list[float]]:
    """Rows of a table of times, and how many times as fast h2o's step is as the full cache's."""
    rows, ratios = [], []
    for part in parts:
        full, h2o = (cpu.milliseconds(found[part], side) for side in ("full", "h2o"))
        ratios.append(full / h2o)
        rows.append(
            {"model": part.shape, "batch": str(part.batch), "context": str(part.context), "full ms": f"{full:.2f}",
             "h2o ms": f"{h2o:.2f}", "full / h2o": f"{ratios[-1]:.2f}x"}
        )  # fmt: skip
    return rows, ratios


# Table 7
def _table7_parts(settings: Settings) -> Iterable[Part]:
    for prompt, new in WORK:
        yield from both("opt-6.7b", 1, prompt, new, "T4").values()


def _table7(settings: Settings, found: Found) -> Judgement:
    memory = plan.PLATFORMS["T4"].memory
    assert memory is not None
    rows = []
    for prompt, new in WORK:
        row = {"prompt + new": f"{prompt} + {new}"}
        for cache, part in both("opt-6.7b", 1, prompt, new, "T4").items():
            for bits, share in ((16, 1.0), (4, 0.25)):
                row[f"{cache}, weights in {bits} bits"] = str(plan.largest_batch(found[part], memory, share))
        rows.append(row)
    return Judgement(
        tables=[Table("Rows of OPT-6.7B that fit 16 GB beside the weights, scales and temporaries left out", rows)],
        notes=[
            "The text: batches up to 20 times larger for less than twice the throughput, since kernels decode slowly. "
            "On a CPU, weights in four bits are another question: `experiments.bench decode --weights=int4`."
        ],
    )


ENTRIES = (
    Entry(
        name="h2o_table2",
        question="How many tokens per second does H2O reach on a GPU of 16 GB, against three systems?",
        here="Bytes and the batches that fit, tokens/s that a T4's bandwidth allows, and steps on this CPU.",
        parts=_table2_parts,
        judge=_table2,
        needs=f"a T4 and those systems for tokens/s; on a GPU: {COMMAND} --batch=4 --context=512 --tokens=512.",
    ),
    Entry(
        name="h2o_table7",
        question="What does H2O reach without offloading, with weights in four bits?",
        here="The batches that fit, from bytes.",
        parts=_table7_parts,
        judge=_table7,
        needs="a T4 and kernels for weights in four bits on it.",
        exact=True,
    ),
)
