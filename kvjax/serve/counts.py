"""The load of a runner at a moment, and its counts since it started."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Load:
    """The load of a runner.

    Attributes:
      rows: its rows.
      running: requests in rows.
      waiting: requests that have no row.
      swapped: those of them that had one, which a request of a higher priority has taken.
      swapped_bytes: bytes of their states in host memory.
    """

    rows: int
    running: int
    waiting: int
    swapped: int = 0
    swapped_bytes: int = 0


@dataclasses.dataclass
class Counts:
    """Counts of a runner since it started. Rates are quotients of differences of two of these.

    Attributes:
      requests: requests that have ended, those cancelled included.
      not_finite: those of them that ended since a log-probability was not finite.
      tokens: new tokens of requests.
      steps: decoding steps, each of all rows; with drafts, a round is a step.
      row_steps: steps times rows.
      useful_row_steps: steps of rows that had a request which went on.
      reads: times that the host has waited for the device.
      prompt_tokens: tokens of prompts that were run, or found in the prefix store.
      found_tokens: those of them that were found.
      rounds: rounds of drafts, of one row each; 0 without drafts, as are the next two.
      drafted: tokens that were drafted. Drafts beyond the last token of a request, or its stop token, do not count.
      accepted: those of them that were accepted.
      preemptions: times that a request has lost its row to one of a higher priority.
      swapped_bytes: bytes that these have moved to host memory; as many move back.
    """

    requests: int = 0
    not_finite: int = 0
    tokens: int = 0
    steps: int = 0
    row_steps: int = 0
    useful_row_steps: int = 0
    reads: int = 0
    prompt_tokens: int = 0
    found_tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    swapped_bytes: int = 0
