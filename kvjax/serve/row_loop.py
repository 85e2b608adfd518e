"""How the rows of a runner decode: `Steps` by one token in a step, `kvjax.serve.rounds.Rounds` by drafts."""

from typing import Protocol

import numpy as np

from kvjax.generation import compiling
from kvjax.generation.decoding import CHUNK
from kvjax.serve import decode_loop
from kvjax.serve.chunked_prefill import Prompt
from kvjax.serve.decode_loop import Chunk, Entry, Rows
from kvjax.serve.intake import Ready
from kvjax.serve.prompts import Prompts
from kvjax.serve.request import Checked
from kvjax.serve.swap import committed
from kvjax.typing import PyTree

# Idle rows end a chunk after this number of steps, summed over rows: the host reads at most once per so many tokens.
TOKENS_PER_READ = CHUNK


class RowLoop(Protocol):
    """How rows decode. Their arrays, whose first dimension is the row, are opaque to the runner."""

    def check(self, request: Checked, prompt: Prompt) -> None:
        """Checks a request that has a prompt.

        Raises:
          KvjaxError: it cannot be decoded so.
        """

    def check_prefix(self) -> None:
        """Checks that requests can continue a prefix.

        Raises:
          InputError: they cannot.
        """

    def explain(self) -> str:
        """Describes the loop in a line after a line break, if there is something to say."""

    def filled(self, rows: PyTree | None, row: int, ready: Ready, entry: Entry) -> PyTree:
        """Returns the rows, new ones for None, with a request in one of them."""

    def run(self, rows: PyTree, going_on: np.ndarray, steps: int, idle: int) -> tuple[PyTree, Chunk]:
        """Dispatches a chunk; for the arguments see `kvjax.serve.decode_loop.decode_chunk`."""


class Steps:
    """Rows that decode by one token in a step, under any spec."""

    def __init__(self, prompts: Prompts, rows: int):
        """Prepares `rows` rows for the requests whose prompts `prompts` runs."""
        self._prompts, self._count = prompts, rows

    def check(self, request: Checked, prompt: Prompt) -> None:
        """Accepts any request."""

    def check_prefix(self) -> None:
        """Accepts any prefix."""

    def explain(self) -> str:
        """Says nothing: it is what `kvjax.generate` does."""
        return ""

    def filled(self, rows: Rows | None, row: int, ready: Ready, entry: Entry) -> Rows:
        """See `RowLoop.filled`."""
        started = ready.started
        if rows is None:
            rows = committed(decode_loop.empty_rows(started.state, entry, rows=self._count))
        return decode_loop.admit(
            rows, started.state, started.logits, np.int32(ready.source), np.int32(row), entry
        )  # fmt: skip

    def run(self, rows: Rows, going_on: np.ndarray, steps: int, idle: int) -> tuple[Rows, Chunk]:
        """See `RowLoop.run`."""
        model, phase = self._prompts.model, self._prompts.layout.decode
        with compiling.announced(compiling.tokens_of(phase)):
            return decode_loop.decode_chunk(
                model.params, rows, going_on, np.int32(steps), np.int32(idle), config=model.config, phase=phase,
                min_row_steps=TOKENS_PER_READ,
            )  # fmt: skip
