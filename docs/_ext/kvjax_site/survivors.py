"""Pictures of what policies keep of a story that kvjax-tiny reads."""

import functools
import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

import kvjax
from kvjax import policies, selection
from kvjax.analysis import Retained, retained
from kvjax_site.entries import Entry

DRAWN = 4  # the layer; in this one heads differ much
LENGTH = 256  # tokens of the text
PROMPT, LONG_PROMPT = (
    128,
    192,
)  # of these, tokens of the prompt: of policies that evict at every step, and of compressors
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
VERSION = "2"
SEEN, EVICTED, PAPER = (0.13, 0.36, 0.62), (0.87, 0.90, 0.94), (1.0, 1.0, 1.0)


@functools.cache
def model() -> kvjax.Model:
    """Returns kvjax-tiny."""
    return kvjax.load("kvjax-tiny")


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
    tokenizer = model().tokenizer
    assert tokenizer is not None
    tokens = np.array(tokenizer.encode(TEXT))[:LENGTH]
    assert len(tokens) == LENGTH, f"the text has {len(tokens)} tokens"
    return retained(model(), tokens[None], spec, prompt_length=LONG_PROMPT if compresses(spec) else PROMPT)


def draw(result: Retained) -> bytes:
    """Draws which tokens each query of a layer saw, for each KV head, as a PNG.

    A row is a query, a column a token: dark where the query saw the token, light where it was evicted.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layer, length, prompt = DRAWN, int(result.lengths[0]), int(result.prompt[0])
    heads = result.last_seen.shape[2]
    figure = Figure(figsize=(3.5 * heads, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    query, token = np.arange(length)[:, None], np.arange(length)
    for head, axes in enumerate(figure.subplots(1, heads, sharey=True, squeeze=False)[0]):
        seen = (token <= query) & (query <= result.last_seen[layer, 0, head, :length])
        image = np.where(seen[..., None], SEEN, np.where((token <= query)[..., None], EVICTED, PAPER))
        axes.imshow(image, extent=(0, length, length, 0), interpolation="nearest")
        axes.axhline(prompt, color="0.25", linewidth=0.8, linestyle=(0, (4, 3)))
        axes.set(title=f"KV head {head}", xlabel="token")
        axes.spines[["top", "right"]].set_visible(False)
        if head == 0:
            axes.set_ylabel("query")
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=100, metadata={"Software": ""})
    return out.getvalue()


def picture(entry: Entry, folder: Path, sources: str) -> str:
    """Draws what a policy keeps, unless the folder has it.

    Args:
      entry: of the policy.
      folder: of the pictures.
      sources: digest of the code that decides what is kept.

    Returns:
      The name of the file, which has a digest of what it depends on.
    """
    about = f"{VERSION} {sources} {TEXT} {spec_of(entry)!r}"
    name = f"{entry.name}-{hashlib.sha256(about.encode()).hexdigest()[:12]}.png"
    if not (folder / name).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(draw(measure(entry)))
    return name
