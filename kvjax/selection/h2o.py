"""What else H2O's authors released as H2O (arXiv:2306.14048): everything is kept, and a query reads some of it.

Each variant has a budget b, of which r slots are for the newest positions, a query's own included, and h = b - r for
heavy hitters. They are for evaluation: no memory is freed. Build them with ``h2o(budget, variant=...)``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import SelectionError
from kvjax.policies.base import Policy, count_argument, fixed_slots
from kvjax.policies.budget import Budget, as_budget
from kvjax.policies.heads import Split
from kvjax.selection.base import Columns, Index, Selection, SelectView
from kvjax.selection.checks import named, phases
from kvjax.selection.choose import best, softmax
from kvjax.statistics import MASS

if TYPE_CHECKING:
    from kvjax.kernels.problem import Problem
    from kvjax.storage.base import Storage

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Variant(Selection):
    """What the variants have in common.

    Attributes:
      budget: slots per KV head, heavy hitters and recent positions together: a number, a fraction of each row's prompt,
        or one of these per layer.
      recent: the number of newest positions; None = half of each row's own budget, ⌊b/2⌋.
    """

    budget: Budget
    recent: int | None = None

    def __post_init__(self) -> None:
        with named(self.name):
            budget = as_budget(self.budget)
            if budget is None:
                raise SelectionError(
                    f"selection {self.name}: without a budget it hides nothing; give slots or a fraction of the prompt."
                )
            object.__setattr__(self, "budget", budget)
            if self.recent is not None:
                object.__setattr__(self, "recent", count_argument("recent", self.recent))
        for slots in fixed_slots(budget):
            self.check_slots(slots)

    def check_slots(self, slots: int) -> None:
        if self.recent is not None and self.recent > slots:
            raise SelectionError(
                f"selection {self.name}: recent={self.recent} is more than its budget of {slots} slots; raise the "
                f"budget to at least {self.recent} or give fewer."
            )

    def refuses(self, policy: Policy, storage: Storage | None = None, *, positions: str = "original") -> str | None:
        if isinstance(policy, Split):
            return f"it keeps every token of every head, and the policy {policy.name} splits the heads; use full()."
        # Nothing is evicted, so that ranks are positions: positions="cache" is the same as "original".
        name = next((each.name for each in phases(policy) if each.budget is not None), None)
        return name and f"it keeps every token, and the policy {name} evicts; use full()."

    def shares(self, budget: Array) -> tuple[Array, Array]:
        """Recent positions and heavy hitters of each row, [B] int32 both, for its budget [B]."""
        recent = budget // 2 if self.recent is None else jnp.full_like(budget, self.recent)
        return recent, budget - recent


@dataclasses.dataclass(frozen=True)
class Allowed(Variant):
    """``masked``, their evaluation code: a query sees the slots that were allowed after the step before.

    After each step the r newest positions are allowed for the next, the token to come counted among them, and of the
    positions older than the r newest present the h of largest mass. The mass of what is neither allowed nor among the r
    newest present becomes 0: a token that leaves the window is not seen for one step and then competes with its mass.
    """

    name = "h2o[masked]"
    in_prompt = True
    needs = frozenset({MASS})

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
        # The token to come is one of the newest: of those that are here one less is.
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
    """``global``, their first release: one heavy set per KV head, of the largest mass that all queries of a text pay.

    A query sees the heavy set up to its own position, and its r newest positions. Not causal: an upper reference. The
    released code's band is ``|i - j| <= R`` with the query's own token on top: its R is r - 1.
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
    """``local``, their lm-eval code: a heavy set for every query of a text, from the queries before it.

    The first h queries see every token before them. Query t ≥ h sees its r newest positions and a heavy set: itself and
    the h - 1 tokens of largest A among the heavy set of the query before (equal: the newer). A is the sum of the
    probabilities, over all earlier tokens, that queries paid a token since it joined. The band is as in `Hindsight`.
    """

    name = "h2o[local]"
    whole_text = True

    def attend_text(self, attend: Callable[[Problem], Any], problem: Problem, view: SelectView) -> Array:
        position = problem.key_position
        key, value = problem.key.astype(jnp.float32), problem.value.astype(jnp.float32)
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
            dense = jax.lax.stop_gradient(softmax(logits, visible[:, :, None]))
            # [B, K, S]
            paid = jnp.mean(dense, axis=2) if problem.group_reduce == "mean" else jnp.max(dense, axis=2)
            room = jnp.where(at < heavy, position.shape[2], heavy - 1)
            stay = best(total, kept, position, room) | own
            seen = visible & (stay | (position > at - recent))
            output = _product("bkgs,bksd->bkgd", softmax(logits, seen[:, :, None]), value)
            # A of what is not in the heavy set is never looked at again.
            settled = total + paid, stay
            return jax.tree.map(lambda new, old: jnp.where(at >= 0, new, old), settled, carry), output

        start = jnp.zeros(position.shape, jnp.float32), jnp.zeros(position.shape, bool)
        queries = jnp.moveaxis(problem.query, 3, 0), problem.query_position.T
        _, outputs = jax.lax.scan(one_query, start, queries)
        return jnp.moveaxis(outputs, 0, 3).astype(problem.value.dtype)


def _product(formula: str, left: Array, right: Array) -> Array:
    """A product in full float32: left alone, GPUs and TPUs would multiply fewer bits."""
    return jnp.einsum(formula, left, right, precision=jax.lax.Precision.HIGHEST)
