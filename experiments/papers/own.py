"""Policies and selections that only a paper's experiment needs: ``own:lightest`` in a cache's text."""

import ast
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax.errors import ConfigError
from kvjax.numerics.statistics import MASS
from kvjax.policies import (
    Importance,
    Policy,
    View,
    evict,
    last,
    mass,
    mean_mass,
    protect_newest,
    protect_varying,
    times_above,
    unprotected,
)
from kvjax.policies.budget import BudgetLike
from kvjax.policies.patterns import Uniform
from kvjax.selection.base import Columns, Index, SelectView
from kvjax.selection.choose import best, grouped_logits, rank
from kvjax.selection.oracle import Optimal

Array = jax.Array
PREFIX = "own:"


@dataclasses.dataclass(frozen=True)
class Lightness(Importance):
    """Ranks a slot by -S, so that the heaviest hitters are evicted first (H2O, Figure 2 c)."""

    needs = frozenset({"mass"})
    amount = False

    def score(self, stats: Mapping[str, Array], view: View) -> Array:
        return -stats["mass"]


def lightest(budget: BudgetLike) -> Policy:
    """Evicts the heaviest hitters first; the newest half of the budget is protected."""
    return evict(importance=Lightness(), scope=protect_newest(None), budget=budget, name="lightest")


def chance(budget: BudgetLike, seed: int = 0) -> Policy:
    """Evicts at random; the newest half of the budget is protected."""
    return evict(importance=Uniform(seed), scope=protect_newest(None), budget=budget, name="chance")


def ranked(budget: BudgetLike, by: str, protect: str) -> Policy:
    """Any importance with any scope of RoCo's Table 1.

    Args:
      budget: see `kvjax.policies.evict`.
      by: ``mass``, ``mean``, ``above`` or ``last``.
      protect: ``nothing``, ``window`` (the newest half of the budget) or ``deviation``.
    """
    importance = {"mass": mass, "mean": mean_mass, "above": times_above(), "last": last}[by]
    scope = {"nothing": unprotected, "window": protect_newest(None), "deviation": protect_varying()}[protect]
    return evict(importance=importance, scope=scope, budget=budget, name=f"{by}, {protect} protected")


@dataclasses.dataclass(frozen=True)
class TopKHeavy(Optimal):
    """Reads half of its slots by accumulated mass and half by the true probabilities (H2O, Table 8, "w.").

    Every token is kept. A slot that is not read receives no mass. Of odd n the larger half goes to probabilities.
    """

    name = "topk_heavy"
    in_prompt = True  # for the mass of the prompt's queries; the tokens of one block read each other anyway
    needs = frozenset({MASS})
    per_slot = frozenset({"mass"})

    def init(self, shape: tuple[int, int, int], dim: int, dtype: DTypeLike) -> Index:
        return {"mass": jnp.zeros(shape, jnp.float32)}

    def chosen(self, index: Index, query: Array, view: SelectView) -> Array:
        candidate = view.visible & ~view.new
        heavy = best(index["mass"], candidate, view.position, self.n // 2)
        # [B, K, G, S]
        score = grouped_logits(query, view.key, view.scale)
        # [B, K, S]
        worth = rank(score, candidate, normalise="probability", reduce="mean", visible=view.visible)
        rest = best(jax.lax.stop_gradient(worth), candidate & ~heavy, view.position, self.n - self.n // 2)
        return heavy | rest

    def settle(self, index: Index, columns: Columns, view: SelectView) -> Index:
        mass = index["mass"] + jax.lax.stop_gradient(columns["mass"])
        return {"mass": jnp.where(view.active, mass, index["mass"])}


def topk_heavy(n: int) -> TopKHeavy:
    """See `TopKHeavy`."""
    return TopKHeavy(n)


POLICIES: Mapping[str, Callable[..., Policy]] = {"lightest": lightest, "chance": chance, "ranked": ranked}
SELECTIONS: Mapping[str, Callable[..., TopKHeavy]] = {"topk_heavy": topk_heavy}


def build(text: str, known: Mapping[str, Callable[..., Any]], **more: Any) -> Any:
    """Builds what ``own:name(argument=value)`` names.

    Args:
      text: of one part of a cache.
      known: factories by name.
      more: further arguments.

    Raises:
      ConfigError: an unknown name.
    """
    node = ast.parse(text.removeprefix(PREFIX), mode="eval").body
    name, given = (node.func, node.keywords) if isinstance(node, ast.Call) else (node, [])
    assert isinstance(name, ast.Name)
    if name.id not in known:
        raise ConfigError(f"unknown {text!r}; known: {', '.join(PREFIX + each for each in known)}.")
    return known[name.id](**more, **{str(each.arg): ast.literal_eval(each.value) for each in given})
