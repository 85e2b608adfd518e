"""CacheBlend (arXiv:2405.16444): caches of chunks one after the other, a part of whose tokens are recomputed."""

import itertools
import numbers
from collections.abc import Callable, Sequence
from typing import NamedTuple, Unpack

import jax
import numpy as np
from numpy.typing import ArrayLike

from kvjax import policies
from kvjax.arguments import choice_argument, number_argument
from kvjax.cache.spec import CacheSpec
from kvjax.errors import InputError, shown
from kvjax.generation.context import Context
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.inputs import check_count
from kvjax.models.model import Model
from kvjax.policies.base import Policy
from kvjax.reuse.cache import ChunkCache, Collected, Text, check_chunks, checked_tokens
from kvjax.reuse.last_block import checked_room, feed_question
from kvjax.reuse.layerwise import LayerResult, run_tokens
from kvjax.summary import one_line

Array = jax.Array
DEVIATIONS = ("value", "key", "both")
VOTING_TOKENS = 8  # the last tokens of a question, whose attention chooses tokens


class Blended(NamedTuple):
    """A context that was made of caches of chunks.

    Attributes:
      context: the context of prefix, chunks and question.
      active: [L, T] bool, the tokens that went on after each layer: those that are recomputed in the next one, and the
        question. Tokens of the prefix never are.
      chunks: the caches.
    """

    context: Context
    active: np.ndarray
    chunks: tuple[ChunkCache, ...]

    def __repr__(self) -> str:
        return one_line(self)

    @property
    def share(self) -> float:
        """The tokens that went on after a layer, question included, divided by all tokens, as a mean over layers."""
        return float(self.active.mean())


