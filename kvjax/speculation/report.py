"""The counts of drafts."""

from typing import NamedTuple

import numpy as np

from kvjax.speculation.loop_state import Counts
from kvjax.summary import one_line


class LevelCounts(NamedTuple):
    """The counts of one level of drafts. Drafts beyond the last token of a row, or its stop token, do not count.

    Attributes:
      rounds: [B] int32.
      drafted: [B, γ] int32, the drafts of each place.
      accepted: [B, γ] int32, those that were accepted.
    """

    rounds: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def tokens_per_round(self) -> float:
        """The mean number of tokens of a round, accepted drafts and one token more."""
        return float(self.accepted.sum() / max(self.rounds.sum(), 1) + 1)

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted."""
        return float(self.accepted.sum() / max(self.drafted.sum(), 1))

    @property
    def by_place(self) -> np.ndarray:
        """[2, γ], accepted and drafted tokens of each place, of all rows."""
        return np.stack([self.accepted.sum(axis=0), self.drafted.sum(axis=0)])


class Drafts(NamedTuple):
    """The counts of a generation with drafts.

    Attributes:
      levels: of each level, the nearest to the target first.
      by_round: [B, R] int32, the number of accepted drafts of each round of the target; -1 after a row's last round.
    """

    levels: tuple[LevelCounts, ...]
    by_round: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)

    @classmethod
    def from_counts(cls, counts: tuple[Counts, ...], by_round: np.ndarray, rows: int) -> "Drafts":
        """Returns the counts of the first `rows` rows, on the host."""
        levels = tuple(LevelCounts(*(np.asarray(each)[:rows] for each in one)) for one in counts)
        return cls(levels, by_round[:rows, : int(levels[0].rounds.max(initial=0))])

    @property
    def rounds(self) -> np.ndarray:
        """[B] int32, the rounds of the target."""
        return self.levels[0].rounds

    @property
    def drafted(self) -> int:
        """The number of tokens that were drafted for the target."""
        return int(self.levels[0].drafted.sum())

    @property
    def accepted(self) -> int:
        """The number of them that were accepted."""
        return int(self.levels[0].accepted.sum())

    @property
    def tokens_per_round(self) -> float:
        """See `LevelCounts.tokens_per_round`, of the target."""
        return self.levels[0].tokens_per_round

    @property
    def acceptance(self) -> float:
        """See `LevelCounts.acceptance`, of the target."""
        return self.levels[0].acceptance
