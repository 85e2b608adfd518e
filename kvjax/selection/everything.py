"""The default selection, which reads every slot."""

import dataclasses

from kvjax.selection.base import Selection
from kvjax.selection.checks import factory


@dataclasses.dataclass(frozen=True)
class ReadAll(Selection):
    """Reads every slot that is held."""

    name = "everything"

    @property
    def reads_all(self) -> bool:
        return True


@factory
def everything() -> ReadAll:
    """Reads every slot that is held; the default."""
    return ReadAll()
