"""Scores several continuations of one context. The context is processed once, and its cache copied for each of them."""

from collections.abc import Sequence
from typing import NamedTuple, Unpack

import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import check_type
from kvjax.cache.spec import CacheSpec
from kvjax.contexts.feed import Plan, score_copies
from kvjax.contexts.turns import planned_turn
from kvjax.errors import InputError
from kvjax.generation import compiling
from kvjax.generation.context import Context, check_context
from kvjax.generation.generate import check_room
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.generation.prefill import prepare, run_prompts
from kvjax.inputs import check_batch, check_no_text
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model, check_model
from kvjax.numerics.finite import error_of
from kvjax.parallel import distributed
from kvjax.policies.base import Policy
from kvjax.summary import one_line


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
    options = options_of(options, cache, "score_choices")
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
    check_model(model)
    check_context(prefilled, "prefilled")
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
    rows = prefilled.logits.shape[0]
    for start in range(0, len(pairs), rows):
        part = pairs[start : start + rows]
        plan, width = planned(prefilled, max(len(asked[row][number]) for row, number in part))
        # [R, width], [R] and [R]; rows without a choice have length 0
        ids, ends, sources = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        for place, (row, number) in enumerate(part):
            choice = asked[row][number]
            ids[place, : len(choice)], ends[place], sources[place] = choice, len(choice), row
        with model.on_mesh(), compiling.announced(compiling.tokens_of(plan.held)):
            scores, greedy, _ = score_copies(
                model.params, prefilled.state, prefilled.logits, *model.place((sources, ids, ends)),
                config=model.config, plan=plan,
            )  # fmt: skip
        logprobs, best = distributed.to_host((scores, greedy))
        for place, (row, number) in enumerate(part):
            found[row][number] = ChoiceScore(logprobs[place, : ends[place]], bool(best[place]))
    scores = [[each for each in own if each is not None] for own in found]
    bad = [row for row, own in enumerate(scores) if not all(np.isfinite(each.logprobs).all() for each in own)]
    if bad:
        raise error_of(bad, len(scores), scores, noun="context")
    return scores


def planned(context: Context, longest: int) -> tuple[Plan, int]:
    """Returns how continuations of up to `longest` tokens are fed, and the number of tokens that they are padded to."""
    # The last token is not fed.
    plan, width, _ = planned_turn(context, max(longest - 1, 1), block=1)
    return plan, 1 if longest == 1 else 1 + width


def _check_choices(
    config: DecoderConfig, choices: Sequence[Sequence[Sequence[int]]], lengths: np.ndarray
) -> list[list[np.ndarray]]:
    """Returns the checked choices of each context, [n] int32 each."""
    check_type("choices", choices, (list, tuple, np.ndarray), "for each context a list of its continuations")
    if len(choices) != len(lengths):
        raise InputError(f"choices must be {len(lengths)} lists, one per context; got {len(choices)}.")
    check_no_text("choices", choices)
    for row, each in enumerate(choices):
        check_type(f"the choices of context {row}", each, (list, tuple, np.ndarray), "a list of rows of token ids")
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
