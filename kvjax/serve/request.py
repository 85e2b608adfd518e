"""Requests, what comes of them, and the checks of their arguments."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

import numpy as np

from kvjax.arguments import check_type
from kvjax.contexts.state_trie import check_namespace
from kvjax.errors import InputError, shown
from kvjax.generation.context import Context
from kvjax.generation.sampling import Greedy, Sample, Sampler, check_sampling
from kvjax.inputs import check_batch, check_count, check_one_row, check_stop
from kvjax.models.config import DecoderConfig
from kvjax.serve.documents import Documents, checked_documents
from kvjax.serve.prefix import length_of, text_of
from kvjax.summary import one_line

Reason = Literal["stop", "length", "cancelled", "error"]
#: Receives the new tokens of a request, a few at a time, and says how many of these end it; None = it continues.
Until = Callable[[Sequence[int]], int | None]
MAX_STOPS = 16  # token ids that end a request; the rows of a batch have arrays of this size
SEEDS = 1 << 32  # seeds are smaller
NUMBERS = 1 << 31  # so are numbers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and the options of its continuation.

    Attributes:
      tokens: [n] token ids of the prompt; of a request with a prefix, those that follow it, possibly none; of one with
        documents, those that follow these, at least one.
      max_new_tokens: the maximum number of new tokens, at least 1.
      stop: token ids that end the request, in addition to those of the runner. The stop token is part of the result.
      sampler: how a token is chosen from the logits; None for the runner's sampler.
      seed: the result is that of ``kvjax.generate(key=jax.random.key(seed))``; None for the runner's key.
      number: the result is that of ``kvjax.generate(requests=[number])``; None for 0 if there is a seed, otherwise for
        the number of the requests that were submitted before. A sampled token depends on the key, this number and the
        token's position, and on no other request.
      prefix: a context of one row that the request continues, from `Runner.prefix`; see `kvjax.serve.prefix`.
      documents: texts before the tokens, whose caches are computed once and used in any order; see
        `kvjax.serve.Documents`. The result is close to that of a prompt of all these tokens, and not equal.
      early: whether its first tokens are sent as soon as possible; the chunk that chooses them is then a short one.
      priority: requests of a higher priority are served first, and take the rows of others if none is free; see
        `kvjax.serve.preemption`. Among equal ones, the one that was submitted first. (vLLM's field of this name, and
        the HTTP server's, has the opposite sign: there the lowest number is served first.)
      keep_context: whether `Result.context` is the context after its last token, which another request can continue.
        What depends on the length of the text, some budgets and RoPE, is then for a text of `Limits.new_tokens` tokens
        after the prompt, as that of a prefix is.
      namespace: whose prompts and documents it may share; those of others are never found.
      until: see `Until`; for ends that are no single token. It is called on the host after every chunk of tokens, and a
        request may hold its row until the end of the next chunk.
    """

    tokens: Sequence[int] | np.ndarray
    max_new_tokens: int
    stop: int | Sequence[int] = ()
    sampler: Sampler | None = None
    seed: int | None = None
    number: int | None = None
    prefix: Context | None = None
    documents: Documents | None = None
    early: bool = False
    priority: int = 0
    keep_context: bool = False
    namespace: Hashable = None
    until: Until | None = None

    def __repr__(self) -> str:
        return one_line(self)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a request.

    Attributes:
      id: from `Runner.submit`.
      tokens: [n] int32, the new tokens, including a stop token.
      logprobs: [n] float32, the log-probability of each token under the model, before temperature.
      reason: ``stop``: a stop token, or `Request.until`, ended the request; ``length``: it has `max_new_tokens`;
        ``cancelled``: it was cancelled, and has the tokens that it had then; ``error``: the log-probability of the next
        token was not finite, or its context could not be kept.
      prompt: the number of its prompt's tokens, those of its prefix included.
      found: the number of those that were found in the runner's prefix store; of a request with documents, those of
        the documents whose caches were found.
      error: what ended it, if `reason` is ``error``; otherwise None.
      context: what `kvjax.contexts.decode` returns as such: the context after its last token, if `Request.keep_context`
        asks for it. None of a request that was cancelled, or ended by an error or by `Request.until`.
    """

    id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    reason: Reason
    prompt: int
    found: int = 0
    error: Exception | None = None
    context: Context | None = None

    def __repr__(self) -> str:
        return one_line(self)


@dataclasses.dataclass(frozen=True)
class Progress:
    """New tokens of a request.

    Attributes:
      id: from `Runner.submit`.
      tokens: [n] int32, the tokens since the last `Progress` of the request.
      logprobs: [n] float32.
      result: the whole result, if these are its last tokens; otherwise None.
    """

    id: int
    tokens: np.ndarray
    logprobs: np.ndarray
    result: Result | None

    def __repr__(self) -> str:
        return one_line(self)


@dataclasses.dataclass(frozen=True)
class Checked:
    """The checked arguments of a request; see `Request`.

    Attributes:
      tokens: [n] int32, those of its documents included.
      stop: [m] int32.
    """

    tokens: np.ndarray
    max_new_tokens: int
    stop: np.ndarray
    sampler: Greedy | Sample
    seed: int | None
    number: int
    prefix: Context | None
    documents: Documents | None
    early: bool
    priority: int
    keep_context: bool
    namespace: Hashable
    until: Until | None


def check_request(config: DecoderConfig, request: Request, stop: np.ndarray, sampler: Sampler, count: int) -> Checked:
    """Checks a request, apart from its size.

    Args:
      config: the decoder.
      request: the request.
      stop: [m] int32, token ids that end every request.
      sampler: of requests that have none.
      count: the number of requests that were submitted before.

    Raises:
      InputError: an argument that is not valid for the model.
    """
    check_type("a request", request, Request, "kvjax.serve.Request(tokens=..., max_new_tokens=...)")
    check_count("max_new_tokens", request.max_new_tokens)
    if request.until is not None and not callable(request.until):
        raise InputError(f"until must be a function, or None; got {shown(request.until)}.")
    own = request.sampler if request.sampler is not None else sampler
    check_sampler(own)
    check_one_row("a request", request.tokens)
    tokens = np.asarray(request.tokens)
    check_namespace(request.namespace)
    for name in ("early", "keep_context"):
        check_type(name, getattr(request, name), bool, "True or False")
    if request.prefix is not None and not isinstance(request.prefix, Context):
        raise InputError(f"prefix must be a context, from Runner.prefix; got {shown(request.prefix)}.")
    documents = None
    if request.documents is not None:
        if request.prefix is not None:
            raise InputError("a request cannot have both a prefix and documents; give the texts as documents.")
        documents = checked_documents(config, request.documents)
        tokens = np.concatenate([documents.tokens, tokens.reshape(-1)]) if tokens.size else documents.tokens
    if request.prefix is None or tokens.size:
        before = 0 if request.prefix is None else length_of(request.prefix)
        # The last new token takes a position too if its context is kept.
        following = request.max_new_tokens + request.keep_context
        batch = check_batch(config, tokens, None, new_tokens=following + before)
        tokens = batch.tokens[0]
    else:
        check_batch(config, text_of(request.prefix), None, new_tokens=request.max_new_tokens + request.keep_context)
    number = request.number if request.number is not None else 0 if request.seed is not None else count
    return Checked(
        tokens.astype(np.int32).reshape(-1), request.max_new_tokens, check_stops(stop, request.stop), own,
        None if request.seed is None else _below("seed", request.seed, SEEDS), _below("number", number, NUMBERS),
        request.prefix, documents, request.early, _priority(request.priority), request.keep_context, request.namespace,
        request.until,
    )  # fmt: skip


def check_sampler(sampler: Sampler) -> None:
    """Checks that a sampler's settings can be data of a row.

    Raises:
      InputError: it is neither `Greedy` nor `Sample`.
    """
    check_sampling(sampler, None)
    if not isinstance(sampler, Greedy | Sample):
        raise InputError(
            "requests are sampled by kvjax.Greedy or kvjax.Sample, whose settings are data of each row; got "
            f"{sampler!r}."
        )


def check_stops(shared: np.ndarray, own: int | Sequence[int]) -> np.ndarray:
    """Returns the token ids that end a request, [m] int32.

    Args:
      shared: [m] int32, those of every request.
      own: those of one request.

    Raises:
      InputError: one is no whole number of at least 0, or there are more than `MAX_STOPS`.
    """
    stop = np.union1d(shared, check_stop(own)).astype(np.int32)
    if stop.size > MAX_STOPS or (stop.size and stop[0] < 0):
        raise InputError(
            f"stop must be at most {MAX_STOPS} token ids of at least 0, including those of the runner; got {stop}."
        )
    return stop


def _priority(value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InputError(f"priority must be a whole number, higher = served sooner; got {shown(value)}.")
    return int(value)


def _below(name: str, value: int, limit: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= value < limit:
        raise InputError(f"{name} must be a whole number from 0 to {limit - 1}; got {shown(value)}.")
    return int(value)
