"""An additional page of a leaderboard: long generations, their repetitions, and agreement with the full cache."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.leaderboards.config import FULL, WHOLE
from experiments.reports import tables
from experiments.reports.bootstrap import MIN_VALUES, interval
from kvjax.typing import JsonObject

PAGE = "generation.md"
GENERATED = "generated"  # marks the experiment by its number of new tokens, and names its results in a row
OPENING = "opening"  # the number of tokens of its prompts
KEPT = ("agreement_by_row", "same_until_by_row", "new_tokens", "slots", "kv_bytes", "full_kv_bytes", "footprint")
ABOUT = """\
{new:,} tokens are generated greedily after {opening} tokens of each row of the first text. A budget is a share of both.
*Tokens* is the mean number before one that ends a text. *Distinct-2* is the share of a text's pairs of tokens that are
distinct, and *longest repeat* the length of the longest piece that occurs twice in it. *As full* is the share of tokens
that are the full cache's at the same place, and *first differs after* how many are before the first that is not; in
parentheses are 95 % intervals where there are at least {least} rows. Both go on after the end of a text; a row without
a difference counts with all of its tokens. *Footprint* is the slots held, summed over steps, of the full cache's:
policies that compress prompts hold all that is generated."""


def generation_of(own: Mapping[str, Any], full: Mapping[str, Any], opening: int) -> JsonObject:
    """Returns what a row keeps of a generation.

    Args:
      own: the cache's row of the result; see `experiments.runs.measure.Measurement.row`.
      full: the full cache's.
      opening: tokens of the prompts.
    """
    if GENERATED not in own:
        return {"error": "measured by older code; --rerun measures it again"}
    return {**own[GENERATED], FULL: full[GENERATED], OPENING: opening, **{name: own[name] for name in KEPT}}


def files(found: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Returns the page, name -> content, or nothing if nothing was generated.

    Args:
      found: see `experiments.leaderboards.page.files`.
    """
    every = [row for row in found["rows"] if GENERATED in row]
    rows = [row for row in every if "error" not in row[GENERATED]]
    if not rows:
        return {}
    first = rows[0][GENERATED]
    lines = [
        {"cache": f"`{FULL}`", "budget": "", **_numbers(first[FULL]), "as full": "100 %", "first differs after": "",
         "footprint": "100 %"}
    ]  # fmt: skip
    for row in sorted(rows, key=lambda row: row["budget"] or WHOLE):
        own, seed = row[GENERATED], f"{row['cache']} {row['budget']} {GENERATED}"
        agreement = 100 * np.asarray(own["agreement_by_row"])
        lines.append(
            {
                "cache": f"`{row['cache']}`",
                "budget": "" if row["budget"] is None else f"{100 * row['budget']:g} %",
                **_numbers(own),
                "as full": f"{_with_interval(agreement, seed)} %",
                "first differs after": _with_interval(own["same_until_by_row"], seed),
                "footprint": f"{100 * own['footprint']:.0f} %",
            }
        )
    about = ABOUT.format(new=first["new_tokens"], opening=first[OPENING], least=MIN_VALUES)
    parts = ["# Long generation", about, f"`{found['command']}`", tables.table(lines, "github")]
    failed = [row for row in every if row not in rows]
    parts += [f"- Not measured: `{row['cache']}` at {row['budget']}: {row[GENERATED]['error']}" for row in failed]
    return {PAGE: "\n\n".join(parts) + "\n"}


def _numbers(found: Mapping[str, float]) -> dict[str, str]:
    return {
        "tokens": f"{found['tokens']:.0f}",
        "distinct-2": f"{found['distinct-2']:.0f} %",
        "longest repeat": f"{found['longest repeat']:.0f}",
    }


def _with_interval(values: Sequence[float] | np.ndarray, seed: str) -> str:
    if len(values) < MIN_VALUES:
        return f"{np.mean(values):.0f}"
    low, high = interval(values, seed)
    return f"{np.mean(values):.0f} ({low:.0f} to {high:.0f})"
