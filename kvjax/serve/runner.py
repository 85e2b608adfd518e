"""`Runner`: serves many requests through the rows of one batch.

A row whose request has ended takes the next one while the other rows go on. The host reads once a chunk of tokens, and
runs the prompts of waiting requests while a chunk decodes.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from numpy.typing import ArrayLike

from kvjax import contexts
from kvjax.arguments import plain_signature
from kvjax.attention import Implementation
from kvjax.cache import shared_prefix
from kvjax.cache.planning.limits import Limits
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.contexts.folders import ContextCodec
from kvjax.contexts.prefix_store import PrefixStore
from kvjax.errors import InputError, NonFiniteError, shown
from kvjax.generation.context import Context
from kvjax.generation.decoding import CHUNK
from kvjax.generation.sampling import Greedy, Sampler, check_sampling
from kvjax.inputs import check_count, check_stop
from kvjax.models.model import Model, check_model
from kvjax.numerics.finite import PAD, WHY
from kvjax.policies.base import Policy
from kvjax.selection.base import Selection
from kvjax.serve import decode_loop
from kvjax.serve import prefix as prefixes
from kvjax.serve.counts import Counts, Load
from kvjax.serve.documents import DOCUMENT_BYTES, DocumentCaches, spans_of
from kvjax.serve.intake import Intake, Job
from kvjax.serve.preemption import SWAP_BYTES, SwapSpace, order, preempted_row, yields_to
from kvjax.serve.prompt_states import PromptStates
from kvjax.serve.prompts import AUTO, Prompts
from kvjax.serve.request import (
    MAX_STOPS,
    Progress,
    Reason,
    Request,
    Result,
    check_request,
    check_sampler,
    check_stops,
)
from kvjax.serve.rounds import Rounds, check_draft, drafted_spec
from kvjax.serve.row_loop import RowLoop, Steps
from kvjax.serve.sampling import settings
from kvjax.serve.swap import swap_in, take_row
from kvjax.speculation.drafts import Draft
from kvjax.storage.base import Storage
from kvjax.typing import PyTree

Array = jax.Array
FIRST_STEPS = 1  # of the chunk that chooses the first tokens of a request for which somebody waits
TURN_TOKENS = 2048  # tokens of prompts, padding included, that are run between two chunks while rows decode


@dataclasses.dataclass
class _Flight:
    """A chunk that has been dispatched, the jobs of the rows then, and the most steps that it takes."""

    chunk: decode_loop.Chunk
    jobs: list[Job | None]
    steps: int


class Runner:
    """Serves requests in the rows of one batch.

    A request's tokens are those of `kvjax.generate` for its prompt alone: they depend neither on the other requests,
    nor on the row, nor on when the request is submitted. In bfloat16, products of one row may be rounded otherwise than
    those of several, and tokens then depend on whether there is one row. It is not safe to call from several threads.

    ``for result in runner`` yields results as they come, until every submitted request has ended; requests may be
    submitted meanwhile.

    Attributes:
      counts: what has been done so far.
      prompts: how prompts are run.
      prefix_store: the states of prompts; None if none are kept.
      documents: the caches of requests' documents.
    """

    @plain_signature
    def __init__(
        self,
        model: Model,
        policy: Policy | CacheSpec,
        *,
        rows: int,
        limits: Limits,
        sampler: Sampler = Greedy(),
        stop: int | Sequence[int] = (),
        key: Array | None = None,
        prefill_block: int | str | None = AUTO,
        chunk: int = CHUNK,
        refill: int | None = None,
        turn_tokens: int = TURN_TOKENS,
        swap_bytes: int = SWAP_BYTES,
        prefix_store: PrefixStore | None = None,
        document_bytes: int = DOCUMENT_BYTES,
        implementation: Implementation = "auto",
        storage: Storage | None = None,
        selection: Selection | None = None,
        speculate: Draft | None = None,
    ):
        """Prepares the programs; nothing is compiled yet.

        Args:
          model: from `kvjax.load`; calibrated, if the storage needs it (`kvjax.calibrated`).
          policy: which slots the cache keeps, or a `CacheSpec`.
          rows: the number of requests that decode at the same time; rounded up to what a mesh divides.
          limits: the longest prompt, and the most new tokens of a request. Of a request with a prefix, the new tokens
            include those that it gives after the prefix.
          sampler: of requests that have none of their own.
          stop: token ids that end every request.
          key: random key of requests without a seed; None for `jax.random.key(0)`.
          prefill_block: tokens of a block of a prompt; a prompt of more than one block is run block by block between
            chunks of tokens. None for one shot; ``auto`` for blocks where they do not change what is kept.
          chunk: the most steps between two reads of the host, 1 to `CHUNK`.
          refill: the number of idle rows at which a chunk ends if requests wait; None for an eighth of the rows.
          turn_tokens: the number of tokens of prompts, padding included, after which the running rows go on.
          swap_bytes: bytes of host memory for the rows of requests that others of a higher priority have taken; 0 =
            no request loses its row.
          prefix_store: where the states of prompts are kept, so that a prompt that begins like an earlier one is not
            run again as a whole; see `kvjax.serve.prompt_states`. Answers do not depend on what it has. Several
            runners of one thread may share it. A row copies the state that it continues, so that the arrays of rows
            are of the same size with a store, whose bytes come on top; slots that all rows read together are those
            of `kvjax.contexts.with_prefix`.
          document_bytes: bytes of host memory for the caches of `Request.documents`; 0 = they are refused.
          implementation: see `kvjax.CacheOptions`.
          storage: see `kvjax.CacheOptions`.
          selection: see `kvjax.CacheOptions`.
          speculate: how tokens are drafted, as in `kvjax.generate`: by one selection or one `kvjax.speculation.seen`,
            which read the rows' own cache, under `full`; tokens are those without drafts. None = they are not.

        Raises:
          KvjaxError: arguments that are not valid, or a combination that cannot work; see `kvjax.generate`.
        """
        check_model(model)
        counts = {"rows": rows, "chunk": chunk, "refill": 1 if refill is None else refill, "turn_tokens": turn_tokens}
        for name, value in counts.items():
            check_count(name, value)
        if chunk > CHUNK:
            raise InputError(f"chunk must be at most {CHUNK} steps; got {chunk}.")
        check_sampler(sampler)
        if prefix_store is not None and not isinstance(prefix_store, PrefixStore):
            raise InputError(f"prefix_store must be kvjax.PrefixStore(max_bytes) or None; got {shown(prefix_store)}.")
        # Each device has as many rows.
        rows = model.rows_on_mesh(rows)
        spec, level = as_spec(policy, storage, selection), None
        if speculate is not None:
            level = check_draft(model, speculate, sampler)
            spec = drafted_spec(level, spec)
        self.prompts = Prompts(
            model, spec, limits=limits, rows=rows, prefill_block=prefill_block,
            stored=prefix_store is not None, implementation=implementation,
        )  # fmt: skip
        self.model = self.prompts.model
        self._loop: RowLoop = Steps(self.prompts, rows) if level is None else Rounds(self.prompts, level, rows)
        self._speculates = level is not None
        self.counts = Counts()
        self._sampler, self._stop = sampler, check_stops(check_stop(stop), ())
        key = check_sampling(sampler, key)
        self._key = jax.random.key(0) if key is None else key
        self._rows_count, self._chunk = rows, chunk
        self._refill = max(1, rows // 8) if refill is None else min(refill, rows)
        states = None if prefix_store is None else PromptStates(prefix_store, self.prompts)
        self._states, self.prefix_store = states, prefix_store
        self.documents = DocumentCaches(self.prompts, document_bytes)
        self._intake = Intake(
            self.prompts, states if states is not None and states.active else None, self.documents, look=rows,
            turn_tokens=turn_tokens,
        )  # fmt: skip
        self._swapped = SwapSpace(swap_bytes)
        self._rows: PyTree | None = None
        self._jobs: list[Job | None] = [None] * rows
        self._flights: collections.deque[_Flight] = collections.deque()
        self._alive: dict[int, Job] = {}
        self._cancelled: list[Job] = []
        self._submitted = 0

    def submit(self, request: Request) -> int:
        """Adds a request.

        Args:
          request: the request.

        Returns:
          Its id: the number of requests that were submitted before.

        Raises:
          InputError: it is not valid for the model, or exceeds the limits.
          PolicyError: the budget cannot work for the length of its prompt.
        """
        checked = check_request(self.model.config, request, self._stop, self._sampler, self._submitted)
        prompt, new_tokens = None, checked.max_new_tokens
        if checked.keep_context or checked.prefix is not None or checked.documents is not None:
            self._loop.check_prefix()
        if checked.keep_context:
            new_tokens += 1  # the last one is fed too
        if checked.prefix is None:
            prompt = self.prompts.prompt(checked.tokens, new_tokens)
            if checked.keep_context:
                # Any number of tokens may follow, as after a prefix.
                prompt = self.prompts.prompt(checked.tokens, self.prompts.limits.new_tokens)
            self._loop.check(checked, prompt)
            if checked.documents is not None:
                self.documents.check(checked.documents, len(checked.tokens) - len(checked.documents.tokens))
                prompt = prompt._replace(spans=spans_of(checked.documents, len(prompt.tokens)))
        else:
            prefixes.check(checked.prefix, self.prompts, len(checked.tokens) + new_tokens)
        bucket = 0 if prompt is None else self.prompts.bucket(prompt) if checked.documents is None else None
        job = Job(self._submitted, checked, prompt, bucket)
        self._submitted += 1
        self._alive[job.id] = job
        self._intake.add(job)
        return job.id

    @plain_signature
    def prefix(self, tokens: ArrayLike) -> Context:
        """Runs a text that requests can continue; see `kvjax.serve.prefix.make`."""
        self._loop.check_prefix()
        return prefixes.make(self.prompts, tokens)

    def save_prefix(self, folder: str | Path, prefix: Context, *, codec: ContextCodec | None = None) -> None:
        """Saves a context; see `kvjax.contexts.save`."""
        contexts.save(folder, prefix, codec=codec)

    def load_prefix(self, folder: str | Path, *, codec: ContextCodec | None = None) -> Context:
        """Loads a context that requests can continue; see `kvjax.serve.prefix.load`."""
        self._loop.check_prefix()
        return prefixes.load(folder, self.prompts, codec=codec)

    def cancel(self, number: int) -> bool:
        """Cancels a request; its row is free from the next chunk on, and its result has the tokens so far.

        Args:
          number: from `submit`.

        Returns:
          Whether the request had not ended.
        """
        job = self._alive.get(number)
        if job is None or job.ended:
            return False
        job.ended = True
        self._cancelled.append(job)
        self._intake.drop(job)
        self._swapped.drop(job)
        return True

    @property
    def idle(self) -> bool:
        """Whether every request has ended, and been reported."""
        return not self._alive

    @property
    def load(self) -> Load:
        """The load at the moment."""
        running = sum(job is not None and not job.ended for job in self._jobs)
        waiting = sum(not job.ended for job in self._alive.values()) - running
        return Load(self._rows_count, running, waiting, len(self._swapped), self._swapped.nbytes)

    def explain(self) -> str:
        """Describes the cache and how prompts are run."""
        block = self.prompts.block
        how = f"in blocks of {block} tokens" if block else f"in one shot: {self.prompts.one_shot_reason}"
        store = "" if self._states is None else f"\nprefix store: {self._states.explain()}"
        return f"{self.prompts.layout.explain()}\nprompts: {how}{store}{self._loop.explain()}"

    def __iter__(self) -> Iterator[Result]:
        """Yields results until every request has ended."""
        for progress in self.stream():
            if progress.result is not None:
                yield progress.result

    def stream(self) -> Iterator[Progress]:
        """Yields the new tokens of requests as they come, until every request has ended."""
        while not self.idle:
            yield from self.step()

    def step(self) -> list[Progress]:
        """Runs prompts and one chunk of tokens.

        Returns:
          The new tokens of each request that has some, and the results of those that have ended.
        """
        with self.model.on_mesh():
            if not self._flights:
                self._admit()
                self._dispatch()
            self._run_prompts()
            if not self._some_wait:
                # No row is refilled: the next chunk need not wait for what this one has produced.
                self._dispatch_ahead()
            found = self._read()
            self.counts.prompt_tokens = self._intake.prompt_tokens
            self.counts.found_tokens = self._intake.found_tokens
            self.counts.preemptions, self.counts.swapped_bytes = self._swapped.preemptions, self._swapped.moved_bytes
            if not self._flights:
                self._admit()
                self._dispatch()
        return found

    # Rows.

    def _run_prompts(self) -> None:
        """Dispatches prompts for the rows that are free, and for those that will be free next."""
        running = [job for job in self._jobs if job is not None and not job.ended]
        free, next_one = self._rows_count - len(running), self._intake.most_urgent
        taken = min(sum(yields_to(job, next_one) for job in running), self._swapped.room(self._rows))
        self._intake.run(free + taken + self._refill, limited=bool(running))

    def _admit(self) -> None:
        """Gives free rows to the jobs that are ready, and rows of others to those of a higher priority."""
        self._run_prompts()
        for row, job in enumerate(self._jobs):
            if job is None or job.ended:
                self._fill(row)
        while self._swapped.room(self._rows) and (urgent := self._intake.ready) is not None:
            taken = preempted_row(self._jobs, urgent)
            if taken is None or (job := self._jobs[taken]) is None or self._rows is None:
                return
            self._swapped.put(job, self._rows, taken)
            self._fill(taken)

    def _fill(self, row: int) -> None:
        """Gives a row to the first job that has a state, or to none."""
        swapped, ready = self._swapped.first, self._intake.ready
        self._jobs[row] = None
        if swapped is not None and (ready is None or order(swapped) < order(ready)):
            assert self._rows is not None
            back = self._swapped.take()
            self._jobs[row], self._rows = back.job, swap_in(self._rows, row, back.held)
        elif (taken := self._intake.take()) is not None:
            self._jobs[row] = taken.job
            self._rows = self._loop.filled(self._rows, row, taken, self._entry(taken.job))

    @property
    def _some_wait(self) -> bool:
        """Whether there is a request without a row."""
        return bool(self._intake or self._swapped)

    def _entry(self, job: Job) -> decode_loop.Entry:
        own = job.request
        stop = np.full(MAX_STOPS, PAD, np.int32)
        stop[: len(own.stop)] = own.stop
        given = np.zeros(self.prompts.limits.new_tokens, np.int32)
        given[: job.given] = own.tokens[: job.given]
        # [V]
        seen = np.zeros(self.model.config.vocab_size, bool)
        seen[own.tokens] = True
        if own.prefix is not None:
            seen[prefixes.text_of(own.prefix)] = True
        seen |= shared_prefix.seen_of(self.model.params)
        key = self._key if own.seed is None else jax.random.key(own.seed, impl=jax.random.key_impl(self._key))
        return decode_loop.Entry(
            key=key, number=np.int32(own.number), max_new_tokens=np.int32(own.max_new_tokens), stop=stop,
            sampling=settings(own.sampler), seen=seen, given=given, given_length=np.int32(job.given),
            behind=np.int32(shared_prefix.tokens_of(self.model.params)),
        )  # fmt: skip

    def _dispatch(self) -> None:
        """Dispatches a chunk if some row has a request."""
        going_on = np.array([job is not None and not job.ended for job in self._jobs])
        if self._rows is None or not going_on.any():
            return
        new = [job for job in self._jobs if job is not None and not job.dispatched]
        # Tokens that are given are fed one in a step, and the next one is chosen.
        steps = min([self._chunk, *(FIRST_STEPS + job.given for job in new if job.request.early)])
        for job in new:
            job.dispatched = True
        idle = self._refill if self._some_wait else self._rows_count + 1
        self._rows, chunk = self._loop.run(self._rows, going_on, steps, idle)
        self._flights.append(_Flight(chunk, list(self._jobs), steps))
        self._intake.begin_turn()

    def _dispatch_ahead(self) -> None:
        """Dispatches the chunk after the one in flight, unless all requests will have ended by then for certain."""
        if not self._flights:
            return
        longest = max(job.left for job in self._jobs if job is not None)
        if longest > sum(flight.steps for flight in self._flights):
            self._dispatch()

    # Results.

    def _read(self) -> list[Progress]:
        """Waits for the oldest chunk, and takes its tokens apart."""
        found = []
        if self._flights:
            flight = self._flights.popleft()
            chunk = jax.device_get(flight.chunk)
            self.counts.reads += 1
            self.counts.steps += int(chunk.steps)
            self.counts.row_steps += int(chunk.steps) * self._rows_count
            if chunk.drafts is not None:
                self.counts.rounds += int(chunk.row_steps.sum())
                self.counts.drafted += int(chunk.drafts.drafted)
                self.counts.accepted += int(chunk.drafts.accepted)
            for row, job in enumerate(flight.jobs):
                if job is None or job.ended:
                    continue
                self.counts.useful_row_steps += int(chunk.row_steps[row])
                new = chunk.tokens[row] != PAD
                tokens, logprobs = chunk.tokens[row][new], chunk.logprobs[row][new]
                finite = bool(np.isfinite(chunk.logprobs[row]).all())
                progress = self._progress(job, tokens, logprobs, bool(chunk.active[row]), finite)
                if progress is not None:
                    found.append(self._with_context(progress, job, row))
        for job in self._cancelled:
            found.append(self._end(job, "cancelled", np.zeros(0, np.int32), np.zeros(0, np.float32)))
        self._cancelled.clear()
        for job, error in self._intake.failed:
            if not job.ended:
                found.append(self._end(job, "error", np.zeros(0, np.int32), np.zeros(0, np.float32), error))
        self._intake.failed.clear()
        return found

    def _progress(
        self, job: Job, tokens: np.ndarray, logprobs: np.ndarray, active: bool, finite: bool
    ) -> Progress | None:
        """Adds new tokens to a job, which ends after them if the next log-probability was not finite."""
        end = None
        if job.request.until is not None and tokens.size:
            end = job.request.until([int(token) for token in tokens])
        if end is not None:
            if not self._speculates:
                # A round makes several tokens, so that no step is known to be beyond the end.
                self.counts.useful_row_steps -= max(0, len(tokens) - max(end, 0))
            tokens, logprobs = tokens[: max(end, 0)], logprobs[: max(end, 0)]
        self._add(job, tokens, logprobs)
        job.ended_by_host = end is not None or not finite
        if end is None and not finite:
            return self._end(job, "error", tokens, logprobs)
        if end is None and active:
            return Progress(job.id, tokens, logprobs, None) if tokens.size else None
        stopped = end is not None or (tokens.size > 0 and int(tokens[-1]) in job.request.stop)
        return self._end(job, "stop" if stopped else "length", tokens, logprobs)

    def _with_context(self, progress: Progress, job: Job, row: int) -> Progress:
        """Adds the context to the result of a request that asks for it.

        The row still has it: steps after the last token leave it as it is, and no other request has the row yet. A
        request that the host has ended may have gone further.
        """
        result, own = progress.result, job.request
        if result is None or not own.keep_context or job.ended_by_host or self._rows is None:
            return progress
        before = own.prefix if job.prompt is None else job.prompt
        assert before is not None
        given = own.tokens if job.prompt is None else own.tokens[:0]
        try:
            state = take_row(self._rows.state, row)
            context = prefixes.after_request(self.prompts, before, given, result.tokens, state)
            result = dataclasses.replace(result, context=context)
        except Exception as error:  # such as too little memory: of this request, and the others go on
            result = dataclasses.replace(result, reason="error", error=error)
        return dataclasses.replace(progress, result=result)

    def _add(self, job: Job, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        job.tokens.append(tokens)
        job.logprobs.append(logprobs)
        job.count += len(tokens)
        self.counts.tokens += len(tokens)

    def _end(
        self, job: Job, reason: Reason, tokens: np.ndarray, logprobs: np.ndarray, error: Exception | None = None
    ) -> Progress:
        """Ends a job; without another error, one that ends with ``error`` has a log-probability that is not finite."""
        job.ended = True
        del self._alive[job.id]
        self.counts.requests += 1
        if reason == "error" and error is None:
            self.counts.not_finite += 1
            error = NonFiniteError(
                f"the log-probability of a token is not finite, after {job.count} new tokens of this request. {WHY}"
            )
        own = job.request
        result = Result(
            id=job.id,
            tokens=np.concatenate([np.zeros(0, np.int32), *job.tokens]),
            logprobs=np.concatenate([np.zeros(0, np.float32), *job.logprobs]),
            reason=reason,
            prompt=len(own.tokens) + (0 if own.prefix is None else prefixes.length_of(own.prefix)),
            found=job.found,
            error=error,
        )
        return Progress(job.id, tokens, logprobs, result)
