"""Requests before they have a row: their prompts are run ahead, so that a row that becomes free is not kept waiting."""

import collections
import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from kvjax.serve import prefix as prefixes
from kvjax.serve.chunked_prefill import InBlocks, Prompt, Started
from kvjax.serve.documents import DocumentCaches, DocumentPrompt
from kvjax.serve.prompt_states import PromptStates, StoredPrompt
from kvjax.serve.prompts import Prompts
from kvjax.serve.request import Checked

Parts = InBlocks | StoredPrompt | DocumentPrompt  # of a prompt
MAX_BEGUN = 2  # prompts in blocks that have begun and not ended


@dataclasses.dataclass(eq=False)
class Job:
    """A request on its way.

    Attributes:
      id: see `kvjax.serve.Runner.submit`.
      request: the request.
      prompt: its prompt; None if it continues a prefix.
      bucket: the width that the prompt is padded to, 0 without one; None if it is run in blocks, or has documents.
      tokens: the new tokens of each chunk.
      logprobs: their log-probabilities.
      count: the number of new tokens.
      ended: whether it has all its tokens, or was cancelled.
      ended_by_host: whether its row, when it ended, might have gone on.
      dispatched: whether a chunk that decodes it has been dispatched.
      found: the number of its prompt's tokens, or of its documents', that were in a store.
    """

    id: int
    request: Checked
    prompt: Prompt | None
    bucket: int | None
    tokens: list[np.ndarray] = dataclasses.field(default_factory=list)
    logprobs: list[np.ndarray] = dataclasses.field(default_factory=list)
    count: int = 0
    ended: bool = False
    ended_by_host: bool = False
    dispatched: bool = False
    found: int = 0

    @property
    def given(self) -> int:
        """The number of tokens that its row is fed before any is chosen."""
        prefix = self.request.prefix
        return 0 if prefix is None or prefixes.at_once(prefix) else len(self.request.tokens)

    @property
    def left(self) -> int:
        """The most steps that it may take."""
        return self.given + self.request.max_new_tokens - self.count


@dataclasses.dataclass(eq=False)
class Ready:
    """A job whose prompt has been run.

    Attributes:
      job: the job.
      started: what its prompt was run with.
      source: its row of `started`.
    """

    job: Job
    started: Started
    source: int


