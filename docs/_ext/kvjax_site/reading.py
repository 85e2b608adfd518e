"""Pictures of the slots that each decoding step reads under a selection, while kvjax-tiny reads a story."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax import policies
from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_steps
from kvjax.typing import PyTree
from kvjax_site import pictures, survivors
from kvjax_site.entries import Entry

#: Examples that read about a quarter of the story; those of `kvjax_site.entries` would read all of it.
EXAMPLES: Mapping[str, str] = {
    "optimal": "optimal(48)",
    "quest": "quest(page=8, budget=64)",
    "infinigen": "infinigen(cap=48)",
    "lserve": "lserve(page=16, sub=4, every=8, budget=80)",
    "retrieval": "retrieval(chunk=8, budget=64)",
    "tokenselect": "tokenselect(k=24, sinks=4, recent=24)",
    "shadowkv": "shadowkv(rank=32, chunk=8, budget=32, local=1, outliers=2)",
    "alisa": "alisa(48)",
    "a2ats": "a2ats(k=47)",
    "sparf": "sparf(16, 47)",
    "rekv": "rekv(page=8, budget=32, recent=24, question=8)",
}
#: Changes whenever the pictures would.
VERSION = "1"
COLOURS = (pictures.PAPER, pictures.HELD, pictures.READ)
HEIGHT = 2.6  # inches


def example_of(entry: Entry) -> str:
    """Returns the selection that is drawn, as Python."""
    return EXAMPLES.get(entry.name, entry.example)


def measure(entry: Entry) -> np.ndarray:
    """Returns what each step did with each slot, [K, steps, T] int: 2 = read, 1 = held and not read, 0 = not yet held.

    Every token is kept, so that slots are numbered by their tokens.
    """
    spec = kvjax.CacheSpec(policies.full(), selection=entry.build(example_of(entry)))
    prompt = survivors.LONG_PROMPT
    run = over_steps(
        survivors.model(), survivors.tokens(), (spec,), _held_and_read, lambda *_: (), prompt_length=prompt,
        lengths=None,
    )  # fmt: skip
    # [K, T, steps]
    found = run.queries[survivors.DRAWN, 0, ..., prompt:]
    return np.swapaxes(found, 1, 2).astype(int)


def _held_and_read(carry: PyTree, attention: tuple[Rows]) -> tuple[PyTree, Any]:
    """Returns 0, 1 or 2 for each token, [B, K, 1, T, 1], of the single query of a step."""
    (rows,) = attention
    # [B, K, 1, T]
    held, seen = rows.held[..., 0, :], rows.seen[..., 0, :]
    return carry, (held.astype(int) + seen.astype(int))[..., None]


def picture(entry: Entry, folder: Path, sources: str) -> list[str]:
    """Draws which slots each step reads, unless the folder has it; see `kvjax_site.survivors.picture`."""

    def draw() -> list[bytes]:
        return [
            pictures.draw(
                cells, COLOURS, title=f"KV head {head}", rows="decoding step", columns="slot", height=HEIGHT, first=1
            )
            for head, cells in enumerate(measure(entry))
        ]

    about = f"{VERSION} {sources} {survivors.TEXT} {example_of(entry)}"
    return pictures.kept(entry.name, about, folder, survivors.model().config.num_kv_heads, draw)
