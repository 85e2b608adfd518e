"""H2O, Figures 5 and 6: what the text looks like."""

from collections.abc import Callable, Iterable

from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import fullref
from experiments.papers.settings import Settings
from experiments.papers.statistics import paired_bootstrap
from experiments.papers.verdict import Claim, Judgement, Table

CACHES = ("full", "h2o", "local_only")
NEW = 256


def _part(settings: Settings, cache: str, text: str) -> fullref.Greedy:
    return fullref.greedy(settings, cache, 0.2, text=text, rows=settings.scale.rows, new=settings.scale.tokens(NEW))


def _parts(text: str) -> Callable[[Settings], Iterable[Part]]:
    return lambda settings: [_part(settings, cache, text) for cache in CACHES]


def _judge(text: str) -> Callable[[Settings, Found], Judgement]:
    def judge(settings: Settings, found: Found) -> Judgement:
        results = {cache: found[_part(settings, cache, text)] for cache in CACHES}
        rows = [
            {"policy": cache, **fullref.diversity_cells(result),
             "agrees with full": f"{100 * fullref.agreement(result, results['full']):.1f} %",
             "first differs after": f"{fullref.same_until(result, results['full']):.1f}"}
            for cache, result in results.items()
        ]  # fmt: skip
        distinct = {cache: fullref.distinct_2(result) for cache, result in results.items()}
        comparisons = {
            cache: paired_bootstrap(
                f"{cache} against full, distinct-2", distinct[cache], distinct["full"], seed=settings.seed
            )
            for cache in CACHES[1:]
        }
        gap = {cache: f"{each.difference:+.1f} points" for cache, each in comparisons.items()}
        return Judgement(
            tables=[Table(f"Greedy text of {len(distinct['full'])} rows, at a budget of 0.2", rows)],
            confirm=[
                Claim(
                    "h2o's share of distinct pairs is at least the full cache's", comparisons["h2o"].difference >= 0,
                    gap["h2o"],
                ),
                Claim(
                    "local_only's is lower than the full cache's", comparisons["local_only"].lower, gap["local_only"]
                ),
            ],
            contradict=[Claim("h2o repeats more than the full cache", comparisons["h2o"].lower, gap["h2o"])],
            comparisons=list(comparisons.values()),
        )  # fmt: skip

    return judge


HERE = "Prompts from {}, continued greedily: the share of distinct n-grams, and the longest that occurs twice, by row."

ENTRIES = (
    Entry(
        name="h2o_fig5",
        question="What does the text of OPT look like at 20 % of the cache?",
        here=HERE.format("Great Expectations"),
        parts=_parts("book"),
        judge=_judge("book"),
    ),
    Entry(
        name="h2o_fig6",
        question="What does the text of LLaMA look like at 20 % of the cache?",
        here=HERE.format("Alice in Wonderland"),
        parts=_parts("alice"),
        judge=_judge("alice"),
    ),
)
