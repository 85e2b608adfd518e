"""H2O, Table 4: more shots, and longer prompts."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import choice, lm
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

CACHES = ("full", "local_only", "h2o")


def _prompts(settings: Settings) -> tuple[int, ...]:
    return settings.scale.some((128, 256, 512, 768), (96, settings.scale.prompt))


def _shots(settings: Settings) -> tuple[int, ...]:
    return settings.scale.some((0, 2, 5, 10), (0, 5))


def _table4_parts(settings: Settings) -> Iterable[Part]:
    for cache in CACHES:
        yield from (lm.lm(settings, cache, 0.2, prompt=prompt) for prompt in _prompts(settings))
        yield from (choice.choice(settings, cache, 0.2, task="copa", shots=shots) for shots in _shots(settings))


def _table4(settings: Settings, found: Found) -> Judgement:
    rows, comparisons, losses, larger = [], [], {}, []
    for prompt in _prompts(settings):
        results = {cache: found[lm.lm(settings, cache, 0.2, prompt=prompt)] for cache in CACHES}
        row = {"prompt": str(prompt), "full": lm.shown(results["full"])}
        for cache in CACHES[1:]:
            losses[cache, prompt] = lm.loss(results[cache], results["full"])
            row[f"{cache}, above full"] = f"{100 * losses[cache, prompt]:+.2f} %"
        rows.append(row)
        what = f"local_only against h2o, prompts of {prompt}"
        comparisons.append(lm.compare(what, results["local_only"], results["h2o"], settings))
        larger.append(losses["local_only", prompt] > losses["h2o", prompt])
    chosen = []
    for shots in _shots(settings):
        results = {cache: found[choice.choice(settings, cache, 0.2, task="copa", shots=shots)] for cache in CACHES}
        full = results["full"]
        row = {"shots, at most": str(shots), "on average": f"{full['shots'].mean():.1f}"}
        row |= {cache: f"{100 * choice.accuracy(results[cache]):.1f} %" for cache in CACHES}
        row |= {f"{c} as full": f"{100 * choice.agreement(results[c], full):.0f} %" for c in CACHES[1:]}
        chosen.append(row)
        what = f"h2o against local_only, {shots} shots"
        comparisons.append(choice.compare(what, results["h2o"], results["local_only"], full))
    every = {cache: [losses[cache, prompt] for prompt in _prompts(settings)] for cache in CACHES[1:]}
    spread = max(every["h2o"]) - min(every["h2o"])
    growth = {cache: each[-1] - each[0] for cache, each in every.items()}
    return Judgement(
        tables=[
            Table("Perplexity at 0.2 by length of the prompt", rows),
            Table("COPA at 0.2: accuracy, and questions decided as under full", chosen),
        ],
        confirm=[
            Claim("h2o's loss differs by less than 1 % of perplexity between lengths", spread < 0.01, f"{spread:.2%}"),
            Claim("local_only's loss is larger at each length", all(larger), f"at {sum(larger)} of {len(larger)}"),
        ],
        contradict=[
            Claim(
                "h2o's loss grows with length (by 1 % or more) while local_only's does not",
                growth["h2o"] >= 0.01 > growth["local_only"],
                ", ".join(f"{cache} {value:+.2%}" for cache, value in growth.items()),
            )
        ],
        comparisons=comparisons,
        draw=lambda: figures.curves([
            figures.Panel(
                "Perplexity above the full cache's", "tokens of the prompt", "%",
                {cache: (list(_prompts(settings)), [100 * x for x in each]) for cache, each in every.items()},
            )
        ]),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_table4",
        question="Do more shots, which make longer prompts, change the finding?",
        here="Perplexity of a book after prompts of four lengths, and COPA after more and more solved questions.",
        parts=_table4_parts,
        judge=_table4,
    ),
)
