"""Generation: prompts in, new tokens out; `kvjax.generation.decoding` is the loop."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike
from tqdm.auto import tqdm

from kvjax.arguments import plain_signature
from kvjax.cache import shared_prefix
from kvjax.cache.layer_stack import positions_of
from kvjax.cache.planning.layout import CacheLayout, kept
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import KVState
from kvjax.errors import InputError, shown
from kvjax.generation import compiling, selection_record
from kvjax.generation.context import Context, check_context
from kvjax.generation.decoding import CHUNK, Carry, decode_steps, first_token, nothing_forced
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.generation.prefill import run_prefill
from kvjax.generation.sampling import Greedy, Sampler, check_sampling, penalty_of
from kvjax.generation.selection_record import Record
from kvjax.inputs import check_count, check_stop
from kvjax.models.calibrate import Needs, with_calibration
from kvjax.models.model import Model, check_model
from kvjax.numerics.finite import PAD, check_finite
from kvjax.parallel import distributed
from kvjax.policies.base import Policy
from kvjax.policies.parameters import distinct
from kvjax.storage.calibration import Calibration, required
from kvjax.summary import one_line

Array = jax.Array
UNTIL_EVERY = 8  # tokens after which `until` is asked which rows have ended


class Generation(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: [B, max_new_tokens] int32, the new tokens; `PAD` after a row's stop token.
      lengths: [B] int32, the number of new tokens of each row, including its stop token.
      logprobs: [B, max_new_tokens] float32, the log-probability of each token under the model, before temperature and
        penalties; 0 where `tokens` is `PAD`.
      state: the cache. It does not contain the last token of each row, which is not fed back to the model. On a mesh,
        rows without a token may follow those of the batch; see `Model.rows_on_mesh`.
      record: what selections chose, if it was asked for; otherwise None. Its first step feeds the first new token.
      layout: the static description of the cache.
      context: of `kvjax.contexts.decode`, the context after the new tokens; otherwise None.
      drafts: of `kvjax.speculation.speculate`, the counts of drafted and accepted tokens; otherwise None.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    logprobs: np.ndarray
    state: KVState
    record: Record | None = None
    layout: CacheLayout | None = None
    context: Context | None = None
    drafts: Any = None  # a `kvjax.speculation.Drafts`

    def __repr__(self) -> str:
        return one_line(self)

    def kept(self, layer: int) -> list[list[np.ndarray]]:
        """Returns the positions that a layer still holds: for each row and KV head [n] int32, ascending.

        Args:
          layer: the number of the layer; negative ones count from the last.

        Raises:
          InputError: there is no such layer, or the result has no layout.
        """
        return kept(self.layout, self.state, layer, len(self.tokens))


@cache_keywords()
def generate(
    model: Model,
    tokens: ArrayLike,
    policy: Policy | CacheSpec,
    *,
    max_new_tokens: int,
    lengths: ArrayLike | None = None,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    until: Callable[[np.ndarray], np.ndarray] | None = None,
    progress: bool = False,
    requests: ArrayLike | None = None,
    record: bool = False,
    speculate: Any = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Generation:
    """Generates tokens after prompts, with a cache that is limited by a policy.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, the prompts, rows padded at the end; or a list of rows of any lengths. For texts see
        `kvjax.generate_text`.
      policy: which slots the cache keeps, or a `CacheSpec`.
      max_new_tokens: the maximum number of new tokens per row, at least 1.
      lengths: [B] int, the number of real tokens of each row; None for T, or for the whole rows of a list.
      sampler: how a token is chosen from the logits.
      key: [] random key for sampling, or [B], one per row; None for `jax.random.key(0)`.
      stop: token ids that end a row. The stop token is part of the result.
      stream: a function that is called after every step with the new token of each row, [B] int32, `PAD` for a row that
        has ended.
      until: a function that says which rows have ended, [B] bool, from their new tokens so far, [B, n] int32. It is
        called every `UNTIL_EVERY` tokens at the most; a row may have some tokens beyond its end.
      progress: whether to show a progress bar.
      requests: [B] int, the id of each row's request. A sampled token depends on the key, the request's id and the
        token's position, and not on the rest of the batch. None for the row numbers, or for 0 if each row has a key.
      record: whether to record what selections choose; not with a kernel that does a whole step.
      speculate: how tokens are drafted, as ``draft`` of `kvjax.speculate`, under `full`; not with `stream`, `until` or
        `record`. None = they are not.
      options: storage, selection, blocks of the prompt and other options of the cache; see `kvjax.CacheOptions`.
      cache: its fields, which may be given one by one, such as ``storage=kvjax.storage.int8()``.

    Raises:
      InputError: if tokens, lengths or options are not valid for the model; before anything is traced.
      PolicyError: if the policy, storage and selection cannot be combined; before anything is traced.
      StorageError: if the storage cannot be combined with the policy, or has no calibration that fits the model;
        before anything is traced.
      ConfigError: if an implementation was requested by name that cannot run.
      NonFiniteError: if the log-probability of a token is not finite. Its row ends there, and the error is raised when
        the other rows have ended; ``error.result`` is the `Generation`.
    """
    options = options_of(options, cache, "generate")
    if speculate is not None:
        for name, given in (("stream", stream), ("until", until), ("record", record or None)):
            if given is not None:
                raise InputError(
                    f"{name} takes tokens one by one, and drafts are accepted several at once; leave it out."
                )
        return _speculated(
            model, tokens, options.spec(policy), options, draft=speculate, max_new_tokens=max_new_tokens,
            lengths=lengths, sampler=sampler, key=key, stop=stop, requests=requests,
        )  # fmt: skip
    model, spec = options.resolve(model, policy)
    prefilled = run_prefill(model, spec, tokens, lengths, max_new_tokens, options)
    return decode(
        model, prefilled, max_new_tokens=max_new_tokens, sampler=sampler, key=key, stop=stop, stream=stream,
        until=until, progress=progress, requests=requests, record=record,
    )  # fmt: skip


def _speculated(
    model: Model, tokens: ArrayLike, spec: CacheSpec, options: CacheOptions, **arguments: Any
) -> Generation:
    """Runs `kvjax.speculate` for a full cache; see `generate`."""
    from kvjax.speculation import speculate  # which uses this module
    from kvjax.speculation.phases import check_full

    check_full(spec.policy, "own")
    own = dataclasses.replace(options, storage=spec.storage, selection=spec.selection)
    return speculate(model, tokens, options=own, **arguments)


@plain_signature
def decode(
    model: Model,
    prefilled: Context,
    *,
    max_new_tokens: int,
    sampler: Sampler = Greedy(),
    key: Array | None = None,
    stop: Sequence[int] = (),
    stream: Callable[[np.ndarray], None] | None = None,
    until: Callable[[np.ndarray], np.ndarray] | None = None,
    progress: bool = False,
    requests: ArrayLike | None = None,
    record: bool = False,
    calibration: Calibration | None = None,
) -> Generation:
    """Generates tokens after prompts that have been prefilled.

    Args:
      model: see `generate`.
      prefilled: from `kvjax.generation.prefill.prefill`. Its state is donated and cannot be used afterwards.
      max_new_tokens: see `generate`; at most as many as given to `prefill`.
      sampler: see `generate`.
      key: see `generate`.
      stop: see `generate`.
      stream: see `generate`.
      until: see `generate`.
      progress: see `generate`.
      requests: see `generate`.
      record: see `generate`.
      calibration: see `generate`; that of the prompts.

    Raises:
      InputError: if an option is not valid, or heads that evict nothing while decoding have too few slots for
        the new tokens.
      StorageError: if the storage needs a calibration that the model has not, or the one that is given does not fit.
      NonFiniteError: see `generate`.
    """
    check_model(model)
    check_context(prefilled, "prefilled")
    for name, given in (("stream", stream), ("until", until)):
        if given is not None and not callable(given):
            raise InputError(f"{name} must be a function, or None; got {shown(given)}.")
    held = [[group.storage for group in layer] for layer in prefilled.layout.decode]
    # Groups of heads that hold every token exactly need none.
    storages = tuple(next((each for each in layer if required(each)), layer[0]) for layer in held)
    needs = Needs(storages, distinct(each for group in prefilled.layout.groups for each in group.policy.params))
    model = with_calibration(model, needs, calibration)
    rows = prefilled.num_rows
    key = check_sampling(sampler, key, rows)
    key = jax.random.key(0) if key is None else key
    stop_ids = check_stop(stop)
    if key.ndim and requests is None:
        requests = np.zeros(rows, np.int32)
    padding = (0, prefilled.logits.shape[0] - rows)
    request = np.pad(check_requests(requests, rows), padding)
    if key.ndim:
        key = key[np.pad(np.arange(rows), padding)]
    check_room(prefilled, max_new_tokens)
    nothing = nothing_forced(prefilled.logits.shape[0])
    seen = seen_tokens(prefilled, sampler)
    seen = None if seen is None else seen | shared_prefix.seen_of(model.params)
    produced: list[tuple[np.ndarray, np.ndarray]] = []
    recorded: list[tuple[selection_record.Steps | None, int]] = []
    done = 1
    with model.on_mesh(), tqdm(total=max_new_tokens, desc="decode", unit="tok", disable=not progress) as bar:
        carry, first, logprob = first_token(
            prefilled.logits, prefilled.state, model.place(request), key, stop_ids,
            model.place(seen), model.place(nothing[:, 0]),
            shared_prefix.length_of(model.params), sampler=sampler,
        )  # fmt: skip
        first, logprob = distributed.to_host((first, logprob))
        produced.append((first[:rows, None], logprob[:rows, None]))
        bar.update()
        if stream:
            stream(produced[0][0][:, 0])
        may_end = len(stop_ids) > 0 or until is not None
        may_end = may_end or not _all_finite(produced)
        forced = model.place(nothing)
        while done < max_new_tokens and (not may_end or bool(distributed.to_host(carry.active).any())):
            if until is not None:
                carry = _ended(carry, until(np.concatenate([ids for ids, _ in produced], axis=1)), rows)
            steps = min(1 if stream else UNTIL_EVERY if until else CHUNK, max_new_tokens - done)
            with compiling.announced(compiling.tokens_of(prefilled.layout.decode)):
                carry, ids, logprobs, own = decode_steps(
                    model.params, carry, stop_ids, steps, forced, config=model.config, phase=prefilled.layout.decode,
                    sampler=sampler, record=record,
                )  # fmt: skip
            recorded.append((own, steps))
            ids, logprobs = distributed.to_host((ids, logprobs))
            produced.append((ids[:rows, :steps], logprobs[:rows, :steps]))
            may_end = may_end or not _all_finite(produced[-1:])
            if stream:
                stream(produced[-1][0][:, 0])
            done += steps
            bar.update(steps)
    pad = ((0, 0), (0, max_new_tokens - done))
    # [B, done]
    ids, logprobs = (np.concatenate(parts, axis=1) for parts in zip(*produced, strict=True))
    # [B, max_new_tokens]
    ids = np.pad(ids, pad, constant_values=PAD)
    lengths = np.asarray(np.sum(ids != PAD, axis=1), np.int32)
    made = selection_record.joined(recorded, prefilled.layout, rows)
    known = np.where(np.isfinite(logprobs), logprobs, np.float32(0))
    result = Generation(ids, lengths, np.pad(known, pad), carry.state, made, prefilled.layout)
    check_finite(logprobs, result)
    return result


def _all_finite(produced: list[tuple[np.ndarray, np.ndarray]]) -> bool:
    """Returns whether the log-probabilities of tokens, which come in pairs with these, are finite."""
    return all(bool(np.isfinite(logprobs).all()) for _, logprobs in produced)


def seen_tokens(prefilled: Context, sampler: Sampler) -> np.ndarray | None:
    """Returns the tokens that each row's prompt has, [B, V] bool on the host; None if the sampler has no penalty.

    Raises:
      InputError: if the tokens of the prompts are not known.
    """
    if penalty_of(sampler) is None:
        return None
    if prefilled.tokens is None:
        raise InputError("a repetition penalty needs the tokens of the prompts, which this Context does not have.")
    rows, vocabulary = prefilled.logits.shape
    # [B, V + 1]: padding goes to the last entry
    seen = np.zeros((rows, vocabulary + 1), bool)
    np.put_along_axis(seen, np.where(prefilled.tokens < 0, vocabulary, prefilled.tokens), True, axis=1)
    return seen[:, :-1]


def _ended(carry: Carry, ended: np.ndarray, rows: int) -> Carry:
    """Returns the carry in which rows, [B] bool, have ended.

    Raises:
      InputError: `ended` has another shape or type, as the result of a caller's function.
    """
    ended = np.asarray(ended)
    if ended.shape != (rows,) or ended.dtype != bool:
        raise InputError(f"until must return which of the {rows} rows have ended, [B] bool; got {shown(ended)}.")
    ended = np.pad(ended, (0, carry.active.shape[0] - rows))
    # The sharding of the rows stays as it is.
    return carry._replace(active=carry.active & ~distributed.put(ended, carry.active.sharding))


def check_room(prefilled: Context, max_new_tokens: int) -> None:
    """Checks that heads that evict nothing while decoding have slots for all new tokens but the last, which is not fed.

    Args:
      prefilled: the prompts' cache, which other tokens may have followed.
      max_new_tokens: the number of tokens that are to follow.

    Raises:
      InputError: there are too few slots, or `max_new_tokens` is below 1.
    """
    check_count("max_new_tokens", max_new_tokens)
    layout, state = prefilled.layout, prefilled.state
    length = distributed.to_host(state.length)
    capacities, held = [], []
    for index, groups in enumerate(zip(layout.prompt, layout.decode, strict=True)):
        for number, (before, after) in enumerate(zip(*groups, strict=True)):
            if not after.evicts:
                capacities.append(after.capacity)
                # A compressor leaves fewer than the row's tokens.
                position = positions_of(state.layers, index)[number] if before.evicts else None
                held.append(length if position is None else jnp.sum(position >= 0, axis=2, dtype=jnp.int32))
    for capacity, slots in zip(capacities, distributed.to_host(held), strict=True):
        if int(slots.max()) + max_new_tokens - 1 > capacity:
            raise InputError(
                f"{int(slots.max())} tokens are cached and {max_new_tokens} more are requested, but the cache has "
                f"{capacity} slots; give `prefill` a larger max_new_tokens or larger limits."
            )
    check_following(prefilled, max_new_tokens - 1)


def check_following(context: Context, fed: int) -> None:
    """Checks that arrays for what follows a prompt, such as those of blocks, tiers and segments, are large enough.

    Args:
      context: the cache.
      fed: the number of tokens that are to be fed.

    Raises:
      InputError: they are for fewer tokens after a prompt, however long that was.
    """
    following = [group.array_sizes.following for group in context.layout.groups if group.array_sizes is not None]
    if not following:
        return
    length, prompt = distributed.to_host((context.state.length, context.state.prompt))
    if (decoded := int(np.max(length - prompt))) + fed > min(following):
        raise InputError(
            f"{decoded} tokens were decoded and {fed + 1} more are requested, but the cache is for {min(following)} "
            "after a prompt; give `prefill` a larger max_new_tokens or larger limits."
        )


def check_requests(requests: ArrayLike | None, rows: int) -> np.ndarray:
    """Returns the checked ids of the rows' requests, [B] int32."""
    if requests is None:
        return np.arange(rows, dtype=np.int32)
    ids = np.asarray(requests)
    maximum = np.iinfo(np.int32).max
    if ids.shape != (rows,) or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 or ids.max() > maximum:
        raise InputError(
            f"requests must be {rows} whole numbers from 0 to {maximum}, one per row; got {shown(requests)}."
        )
    return ids.astype(np.int32)
