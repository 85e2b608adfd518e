"""Variants of H2O in its authors' code (arXiv:2306.14048), which keep every token and hide some from each query.

Each variant has a budget b: r slots for the newest positions, including the query's own, and h = b - r for heavy
hitters. They are for evaluation: no memory is freed. Build them with ``h2o(budget, variant=...)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.arguments import count_argument
from kvjax.errors import SelectionError
from kvjax.numerics.soft_cap import soft_capped
from kvjax.numerics.statistics import MASS
from kvjax.policies.base import Policy, fixed_slots
from kvjax.policies.budget import Budget, as_budget
from kvjax.policies.traits import evicting, is_split
from kvjax.selection.base import Columns, Index, Selection, SelectView
from kvjax.selection.checks import named
from kvjax.selection.choose import best, softmax

if TYPE_CHECKING:
    from kvjax.kernels.problem import Problem
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Variant(Selection):
    """Base class of the variants.

    Attributes:
      budget: slots per KV head for heavy hitters and recent positions: a number, a fraction of each row's prompt, or
        one of these per layer.
      recent: the number of newest positions; None = half of each row's own budget, ⌊b/2⌋.

    Raises:
      SelectionError: an attribute that is not valid.
    """

    budget: Budget
    recent: int | None = None

    def __post_init__(self) -> None:
        with named(self.name):
            budget = self.budget if isinstance(self.budget, Budget) else as_budget(self.budget)
            if budget is None:
                raise SelectionError("budget=None hides nothing; give slots or a fraction of the prompt.")
            object.__setattr__(self, "budget", budget)
            if self.recent is not None:
                object.__setattr__(self, "recent", count_argument("recent", self.recent))
        for slots in fixed_slots(budget):
            self.check_slots(slots)

    def check_slots(self, slots: int) -> None:
        if self.recent is not None and self.recent > slots:
            raise SelectionError(
                f"selection {self.name}: recent={self.recent} is more than its budget of {slots} slots; raise the "
                f"budget to at least {self.recent} or lower recent."
            )

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        if is_split(policy):
            return (
                f"it keeps every token of every head and layer, and the policy {policy.name} splits them; use full()."
            )
        # Nothing is evicted, so that ranks are positions, and positions="cache" is the same as "original".
        name = evicting(policy)
        return name and f"it keeps every token, and the policy {name} evicts; use full()."

    def shares(self, budget: Array) -> tuple[Array, Array]:
        """Splits each row's budget [B] into recent positions and heavy hitters, [B] int32 each."""
        recent = budget // 2 if self.recent is None else jnp.full_like(budget, self.recent)
        return recent, budget - recent


@dataclasses.dataclass(frozen=True)
class Allowed(Variant):
    """H2O's evaluation code, ``masked``: a query sees the slots that the previous step allowed.

    Each step allows the r newest positions of the next step, and of the positions older than the r newest of this step
    the h of largest mass. The mass of a position that is neither allowed nor one of the r newest becomes 0. A token
    that leaves the window is therefore not seen for one step, and then ranked by its mass.
    """

    name = "h2o[masked]"
    in_prompt = True
    needs = frozenset({MASS})
    per_slot = frozenset({"mass", "allowed"})

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {"mass": jnp.zeros(shape, jnp.float32), "allowed": jnp.zeros(shape, bool)}

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        return index["allowed"] & view.visible & ~view.new

    def always(self, index: Index, view: SelectView) -> Array:
        return view.new

    def settle(self, index: Index, columns: Columns, view: SelectView) -> Index:
        recent, heavy = self.shares(view.budget)
        mass = index["mass"] + jax.lax.stop_gradient(columns["mass"])
        present = view.recent(recent)
        # The next token is one of the newest of the next step.
        near = view.live & view.recent(recent - 1)
        best_older = best(mass, view.live & ~present, view.position, heavy[:, None, None])
        settled = {
            "mass": jnp.where(best_older | present, mass, 0.0),
            "allowed": near | best_older,
        }
        # A row without a token in this step is unchanged.
        return {name: jnp.where(view.active, settled[name], index[name]) for name in index}


@dataclasses.dataclass(frozen=True)
class Hindsight(Variant):
    """H2O's first release, ``global``: one heavy set per KV head, of the largest mass over all queries of a text.

    A query sees the heavy set up to its own position, and its r newest positions. The heavy set is not causal: this is
    an upper reference. The released code's band is ``|i - j| <= R``, where R = r - 1.
    """

    name = "h2o[global]"
    whole_text = True
    needs = frozenset({MASS})

    def attend_text(self, attend: Callable[[Problem], Any], problem: Problem, view: SelectView) -> Array:
        _, columns = attend(problem)
        recent, heavy = self.shares(view.budget)
        mass = jax.lax.stop_gradient(columns["mass"])
        exempt = best(mass, view.live, view.position, heavy[:, None, None])
        attended, _ = attend(problem.without_statistics().replace(band=recent, exempt=exempt))
        return attended.output.astype(problem.value.dtype)


@dataclasses.dataclass(frozen=True)
class Local(Variant):
    """H2O's lm-eval code, ``local``: a heavy set for every query of a text, from the queries before it.

    The first h queries see every token before them. Query t ≥ h sees its r newest positions and a heavy set: itself and
    the h - 1 tokens of largest A in the heavy set of the query before (of equal A, the newer). A is the sum of the
    probabilities, in a softmax over all earlier tokens, of the queries since the token joined. For r see `Hindsight`.
    """

    name = "h2o[local]"
    whole_text = True

    def attend_text(self, attend: Callable[[Problem], Any], problem: Problem, view: SelectView) -> Array:
        position = problem.key_position
        key, value = (x.astype(jnp.float32) for x in problem.arrays())
        recent, heavy = (each[:, None, None] for each in self.shares(view.budget))

        def one_query(carry: tuple[Array, Array], inputs: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            total, kept = carry  # A, and the heavy set of the query before: [B, K, S] float32 and bool
            query, at = inputs  # [B, K, G, D] and [B]; -1 = padding
            at = at[:, None, None]
            own = (position == at) & (at >= 0)
            visible = (position >= 0) & (position <= at)
            if problem.window is not None:
                visible &= position > at - problem.window
            # [B, K, G, S]
            logits = problem.scale * _product("bkgd,bksd->bkgs", query.astype(jnp.float32), key)
            logits = soft_capped(logits, problem.soft_cap)
            dense = jax.lax.stop_gradient(softmax(logits, visible[:, :, None]))
            # [B, K, S]
            paid = jnp.mean(dense, axis=2) if problem.group_reduce == "mean" else jnp.max(dense, axis=2)
            room = jnp.where(at < heavy, position.shape[2], heavy - 1)
            stay = best(total, kept, position, room) | own
            seen = visible & (stay | (position > at - recent))
            output = _product("bkgs,bksd->bkgd", softmax(logits, seen[:, :, None]), value)
            # A is not read again for tokens outside of the heavy set.
            settled = total + paid, stay
            return jax.tree.map(lambda new, old: jnp.where(at >= 0, new, old), settled, carry), output

        start = jnp.zeros(position.shape, jnp.float32), jnp.zeros(position.shape, bool)
        queries = jnp.moveaxis(problem.query, 3, 0), problem.query_position.T
        _, outputs = jax.lax.scan(one_query, start, queries)
        return jnp.moveaxis(outputs, 0, 3).astype(problem.value.dtype)


def _product(formula: str, left: Array, right: Array) -> Array:
    """Multiplies in full float32; by default, GPUs and TPUs multiply in fewer bits."""
    return jnp.einsum(formula, left, right, precision=jax.lax.Precision.HIGHEST)
