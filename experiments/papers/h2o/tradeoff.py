"""H2O, Figure 1: quality against memory."""

import dataclasses
from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import lm, plan
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table
from experiments.reports import tables

BUDGETS = (0.05, 0.1, 0.2, 0.4, 0.8)
JUDGED = (0.05, 0.1, 0.2, 0.4)
ROWS, LENGTH, STATED = 128, 1024, 180e9  # the cache of OPT-30B that the text states


def _static(settings: Settings) -> dict[str, str]:
    """Name -> cache of each static pattern."""
    block = settings.scale.pattern
    return {
        "local_only": "local_only", "window": "window", "strided": "strided(stride=4)",
        "fixed": f"fixed(block={block},columns={block // 4})",
    }  # fmt: skip


def _caches(settings: Settings) -> dict[str, str]:
    return {"h2o": "h2o", **_static(settings), "random": "random"}


STATED_PART = plan.plan("full", 1.0, shape="opt-30b", batch=ROWS, prompt=LENGTH, new=1, device="A100")


def _fig1_parts(settings: Settings) -> Iterable[Part]:
    yield STATED_PART
    yield lm.lm(settings, "full", 1.0)
    yield plan.held(settings, "full", 1.0)
    for cache in _caches(settings).values():
        for budget in settings.scale.some(BUDGETS, (0.1, 0.4)):
            yield lm.lm(settings, cache, budget)
            yield plan.held(settings, cache, budget)


def _fig1(settings: Settings, found: Found) -> Judgement:
    full, every = found[lm.lm(settings, "full", 1.0)], found[plan.held(settings, "full", 1.0)]
    budgets = settings.scale.some(BUDGETS, (0.1, 0.4))
    rows, lines, comparisons, better = [], {}, [], {}
    for name, cache in _caches(settings).items():
        results = [found[lm.lm(settings, cache, budget)] for budget in budgets]
        held = [found[plan.held(settings, cache, budget)]["bytes"] / every["bytes"] for budget in budgets]
        lines[name] = ([100 * float(each) for each in held], [lm.perplexity(each) for each in results])
        pairs = zip(budgets, results, strict=True)
        rows.append({"policy": name} | {f"{budget:g}": lm.shown(result) for budget, result in pairs})
        if name not in ("h2o", "random"):
            for budget, result in zip(budgets, results, strict=True):
                if budget in JUDGED:
                    h2o = found[lm.lm(settings, "h2o", budget)]
                    better[name, budget] = lm.compare(f"h2o against {name} at {budget:g}", h2o, result, settings)
                    comparisons.append(better[name, budget])
    below = sum(each.lower for each in comparisons)
    beaten = {name: sum(better[name, b].higher for b in budgets if b in JUDGED) for name in _static(settings)}
    held_bytes = plan.value(found[STATED_PART], "cache")
    lines["full"] = ([0.0, 100.0], [lm.perplexity(full)] * 2)
    panel = figures.Panel(
        "Perplexity against memory", "KV cache held, % of the full cache", "perplexity", lines, log_y=True
    )
    # By chance is so much worse that the others cannot be told apart beside it.
    near = {name: line for name, line in lines.items() if name != "random"}
    close = dataclasses.replace(panel, title="The same without random", lines=near, log_y=False)
    return Judgement(
        tables=[Table(f"Perplexity by budget; the full cache has {lm.shown(full)}", rows)],
        confirm=[
            Claim(
                "h2o is below every static pattern at 0.05 to 0.4", below == len(comparisons),
                f"lower in {below} of {len(comparisons)}",
            ),
            Claim(
                "OPT-30B at batch 128 and length 1,024 has a cache of 180 GB, within 1 %",
                abs(held_bytes / STATED - 1) < 0.01, tables.show_bytes(held_bytes),
            ),
        ],
        contradict=[
            Claim(f"{name} is better than h2o at two budgets or more", count >= 2, f"at {count}")
            for name, count in beaten.items()
        ],
        comparisons=comparisons,
        notes=["window keeps four sinks and local_only none: where only the former is better, sinks explain it."],
        draw=lambda: figures.curves([panel, close]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_fig1",
        question="Where does H2O stand between dense, sparse-pattern and window caches, in accuracy against memory?",
        here="Perplexity of a book against the share of the cache that is held, and the bytes of OPT-30B's cache.",
        parts=_fig1_parts,
        judge=_fig1,
    ),
)
