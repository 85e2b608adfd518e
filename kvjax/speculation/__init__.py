"""Speculation: tokens that a short reading of the cache drafts, and that the full cache verifies.

`speculate` generates in rounds of drafts. A selection drafts from the model's own cache, `seen` from the slots that a
policy ranks highest, `own` with a small cache of a policy; a `level` describes one of several.
`rules` has the acceptance rules.
"""

from typing import TYPE_CHECKING

from kvjax import lazy

if TYPE_CHECKING:
    from kvjax.speculation.drafts import Level, Own, Seen, level, own, seen
    from kvjax.speculation.report import Drafts, LevelCounts
    from kvjax.speculation.speculating import speculate
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "kvjax.speculation.drafts": ("Level", "Own", "Seen", "level", "own", "seen"),
            "kvjax.speculation.report": ("Drafts", "LevelCounts"),
            "kvjax.speculation.speculating": ("speculate",),
        },
    )

__all__ = ["Drafts", "Level", "LevelCounts", "Own", "Seen", "level", "own", "seen", "speculate"]