class Intake:
    """Waiting requests, by priority, and then in the order in which they came.

    Attributes:
      prompt_tokens: the number of tokens of prompts that have been run, or found.
      found_tokens: the number of those that were found.
      failed: requests whose documents have raised an error, which `Runner` takes.
    """

    def __init__(
        self,
        prompts: Prompts,
        states: PromptStates | None,
        documents: DocumentCaches,
        *,
        look: int,
        turn_tokens: int,
    ):
        """Begins without requests.

        Args:
          prompts: runs prompts.
          states: finds those that were run before; None for none.
          documents: the caches of requests' documents.
          look: the number of waiting requests that the next prompts are chosen from.
          turn_tokens: the number of tokens of prompts, padding included, after which running rows go on.
        """
        self.prompt_tokens = self.found_tokens = 0
        self.failed: list[tuple[Job, Exception]] = []
        self._states, self._documents = states, documents
        self._prompts, self._look, self._turn_tokens = prompts, look, turn_tokens
        self._waiting: collections.deque[Job] = collections.deque()
        self._ready: collections.deque[Ready] = collections.deque()
        # By arrival; the most urgent one goes on.
        self._begun: list[tuple[Job, Parts]] = []
        self._block_next, self._spent = True, 0

    def __bool__(self) -> bool:
        """Whether there is a request without a row."""
        return bool(self._waiting or self._ready or self._begun)

    def add(self, job: Job) -> None:
        """Adds a request."""
        place = len(self._waiting)
        while place and self._waiting[place - 1].request.priority < job.request.priority:
            place -= 1
        self._waiting.insert(place, job)

    def drop(self, job: Job) -> None:
        """Forgets a request that was cancelled."""
        self._waiting = collections.deque(each for each in self._waiting if each is not job)
        self._ready = collections.deque(each for each in self._ready if each.job is not job)
        self._begun = [each for each in self._begun if each[0] is not job]

    def begin_turn(self) -> None:
        """Says that the running rows have gone on."""
        self._spent = 0

    def run(self, wanted: int, *, limited: bool) -> None:
        """Dispatches prompts until some are ready; they may be one more, and the others that one program runs.

        Args:
          wanted: how many.
          limited: whether rows are running, so that the turn's tokens are a limit.
        """
        while not self._are_ready(wanted) and not (limited and self._spent >= self._turn_tokens):
            # A block of a long prompt and short prompts take turns, so that neither waits for all of the other.
            ran = (self._run_block() if self._block_next else 0) or self._run_short() or self._run_block()
            if not ran:
                return
            self._spent += ran

    def take(self) -> Ready | None:
        """Takes the next job whose prompt has been run."""
        if (found := self._next_ready) is not None:
            self._ready.remove(found)
        return found

    @property
    def ready(self) -> Job | None:
        """The job that `take` returns next."""
        return None if (found := self._next_ready) is None else found.job

    @property
    def most_urgent(self) -> Job | None:
        """The most urgent job whose prompt waits, or has begun and not ended."""
        jobs = [*itertools.islice(self._waiting, 1), *(job for job, _ in self._begun)]
        return max(jobs, key=lambda job: job.request.priority, default=None)

    @property
    def _next_ready(self) -> Ready | None:
        return max(self._ready, key=lambda each: each.job.request.priority, default=None)

    def _are_ready(self, wanted: int) -> bool:
        """Whether `wanted` prompts are ready that go before the next one, or `wanted` + 1 in all.

        Without the second limit, requests of ever higher priorities would each add a state.
        """
        if (following := self.most_urgent) is None or len(self._ready) > wanted:
            return len(self._ready) >= wanted
        least = following.request.priority
        return sum(each.job.request.priority >= least for each in self._ready) >= wanted

    def _run_block(self) -> int:
        """Dispatches the next block of a long prompt; returns the number of its tokens, 0 if there is none."""
        self._block_next = False
        first = max(self._begun, key=lambda each: each[0].request.priority, default=None)
        waiting = next((job for job in self._next() if job.bucket is None), None)
        if first is None or (waiting is not None and self._overtakes(waiting, first[0])):
            if waiting is None or waiting.prompt is None:
                return 0
            self._waiting.remove(waiting)
            if self._find(waiting):
                return 1
            first = waiting, self._begin(waiting, waiting.prompt)
            self._begun.append(first)
        job, blocks = first
        try:
            started = blocks.advance()
        except Exception as error:  # such as too little memory for caches: of this request, and the others go on
            if job.request.documents is None:
                raise
            self._begun.remove(first)
            self.failed.append((job, error))
            return 1
        if started is not None:
            self._begun.remove(first)
            self._are_run([job], started)
        return blocks.step

    def _overtakes(self, waiting: Job, begun: Job) -> bool:
        """Whether the blocks of a more urgent prompt come first; each prompt that has begun holds a cache."""
        return waiting.request.priority > begun.request.priority and len(self._begun) < MAX_BEGUN

    def _run_short(self) -> int:
        """Dispatches the first waiting prompt of one shot, and others of its bucket; returns the number of tokens."""
        self._block_next = True
        first = next((job for job in self._next() if job.bucket is not None), None)
        if first is None:
            return 0
        bucket = first.bucket
        assert bucket is not None
        if first.request.prefix is not None:
            self._waiting.remove(first)
            self._ready.append(Ready(first, prefixes.started(first.request.prefix, first.request.tokens), 0))
            return 1 + len(first.request.tokens)
        if self._whole_alone and self._find(first):
            self._waiting.remove(first)
            return 1
        max_prompts = self._prompts.at_once(bucket)
        others = (job for job in self._next() if job.bucket == bucket and job is not first)
        jobs = [first, *itertools.islice(others, max_prompts - 1)]
        for job in jobs:
            self._waiting.remove(job)
        prompts = [job.prompt for job in jobs if job.prompt is not None]
        started = self._prompts.run(prompts, bucket)
        self._are_run(jobs, started)
        if self._states is not None and self._whole_alone:
            for source, (job, prompt) in enumerate(zip(jobs, prompts, strict=True)):
                self._states.put_one_shot(prompt, job.request.namespace, started, source)
        return bucket * max_prompts

    @property
    def _whole_alone(self) -> bool:
        """Whether prompts are stored that are run in one shot: where all are, so that no beginnings can be found."""
        return self._states is not None and self._prompts.block is None

    def _find(self, job: Job) -> bool:
        """Whether the prompt of a job was in the store; the job is then ready."""
        if self._states is None or job.prompt is None or job.request.documents is not None:
            return False
        started = self._states.whole(job.prompt, job.request.namespace)
        if started is not None:
            job.found = len(job.prompt.tokens)
            self._are_run([job], started)
        return started is not None

    def _begin(self, job: Job, prompt: Prompt) -> Parts:
        """Begins a prompt that is run block by block, or document by document."""
        own = job.request
        blocks: StoredPrompt | DocumentPrompt | None = None
        if own.documents is not None:
            blocks = self._documents.begin(prompt, own.documents, own.namespace)
        elif self._states is not None:
            blocks = self._states.begin(prompt, own.namespace)
        if blocks is None:
            return self._prompts.begin(prompt)
        job.found = blocks.found
        return blocks

    def _are_run(self, jobs: list[Job], started: Started) -> None:
        """Says that the prompts of jobs have been run, or found."""
        self._ready.extend(Ready(job, started, source) for source, job in enumerate(jobs))
        self.prompt_tokens += sum(len(job.request.tokens) for job in jobs)
        self.found_tokens += sum(job.found for job in jobs)

    def _next(self) -> Iterator[Job]:
        """The waiting requests among which prompts are looked for."""
        return itertools.islice(self._waiting, self._look)
