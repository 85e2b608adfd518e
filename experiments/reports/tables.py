"""Tables and Markdown that runs and sweeps share."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from tabulate import tabulate

Row = dict[str, Any]
_TABLE = re.compile(r"\(\(\([\d,() ]*\)\)\)")
NONE = "-"


class Section(NamedTuple):
    """A table of a report, with its heading.

    Attributes:
      title: the heading.
      about: a paragraph before the table; empty for none.
      rows: the cells of each line by column.
    """

    title: str
    about: str
    rows: Sequence[dict[str, str]]

    def markdown(self) -> str:
        """Returns the section as a part of a report in Markdown."""
        return "\n\n".join([f"## {self.title}", *([self.about] if self.about else []), table(self.rows, "github")])


def short(name: str) -> str:
    """A cache's name without tables of heads: ``razor_attention(...)``."""
    return _TABLE.sub("(...)", name)


def own_row(result: Row) -> Row:
    """The row of a result's own policy among its baselines: the last one, except for the full cache, which is first."""
    # A result of older code may have named it otherwise; it is the last.
    return next((row for row in result["rows"] if row["policy"] == result["policy"]), result["rows"][-1])


def show_budget(row: Row) -> str:
    """The budget and the slots that heads hold: ``20 % (51)``, ``256``, ``51 to 895``, ``all (895)``.

    A policy that keeps every token and lets a query read some of them has ``all (895), 20 % read``.
    """
    least, most, budget = row["least_slots"], row["slots"], row["budget"]
    slots = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    share = f"{100 * budget:g} %" if isinstance(budget, float) else None
    if row["keeps_all"]:
        read = share or (f"{budget:,}" if isinstance(budget, int) else "part")
        return f"all ({slots})" if budget is None else f"all ({slots}), {read} read"
    return f"{share} ({slots})" if share else slots


