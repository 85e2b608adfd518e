"""RoCo, Table 3 and Figure 6: what of the prompt can still be said."""

from collections.abc import Iterable

import numpy as np

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part, Result
from experiments.papers.recipes import recall
from experiments.papers.roco.scopes import BLOCK
from experiments.papers.roco.summaries import POLICIES
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table, at_least
from experiments.tasks import ngrams

# Table 3
BUDGETS = (0.2, 0.5, 0.8)
WORDS = 6
COMPARED = ("roco", "h2o")


def _copy(settings: Settings, cache: str, budget: float, distance: str = "near") -> recall.Recall:
    return recall.recall(
        settings, cache, budget, task="copy", distance=distance, block=BLOCK, difficulty=WORDS,
        length=recall.short(settings),
    )  # fmt: skip


def _asked(settings: Settings) -> dict[tuple[str, float], tuple[str, ...]]:
    """(distance, budget) -> caches."""
    return {("near", budget): ("full", *COMPARED) for budget in settings.scale.some(BUDGETS, (0.5,))}


def _table3_parts(settings: Settings) -> Iterable[Part]:
    for (distance, budget), caches in _asked(settings).items():
        yield from (_copy(settings, cache, budget, distance) for cache in caches)


def _rouge_l(result: Result) -> float:
    """The mean ROUGE-L of answers against the true ones, each cut to the length of the true one."""
    scores = []
    for made, true in zip(result["tokens"], result["answers"], strict=True):
        count = int(np.sum(true >= 0))
        scores.append(ngrams.token_scores([made[:count]], [true[:count]])["ROUGE-L"])
    return float(np.mean(scores))


def _table3(settings: Settings, found: Found) -> Judgement:
    asked, tables, comparisons = _asked(settings), [], {}
    for (distance, budget), caches in asked.items():
        parts = {cache: _copy(settings, cache, budget, distance) for cache in caches}
        title = f"{WORDS} words, {parts['full'].nearest} to {parts['full'].farthest} tokens back, at {budget:g}"
        tables.append(Table(title, [
            {"policy": f"{cache} ({POLICIES[cache]})" if cache in POLICIES else cache,
             "exact": recall.shown(found[part]), "R-L": f"{_rouge_l(found[part]):.1f}"}
            for cache, part in parts.items()
        ]))  # fmt: skip
        what = f"roco against h2o, {distance}, at {budget:g}"
        comparisons[distance, budget] = recall.compare(what, *(found[parts[c]] for c in COMPARED))
    main = [made for (distance, _), made in comparisons.items() if distance == "near"]
    # (distance, budget) and cache -> the share of exact answers
    share = {
        (key, cache): recall.share(found[_copy(settings, cache, key[1], key[0])])
        for key in asked
        for cache in ("full", *COMPARED)
    }
    reduced = {each: value for each, value in share.items() if each[1] != "full"}
    begins = [key[1] for (key, _), value in reduced.items() if value > 0]
    best = max(share[key, "full"] for key in asked)
    nothing = max(reduced.values()) == 0
    begin = f"the smallest budget with an exact answer is {min(begins):g}" if begins else "no answer is exact"
    won = [made.higher for made in main]
    return Judgement(
        tables=tables,
        confirm=[Claim("roco is better than h2o at two of three budgets", at_least(won, 2),
                       f"at {sum(won)} of {len(won)}")],
        contradict=[Claim("both are equal at 0 %", nothing, begin)],
        comparisons=list(comparisons.values()),
        notes=[
            f"The full cache's best is {best:.0%}. Nothing is reconstructed here."
            if nothing else f"Of roco and h2o, {begin}; the full cache's best is {best:.0%}.",
            "A fact is read once, long before it is asked for; the words are drawn at random, so that nothing but the "
            "cache can tell them.",
        ],
    )  # fmt: skip


# Figure 6
RATE = 0.3
NAMES = ("full", "roco", "h2o", "window")


def _names(settings: Settings, cache: str) -> recall.Recall:
    return recall.recall(settings, cache, RATE, task="multi_key", block=BLOCK, length=recall.short(settings))


def _fig6(settings: Settings, found: Found) -> Judgement:
    results = {cache: found[_names(settings, cache)] for cache in NAMES}
    part = _names(settings, "roco")
    rows = [
        {"policy": f"{cache} ({POLICIES[cache]})" if cache in POLICIES else cache, "exact": recall.shown(result),
         "R-L": f"{_rouge_l(result):.1f}"}
        for cache, result in results.items()
    ]  # fmt: skip
    made = {other: recall.compare(f"roco against {other}", results["roco"], results[other]) for other in NAMES[2:]}
    share = {cache: recall.share(result) for cache, result in results.items()}
    shown = ", ".join(f"{cache} {value:.0%}" for cache, value in share.items())
    newest = int(RATE * part.length)
    return Judgement(
        tables=[Table(f"One of four names' numbers, {part.nearest} to {part.farthest} tokens back, at {RATE:g}", rows)],
        confirm=[
            Claim("roco answers more than h2o and window", all(each.higher for each in made.values()), shown)
        ],
        contradict=[Claim("all of them are at 0 %", max(share[cache] for cache in NAMES[1:]) == 0, shown)],
        comparisons=list(made.values()),
        notes=[
            f"Of the facts {recall.inside(part, newest):.0%} lie inside a window of the whole budget, and "
            f"{recall.inside(part, newest // 2):.0%} inside h2o's recent half.",
        ],
        draw=lambda: figures.bars("Numbers that are still right", "%",
                                  {cache: {"exact answers": 100 * value} for cache, value in share.items()}),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="roco_table3",
        question="Is the original text still in the reduced cache?",
        here="Spans of random words hidden in a text, to be continued from their first three; prompts of half the "
        f"usual length are evicted from while they are read, in blocks of {BLOCK} tokens.",
        parts=_table3_parts,
        judge=_table3,
    ),
    Entry(
        name="roco_fig6",
        question="Does a case study show the same answer as under the full cache?",
        here="The small model knows no actors: numbers of names that its prompt, of half the usual length, tells; one "
        "of four is asked for.",
        parts=lambda settings: [_names(settings, cache) for cache in NAMES],
        judge=_fig6,
    ),
)
