"""H2O, Table 1: static patterns, and with heavy hitters."""

from collections.abc import Iterable

from experiments.papers.entry import Entry, Found, published, with_published
from experiments.papers.parts import Part
from experiments.papers.recipes import choice, lm
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table, at_least

TASKS = ("copa", "openbookqa", "piqa", "winogrande")
HEAVY = "with_heavy_hitters"


def _patterns(block: int, local: int) -> dict[str, tuple[str, str]]:
    """Name -> the pattern, and with half of its budget for heavy hitters."""
    fixed = f"fixed(block={block},columns={block // 4})"
    return {
        "local": ("local_only", f"{HEAVY}(local_only)"),
        # By default half of the budget is local, which would be all that is left beside the heavy hitters.
        "strided": ("strided(stride=4)", f"{HEAVY}(strided(stride=4,local={local}))"),
        "fixed": (fixed, f"{HEAVY}({fixed})"),
    }


def _read(settings: Settings, budget: float) -> dict[str, tuple[str, str]]:
    """The patterns under which texts are scored."""
    return _patterns(settings.scale.pattern, int(budget * settings.scale.prompt) // 4)


#: The patterns under which questions are asked, whose prompts are shorter: with a large vocabulary some have 70 tokens,
#: of which half of a fifth is 7.
ASKED = _patterns(4, 4)


def _budgets(settings: Settings) -> tuple[float, ...]:
    return settings.scale.some((0.2, 0.1), (0.2,))


def _tasks(settings: Settings) -> tuple[str, ...]:
    return settings.scale.some(TASKS, ("copa",))


def _asked(settings: Settings) -> tuple[str, ...]:
    """The names of the patterns under which questions are asked."""
    return settings.scale.some(tuple(ASKED), ("local",))


def _table1_parts(settings: Settings) -> Iterable[Part]:
    for budget in _budgets(settings):
        yield from (lm.lm(settings, cache, budget) for cache in ("full", "h2o"))
        for pair in _read(settings, budget).values():
            yield from (lm.lm(settings, cache, budget) for cache in pair)
    for task in _tasks(settings):
        yield from (choice.choice(settings, cache, 0.2, task=task) for cache in ("full", "h2o"))
        for name in _asked(settings):
            yield from (choice.choice(settings, cache, 0.2, task=task) for cache in ASKED[name])


def _table1(settings: Settings, found: Found) -> Judgement:
    budgets, tasks, comparisons, better = _budgets(settings), _tasks(settings), [], {}
    named = {"full": dict.fromkeys(budgets, "full"), "h2o": dict.fromkeys(budgets, "h2o")}
    asked = {"full": "full", "h2o": "h2o"}
    for name in ASKED:
        for place, word in enumerate(("w.o.", "w.")):
            named[f"{name} {word}"] = {b: _read(settings, b)[name][place] for b in budgets}
            if name in _asked(settings):
                asked[f"{name} {word}"] = ASKED[name][place]
        for budget in budgets:
            without, with_heavy = (found[lm.lm(settings, c, budget)] for c in _read(settings, budget)[name])
            what = f"{name} with heavy hitters against without at {budget:g}"
            better[name, budget] = lm.compare(what, with_heavy, without, settings)
            comparisons.append(better[name, budget])
    rows = []
    for name, caches in named.items():
        row = {"cache": name}
        row |= {f"perplexity at {b:g}": lm.shown(found[lm.lm(settings, caches[b], b)]) for b in budgets}
        for task in tasks:
            if name not in asked:
                row[task] = "-"
                continue
            result, full = (found[choice.choice(settings, c, 0.2, task=task)] for c in (asked[name], "full"))
            row[task] = f"{100 * choice.accuracy(result):.1f}, {100 * choice.agreement(result, full):.0f} as full"
        rows.append(row)
    gains = [better[name, 0.2] for name in ASKED]
    matches = {name: name for name in named} | {"full": "Full"}
    shown = ", ".join(f"{name} {each.result}" for name, each in zip(ASKED, gains, strict=True))
    compared = with_published(rows, published("h2o_table1"), matches, "cache")
    return Judgement(
        tables=[Table("Perplexity; accuracy in %, questions decided as full", compared)],
        confirm=[Claim("each pattern is better with heavy hitters than without", all(g.lower for g in gains), shown)],
        contradict=[
            Claim(
                "two of the three are not better with heavy hitters", at_least([lm.as_good(g) for g in gains], 2), shown
            )
        ],
        comparisons=comparisons,
        notes=[
            "The paper's stride and block are lost. Here the stride is 4, and of each block a quarter of the columns "
            f"stays; blocks have {settings.scale.pattern} tokens, and strided with heavy hitters has a quarter of its "
            "budget for local tokens. Where questions are asked, whose prompts are short, both are 4 tokens.",
        ],
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_table1",
        question="Do static patterns fail at a small budget, and does half of it for heavy hitters repair them?",
        here="Perplexity of a book and four multiple-choice tasks after up to five solved questions, at 0.2 and 0.1.",
        parts=_table1_parts,
        judge=_table1,
    ),
)
