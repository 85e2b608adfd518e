"""RoCo, Figure 5: perplexity against the budget."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import lm
from experiments.papers.roco.scopes import BLOCK
from experiments.papers.roco.summaries import POLICIES
from experiments.papers.settings import Settings
from experiments.papers.statistics import Comparison
from experiments.papers.verdict import Claim, Judgement, at_least

TEXTS = ("book", "alice", "wiki")
RATES = (0.1, 0.15, 0.2, 0.5, 0.8)
SMALL, LARGE = 0.15, 0.5  # of claims
MAIN = ("roco", "h2o", "window")


def _texts(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(TEXTS, ("book",))


def _rates(settings: Settings, text: str, policy: str) -> tuple[float, ...]:
    """The budgets of a policy on a text: a curve of those that claims are about, on one text."""
    if policy in MAIN and text == "book":
        return settings.scale.some(RATES, (SMALL, LARGE))
    return (SMALL, LARGE) if policy in MAIN[:2] else (SMALL,)


def _part(settings: Settings, policy: str, rate: float, text: str) -> lm.LM:
    return lm.lm(settings, policy, rate, text=text, block=BLOCK)


def _parts(settings: Settings) -> Iterable[Part]:
    for text in _texts(settings):
        yield lm.lm(settings, "full", 1.0, text=text)
        for policy in POLICIES:
            yield from (_part(settings, policy, rate, text) for rate in _rates(settings, text, policy))


def _judge(settings: Settings, found: Found) -> Judgement:
    tables, panels = [], []
    comparisons: list[Comparison] = []
    roco, others, gap = [], [], []
    for text in _texts(settings):
        full = found[lm.lm(settings, "full", 1.0, text=text)]
        results = {(p, r): found[_part(settings, p, r, text)] for p in POLICIES for r in _rates(settings, text, p)}
        shown = {("full", rate): full for rate in sorted({rate for _, rate in results})} | results
        names = {policy: f"{policy} ({name})" for policy, name in POLICIES.items()}
        table, panel = lm.by_budget(
            text, shown, budget="budget rate", names=names,
            drawn=[*(policy for policy in POLICIES if policy != "random"), "full"],
        )  # fmt: skip
        tables.append(table)
        panels.append(panel)
        made = {
            (other, rate): lm.compare(f"roco against {other} on {text} at {rate:g}", results["roco", rate],
                                      results[other, rate], settings)
            for other, rate in (("h2o", SMALL), ("h2o", LARGE), ("window", SMALL))
        }  # fmt: skip
        comparisons += made.values()
        roco.append(made["h2o", SMALL].lower)
        others.append(made["h2o", SMALL].higher or made["window", SMALL].higher)
        small, large = (
            abs(lm.perplexity(results["h2o", r]) - lm.perplexity(results["roco", r])) for r in (SMALL, LARGE)
        )
        gap.append((text, small, large))
    falling = [small > large for _, small, large in gap]
    return Judgement(
        tables=tables,
        confirm=[
            Claim(f"roco is better than h2o at {SMALL:g} on two of three texts", at_least(roco, 2), f"on {sum(roco)}"),
            Claim(f"the gap is smaller at {LARGE:g}, on two of three texts", at_least(falling, 2),
                  ", ".join(f"{text} {small:.2f} and {large:.2f}" for text, small, large in gap)),
        ],
        contradict=[
            Claim(f"h2o or window is better than roco at {SMALL:g} on two texts", at_least(others, 2),
                  f"on {sum(others)}"),
        ],
        comparisons=comparisons,
        notes=[
            "random is left out of the figure: its perplexities are of another order.",
            "wiki is far from what the model was trained on, and its full cache need not be the best one there.",
        ],
        draw=lambda: figures.curves(panels),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="roco_fig5",
        question="How does perplexity depend on the budget rate?",
        here=f"Three texts; prompts are evicted from while they are read, in blocks of {BLOCK} tokens.",
        parts=_parts,
        judge=_judge,
    ),
)
