"""H2O, Table 6: which half of the budget matters."""

from collections.abc import Iterable

from experiments.papers import figures
from experiments.papers.entry import Entry, Found
from experiments.papers.parts import Part
from experiments.papers.recipes import choice, lm, recall
from experiments.papers.settings import Settings
from experiments.papers.verdict import Claim, Judgement, Table

BUDGETS = (0.1, 0.2)
ALONE = ("local_only", "heavy_only")
TASKS = ("copa", "openbookqa")
THEIRS = {"full": "Full", "local_only": "Local", "heavy_only": "heavy", "h2o": "Local + heavy"}  # the paper's names


def _policies(settings: Settings, budget: float) -> tuple[str, ...]:
    """The policies of a budget; the last two have a quarter and three quarters of it for recent tokens."""
    slots = int(budget * settings.scale.prompt)
    parts = tuple(f"h2o(recent={round(part * slots)})" for part in (0.25, 0.75))
    return ("full", *ALONE, "h2o", *settings.scale.some(parts, ()))


def _asked(settings: Settings) -> tuple[float, ...]:
    """The budgets under which questions are asked."""
    return settings.scale.some(BUDGETS, (0.2,))


def _parts(settings: Settings) -> Iterable[Part]:
    for budget in BUDGETS:
        yield from (lm.lm(settings, name, budget) for name in _policies(settings, budget))
    for name in ("full", *ALONE, "h2o"):
        for budget in _asked(settings):
            yield recall.recall(settings, name, budget)
            yield from (choice.choice(settings, name, budget, task=task) for task in TASKS)


def _judge(settings: Settings, found: Found) -> Judgement:
    rows, comparisons, values = [], [], {}
    for name in _policies(settings, 0.2):
        row = {"policy": f"{name} ({THEIRS[name]})" if name in THEIRS else name}
        for budget in BUDGETS:
            own = _policies(settings, budget)[_policies(settings, 0.2).index(name)]
            result = found[lm.lm(settings, own, budget)]
            values[name, budget] = lm.perplexity(result)
            row[f"perplexity at {budget:g}"] = lm.shown(result)
        for budget in _asked(settings) if name in ("full", "h2o", *ALONE) else ():
            row[f"passkey at {budget:g}"] = recall.shown(found[recall.recall(settings, name, budget)])
            for task in TASKS:
                chosen, all_of = (found[choice.choice(settings, each, budget, task=task)] for each in (name, "full"))
                cell = f"{100 * choice.accuracy(chosen):.1f}, {100 * choice.agreement(chosen, all_of):.0f} as full"
                row[f"{task} at {budget:g}"] = cell
        rows.append(row)
    better = {}
    for budget in BUDGETS:
        results = {name: found[lm.lm(settings, name, budget)] for name in (*ALONE, "h2o")}
        for one, other in (("h2o", "local_only"), ("h2o", "heavy_only"), ("heavy_only", "local_only")):
            made = lm.compare(f"{one} against {other} at {budget:g}", results[one], results[other], settings)
            comparisons.append(made)
            better[one, other, budget] = made
    columns = list(rows[0])
    rows = [{column: row.get(column, "-") for column in columns} for row in rows]

    def each(one: str, other: str) -> str:
        return "; ".join(f"{budget:g}: {better[one, other, budget].result}" for budget in BUDGETS)

    def lower(one: str, other: str) -> bool:
        return all(better[one, other, budget].lower for budget in BUDGETS)

    return Judgement(
        tables=[Table("Perplexity, recall and choices", rows)],
        confirm=[
            Claim("h2o has a lower perplexity than local_only", lower("h2o", "local_only"), each("h2o", "local_only")),
            Claim("h2o has a lower perplexity than heavy_only", lower("h2o", "heavy_only"), each("h2o", "heavy_only")),
            Claim(
                "heavy_only has a lower perplexity than local_only", lower("heavy_only", "local_only"),
                each("heavy_only", "local_only"),
            ),
        ],
        contradict=[
            Claim(
                f"{part} alone is as good as both halves at both budgets",
                all(lm.as_good(better["h2o", part, budget]) for budget in BUDGETS), each("h2o", part),
            )
            for part in ALONE
        ],
        comparisons=comparisons,
        notes=[
            "Columns of tasks: accuracy in %, and the share of the questions decided as under the full cache; chance "
            "is 50 (copa) and 25 (openbookqa)."
        ],
        draw=lambda: figures.bars(
            "Perplexity by budget", "perplexity",
            {f"{b:g}": {n: values[n, b] for n in _policies(settings, 0.2)} for b in BUDGETS}, log=True,
        ),
    )  # fmt: skip


ENTRIES = (
    Entry(
        name="h2o_table6",
        question="Which half of the budget matters: the heavy hitters or the recent tokens?",
        here="Perplexity of a book, passkeys, and choices of COPA and OpenBookQA, under the "
        "same budgets; and h2o with a quarter and three quarters of its budget for recent tokens.",
        parts=_parts,
        judge=_judge,
    ),
)
