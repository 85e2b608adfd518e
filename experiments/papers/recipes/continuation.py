"""How probable the full cache finds the greedy text of another cache."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import kvjax
from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes.fullref import Greedy
from experiments.papers.settings import Settings
from kvjax import policies


@dataclasses.dataclass(frozen=True, kw_only=True)
class Likely(Part):
    """Scores the tokens of a `Greedy` under the full cache.

    The result has ``logprobs`` [rows, new] float32.

    Attributes:
      of: whose tokens.
    """

    of: Greedy

    def files(self, settings: Settings) -> Sequence[Path]:
        return self.of.files(settings)

    def measure(self, lab: Lab) -> Result:
        of = self.of
        prompts = lab.rows(of, of.text, of.rows, of.prompt)
        # [rows, prompt + new]
        tokens = np.concatenate([prompts, lab.get(of)["tokens"]], axis=1)
        scored = kvjax.log_likelihood(lab.model(of.model), tokens, policies.full(), prompt_length=tokens.shape[1])
        # Entry t scores token t + 1.
        return {"logprobs": np.asarray(scored.logprobs)[:, of.prompt - 1 :]}


def likely(of: Greedy) -> Likely:
    """A part."""
    return Likely(model=of.model, of=of)
