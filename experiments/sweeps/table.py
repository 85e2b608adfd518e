"""The table of a sweep: the full cache's row, then a line for each combination, with 95 % intervals."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from experiments.reports import tables
from experiments.reports.tables import NONE, Row
from experiments.runs import identity
from experiments.sweeps import intervals, seeds
from experiments.sweeps.intervals import FULL, PERPLEXITY
from kvjax.typing import JsonObject

NAMING = ("policy.name", "storage", "selection")  # the fields that a policy's name in reports is made of
COLUMNS = dict.fromkeys(NAMING, "policy") | {"policy.budget": "budget (slots)"}  # of `tables.cells`
ABOVE = "above full"  # the column of the difference to the full cache's perplexity
RATES = ("prefill tok/s", "decode tok/s")
OTHER_CODE = " *"  # marks results that were computed by other code
COMMIT = 10  # digits of a commit that are shown
FAILED = "FAILED"

LEGEND = (
    "*Numbers in parentheses* are 95 % intervals of a mean, by the bootstrap over rows or prompts of all seeds. Rows "
    "differ in difficulty, so the intervals of two caches may overlap although one of them is better on the same rows: "
    "*above full* compares row by row, and is the perplexity above the full cache's. After ± is the standard deviation "
    "over seeds."
)


class Reference(NamedTuple):
    """The full cache under one setting of the fields that do not choose a cache.

    Attributes:
      swept: these fields, of those that were swept.
      results: those that the rows are of, one for each seed.
      rows: the full cache's row of each of these results.
    """

    swept: JsonObject
    results: list[Row]
    rows: list[Row]


def chooses_cache(path: str) -> bool:
    """Whether a field chooses a cache, and nothing that the full cache depends on."""
    return path.startswith("policy.") or path in ("storage", "selection", "baselines")


def others(swept: JsonObject) -> JsonObject:
    """Returns the fields of a combination that do not choose a cache, without the seed."""
    return {path: value for path, value in swept.items() if not chooses_cache(path) and path != seeds.SEED}


def references(found: Sequence[Row]) -> list[Reference]:
    """Returns the full cache of each setting of the other fields, once however many combinations share it.

    A setting is left out where no result has a row of the full cache.
    """
    kept: dict[str, dict[object, tuple[Row, Row]]] = {}
    settings: dict[str, JsonObject] = {}
    for result in found:
        if result["status"] == "ok" and (row := intervals.full_row(result)) is not None:
            own = others(result["swept"])
            settings.setdefault(repr(own), own)
            kept.setdefault(repr(own), {}).setdefault(result["swept"].get(seeds.SEED), (result, row))
    return [
        Reference(settings[key], [result for result, _ in by_seed.values()], [row for _, row in by_seed.values()])
        for key, by_seed in kept.items()
    ]


def full_rows(results: Sequence[Row]) -> list[Row]:
    """Returns the full cache's row of each result, or none if one of them has none."""
    rows = [row for result in results if (row := intervals.full_row(result)) is not None]
    return rows if len(rows) == len(results) else []


def cells(
    found: Sequence[Row], *, with_intervals: bool = True, report: Callable[[Row], str] | None = None
) -> list[dict[str, str]]:
    """Returns one line for each combination, all seeds in one: what it set, then what came of it.

    The full cache's lines are first, unless the full cache is one of the combinations.

    Args:
      found: results of a sweep.
      with_intervals: whether numbers are followed by their intervals.
      report: returns the cell of a column of links from a result; None = no such column.
    """
    columns = dict.fromkeys(_column(path) for result in found for path in result["swept"])
    references = [_full_line(each, columns, with_intervals) for each in _unlisted_references(found)]
    groups = seeds.groups(found)
    lines = [*references, *(_line(group, with_intervals) for group in groups)]
    # In the order of the line that has the most.
    names = list(dict.fromkeys(key for line in sorted(lines, key=len, reverse=True) for key in line))
    shown = [{key: line.get(key, NONE) for key in names} for line in lines]
    for line, group in zip(shown[len(references) :], groups, strict=True):
        if not any(map(_is_done, group)):
            line[names[-1]] = FAILED
    if report is None:
        return shown
    links = [", ".join(map(report, group)) for group in sources(found)]
    return [line | {"report": each or NONE} for line, each in zip(shown, links, strict=True)]


def sources(found: Sequence[Row]) -> list[list[Row]]:
    """Returns the results whose own policy each line of `cells` shows; none for the full cache's lines."""
    groups = [[result for result in group if _is_done(result)] for group in seeds.groups(found)]
    return [[] for _ in _unlisted_references(found)] + groups


def _unlisted_references(found: Sequence[Row]) -> list[Reference]:
    """Returns the full caches that are none of the combinations."""
    own = {
        repr(others(result["swept"])) for result in found
        if _is_done(result) and tables.own_row(result)["policy"] == FULL
    }  # fmt: skip
    return [each for each in references(found) if repr(each.swept) not in own]


def _full_line(reference: Reference, columns: Iterable[str], with_intervals: bool) -> dict[str, str]:
    line = dict.fromkeys(columns, NONE) | _settings(reference.swept)
    if seeds.SEED in line:
        line[seeds.SEED] = _seeds([result["swept"][seeds.SEED] for result in reference.results])
    line |= _measured(reference.results, reference.rows, with_intervals)
    return _marked(line, reference.results)


def _line(group: Sequence[Row], with_intervals: bool) -> dict[str, str]:
    """Returns the line of a combination, whose runs differ in the seed alone."""
    done = [result for result in group if _is_done(result)]
    shown = done[0] if done else group[0]
    line = _settings(shown["swept"])
    if len(group) > 1:
        line[seeds.SEED] = _seeds([result["swept"][seeds.SEED] for result in done])
    if done:
        line |= _measured(done, [tables.own_row(result) for result in done], with_intervals)
    line |= {"policy": label_of(shown)} if "policy" in line else {}
    return _marked(line, done)


