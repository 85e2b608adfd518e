"""A published system around key-value caches: what it is in kvjax, or why it is not there."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

Question = Literal["keep", "hold", "look", "reuse", "share", "serve", "not a KV cache"]
Axis = Literal["policy", "storage", "selection"]

#: Measured results by the label of their link -> file of the repository, with a heading where it has several.
FIGURES: Mapping[str, str] = {
    "policies": "experiments/measured/leaderboard/policies_tiny.md",
    "papers": "docs/papers.md#what-holds-on-smollm2-135m-instruct",
    "figure 1 of H2O": "experiments/measured/papers-smollm2/README.md#h2o_fig1",
    "chance": "docs/evidence.md#does-a-score-beat-chance-if-the-prompt-is-kept",
    "unseen questions": "docs/evidence.md#does-kvzip-keep-the-answers-to-unseen-questions",
    "turns": "docs/evidence.md#do-later-turns-find-what-the-first-one-finds",
    "heads": "docs/policies.md#layers-and-heads",
    "trained merge": "docs/policies.md#merges",
    "trained gate": "kvjax/pretrained/kvjax-tiny-gate/README.md",
    "storages": "experiments/measured/notes.md#what-a-storage-costs-in-perplexity",
    "storages, SmolLM2": "docs/storages.md#on-smollm2-135m-instruct",
    "slots read": "experiments/measured/notes.md#what-a-selection-must-read-on-smollm2",
    "selections": "docs/leaderboard.md#selections-on-kvjax-tiny",
    "pages of prompts": "docs/selections.md#prompts-that-read-pages",
    "chunks": "docs/reuse.md#how-well",
    "edits": "docs/reuse.md#how-well-after-edits",
    "learned reuse": "docs/reuse.md#learned-reuse",
    "messages": "docs/contexts.md#contexts-as-bytes",
    "prefixes": "docs/serving.md#prompts-that-begin-alike",
    "shared": "docs/contexts.md#one-text-for-all-rows",
    "drafts": "experiments/measured/notes.md#rounds-of-drafts",
    "plans of serving": "docs/simulations.md#serving",
    "plans of preemption": "docs/simulations.md#preemption",
    "plans of layouts": "docs/simulations.md#layouts",
    "plans of a pool": "docs/simulations.md#pool",
    "plans of phases": "docs/simulations.md#phases",
    "plans of a drive": "docs/simulations.md#storage",
    "plans of activations": "docs/simulations.md#activations",
    "plans of traffic": "docs/simulations.md#traffic",
}


@dataclasses.dataclass(frozen=True)
class System:
    """A published system or method.

    Attributes:
      asks: what it is about.
      title: its name, which no other entry has.
      paper: its number in arXiv; empty if it has none.
      names: its names in kvjax, the main one first; empty for what is not there.
      form: how the form here differs from the paper's, or which part of it there is; empty if it does not.
      spec: it as text on a command line, for what is made of several parts: axis -> expression.
      command: the command that runs it.
      test: the file that tests it.
      figure: the label of a measured result in `FIGURES`; empty if there is none.
      reason: why it is not there; empty for what is.
    """

    asks: Question
    title: str
    paper: str = ""
    names: tuple[str, ...] = ()
    _: dataclasses.KW_ONLY
    form: str = ""
    spec: tuple[tuple[Axis, str], ...] = ()
    command: str = ""
    test: str = ""
    figure: str = ""
    reason: str = ""

    @property
    def is_there(self) -> bool:
        """Whether kvjax has it, or a part of it."""
        return bool(self.names or self.command)
