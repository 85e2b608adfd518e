"""The factor of Cache-Craft's repair (arXiv:2502.15734), chosen by contexts that are measured."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import number_argument, plain_signature
from kvjax.errors import InputError, shown
from kvjax.reuse.crafting import Crafted, craft
from kvjax.reuse.measures import distances
from kvjax.reuse.store import ChunkStore
from kvjax.summary import one_line

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
Request = tuple[Sequence[ArrayLike], ArrayLike]  # chunks in their order, and the question
Quality = Callable[[int, Crafted], float]
PAIR = 2  # chunks, question


class CalibratedAlpha(NamedTuple):
    """The factor that was chosen, and what was measured.

    Attributes:
      alpha: the smallest factor at which the mean quality reaches the target.
      alphas: [A] float64, the factors that were measured, ascending; the last one is `alpha`.
      quality: [A, N] float64, the quality of each request.
      share: [A, N] float64, the share of each request's chunks that was recomputed, as a mean over layers.
    """

    alpha: float
    alphas: np.ndarray
    quality: np.ndarray
    share: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def smallest_alpha(quality: Mapping[float, ArrayLike], target: float) -> float | None:
    """Returns the smallest factor at which the mean quality reaches a target; None if there is none.

    Qualities need not rise with the factor: a smaller factor that reaches the target is chosen even if a larger one
    does not.

    Args:
      quality: factor -> [N] qualities of a sample.
      target: the least mean.
    """
    # A mean of many numbers may be below the target by rounding alone.
    reached = [each for each, own in quality.items() if float(np.mean(np.asarray(own, np.float64))) >= target - 1e-12]
    return min(reached, default=None)


@plain_signature
def calibrate_alpha(
    store: ChunkStore,
    requests: Sequence[Request],
    *,
    target: float,
    quality: Quality | None = None,
    alphas: Sequence[float] = ALPHAS,
) -> CalibratedAlpha:
    """Chooses `alpha` of `kvjax.reuse.craft`: the smallest factor at which the mean quality of requests is high enough.

    Factors are tried from the smallest to the largest, each with all requests, until one reaches the target. The store
    is as before afterwards: its chunks, their variants and their scores.

    Args:
      store: has the variants that requests choose from.
      requests: of each, the chunks in their order, and the question.
      target: the least mean quality.
      quality: called with the number of a request and its context, returns a number that is larger for better contexts,
        such as 1 or 0 for a right or a wrong answer. None = one less the relative distance of values from those of a
        whole prefill, as a mean over layers (`kvjax.reuse.distances`), which computes that prefill each time.
      alphas: the factors that are tried, at least 0.

    Raises:
      InputError: there is no request or no factor, a number that is not valid, or no factor reaches the target; see
        also `kvjax.reuse.craft`.
    """
    if not isinstance(store, ChunkStore):
        raise InputError(f"store must be a ChunkStore; got {shown(store)}.")
    target = number_argument("target", target, minimum=-math.inf, maximum=math.inf, error=InputError)
    if quality is None and target > 1:
        raise InputError(f"target={target:g} cannot be reached: without quality=, no quality is above 1.")
    if not requests:
        raise InputError("requests must have at least one pair of chunks and a question.")
    for number, request in enumerate(requests):
        if not isinstance(request, tuple | list) or len(request) != PAIR:
            raise InputError(f"request {number} must be a pair (chunks, question); got {shown(request)}.")
    given = sorted({number_argument("alphas: each factor", each, minimum=0, maximum=1e9, error=InputError)
                    for each in alphas})  # fmt: skip
    if not given:
        raise InputError(f"alphas must have at least one factor; got {shown(alphas)}.")
    trial = store.copy()

    def of_values(_: int, made: Crafted) -> float:
        return 1 - float(np.mean(distances(store.model, made.blended).value))

    measure = of_values if quality is None else quality
    found: dict[float, list[float]] = {}
    shares: list[list[float]] = []
    for alpha in given:
        made = [craft(trial, chunks, question, alpha=alpha) for chunks, question in requests]
        found[alpha] = [float(measure(number, each)) for number, each in enumerate(made)]
        shares.append([_share(each) for each in made])
        if smallest_alpha({alpha: found[alpha]}, target) is not None:
            return CalibratedAlpha(alpha, np.array(list(found)), np.array(list(found.values())), np.array(shares))
    means = ", ".join(f"{alpha:g}: {np.mean(own):.4g}" for alpha, own in found.items())
    raise InputError(f"no factor reaches a mean quality of {target:g}; the means are {means}. Lower the target.")


def _share(made: Crafted) -> float:
    """Returns the share of the tokens of chunks that were recomputed, as a mean over layers."""
    counts = [score.count(len(cache)) for score, cache in zip(made.scores, made.blended.chunks, strict=True)]
    return sum(counts) / sum(map(len, made.blended.chunks))
