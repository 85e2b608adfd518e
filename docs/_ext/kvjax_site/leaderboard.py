"""The rows of the measured leaderboard that have a policy or a selection, for the page of that."""

import functools
import json
from pathlib import Path

import numpy as np

from experiments.config import JOINED
from experiments.leaderboards import scores
from experiments.leaderboards.page import HELD, READ, cells_of, merged
from experiments.leaderboards.scores import LOSS
from experiments.reports import tables
from kvjax.typing import JsonObject

BUDGET = "budget"
FOLDER = Path("experiments", "measured", "leaderboard")
#: Files that experiments/measured/leaderboard/smollm2.md is made of.
FILES = ("policies_smollm2.json", "budgets_smollm2.json", "budget5_smollm2.json")


def section(name: str, root: Path) -> list[str]:
    """Returns the lines of a section about a policy or a selection; none if the leaderboard does not have it.

    Args:
      name: of the registry.
      root: the repository.
    """
    found = measured(root)
    rows = [scores.with_means(row) for row in found["rows"] if row["status"] == "ok" and name in _parts(row["cache"])]
    if not rows:
        return []
    sizes, tasks = found["sizes"], tables.short_names(list(rows[0]["tasks"]))
    full = " and ".join(f"{np.mean(each['full']):.0f} in `{tasks[task]}`" for task, each in rows[0]["tasks"].items())
    whole = all(row.get("read") in (None, 1.0) for row in rows)
    read = {} if whole else {READ: "slots read"}
    heads = {
        "cache": "cache", BUDGET: BUDGET, HELD: "bytes held, of the full cache's", **read, LOSS: LOSS,
        **{task: f"`{task}`" for task in tasks.values()},
    }  # fmt: skip
    filled = any("{" in row["cache"] for row in rows)
    lines = [
        "## How it fares", "",
        f"{sizes['model']}, {sizes['new']} tokens after prompts of {sizes['prompt']:,}, {sizes['rows']} rows of "
        f"{', '.join(sizes['texts'])}: perplexity above that of the full cache, and scores of tasks out of 100, with "
        f"95 % intervals. The full cache has {full}. The [leaderboard](../measured/leaderboard.md) has the other "
        "caches, and [](../../leaderboard.md) says how to read it.",
        *(["In names, `{share}` and `{tokens}` stand for the budget."] if filled else []),
        "", f"| {' | '.join(heads.values())} |", "|" + "---|" * len(heads),
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: (row["cache"], row["budget"] or 1)):
        cells = cells_of(row, tasks) | {BUDGET: f"{100 * row['budget']:g} %" if row["budget"] else ""}
        lines.append(f"| {' | '.join(cells.get(name, '') for name in heads)} |")
    return [*lines, ""]


@functools.cache
def measured(root: Path) -> JsonObject:
    """Returns the contents of the measured leaderboard; see `experiments.leaderboards.page.merged`."""
    return merged([json.loads((root / FOLDER / file).read_text()) for file in FILES])


def _parts(cache: str) -> list[str]:
    """Returns the names of a cache's policy, storage and selection, without `full` beside another one."""
    names = [part.partition("(")[0] for part in cache.split(JOINED)]
    return names[1:] if names[0] == "full" else names