def _marked(line: dict[str, str], results: Sequence[Row]) -> dict[str, str]:
    """Returns a line whose first cell is marked if other code computed one of its results."""
    if any(map(of_other_code, results)):
        first = next(iter(line))
        line[first] += OTHER_CODE
    return line


def _is_done(result: Row) -> bool:
    return bool(result["status"] == "ok")


def _column(path: str) -> str:
    return COLUMNS.get(path, path.split(".")[-1])


def _settings(swept: JsonObject) -> dict[str, str]:
    """Returns the cells of what was swept."""
    return {_column(path): str(value) for path, value in swept.items()}


def _seeds(values: Sequence[int]) -> str:
    """Returns the cell of one seed or of several."""
    return str(values[0]) if len(values) == 1 else f"{len(values)} seeds"


def _measured(results: Sequence[Row], rows: Sequence[Row], with_intervals: bool) -> dict[str, str]:
    """Returns the cells of measurements.

    Args:
      results: one for each seed.
      rows: of these results, each of the same cache.
      with_intervals: see `cells`.
    """
    line, name = seeds.cells(rows), rows[0]["policy"]
    if any(result.get("config", {}).get("repeats") == 1 for result in results):
        line = {column: text for column, text in line.items() if column not in RATES}
    full = full_rows(results)
    comparison = intervals.against_full(name, rows, full) if full and name != FULL else None
    if with_intervals:
        for column, (low, high) in intervals.bounds(rows, f"{name} {rows[0]['budget']}").items():
            # Nothing agrees with the full cache more surely than itself.
            measured_by_itself = name == FULL and column in (intervals.AGREEMENT, intervals.SAME_UNTIL)
            if line.get(column, NONE) != NONE and not measured_by_itself:
                line[column] = intervals.shown(column, line[column], low, high)
    if not full or PERPLEXITY not in line:
        return line
    above = NONE if comparison is None else intervals.show_percent(comparison)
    made: dict[str, str] = {}
    for column, text in line.items():
        made[column] = text
        if column == PERPLEXITY:
            made[ABOVE] = above if with_intervals else above.partition(" (")[0]
    return made


def label_of(result: Row) -> str:
    """Returns the label of a result's policy in tables and plots."""
    return str(result.get("label", result["policy"]))


def of_other_code(result: Row) -> bool:
    """Whether a result was computed by other sources than these."""
    return bool(result["environment"].get("code") != identity.code())


def other_code(found: Sequence[Row]) -> list[str]:
    """A line about results that were computed by other code, if there are any."""
    old = [result for result in found if _is_done(result) and of_other_code(result)]
    if not old:
        return []
    commits = sorted({(result["environment"].get("commit") or "unknown")[:COMMIT] for result in old})
    of = ", ".join(commits)
    count = f"{len(old)} of {len(found)} results are of other code (commit {of})"
    return [f"{OTHER_CODE.strip()} {count}; --rerun computes them anew."]


def points(found: Sequence[Row], quality: str) -> list[Row]:
    """Returns the points of the plot: the swept budget, or the share of the cache where that has no one unit."""
    done = []
    for group in seeds.groups([result for result in found if _is_done(result)]):
        own = [tables.own_row(result) for result in group]
        if own[0][quality] is not None and own[0]["policy"] != FULL:
            done.append((group, own, seeds.mean(own)))
    kinds = {type(row["budget"]) for *_, row in done}
    if kinds == {float}:
        name, scale = "budget, % of the prompt", lambda row: 100 * row["budget"]
    elif kinds == {int}:
        name, scale = "budget, slots per KV head", lambda row: row["budget"]
    else:
        name, scale = "KV cache held, % of the full cache", lambda row: 100 * row["kv_bytes"] / row["full_kv_bytes"]
    shown = []
    for group, own, row in done:
        named = ("policy.budget", seeds.SEED, *NAMING)
        settings = {path: v for path, v in group[0]["swept"].items() if path not in named}
        label = " ".join([label_of(group[0]), *(f"{path.split('.')[-1]}={value}" for path, value in settings.items())])
        full = next((r[quality] for r in group[0]["rows"] if r["policy"] == FULL), None)
        known = quality == "perplexity" and full is not None
        shown.append(
            {"label": label, "x": scale(row), "x_name": name, "full": full if known else None}
            | height(group, own, quality)
        )
    return shown


def height(results: Sequence[Row], own: Sequence[Row], quality: str) -> Row:
    """Returns the place of a point on the axis of quality.

    Args:
      results: of one setting, one for each seed.
      own: the row of each of them.
      quality: ``perplexity`` or ``agreement``.

    Returns:
      ``y``, the mean over seeds; ``error``, its standard deviation or None; ``interval``, [low, high] or None: the
      interval of the difference to the full cache, drawn at y, where perplexities and the full cache's are known, and
      else that of y itself.
    """
    factor = 100 if quality == "agreement" else 1
    spread = seeds.deviation([row[quality] for row in own])
    y = factor * seeds.mean(own)[quality]
    full = full_rows(results) if quality == "perplexity" else []
    comparison = intervals.against_full("point", own, full) if full else None
    interval = None
    if comparison is not None and comparison.low is not None and comparison.high is not None:
        interval = tuple(y * intervals.exp(end - comparison.difference) for end in (comparison.low, comparison.high))
    else:
        column = PERPLEXITY if quality == "perplexity" else intervals.AGREEMENT
        if (found := intervals.bounds(own, "point").get(column)) is not None:
            interval = tuple(factor * end for end in found)
    return {"y": y, "error": None if spread is None else factor * spread, "interval": interval}
