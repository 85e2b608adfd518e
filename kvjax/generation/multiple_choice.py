"""Scores several continuations of one context. The context is processed once, and its cache copied for each of them."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache.layer_stack import arranged_state, stacked_runs
from kvjax.cache.planning.layout import Phase
from kvjax.cache.planning.limits import half_steps, power_of_two
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Block, KVState
from kvjax.errors import InputError
from kvjax.generation import compiling
from kvjax.generation.context import Context
from kvjax.generation.generate import check_room
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords
from kvjax.generation.prefill import prepare, run_prompts
from kvjax.generation.program import program
from kvjax.inputs import check_batch, check_no_text
from kvjax.models.bound import BoundDecoder, bind, logprob_of, over_logits
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model
from kvjax.numerics.finite import error_of
from kvjax.parallel import distributed, host_memory
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy
from kvjax.summary import one_line

Array = jax.Array
FEW_FED = 8  # tokens that fewer are padded to where the tokens of a continuation are fed in one block
MANY_FED = 64  # the same where they are fed one at a time; steps that no row needs are not taken


class ChoiceScore(NamedTuple):
    """The score of one continuation.

    Attributes:
      logprobs: [n] float32, the log-probability of each of its tokens given the context and the tokens before it.
      greedy: whether each of its tokens is the most probable one; among equal logits the lowest id.
    """

    logprobs: np.ndarray
    greedy: bool

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def total(self) -> float:
        """The log-probability of the continuation, in nats."""
        return float(np.sum(self.logprobs, dtype=np.float64))


@cache_keywords()
def score_choices(
    model: Model,
    tokens: ArrayLike,
    choices: Sequence[Sequence[Sequence[int]]],
    policy: Policy | CacheSpec,
    *,
    lengths: ArrayLike | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> list[list[ChoiceScore]]:
    """Scores the choices of questions: several continuations of each context, by teacher forcing.

    Each context is processed once, as a prompt under the policy. Its cache is then copied for each of its choices,
    whose tokens are fed as in generation: the scores are those of `kvjax.log_likelihood` on the context and one choice.
    Where nothing is evicted, encoded or left unread while decoding, the tokens of a choice are fed in one block.

    As many choices as there are contexts are scored at a time, so that two caches of this size exist.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, the contexts, rows padded at the end; or a list of rows of any lengths.
      choices: for each context its continuations, each of at least one token.
      policy: which slots the cache keeps, or a `CacheSpec`.
      lengths: [B] int, the number of real tokens of each context; None for T.
      options: see `kvjax.CacheOptions`; the new tokens of its limits are those of the longest choice.
      cache: fields of the options.

    Returns:
      For each context the scores of its choices. What depends on the length of a text (frequencies of some rotary
      embeddings, budgets that are a share of the text) is that of a context with its longest choice.

    Raises:
      InputError: see `kvjax.generate`; also if the choices are not those of the contexts, or one has no token.
      PolicyError: see `kvjax.generate`.
      StorageError: see `kvjax.generate`.
      ConfigError: see `kvjax.generate`.
      NonFiniteError: if a log-probability is not finite; ``error.rows`` are contexts, and ``error.result`` has all
        scores.
    """
    options = (options or CacheOptions()).updated(cache, "score_choices")
    model, spec = options.resolve(model, policy)
    batch = check_batch(model.config, tokens, lengths, new_tokens=0)
    asked = _check_choices(model.config, choices, batch.lengths)
    # [B]: contexts without choices have room for one token
    longest = np.array([max((len(each) for each in own), default=1) for own in asked], np.int32)
    total = batch.lengths + longest
    with model.on_mesh():
        prepared = prepare(model, spec, batch.lengths, total, width=batch.width, options=options, pad_rows=True)
        logits, _, state = run_prompts(model, batch.tokens, batch.lengths, total, prepared, score=False)
    return _scores(model, Context(logits, state, prepared.layout, rows=len(asked)), asked)


def score_prefilled(
    model: Model, prefilled: Context, choices: Sequence[Sequence[Sequence[int]]]
) -> list[list[ChoiceScore]]:
    """Scores the choices of contexts that have been processed; see `score_choices`.

    Args:
      model: that of the contexts.
      prefilled: from `kvjax.generation.prefill.prefill` or `kvjax.contexts.extend`, with room for the
        longest choice. It is unchanged.
      choices: for each context its continuations, each of at least one token.

    Returns:
      For each context the scores of its choices.

    Raises:
      InputError: the choices are not those of the contexts, one has no token, or heads that evict nothing while
        decoding have too few slots.
      NonFiniteError: see `score_choices`.
    """
    lengths = distributed.to_host(prefilled.state.length)[: prefilled.num_rows]
    asked = _check_choices(model.config, choices, lengths)
    if longest := max((len(each) for own in asked for each in own), default=0):
        check_room(prefilled, longest)
    return _scores(model, prefilled, asked)


def _scores(model: Model, prefilled: Context, asked: list[list[np.ndarray]]) -> list[list[ChoiceScore]]:
    """Scores checked choices, as many at a time as there are rows."""
    pairs = [(row, number) for row, own in enumerate(asked) for number in range(len(own))]
    # Continuations of like lengths are scored together.
    pairs.sort(key=lambda pair: -len(asked[pair[0]][pair[1]]))
    found: list[list[ChoiceScore | None]] = [[None] * len(own) for own in asked]
    phase, rows = prefilled.layout.decode, prefilled.logits.shape[0]
    at_once = takes_blocks(phase)
    phase = without_step_kernels(phase) if at_once else phase
    for start in range(0, len(pairs), rows):
        part = pairs[start : start + rows]
        width = _width(max(len(asked[row][number]) for row, number in part), at_once)
        # [R, width], [R] and [R]; rows without a choice have length 0
        ids, ends, sources = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for place, (row, number) in enumerate(part):
            choice = asked[row][number]
            ids[place, : len(choice)], ends[place], sources[place] = choice, len(choice), row
        with model.on_mesh(), compiling.announced(compiling.tokens_of(phase)):
            scores, greedy, _ = score_copies(
                model.params, prefilled.state, prefilled.logits, *model.place((sources, ids, ends)),
                config=model.config, phase=phase, at_once=at_once,
            )  # fmt: skip
        logprobs, best = distributed.to_host((scores, greedy))
        for place, (row, number) in enumerate(part):
            found[row][number] = ChoiceScore(logprobs[place, : ends[place]], bool(best[place]))
    scores = [[each for each in own if each is not None] for own in found]
    bad = [row for row, own in enumerate(scores) if not all(np.isfinite(each.logprobs).all() for each in own)]
    if bad:
        raise error_of(bad, len(scores), scores, noun="context")
    return scores


def takes_blocks(phase: Phase) -> bool:
    """Returns whether tokens that are fed in one block have the same scores as tokens that are fed one at a time."""
    return not any(
        group.evicts
        or group.storage.new_tokens_separate
        or not group.selection.reads_all
        or group.policy.positions != "original"
        for layer in phase
        for group in layer
    )  # fmt: skip


def without_step_kernels(phase: Phase) -> Phase:
    """Returns the phase without kernels that take one token a row."""
    return tuple(
        tuple(dataclasses.replace(group, step_implementation=None, attn_implementation="xla") for group in layer)
        for layer in phase
    )


@program(static_argnames=("config", "phase", "at_once"))
def score_copies(
    params: Params,
    state: KVState,
    logits: Array,
    rows: Array,
    tokens: Array,
    lengths: Array,
    *,
    config: DecoderConfig,
    phase: Phase,
    at_once: bool,
) -> tuple[Array, Array, KVState]:
    """Copies rows of a cache and scores a continuation of each copy. The last token of each is not fed.

    Args:
      params: of the decoder.
      state: the cache of the contexts; not donated.
      logits: [B, V] float32 after each context.
      rows: [R] int32, the context of each continuation.
      tokens: [R, n] int32, the continuations.
      lengths: [R] int32, the number of tokens of each; 0 = none.
      config: the decoder.
      phase: the groups of heads of each layer while decoding.
      at_once: whether tokens are fed in one block; see `takes_blocks`.

    Returns:
      The log-probability of each token, [R, n] float32, 0 from the end of the continuation on; whether all its tokens
      are the most probable ones, [R] bool; and the copies of the cache afterwards.
    """
    compiling.traced()
    decoder = bind(config, params)
    stacked, runs = stacked_runs(state.layers), decoder.runs_now(state, phase)
    state, decoder = arranged_state(state, runs), decoder.looped(runs)
    count, width = tokens.shape
    kv: KVState = jax.tree.map(lambda leaf: host_memory.take_rows(leaf, rows), state)
    # [R] each
    first, best = _score(host_memory.take_rows(logits, rows), tokens[:, 0])
    # [R, n]
    scores = jnp.zeros((count, width), jnp.float32).at[:, 0].set(first)
    if width == 1:
        return _known(scores, lengths), best, arranged_state(kv, stacked)
    if at_once:
        # [n - 1]
        at = jnp.arange(width - 1, dtype=jnp.int32)
        # [R, n - 1]
        fed = at < (lengths - 1)[:, None]
        block = _block(kv, jnp.where(fed, kv.length[:, None] + at, -1))
        # [R, n - 1, E]
        x, kv = decoder.hidden(tokens[:, :-1], kv, block, phase)
        # [R, n - 1] each
        more, agrees = over_logits(decoder, x, tokens[:, 1:], _score)
        scores, best = scores.at[:, 1:].set(more), best & jnp.all(agrees | ~fed, axis=1)
        return _known(scores, lengths), best, arranged_state(kv, stacked)

    def body(number: Array, carry: tuple[KVState, Array, Array]) -> tuple[KVState, Array, Array]:
        kv, scores, best = carry
        # [R]
        active = number < lengths - 1
        block = _block(kv, jnp.where(active, kv.length, -1)[:, None])
        # [R, 1, E]
        x, kv = decoder.hidden(tokens[:, number][:, None], kv, block, phase)
        # [R] each
        score, agrees = _score_hidden(decoder, x, tokens[:, number + 1])
        return kv, scores.at[:, number + 1].set(score), best & (agrees | ~active)

    kv, scores, best = jax.lax.fori_loop(0, jnp.max(lengths) - 1, body, (kv, scores, best))
    return _known(scores, lengths), best, arranged_state(kv, stacked)


def _block(kv: KVState, position: Array) -> Block:
    """The tokens of a step at positions [R, n] int32, -1 = padding."""
    return Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)


def _score(logits: Array, target: Array) -> tuple[Array, Array]:
    """The log-probability of tokens [...] under logits [..., V], and whether they are the most probable ones."""
    # [..., 1]
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)
    # [..., V]
    token = jnp.arange(logits.shape[-1], dtype=jnp.int32)
    better = (logits > chosen) | ((logits == chosen) & (token < target[..., None]))
    return logprob_of(logits, target), ~jnp.any(better, axis=-1)


def _score_hidden(decoder: BoundDecoder, x: Array, target: Array) -> tuple[Array, Array]:
    """As `_score`, of hidden states [R, 1, E] and tokens [R]."""
    return _score(decoder.logits(x[:, 0]), target)


def _known(scores: Array, lengths: Array) -> Array:
    """Sets scores [R, n] to 0 from the end of each continuation on."""
    return jnp.where(jnp.arange(scores.shape[1], dtype=jnp.int32) < lengths[:, None], scores, 0.0)


def _width(longest: int, at_once: bool) -> int:
    """The number of tokens that continuations are padded to, so that few programs serve all lengths."""
    if longest == 1:
        return 1
    return 1 + (half_steps(longest - 1, FEW_FED) if at_once else power_of_two(longest - 1, MANY_FED))


def _check_choices(
    config: DecoderConfig, choices: Sequence[Sequence[Sequence[int]]], lengths: np.ndarray
) -> list[list[np.ndarray]]:
    """Returns the checked choices of each context, [n] int32 each."""
    if len(choices) != len(lengths):
        raise InputError(f"choices must be {len(lengths)} lists, one per context; got {len(choices)}.")
    check_no_text("choices", choices)
    asked = [[np.asarray(each) for each in own] for own in choices]
    for row, own in enumerate(asked):
        for ids in own:
            if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
                raise InputError(
                    f"a choice must be a sequence of at least one token id; context {row} has one of "
                    f"{ids.dtype}, shape {ids.shape}."
                )
            # Checks the vocabulary, and that there are positions for all tokens but the last, which is not fed.
            check_batch(config, ids[None], None, new_tokens=0)
            fed = int(lengths[row]) + ids.size - 1
            if config.learned_positions and fed > config.max_positions:
                raise InputError(
                    f"this model's learned position table ends at {config.max_positions} tokens, but a context of "
                    f"{lengths[row]} tokens and a choice of {ids.size} need {fed}; shorten the context."
                )
    return [[ids.astype(np.int32) for ids in own] for own in asked]
