"""H2O's Algorithm 1 by hand: what kvjax evicts in the first layer, beside a loop in NumPy."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments.papers.parts import Lab, Part, Result
from experiments.papers.settings import Settings
from kvjax import analysis, policies
from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.typing import PyTree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Algorithm(Part):
    """Feeds rows token by token with `budget` slots, of which the `recent` newest are protected.

    The result has ``kvjax`` and ``numpy`` [B, K, T] int32, the newest query that saw each token in the first layer; and
    of the first row and head, for each step, ``live`` [T, budget + 1] int32, the positions that a query saw, ``score``
    of that shape, what they had received, both -1 where there are fewer; and ``evicted`` [T] int32, -1 for none.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      length: tokens of each.
      budget: slots per head.
      recent: the newest that are protected.
    """

    text: str
    rows: int
    length: int
    budget: int
    recent: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text),)

    def measure(self, lab: Lab) -> Result:
        model, tokens = lab.model(self.model), lab.rows(self, self.text, self.rows, self.length)
        policy = policies.h2o(self.budget, recent=self.recent)
        kept = analysis.retained(model, tokens, policy, prompt_length=1)
        # [L, B, H, keys, queries]; keys and values of the first layer do not depend on what is evicted
        logits = np.asarray(over_tiles(model, tokens, None, _logits, lambda *_: ()).queries, np.float64)[0]
        heads = model.config.num_kv_heads
        # [B, K, G, queries, keys]
        logits = np.swapaxes(logits, -1, -2).reshape(self.rows, heads, -1, *logits.shape[-1:-3:-1])
        found = np.zeros((self.rows, heads, self.length), np.int32)
        steps: Result = {}
        for row in reversed(range(self.rows)):
            for head in reversed(range(heads)):
                found[row, head], steps = follow(logits[row, head], self.length, self.budget, self.recent)
        return {"kvjax": kept.last_seen[0], "numpy": found, **steps}


def algorithm() -> Algorithm:
    """The example's budget of 3."""
    return Algorithm(text="book", rows=2, length=24, budget=3, recent=1)


def follow(logits: np.ndarray, length: int, budget: int, recent: int) -> tuple[np.ndarray, Result]:
    """Algorithm 1 on one KV head.

    Args:
      logits: [G, queries, keys] of the query heads that share it.
      length: tokens.
      budget: slots that stay after a step.
      recent: the newest positions that are protected.

    Returns:
      The newest query that saw each token, [length] int32, and ``live``, ``score`` and ``evicted``.
    """
    live: list[int] = []
    score: dict[int, float] = {}
    last = np.zeros(length, np.int32)
    steps = {
        "live": np.full((length, budget + 1), -1, np.int32), "score": np.full((length, budget + 1), -1.0),
        "evicted": np.full(length, -1, np.int32),
    }  # fmt: skip
    for query in range(length):
        live.append(query)
        score[query] = 0.0
        # [G, live]
        weight = np.exp(logits[:, query, live] - logits[:, query, live].max(axis=-1, keepdims=True))
        paid = (weight / weight.sum(axis=-1, keepdims=True)).mean(axis=0)
        for token, own in zip(live, paid, strict=True):
            score[token] += own
        last[live] = query
        steps["live"][query, : len(live)] = live
        steps["score"][query, : len(live)] = [score[token] for token in live]
        if len(live) > budget:
            # The older position is evicted if scores are equal.
            victim = min((token for token in live if token <= query - recent), key=lambda token: (score[token], token))
            live.remove(victim)
            steps["evicted"][query] = victim
    return last, steps


def _logits(carry: PyTree, attention: tuple[Rows]) -> tuple[PyTree, PyTree]:
    (rows,) = attention
    # [B, K, G, T, n]
    return carry, jnp.swapaxes(rows.logits, -1, -2)
