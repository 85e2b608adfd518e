"""What else H2O's authors released as H2O (arXiv:2306.14048), beside the "real drop" that the paper describes.

ring    the FlexGen port, for odd budgets b = 2k - 1: the k heaviest and a ring of the k - 1 newest, whose oldest
        moves up when a heavy one goes
masked  their evaluation code: everything is kept, and a query sees the allowed set alone
global  their first release: one heavy set a head from all the text's queries, later ones too. Not causal
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.base import Mask, Policy, Scope, Stats, View
from kvjax.selection import largest
from kvjax.statistics import Observation

Array = jax.Array


def _heavy_slots(budget: int) -> int:
    if budget % 2 == 0:  # a fraction's too: each row's own
        raise PolicyError(
            f"h2o: variant='ring' holds k heavy slots and k - 1 of its ring; a budget of {budget} is even, give "
            f"{budget - 1} or {budget + 1}."
        )
    return (budget + 1) // 2


#: A prompt protects its k - 1 newest; while decoding, the token that comes takes the place of the ring's oldest, which
#: has not joined the heavy ones yet when their lowest goes: k are safe.
ring = Scope(
    frozenset(),
    lambda stats, view: view.recent(view.budget // 2 + int(view.decoding)),
    _heavy_slots,
    in_kernel=True,
)


def _evaluation(recent: Callable[[View], Array]) -> Mask:
    """The allowed set of the next step: the newest, and the heaviest of those that are older than these."""

    def settle(stats: Stats, view: View) -> Stats:
        newest = recent(view)
        # The token to come is one of the newest: of those that are here one less is.
        near = view.live & view.recent(newest - 1)
        older = jnp.where(view.recent(newest), -1, view.position)
        heavy = largest(stats["mass"], older, (view.budget - newest)[:, None, None])
        # Who just leaves the window keeps its score, invisible for one step, and then competes.
        scored = heavy | view.recent(newest)
        return {"mass": jnp.where(scored, stats["mass"], 0.0), "allowed": near | heavy}

    return Mask(visible=lambda stats, view: stats["allowed"], settle=settle)


def _hindsight(recent: Callable[[View], Array]) -> Mask:
    """The heaviest of the whole text, and a band of the newest before each query."""

    def heavy(stats: Stats, view: View) -> Array:
        return largest(stats["mass"], view.position, (view.budget - recent(view))[:, None, None])

    return Mask(visible=heavy, band=recent)


MASKS = {"masked": _evaluation, "global": _hindsight}
VARIANTS = ("drop", "ring", *MASKS)


def masked(policy: Policy, mask: Callable[[Callable[[View], Array]], Mask], recent: int | None) -> Policy:
    """The policy, hiding what it would evict."""
    # Everything is live, so that ranks are positions, and "cache" is "original".
    if policy.merge is not None:
        raise PolicyError(f"policy {policy.name}: it evicts nothing that could be merged; leave out merge.")

    def observe(stats: Stats, observation: Observation) -> Stats:
        return stats | policy.observe(stats, observation)

    return policy._replace(
        init=lambda shape: policy.init(shape) | {"allowed": jnp.zeros(shape, bool)},
        observe=observe,
        mask=mask(lambda view: view.budget // 2 if recent is None else jnp.full_like(view.budget, recent)),
        importance=None,
        scope=None,
    )
