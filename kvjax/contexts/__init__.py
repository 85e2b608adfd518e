"""Contexts: caches that are values. They are continued, forked, joined, rewound, saved and loaded.

A `kvjax.Context` is the cache after some tokens, the logits after the last of them, the tokens, and how they were made.
`prefill` begins one, `extend` adds a turn, `decode` generates and returns the context afterwards; `rows` copies rows (a
fork), `join` puts the rows of two contexts into one, `rewind` forgets the last tokens,
`with_prefix` lets all rows follow one that is held once, and `save` and `load` keep one in a folder.
"""

from typing import TYPE_CHECKING

from kvjax import lazy

if TYPE_CHECKING:
    from kvjax.contexts.answers import decode
    from kvjax.contexts.batches import join, rows
    from kvjax.contexts.folders import load, save
    from kvjax.contexts.prompts import prefill
    from kvjax.contexts.rewinding import rewind
    from kvjax.contexts.shared import with_prefix
    from kvjax.contexts.turns import extend
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "kvjax.contexts.answers": ("decode",),
            "kvjax.contexts.batches": ("join", "rows"),
            "kvjax.contexts.folders": ("load", "save"),
            "kvjax.contexts.prompts": ("prefill",),
            "kvjax.contexts.rewinding": ("rewind",),
            "kvjax.contexts.shared": ("with_prefix",),
            "kvjax.contexts.turns": ("extend",),
        },
    )

__all__ = ["decode", "extend", "join", "load", "prefill", "rewind", "rows", "save", "with_prefix"]