@cache_keywords()
def blend(
    model: Model,
    chunks: Sequence[ChunkCache],
    question: ArrayLike,
    policy: Policy | CacheSpec | None = None,
    *,
    ratio: float | Sequence[float] = 0.15,
    check: int | None = 1,
    deviation: str = "value",
    by_question: float = 0.0,
    first: int = 0,
    room: int | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Blended:
    """Makes a context of caches of chunks, and recomputes the tokens whose keys or values differ most (CacheBlend).

    All tokens of chunks go through the layers before `check`, and through that layer. The tokens go on whose values
    there differ most from those of the caches; in later layers, they attend to the keys and values of all tokens, and
    replace their own. The question is read at the end.

    Args:
      model: that of the chunks.
      chunks: the caches, one after the other, all after one prefix.
      question: [n] int, what follows the chunks; at least one token.
      policy: of the cache, or its `CacheSpec` with exact storage: one that needs no attention of the tokens of chunks;
        None = `kvjax.policies.full`.
      ratio: the share of the chunks' tokens that go on after `check`; or one for each layer from `check` on, not
        rising, each of which chooses among those of the one before (the paper's gradual filtering).
      check: the layer whose values are compared, from 1 to the last; None = no token is chosen by deviation.
      deviation: what is compared: ``value``, ``key``, or ``both``, by the squared distance over KV heads and features.
      by_question: the part of `ratio` that the question chooses, from 0 to 1: tokens that it attends to, in the caches
        as they are, are recomputed in all layers, and only the rest by deviation. 1 = all of them, the idea of
        ProphetKV (arXiv:2602.02579). The choice is kvjax's own: every KV head votes for the tokens that it keeps under
        `kvjax.policies.snapkv`, whose window is the last `VOTING_TOKENS` tokens of the question, and tokens with the
        most votes are chosen.
      first: the number of first tokens of each chunk that are recomputed in all layers, in addition to those chosen
        by deviation (as in EPIC, arXiv:2410.15332).
      room: the number of tokens that arrays are made for; None for 256 more than there are.
      options: see `kvjax.CacheOptions`.
      cache: fields of the options.

    Raises:
      InputError: chunks of another model or of different prefixes, a question without tokens, a share, layer or count
        that is not valid, or a cache that needs the queries of chunks.
      PolicyError: see `kvjax.generate`.
    """
    options = options_of(options, cache, "blend")
    prefix = check_chunks(model, chunks)
    layers = model.config.num_layers
    ids = checked_tokens(model.config, "question", question)
    shares = _checked_shares(ratio, check, layers)
    by_question = number_argument("by_question", by_question, minimum=0, maximum=1, error=InputError)
    if by_question and isinstance(ratio, Sequence):
        raise InputError("by_question needs one ratio for all layers.")
    if 0 < by_question < 1 and check is None:
        raise InputError(
            f"by_question={by_question:g} leaves tokens to be chosen by deviation, which check=None does not compare; "
            "give by_question=1, or a check."
        )
    choice_argument("deviation", deviation, DEVIATIONS, error=InputError)
    if first != 0:
        check_count("first", first)
    text = Text.of(model, chunks, prefix)
    begun = 0 if prefix is None else len(prefix)
    always = np.zeros(len(text), bool)
    for start, each in zip(text.starts, chunks, strict=True):
        always[start : start + min(first, len(each))] = True
    number = len(text) - begun
    counts = [_count(share, number) for share in shares]
    room = checked_room(model.config, room, len(text) + len(ids))
    if by_question and not isinstance(ratio, Sequence):
        count = _count(float(ratio), number)
        asked = _count(by_question, count)
        if asked:
            votes = _votes(model, text, ids, count, room, options)[begun:]
            always[begun + largest(votes, np.arange(number), asked, always[begun:])] = True
        counts = [count - asked] * len(counts)
    if by_question == 1:
        # Nothing is left to be chosen by deviation, so that other tokens need not enter a layer.
        check = None
    # [n] the tokens that enter layer 0
    position = np.flatnonzero(always) if check is None else np.arange(begun, len(text))

    def choose(layer: int, result: LayerResult, position: np.ndarray) -> np.ndarray:
        if check is None or layer < check:
            return np.arange(len(position))
        # A number: chosen once.
        if layer > check and isinstance(ratio, numbers.Real):
            return np.arange(len(position))
        parts = {"key": result.key_deviation, "value": result.value_deviation}
        sides = parts if deviation == "both" else (deviation,)
        found = np.sum([np.asarray(parts[side][0])[: len(position)] for side in sides], axis=0)
        return largest(found, position, counts[layer - check], always[position])

    return recompute(model, chunks, text, ids, policy, position.astype(np.int32), choose, room=room, options=options)


def recompute(
    model: Model,
    chunks: Sequence[ChunkCache],
    text: Text,
    question: np.ndarray,
    policy: Policy | CacheSpec | None,
    position: np.ndarray,
    choose: Callable[[int, LayerResult, np.ndarray], np.ndarray] | None,
    *,
    room: int | None,
    options: CacheOptions,
) -> Blended:
    """Runs tokens of chunks through the layers, and the question after all.

    Args:
      model: that of the chunks.
      chunks: the caches.
      text: prefix and chunks.
      question: [n] int32.
      policy: of the cache; None = full.
      position: [n] int32, of the tokens that enter the first layer.
      choose: see `run_tokens`.
      room: see `blend`.
      options: see `blend`.
    """
    own, spec = options.resolve(model, policies.full() if policy is None else policy)
    room = checked_room(model.config, room, len(text) + len(question))
    held = Collected()
    run = run_tokens(
        model, text.tokens[position], position, text.key, text.value, text.known, total=room, choose=choose,
        record=held.add,
    )  # fmt: skip
    reached = len(held.key)
    keys, values = held.key + text.key[reached:], held.value + text.value[reached:]
    context = feed_question(
        own, spec, text.tokens, keys, values, question, room=room, options=options,
    )  # fmt: skip
    # [L, T]
    active = np.concatenate(
        [run.active[:, : len(text)], np.ones((model.config.num_layers, len(question)), bool)], axis=1
    )
    return Blended(context, active, tuple(chunks))


def largest(score: np.ndarray, position: np.ndarray, count: int, always: np.ndarray) -> np.ndarray:
    """Returns the indices, ascending, of the `count` tokens of the largest scores, and of those that always go on.

    Args:
      score: [n]; of equal ones, the newer token is taken.
      position: [n] int.
      count: among the tokens that do not always go on.
      always: [n] bool.
    """
    order = np.lexsort((-position, -score, always))
    chosen = always.copy()
    chosen[order[: min(count, int((~always).sum()))]] = True
    return np.flatnonzero(chosen)


def _count(share: float, number: int) -> int:
    """Returns a share of a number, rounded down."""
    return int(np.floor(share * number + 1e-9))


def _votes(model: Model, text: Text, question: np.ndarray, count: int, room: int, options: CacheOptions) -> np.ndarray:
    """Returns the number of KV heads that keep each token of a text for a question, [T] int64.

    Args:
      model: of the caches.
      text: prefix and chunks, none of which is recomputed.
      question: [n] int32.
      count: the tokens that a head keeps besides those of the question; at least 1.
      room: see `blend`; the same, so that texts of other lengths share programs.
      options: whose implementation and limits are used.
    """
    window, length = min(len(question), VOTING_TOKENS), len(text) + len(question)
    # A fraction of the text is data of a program, where a number of slots would be compiled.
    budget = policies.Fraction((count + window + 0.5) / length)
    own = CacheOptions(implementation=options.implementation, limits=options.limits)
    model, spec = own.resolve(model, policies.snapkv(budget, window=window))
    context = feed_question(model, spec, text.tokens, text.key, text.value, question, room=room, options=own)
    votes = np.zeros(length, np.int64)
    for layer in range(model.config.num_layers):
        for held in context.kept(layer)[0]:
            votes[held] += 1
    return votes[: len(text)]


def _checked_shares(ratio: float | Sequence[float], check: int | None, layers: int) -> list[float]:
    """Returns a share for each layer from `check` on, or one for all."""
    several = isinstance(ratio, Sequence)
    given = list(ratio) if isinstance(ratio, Sequence) else [ratio]
    if not all(isinstance(each, numbers.Real) and not isinstance(each, bool) and 0 <= each <= 1 for each in given):
        raise InputError(f"ratio must be a number from 0 to 1, or one per layer; got {shown(ratio)}.")
    if check is None:
        if several:
            raise InputError("check=None recomputes nothing, so that ratio cannot be given by layer.")
        return []
    if isinstance(check, bool) or not isinstance(check, numbers.Integral) or not 1 <= check < layers:
        if layers == 1:
            raise InputError("a model of one layer has none whose values depend on other tokens: give check=None.")
        raise InputError(
            f"check must be a layer from 1 to {layers - 1}, or None; got {shown(check)}. The values of layer 0 do not "
            "depend on other tokens."
        )
    if several and len(given) != layers - check:
        raise InputError(f"ratio by layer must have {layers - check} numbers, from layer {check} on; got {len(given)}.")
    if any(one < two for one, two in itertools.pairwise(given)):
        raise InputError(f"ratio must not rise from one layer to the next; got {shown(ratio)}.")
    return [float(each) for each in given]
