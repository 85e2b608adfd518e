"""Verdicts of measurements on a paper's claims: claims that hold or not, and the verdict that follows from them."""

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence

from experiments.papers.statistics import Comparison
from kvjax.typing import JsonObject


class Verdict(enum.Enum):
    """The verdict of an entry."""

    CONFIRM = "CONFIRM"
    CONTRADICT = "CONTRADICT"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOTHING = "NO RESULT TO TEST"  # a picture, or a figure that needs hardware which is not here


@dataclasses.dataclass(frozen=True)
class Claim:
    """A condition of the verdict.

    Attributes:
      text: with its threshold.
      holds: whether it does.
      found: the numbers that decided, for a reader.
    """

    text: str
    holds: bool
    found: str = ""

    def __post_init__(self) -> None:
        # Conditions on arrays are NumPy's.
        object.__setattr__(self, "holds", bool(self.holds))


@dataclasses.dataclass(frozen=True)
class Table:
    """A table as text: a dict of cells for each row, in order.

    Attributes:
      title: one line.
      rows: with the same columns.
    """

    title: str
    rows: Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class Judgement:
    """The tables and claims that an entry draws from its measurements.

    Attributes:
      tables: what was measured, in the paper's form.
      confirm: claims that must all hold for CONFIRM; none: nothing can be confirmed.
      contradict: claims of which one suffices for CONTRADICT.
      comparisons: every test that was made.
      notes: what a reader should know.
      draw: makes the figure, a PNG; None without one.
    """

    tables: Sequence[Table]
    confirm: Sequence[Claim] = ()
    contradict: Sequence[Claim] = ()
    comparisons: Sequence[Comparison] = ()
    notes: Sequence[str] = ()
    draw: Callable[[], bytes] | None = None

    @property
    def verdict(self) -> Verdict:
        """By the claims alone, however few rows there were."""
        if not self.confirm and not self.contradict:
            return Verdict.NOTHING
        confirmed = bool(self.confirm) and all(claim.holds for claim in self.confirm)
        contradicted = any(claim.holds for claim in self.contradict)
        if confirmed == contradicted:
            return Verdict.INCONCLUSIVE
        return Verdict.CONFIRM if confirmed else Verdict.CONTRADICT

    @property
    def too_few(self) -> str:
        """Why the comparisons are too few for a verdict; empty if they are not."""
        few = [each for each in self.comparisons if not each.enough]
        return f"{len(few)} of {len(self.comparisons)} comparisons have too few rows or prompts" if few else ""


def conclude(judgement: Judgement, *, trial: bool) -> tuple[Verdict, str]:
    """The verdict, and why it is not another one.

    Args:
      judgement: of an entry.
      trial: whether the sizes are those of a trial, which decides nothing.

    Returns:
      The verdict by the rule, and a reason in words.
    """
    verdict = judgement.verdict
    if verdict is Verdict.NOTHING:
        return verdict, "there are no claims about numbers"
    why = "the sizes are those of --fast" if trial else judgement.too_few
    if why and verdict is not Verdict.INCONCLUSIVE:
        return Verdict.INCONCLUSIVE, f"{why}; these numbers alone would say {verdict.value}"
    if verdict is Verdict.INCONCLUSIVE:
        both = all(claim.holds for claim in judgement.confirm) and any(claim.holds for claim in judgement.contradict)
        return verdict, "claims of both sides hold" if both and judgement.confirm else "claims of neither side hold"
    sides = judgement.confirm if verdict is Verdict.CONFIRM else judgement.contradict
    return verdict, "; ".join(claim.text for claim in sides if claim.holds)


def at_least(claims: Sequence[bool], count: int) -> bool:
    """Whether `count` or more of some conditions hold."""
    return sum(map(bool, claims)) >= count


def as_json(judgement: Judgement) -> JsonObject:
    """Everything but the figure, for results.json."""
    return {
        "tables": [{"title": table.title, "rows": [dict(row) for row in table.rows]} for table in judgement.tables],
        "confirm": [dataclasses.asdict(claim) for claim in judgement.confirm],
        "contradict": [dataclasses.asdict(claim) for claim in judgement.contradict],
        "comparisons": [dataclasses.asdict(each) | {"result": each.result} for each in judgement.comparisons],
        "notes": list(judgement.notes),
    }
