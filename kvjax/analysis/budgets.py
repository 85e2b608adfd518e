"""Budgets from a model's attention on a text (D2O, arXiv:2406.13035; ZigZagKV, 2412.09036; DuoAttention; KVzip)."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal, overload

import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.full_cache import _add_mass, keys_for_mass
from kvjax.analysis.gates import head_gates
from kvjax.analysis.scan import over_tiles
from kvjax.arguments import MIN_SLOTS, choice_argument, count_argument, did_you_mean, number_argument
from kvjax.errors import InputError
from kvjax.generation.prefill import prefill
from kvjax.inputs import check_batch
from kvjax.models.model import Model
from kvjax.policies.components import Merge
from kvjax.policies.kvzip import kvzip
from kvjax.policies.prompt_replay import REPLAYED

TIE = 1e-9  # differences of remainders below this are rounding


@overload
def budgets(
    model: Model,
    tokens: ArrayLike,
    budget: int,
    *,
    rule: Literal["density", "entropy"] = "density",
    lengths: ArrayLike | None = None,
    **options: Any,
) -> tuple[int, ...]: ...


@overload
def budgets(
    model: Model,
    tokens: ArrayLike,
    budget: float,
    *,
    rule: Literal["gates", "replay"],
    lengths: ArrayLike | None = None,
    **options: Any,
) -> np.ndarray: ...


def budgets(
    model: Model,
    tokens: ArrayLike,
    budget: float,
    *,
    rule: str = "density",
    lengths: ArrayLike | None = None,
    **options: Any,
) -> tuple[int, ...] | np.ndarray:
    """Divides slots among layers, or chooses the heads that keep every token, by a model's attention on a text.

    ``density`` and ``entropy`` run the text once under full attention. Their result is the budget of a policy:
    ``h2o(budget=kvjax.analysis.budgets(model, tokens, 256))``. Its mean is `budget`, and no layer gets fewer than 32
    slots. Slots are rounded by largest remainder; of equal remainders, the lower layer comes first. ``gates`` trains a
    number for each KV head, and ``replay`` runs the text twice; both return a table for `kvjax.policies.duo_attention`.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end. Use texts as long as those that the budgets are for.
      budget: the mean number of slots per KV head over the layers; for ``gates`` and ``replay``, the share of the KV
        heads that keep every token.
      rule: ``density`` gives fewer slots to layers whose accumulated attention varies more between tokens
        (`density_weights`, D2O); ``entropy`` gives more slots to layers whose queries spread their attention over more
        tokens (`entropy_weights`, ZigZagKV); ``gates`` is `head_gates` (DuoAttention); ``replay`` chooses the heads of
        the largest scores when the text is repeated (`replay_scores`, KVzip), rounded down; of equal scores, those of
        lower layers and heads.
      lengths: [B] real tokens of each row; None = all T.
      options: options of the rule. ``entropy`` has `share`; ``gates`` has `answers` and those of `head_gates`;
        ``replay`` has those of `replay_scores`.

    Returns:
      L numbers of slots; for ``gates`` and ``replay``, [L, K] bool.

    Raises:
      InputError: tokens or lengths that do not fit the model, an unknown rule, a budget below 32 slots or a share of
        heads outside [0, 1], or options that the rule does not have or that are not valid.
      PolicyError: see `replay_scores`.
    """
    own = RULES[choice_argument("rule", rule, tuple(RULES), error=InputError)]
    taken = inspect.signature(own).parameters
    for name in options:
        if name not in taken or name in ("model", "tokens", "budget", "lengths"):
            raise InputError(f"rule {rule!r} has no option {name!r}; {did_you_mean(name, taken)}see kvjax.analysis.")
    found: tuple[int, ...] | np.ndarray = own(model, tokens, budget, lengths=lengths, **options)
    return found


def density_weights(model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None) -> np.ndarray:
    """Computes exp(-w / mean w) of each layer, where w is the variance of accumulated attention over tokens (D2O).

    w is the variance, over the tokens of a row, of the attention that a token receives from all queries, averaged over
    query heads and rows. If few tokens receive most of the attention, w is large and few slots are enough
    (arXiv:2406.13035). Dividing w by its mean over the layers is kvjax's choice.

    Args:
      model: see `budgets`.
      tokens: see `budgets`.
      lengths: see `budgets`.

    Returns:
      [L] float64 in (0, 1].

    Raises:
      InputError: tokens or lengths that do not fit the model.
    """
    run = over_tiles(model, tokens, lengths, _add_mass, lambda *shape: jnp.zeros(shape, jnp.float32))
    # [L, B]: the mean over heads of the variance over tokens
    spread = np.stack(
        [np.var(run.carried[:, row, :, :length], axis=-1, dtype=np.float64).mean(axis=1)
         for row, length in enumerate(run.lengths)], axis=1,
    )  # fmt: skip
    # [L]
    density = spread.mean(axis=1)
    mean = density.mean()
    return np.exp(-density / mean) if mean > 0 else np.ones_like(density)


def entropy_weights(
    model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None, share: float = 0.9
) -> np.ndarray:
    """Computes the number of tokens that hold `share` of a query's attention in each layer (ZigZagKV).

    The mean over queries, query heads and rows is the uncertainty of a layer (arXiv:2412.09036). Two choices are
    kvjax's: the mean over all queries of a text, and in `budgets` the minimum of half of the mean number of slots.

    Args:
      model: see `budgets`.
      tokens: see `budgets`.
      lengths: see `budgets`.
      share: a fraction of each query's attention, in (0, 1].

    Returns:
      [L] float64, at least 1.

    Raises:
      InputError: tokens or lengths that do not fit the model, or a share outside (0, 1].
    """
    # [L, B, H, T]; 0 past a row's end
    found = keys_for_mass(model, tokens, lengths=lengths, share=share)
    # [B]
    queries = np.count_nonzero(found[0, :, 0], axis=-1)
    # [L]: every row has the same weight, whatever its length
    return np.asarray((found.sum(axis=-1, dtype=np.float64) / queries[:, None]).mean(axis=(1, 2)))


@dataclasses.dataclass(frozen=True)
class _KeepScores(Merge):
    """Keeps the scores of a replay as a statistic while decoding; merges nothing."""

    remembers = (REPLAYED,)
    folds = False

    def afterwards(self) -> Merge:
        return self


def replay_scores(
    model: Model,
    tokens: ArrayLike,
    *,
    lengths: ArrayLike | None = None,
    instruction: Sequence[int] = (),
    later: Sequence[int] | None = None,
    chunk: int = 2048,
    sinks: int = 4,
) -> np.ndarray:
    """Computes how much each KV head is needed to repeat a text (KVzip, arXiv:2505.23416).

    The score of a head is the mean importance of its slots under `kvjax.policies.kvzip`, over the tokens of a row and
    then over rows. Means instead of maxima are kvjax's choice.

    Args:
      model: see `budgets`.
      tokens: see `budgets`.
      lengths: see `budgets`.
      instruction: see `kvjax.policies.kvzip`.
      later: see `kvjax.policies.kvzip`.
      chunk: see `kvjax.policies.kvzip`.
      sinks: see `kvjax.policies.kvzip`.

    Returns:
      [L, K] float64 in [0, 1].

    Raises:
      InputError: tokens or lengths that do not fit the model.
      PolicyError: an argument of the replay that is not valid, or a mesh that divides slots.
    """
    batch = check_batch(model.config, tokens, lengths, new_tokens=1)
    # With room for every token, nothing is evicted.
    whole = kvzip(int(batch.tokens.shape[1]), instruction=instruction, later=later, chunk=chunk, sinks=sinks)
    policy = dataclasses.replace(whole, merge=_KeepScores())
    made = prefill(model, batch.tokens, policy, max_new_tokens=1, lengths=batch.lengths)
    found = []
    for (layer,) in made.state.layers:
        # [B, K, S]
        live, score = np.asarray(layer.position) >= 0, np.asarray(layer.stats[REPLAYED], np.float64)
        found.append(np.mean(np.sum(np.where(live, score, 0.0), axis=2) / np.sum(live, axis=2), axis=0))
    return np.stack(found)


def divided(weights: ArrayLike, budget: int, *, least: int = MIN_SLOTS) -> tuple[int, ...]:
    """Divides slots in proportion to weights, with at least `least` each.

    A layer whose part would be smaller gets `least`, and the others divide the rest. Parts are rounded by largest
    remainder; of equal remainders, the lower layer comes first.

    Args:
      weights: [L] positive numbers.
      budget: the mean of the result.
      least: the smallest number in the result.

    Returns:
      L whole numbers, whose sum is L · `budget`.

    Raises:
      InputError: weights that are not L positive numbers, or a budget below `least`.
    """
    own = np.asarray(weights, np.float64)
    if own.ndim != 1 or not own.size or not np.all(np.isfinite(own) & (own > 0)):
        raise InputError(f"weights must be one positive number for each layer; got {weights!r}.")
    budget = count_argument("budget", budget, minimum=least, error=InputError)
    total = budget * own.size
    # [L] bool, the layers that get `least`
    low = np.zeros(own.size, bool)
    while True:
        rest = np.where(low, 0.0, own)
        parts = np.where(low, least, rest / max(rest.sum(), np.finfo(np.float64).tiny) * (total - least * low.sum()))
        below = parts < least - TIE
        if not below.any():
            break
        low |= below
    whole = np.floor(parts + TIE).astype(np.int64)
    # Remainders that differ by rounding alone are equal.
    order = np.argsort(-np.round(parts - whole, 9), kind="stable")
    whole[order[: total - whole.sum()]] += 1
    return tuple(int(each) for each in whole)


def _slots(budget: object) -> int:
    return count_argument("budget", budget, minimum=MIN_SLOTS, error=InputError)


def _density(model: Model, tokens: ArrayLike, budget: int, *, lengths: ArrayLike | None) -> tuple[int, ...]:
    budget = _slots(budget)
    return divided(density_weights(model, tokens, lengths=lengths), budget)


def _entropy(
    model: Model, tokens: ArrayLike, budget: int, *, lengths: ArrayLike | None, share: float = 0.9
) -> tuple[int, ...]:
    budget = _slots(budget)
    # At least half of the mean.
    least = max(MIN_SLOTS, -(-budget // 2))
    return divided(entropy_weights(model, tokens, lengths=lengths, share=share), budget, least=least)


@functools.wraps(head_gates)
def _gates(model: Model, tokens: ArrayLike, budget: float, answers: ArrayLike | None = None, **options: Any) -> Any:
    budget = number_argument("budget", budget, minimum=0.0, maximum=1.0, error=InputError)
    if answers is None:
        raise InputError(
            "rule 'gates' needs answers=, the tokens whose predictions must stay; see kvjax.analysis.passkeys."
        )
    return head_gates(model, tokens, answers, **options).heads(budget)


@functools.wraps(replay_scores)
def _replay(model: Model, tokens: ArrayLike, budget: float, **options: Any) -> np.ndarray:
    share = number_argument("budget", budget, minimum=0.0, maximum=1.0, error=InputError)
    scores = replay_scores(model, tokens, **options)
    chosen = np.zeros(scores.size, bool)
    # Rounded down, so that the heads take no more than their share.
    chosen[np.argsort(-scores, axis=None, kind="stable")[: int(share * scores.size + TIE)]] = True
    return chosen.reshape(scores.shape)


#: The rules that `budgets` takes.
RULES: dict[str, Callable[..., Any]] = {"density": _density, "entropy": _entropy, "gates": _gates, "replay": _replay}
