"""Pictures of what policies keep of a story that kvjax-tiny reads."""

import functools
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax import policies, selection
from kvjax.analysis import Retained, retained
from kvjax.models.calibrate import needs_of
from kvjax.policies.traits import parameters_of
from kvjax_site import pictures
from kvjax_site.entries import Entry

DRAWN = 4  # the layer; in this one heads differ much
LENGTH = 256  # tokens of the text
PROMPT = 128  # tokens of the prompt, for policies that evict at every step
LONG_PROMPT = 192  # the same for compressors and selections
TEXT = (
    "The ship left the harbour in the morning, and the old captain stood at the wheel. He had a red coat and a long "
    "white beard. The lock code of Clara is 5318. The sea was quiet, and the wind came from the west. A boy sat on the "
    "deck and looked at the birds. He had never been so far from home. The captain told him of the islands, of their "
    "tall trees and of the people who lived there. In the evening they ate bread and fish, and the cook sang a song. "
    "The boy asked him where they would go. The captain said that nobody knew, for the map was old and the names were "
    "lost. The night was dark, and the stars were bright above the sea. The boy slept under the sails, and he dreamt "
    "of his mother and of the house by the mill. When he woke, the ship lay in a bay, and there were voices on the "
    "shore. The captain put on his red coat. The boat went over the water, and they saw a man who stood on the sand "
    "and held a lamp. He asked the boy for the lock code of Clara. The lock code of Clara is 5318, the boy said."
)
#: Changes whenever the pictures would.
VERSION = "3"
COLOURS = (pictures.PAPER, pictures.EVICTED, pictures.READ)


@functools.cache
def model() -> kvjax.Model:
    """Returns kvjax-tiny."""
    return kvjax.load("kvjax-tiny")


def tokens() -> np.ndarray:
    """Returns the tokens of the text, [1, LENGTH]."""
    tokenizer = model().tokenizer
    assert tokenizer is not None
    ids = np.array(tokenizer.encode(TEXT))[:LENGTH]
    assert len(ids) == LENGTH, f"the text has {len(ids)} tokens"
    return ids[None]


def spec_of(entry: Entry) -> Any:
    """Returns the cache that is drawn: what a pool ranks by, a selection must choose."""
    if entry.kind == "merge":
        return policies.h2o(64, merge=entry.build())
    made = entry.build()
    if entry.name in ("lru", "counter"):
        return kvjax.CacheSpec(made, selection=selection.infinigen(cap=16, first_layer=1))
    return made


def example_of(entry: Entry) -> str:
    """Returns the cache that is drawn, as Python."""
    if entry.kind == "merge":
        return f"h2o(64, merge={entry.name}())"
    return f"{entry.example} + infinigen(cap=16)" if entry.name in ("lru", "counter") else entry.example


def compresses(spec: Any) -> bool:
    """Returns whether a policy evicts at the end of the prompt, or then first."""
    policy = getattr(spec, "policy", spec)
    return "prompt_end" in (getattr(policy, "when", None), getattr(getattr(policy, "prompt", None), "when", None))


def measure(entry: Entry) -> Retained:
    """Returns for each token the last query that saw it."""
    spec = spec_of(entry)
    own = model()
    if needs_of(spec, own.config.num_layers).any:
        own = kvjax.calibrated(own, spec, kvjax.calibrate(own, tokens(), spec))
    return retained(own, tokens(), spec, prompt_length=LONG_PROMPT if compresses(spec) else PROMPT)


def can_draw(entry: Entry) -> bool:
    """Returns whether an entry can be drawn: a merge keeps the same slots as its policy, and a gate must be trained."""
    return entry.kind != "merge" and not any(each.trained for each in parameters_of(entry.build()))


def draw(result: Retained) -> list[bytes]:
    """Draws which tokens each query of a layer saw, one picture for each KV head.

    A row is a query, a column a token: dark where the query saw the token, light where it was evicted.
    """
    length, prompt = int(result.lengths[0]), int(result.prompt[0])
    query, token = np.arange(length)[:, None], np.arange(length)
    drawn = []
    for head, last_seen in enumerate(result.last_seen[DRAWN, 0, :, :length]):
        # [length, length]
        cells = np.where(token > query, 0, np.where(query <= last_seen, 2, 1))
        drawn.append(pictures.draw(cells, COLOURS, title=f"KV head {head}", rows="query", columns="token", line=prompt))
    return drawn


def picture(entry: Entry, folder: Path, sources: str) -> list[str]:
    """Draws what a policy keeps, unless the folder has it.

    Args:
      entry: of the policy.
      folder: of the pictures.
      sources: digest of the code that decides what is kept.

    Returns:
      The names of the files, one for each KV head.
    """
    about = f"{VERSION} {sources} {TEXT} {spec_of(entry)!r}"
    heads = model().config.num_kv_heads
    return pictures.kept(entry.name, about, folder, heads, lambda: draw(measure(entry)))