def show_bytes(count: float) -> str:
    """A number of bytes with three digits and a decimal unit."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB"


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)


def cells(row: Row) -> dict[str, str]:
    """One measurement as a person reads it."""
    until = row["same_until"]
    speeds = {f"{phase} tok/s": _number(row[f"{phase}_tokens_per_second"], ",.0f") for phase in ("prefill", "decode")}
    return {
        "policy": short(row["policy"]),
        "budget (slots)": show_budget(row),
        "perplexity": _number(row["perplexity"], ",.2f" if (row["perplexity"] or 0) < 1000 else ",.0f"),
        **{task: f"{100 * share:.0f} %" for task, share in row.get("recall", {}).items()},
        **{name: f"{score:.2f}" for name, score in headlines(row).items()},
        "agrees with full": NONE if row["agreement"] is None else f"{100 * row['agreement']:.1f} %",
        "first differs after": NONE if until is None else f"{until:.1f} of {row['new_tokens']}",
        **(speeds if row["prefill_tokens_per_second"] is not None else {}),
        "KV held": show_bytes(row["kv_bytes"]),
        "of full": f"{100 * row['kv_bytes'] / row['full_kv_bytes']:.1f} %",
    }


def headlines(row: Row) -> dict[str, float]:
    """The scores of tasks that a table of all tasks shows, by ``TASK: SCORE``."""
    made = row.get("tasks", {})
    names = short_names(list(made))
    return {
        f"{names[task]}: {score}": each["scores"][score] for task, each in made.items() for score in each["headline"]
    }  # fmt: skip


def short_names(tasks: Sequence[str]) -> dict[str, str]:
    """Tasks without their folders and settings, where that is enough to tell them apart."""
    short = {task: task.split("(", 1)[0].rsplit("/", 1)[-1].strip() for task in tasks}
    again = {name for name, count in Counter(short.values()).items() if count > 1}
    return {task: task if name in again else name for task, name in short.items()}


def sections(rows: Sequence[Row]) -> list[Section]:
    """Returns the tables that a report of these results has besides the table of all results."""
    return [*_bytes(rows), *_chunks(rows), *_tasks(rows)]


def _tasks(rows: Sequence[Row]) -> list[Section]:
    """Returns a table for each task: a line a policy, a column a score."""
    found = []
    for task, made in (rows[0].get("tasks", {}) if rows else {}).items():
        columns = list(dict.fromkeys(name for row in rows for name in row["tasks"][task]["scores"]))
        lines = [
            {"policy": row["policy"]}
            | {name: _number(row["tasks"][task]["scores"].get(name), ",.2f") for name in columns}
            for row in rows
        ]
        found.append(Section(task, f"{made['about'].capitalize()}.", lines))
    return found


def _chunks(rows: Sequence[Row]) -> list[Section]:
    """Returns the perplexity of each part of the continuation, if it was asked for: a line a policy."""
    if not any(row.get("perplexity_by_chunk") for row in rows):
        return []
    lines = [
        {"policy": row["policy"]}
        | {
            f"{1 + place * row['chunk']:,} to {min((place + 1) * row['chunk'], row['new_tokens']):,}": f"{value:,.2f}"
            for place, value in enumerate(row["perplexity_by_chunk"])
        }
        for row in rows
    ]
    return [Section("Perplexity by new tokens", "", lines)]


#: Columns of the table of bytes.
PARTS = {
    "codes": "codes", "parameters": "parameters", "exact": "exact", "sides": "sides",
    "rest": "positions, statistics", "calibration": "calibration",
}  # fmt: skip


def _bytes(rows: Sequence[Row]) -> list[Section]:
    """Returns the bytes of each cache by kind, if one of them holds anything but exact numbers."""
    known = [row for row in rows if row.get("kv_parts")]
    if not any(row["kv_parts"]["codes"] or row["kv_parts"]["parameters"] for row in known):
        return []
    lines = []
    for row in known:
        parts, whole = row["kv_parts"], row["kv_parts"]["stores"]
        shown = {title: show_bytes(parts[name]) if parts[name] else NONE for name, title in PARTS.items()}
        lines.append({
            "policy": short(row["policy"]), **shown,
            "held, of full": f"{100 * whole / row['full_kv_bytes']:.1f} %",
            "with positions, statistics": f"{100 * (whole + parts['rest']) / row['full_kv_bytes']:.1f} %",
        })  # fmt: skip
    about = (
        "Bytes that are allocated: codes; their scales and zeros; exact numbers; arrays that the vectors of a row "
        "share; positions, statistics and the index of a selection. *Held, of full* leaves out the last of these. "
        "Arrays of a calibration are shared by all rows and are not counted."
    )
    return [Section("Bytes held", about, lines)]


def table(rows: Sequence[dict[str, str]], style: str = "simple") -> str:
    """Text columns left, numbers right. Styles: tabulate's, e.g. ``simple`` or ``github``."""
    if not rows:
        return "(nothing)"
    text = {"policy", "error", "model"}
    align = ["left" if name in text else "right" for name in rows[0]]
    return tabulate(rows, headers="keys", tablefmt=style, colalign=align, disable_numparse=True)


def markdown(title: str, paragraphs: Sequence[str], rows: Sequence[dict[str, str]], plot: str | None = None) -> str:
    """A short report: title, what was done, the table, the plot."""
    parts = [f"# {title}", *paragraphs, table(rows, "github")]
    return "\n\n".join(parts + ([f"![{title}]({plot})"] if plot else [])) + "\n"


#: What the columns mean, for reports.
LEGEND = (
    "*Perplexity* is of the text after the prompt: its tokens are fed one by one, and the cache changes as it does in "
    "generation. *Agrees with full* is the share of generated tokens that equal the full cache's at the same place, "
    "and *first differs after* the mean number of tokens before the first difference. *Slots* are the live slots of a "
    "KV head at the end; a range if heads or layers differ. *tok/s* is of all rows together, in the fastest "
    "repetition, without compilation. *KV held* are the bytes allocated for keys and values while decoding, and for a "
    "selection's index; *of full* is their share of the full cache's keys and values. A column of a recall task is the "
    "share of prompts whose answer is exactly right. Scores of other tasks are percentages, unless they count tokens; "
    "docs/tasks.md explains them."
)
