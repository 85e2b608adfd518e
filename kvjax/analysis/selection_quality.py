"""Compares the slots that a selection reads with those that the same queries would attend to if they read everything.

InfiniGen (arXiv:2406.19707) reads few of the slots that are held, and chooses them by a guess of the query. `selected`
compares such a choice with the best one of the same size; `skew_effect` measures how much skewing improves the guess.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_steps
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.errors import InputError
from kvjax.generation.selection_record import NONE
from kvjax.models.decoder_layer import SKEW
from kvjax.models.model import Model
from kvjax.models.skew import find_skew, skewed
from kvjax.policies.base import Policy
from kvjax.selection import InfiniGen
from kvjax.selection.choose import best, softmax
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array


class Selected(NamedTuple):
    """The result of `selected`, for each layer, row, KV head and query; all [L, B, K, T].

    Entry t is of query t. In the prompt and past a row's end, and where a layer or a KV head reads everything, all
    numbers are -1 and all shares NaN.

    Attributes:
      number: int32 n, the number of slots that the selection chose, as in `kvjax.generation.selection_record.Record`.
      overlap: float32 in [0, 1], the share of the n chosen slots that are among the best n, which are the candidates of
        largest true probability; NaN where no slot was chosen.
      mass: float32 in [0, 1], the sum of the true probabilities of the slots that were read.
      share: float32 in (0, 1], the number of slots that were read, divided by the number that could have been.
    """

    number: np.ndarray
    overlap: np.ndarray
    mass: np.ndarray
    share: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def selected(
    model: Model,
    tokens: ArrayLike,
    spec: Policy | CacheSpec,
    *,
    prompt_length: ArrayLike,
    lengths: ArrayLike | None = None,
) -> Selected:
    """Measures the quality of a selection's choices: their size, overlap with the best choice, and attention covered.

    The true probability of a slot is that of the softmax of the layer's own query over all slots that are held and
    inside the layer's window, the new token's among them; it is the mean over the query heads that share a KV head. The
    query is that of a run that has read what the selection chose in the steps and layers before.

    Slots that are always read, as the new token's, cannot be chosen and are no candidates for the best n; of equal
    candidates the newer is the better. `kvjax.selection.optimal` chooses exactly the best n: its overlap is 1, and no
    selection that chooses n slots besides the new token covers more of the attention of the same query.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      spec: a `CacheSpec` whose selection is measured, or a policy, which reads everything unless it has a selection.
      prompt_length: int or [B], tokens of each row's prompt; the queries after it are measured.
      lengths: [B] real tokens of each row; None = all T.

    Raises:
      InputError: tokens, lengths or a prompt_length that do not fit, or leave no query to measure.
      PolicyError: a policy, storage and selection that cannot be combined.
    """
    run = over_steps(
        model, tokens, (spec,), _compare_with_best, lambda *_: (), prompt_length=prompt_length, lengths=lengths
    )
    number, *shares = run.queries
    return Selected(np.where(np.isnan(number), NONE, number).astype(np.int32), *shares)


def _compare_with_best(carry: PyTree, attention: tuple[Rows]) -> tuple[PyTree, tuple[Array, ...]]:
    """Returns the fields of `Selected` for one query, [B, K, 1, 1] float32 each; NaN where everything is read."""
    (rows,) = attention
    # [B, K, T], of the single query
    held, seen, choice = (each[:, :, 0, 0] for each in (rows.held, rows.seen, rows.choice))
    # [B, K, T]: the mean over the query heads
    probability = jnp.mean(softmax(rows.logits[..., 0, :], held[:, :, None]), axis=2)
    # [B, K, T]
    position = jnp.broadcast_to(jnp.arange(held.shape[2], dtype=jnp.int32), held.shape)
    # [B, K, T]: what is read without being chosen could not have been chosen
    candidate = held & (choice | ~seen)
    # [B, K, 1]
    number = _count(choice)
    # [B, K, T]
    optimum = best(probability, candidate, position, number)
    # [B, K, 1]
    overlap = jnp.where(number > 0, _count(choice & optimum) / jnp.maximum(number, 1), jnp.nan)
    mass = jnp.sum(jnp.where(seen, probability, 0.0), axis=2, keepdims=True)
    share = _count(seen) / jnp.maximum(_count(held), 1)
    # [K, 1]
    selects = jnp.asarray(rows.selects)[:, None]
    return carry, tuple(jnp.where(selects, x, jnp.nan)[..., None] for x in (number, overlap, mass, share))


def _count(marks: Array) -> Array:
    return jnp.sum(marks, axis=-1, keepdims=True, dtype=jnp.float32)


class SkewEffect(NamedTuple):
    """The result of `skew_effect`; the second axis is 0 without a skew and 1 with one.

    Attributes:
      ratios: [R] float64, the shares of columns.
      overlap: [R, 2, L] float32 in [0, 1], the mean of `Selected.overlap` over rows, KV heads and queries; NaN for a
        layer that reads everything.
      mass: [R, 2, L] float32 in [0, 1], the mean of `Selected.mass`, likewise.
    """

    ratios: np.ndarray
    overlap: np.ndarray
    mass: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def skew_effect(
    model: Model,
    tokens: ArrayLike,
    spec: CacheSpec,
    *,
    ratios: Sequence[float],
    sample: Any,
    prompt_length: ArrayLike,
    lengths: ArrayLike | None = None,
    sample_lengths: ArrayLike | None = None,
) -> SkewEffect:
    """Measures how a skew improves the choice of `kvjax.selection.infinigen` (InfiniGen, arXiv:2406.19707, Fig. 13).

    The figure has the accuracy of tasks with a fifth of the cache read and a tenth of the columns: alpha = inf,
    cap = 0.2 and ratio = 0.1. At ratio 1 a skew changes nothing.

    Args:
      model: from `kvjax.load`; not skewed.
      tokens: see `selected`.
      spec: a `CacheSpec` with `kvjax.selection.infinigen`, whose `ratio` is replaced by each of `ratios`.
      ratios: [R], shares of the columns of a head, each in (0, 1].
      sample: [B', T'] or [T'] int, the text that `kvjax.models.skew.find_skew` finds the skew from; a text other than
        `tokens` shows that a skew holds for other texts too.
      prompt_length: see `selected`.
      lengths: see `selected`.
      sample_lengths: [B'] real tokens of each row of the sample; None = all T'.

    Raises:
      InputError: no ratio, another selection, a model that holds a skew, or a sample of too few tokens; and as
        `selected`.
      SelectionError: a ratio outside (0, 1].
      PolicyError: as `selected`.
    """
    spec = as_spec(spec)
    if not isinstance(spec.selection, InfiniGen):
        raise InputError(
            f"a skew affects only the selection kvjax.selection.infinigen; got a spec with {spec.selection!r}."
        )
    if any(SKEW in model.params[f"layer_{index}"]["attention"] for index in range(model.config.num_layers)):
        raise InputError("the model is already skewed; give the model as kvjax.load returns it.")
    shares = np.asarray(ratios, np.float64)
    if shares.ndim != 1 or not shares.size:
        raise InputError(f"ratios must be a non-empty list of shares of the columns; got {ratios!r}.")
    specs = [
        dataclasses.replace(spec, selection=dataclasses.replace(spec.selection, ratio=float(ratio))) for ratio in shares
    ]
    models = (model, skewed(model, find_skew(model, sample, lengths=sample_lengths)))
    # [R][2]
    found = [
        [selected(each, tokens, own, prompt_length=prompt_length, lengths=lengths) for each in models] for own in specs
    ]
    overlap, mass = (
        np.array([[mean_by_layer(getattr(each, field)) for each in pair] for pair in found], np.float32)
        for field in ("overlap", "mass")
    )
    return SkewEffect(shares, overlap, mass)


def mean_by_layer(values: np.ndarray) -> np.ndarray:
    """[L, ...] -> [L] float64: the mean of what is not NaN; NaN where all is."""
    flat = values.reshape(len(values), -1).astype(np.float64)
    count = np.sum(~np.isnan(flat), axis=1)
    return np.where(count > 0, np.nansum(flat, axis=1), np.nan) / np.maximum(count, 1)
