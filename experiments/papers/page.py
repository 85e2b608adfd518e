"""Pages for readers: an entry's report, and the page of all of them."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from tabulate import tabulate

from experiments.papers.entry import Entry
from experiments.papers.names import PAPERS
from experiments.papers.verdict import Claim, Judgement, Verdict
from kvjax.typing import Json

INTRODUCTION = """\
Every table and figure of three papers, by name, with what was measured here and a verdict. CONFIRM: all claims of that
side hold. CONTRADICT: a claim of that side holds. INCONCLUSIVE: neither, or both, or too few rows. "Better" is said
where the 95 % interval of a paired bootstrap over at least 32 rows excludes 0, or an exact sign test over at least 128
prompts rejects equality at 5 %; each entry says how many comparisons it made, and none of the levels is corrected for
that number. The thresholds were fixed before any run. A model of this size may contradict a paper without the paper
being wrong: read every verdict as one about this model. A commit that this repository does not have was one of a
working copy, before it was joined with others."""


@dataclasses.dataclass(frozen=True)
class Report:
    """An entry's result.

    Attributes:
      entry: which.
      judgement: of its measurements.
      verdict: by the rule.
      reason: of the verdict.
      remarks: lines about the run, such as results of other code.
    """

    entry: Entry
    judgement: Judgement
    verdict: Verdict
    reason: str
    remarks: Sequence[str] = ()

    def markdown(self, level: int = 2) -> str:
        """The report with its figure's file beside it."""
        image = [f"![{self.entry.name}]({self.entry.name}.png)"] if self.judgement.draw is not None else []
        title = f"{'#' * level} {self.entry.name}"
        return "\n\n".join([title, *self._blocks("github", bold="**"), *image]) + "\n"

    def text(self) -> str:
        """The report as a terminal shows it."""
        title = f"{self.entry.name}: {self.entry.paper}"
        return "\n\n".join([f"{title}\n{'=' * len(title)}", *self._blocks("simple")]) + "\n"

    def _blocks(self, style: str, bold: str = "") -> list[str]:
        entry, judgement = self.entry, self.judgement

        def head(words: str) -> str:
            return f"{bold}{words}{bold}"

        blocks = [entry.question, f"{head('The paper.')} {entry.published.caption}"]
        blocks += [_table(entry.published.rows, style)] if entry.published.rows else []
        blocks += [entry.published.shape] if entry.published.shape else []
        blocks.append(f"{head('Here.')} {entry.here}")
        for table in judgement.tables:
            blocks += [head(table.title), _table(table.rows, style)]
        for side, claims in (
            ("CONFIRM needs all of", judgement.confirm),
            ("CONTRADICT needs one of", judgement.contradict),
        ):
            blocks += [f"{head(side)}:\n\n" + "\n".join(map(_claim, claims))] if claims else []
        if judgement.comparisons:
            count = len(judgement.comparisons)
            made = f"{count} comparisons were made" if count > 1 else "One comparison was made"
            rows = [each.row() for each in judgement.comparisons]
            blocks += [f"{head(made)}, the first cache against the second:", _table(rows, style)]
        blocks.append(f"{head(f'Verdict: {self.verdict.value}')} ({self.reason}).")
        blocks += [f"Note: {note}" for note in judgement.notes]
        blocks += [f"{head('Needs')} {entry.needs}"] if entry.needs else []
        return [*blocks, *self.remarks]


def _table(rows: Sequence[Mapping[str, str]], style: str) -> str:
    """Numbers stand at the right of their columns, words at the left."""
    columns = list(rows[0])
    words = [any(not re.match(r"[-+]?[\d.]|-$", row[column]) for row in rows) for column in columns]
    align = ["left" if left else "right" for left in words]
    cells = [[row[column] for column in columns] for row in rows]
    return tabulate(cells, headers=columns, tablefmt=style, colalign=align, disable_numparse=True)


def _claim(claim: Claim) -> str:
    found = f" ({claim.found})" if claim.found else ""
    return f"- {'holds' if claim.holds else 'does not hold'}: {claim.text}{found}"


def page(
    sections: Mapping[str, tuple[Mapping[str, Json], str]],
    about: Sequence[str],
    *,
    model: str = "verdict",
    compared: Mapping[str, Mapping[str, str]] | None = None,
) -> str:
    """The page of all entries that have been run.

    Args:
      sections: entry -> its results.json, and its report in Markdown.
      about: paragraphs about the run.
      model: the title of the column of verdicts.
      compared: the name of another model -> its verdicts, by entry.
    """
    counts = {each.value: sum(result["verdict"] == each.value for result, _ in sections.values()) for each in Verdict}
    counted = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    parts = ["# Papers by name", INTRODUCTION, *about, f"{len(sections)} entries: {counted}."]
    rows = [
        {"entry": f"[{name}](#{name})", "question": result["question"], model: result["verdict"]}
        | {other: verdicts.get(name, "-") for other, verdicts in (compared or {}).items()}
        for name, (result, _) in sections.items()
    ]
    parts.append(_table(rows, "github"))
    for paper, names in PAPERS.items():
        own = [sections[name][1] for name in names if name in sections]
        parts += [f"## {paper}", *own] if own else []
    return "\n\n".join(part.rstrip() for part in parts) + "\n"
