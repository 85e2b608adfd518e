"""RoCo, Tables 4 and 5: a budget for answers, and what a judge makes of them."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import continuation, fullref
from experiments.papers.roco.summaries import POLICIES, near, near_table, order_claims
from experiments.papers.settings import Settings
from experiments.papers.statistics import Comparison, paired_bootstrap
from experiments.papers.verdict import Claim, Judgement, Table

PROMPT, NEW = 64, 384


def _answer(settings: Settings, cache: str, slots: int) -> fullref.Greedy:
    scale = settings.scale
    return fullref.greedy(
        settings, cache, scale.tokens(slots), prompt=scale.tokens(PROMPT), new=scale.tokens(NEW),
        rows=settings.scale.rows,
    )  # fmt: skip


# Table 4
SLOTS = (200, 100)


def _table4_caches(settings: Settings, slots: int) -> dict[str, fullref.Greedy]:
    caches = tuple(POLICIES) if slots == SLOTS[0] else ("window", "h2o", "roco")
    return {cache: _answer(settings, cache, slots) for cache in ("full", *caches)}


def _table4_parts(settings: Settings) -> Iterable[Part]:
    for slots in settings.scale.some(SLOTS, SLOTS[:1]):
        yield from _table4_caches(settings, slots).values()


def _table4(settings: Settings, found: Found) -> Judgement:
    tables, better = [], []
    confirm: list[Claim] = []
    comparisons: list[Comparison] = []
    for slots in settings.scale.some(SLOTS, SLOTS[:1]):
        parts, where = _table4_caches(settings, slots), f"{settings.scale.tokens(slots)} slots"
        tables.append(near_table(settings, found, parts, f"Answers of {parts['full'].new} tokens, {where}"))
        made = near(settings, found, parts, where)
        comparisons += made.values()
        confirm += order_claims(made, where)[0]
        better.append(made["roco", "h2o"])
    return Judgement(
        tables=tables,
        confirm=confirm,
        contradict=[
            Claim("roco is not better than h2o at both budgets", not any(each.higher for each in better),
                  ", ".join(each.result for each in better)),
        ],
        comparisons=comparisons,
        notes=["Greedy texts part for good at the first other token: read R-L beside 'first differs after'."],
    )  # fmt: skip


# Table 5
JUDGED, WITH = ("window", "h2o", "roco"), (200, 250)


def _table5_parts(settings: Settings) -> Iterable[Part]:
    for cache in ("full", *JUDGED):
        for slots in WITH:
            part = _answer(settings, cache, slots)
            yield from (part, continuation.likely(part))


def _table5(settings: Settings, found: Found) -> Judgement:
    def nats(cache: str, slots: int) -> np.ndarray:
        """[rows]: the full cache's negative log-likelihood per token of a cache's text."""
        scored = found[continuation.likely(_answer(settings, cache, slots))]["logprobs"]
        return np.asarray(-np.mean(scored, axis=1, dtype=np.float64))

    own = nats("full", WITH[0])
    mean = {(c, s): float(nats(c, s).mean()) for c in JUDGED for s in WITH}
    far = {key: abs(value - own.mean()) for key, value in mean.items()}
    rows = []
    for cache in ("full", *JUDGED):
        row = {"policy": f"{cache} ({POLICIES[cache]})" if cache in POLICIES else cache}
        for slots in WITH:
            made, shown = found[_answer(settings, cache, slots)], f"{settings.scale.tokens(slots)} slots"
            row[f"nats a token, {shown}"] = f"{nats(cache, slots).mean():.3f}"
            row[f"from full, {shown}"] = f"{far.get((cache, slots), 0):.3f}"
            row[f"distinct-2, {shown}"] = f"{fullref.distinct_2(made).mean():.0f} %"
        rows.append(row)
    comparisons = [
        paired_bootstrap(f"{one} against {other}, {slots} slots, nats a token under full", nats(one, slots),
                         nats(other, slots), seed=settings.seed)
        for slots in WITH for one, other in (("roco", "h2o"), ("h2o", "window"), ("roco", "window"))
    ]  # fmt: skip
    order = {slots: [name for _, name in sorted((far[name, slots], name) for name in JUDGED)] for slots in WITH}
    shown = "; ".join(f"{slots}: {', '.join(names)}" for slots, names in order.items())
    closer = {cache: far[cache, WITH[1]] < far[cache, WITH[0]] for cache in JUDGED}
    return Judgement(
        tables=[Table("The full cache's negative log-likelihood of each cache's own text", rows)],
        confirm=[
            Claim("roco is nearest to the full cache's own, then h2o, then window, at both budgets",
                  all(names == ["roco", "h2o", "window"] for names in order.values()), shown),
            Claim("all are closer at the larger budget", all(closer.values()),
                  ", ".join(f"{cache}: {'yes' if each else 'no'}" for cache, each in closer.items())),
        ],
        contradict=[
            Claim("window is nearest at both budgets", all(names[0] == "window" for names in order.values()), shown),
        ],
        comparisons=comparisons,
        notes=[
            "A likelihood is no judge: text that repeats itself scores high, which distinct-2 shows.",
            "In the paper the full cache wins 75.6 % (its entries plus what they are below it).",
        ],
        draw=lambda: figures.bars(
            "Distance from the full cache's own text", "nats a token",
            {f"{s} slots": {c: far[c, s] for c in JUDGED} for s in WITH},
        ),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="roco_table4",
        question="Does a budget while decoding keep answers?",
        here="Long continuations of short prompts of a book, under two budgets.",
        parts=_table4_parts,
        judge=_table4,
    ),
    Entry(
        name="roco_table5",
        question="Do judges notice?",
        here="In place of a judge: how probable the full cache finds the texts of roco_table4.",
        parts=_table5_parts,
        judge=_table5,
        needs="a judge; win rates are not measured.",
    ),
)
