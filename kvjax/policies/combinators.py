"""Policies made of policies."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvjax.errors import PolicyError
from kvjax.policies.base import Policy, Scope, Stats, View, check, compress, evict, exact, memoized, number_argument
from kvjax.policies.h2o import mass
from kvjax.selection import largest
from kvjax.statistics import Observation

Array = jax.Array


@memoized
def with_heavy_hitters(policy: Policy, *, fraction: float = 0.5) -> Policy:
    """`policy` keeps its best b - ⌊fraction·b⌋ slots, and of the others those of largest S stay (H2O, Tables 1 and 8).

    Args:
      policy: an eviction policy; it ranks under the whole budget b, so that a `local` or `recent` of ⌊b/2⌋ can take all
        that it keeps: give it a number of its own.
      fraction: of each row's budget, for heavy hitters.

    Raises:
      PolicyError: a fraction outside [0, 1], a policy that evicts nothing, or one that protects more than it keeps.
    """
    policy = _one_head_at_a_time("with_heavy_hitters", policy)
    if policy.importance is None:
        raise PolicyError(f"with_heavy_hitters({policy.name}): its statistics are its own; give a policy of `evict`.")
    if policy.then is not None:
        raise PolicyError(f"with_heavy_hitters({policy.name}): it is for prompts only; give an eviction policy.")
    share = exact(number_argument("fraction", fraction, minimum=0.0, maximum=1.0))

    def best(budget: int) -> int:
        kept = budget - share.numerator * budget // share.denominator
        if policy.protects(budget) > kept:
            raise PolicyError(
                f"with_heavy_hitters({policy.name}): the policy protects {policy.protects(budget)} slots, but keeps "
                f"{kept} of a budget of {budget} beside fraction={fraction:g} of heavy hitters."
            )
        return kept

    def protected(stats: Mapping[str, Array], view: View) -> Array:
        priority = policy.priority({s.name: stats[s.name] for s in policy.needs}, view)
        kept = view.budget - view.budget * share.numerator // share.denominator
        return largest(jnp.where(jnp.isnan(priority), -jnp.inf, priority), view.position, kept[:, None, None])

    in_kernel = policy.importance.in_kernel and policy.scope is not None and policy.scope.in_kernel
    return evict(
        importance=mass,
        scope=Scope(policy.needs, protected, best, in_kernel=in_kernel),
        budget=policy.budget,
        positions=policy.positions,
        group_reduce=policy.group_reduce,
        merge=policy.merge,
        name=f"{policy.name}+heavy",
    )


@memoized
def value_norm(policy: Policy) -> Policy:
    """A policy or compressor whose importance is multiplied by ‖v‖_2 of the slot's value (arXiv:2406.12335, eq. 4).

    VATP takes ‖v‖_1, and its code protects the first tokens; here it is ‖v‖_2, and protection is the policy's.

    Raises:
      PolicyError: a policy whose importance is an order and not an amount (`strided`, `fixed`), whose heads share it
        (`tova`, unless ``share_heads=False``), or that is not made by `evict`.
    """
    policy = _one_head_at_a_time("value_norm", policy)
    importance = policy.importance
    if importance is None or not importance.amount:
        raise PolicyError(
            f"value_norm({policy.name}): its importance says who goes first and not by how much; there is nothing to "
            "multiply. Policies such as h2o, roco or scissorhands have amounts."
        )

    def score(stats: Stats, view: View) -> Array:
        norm = jnp.sqrt(jnp.sum(jnp.square(view.value.astype(jnp.float32)), axis=-1))
        return importance.score(stats, view) * norm

    make = functools.partial(evict, merge=policy.merge) if policy.then is None else compress
    return make(
        importance=importance._replace(score=score, in_kernel=False),
        scope=policy.scope,
        budget=policy.budget,
        positions=policy.positions,
        group_reduce=policy.group_reduce,
        name=f"{policy.name}*|v|",
    )


@memoized
def after_prefill(compressor: Policy, *, then: Policy) -> Policy:
    """`compressor` shortens the prompt once, and `then` goes on with its own budget, having observed the prompt too.

    Args:
      compressor: such as snapkv(budget=256); it appends without evicting if left alone.
      then: an eviction policy; what it protects, it protects from the first new token on.

    Raises:
      PolicyError: a compressor that is none, a `then` that is one, two that place or reduce attention differently, or a
        `then` whose heads must hold the same positions.
    """
    for policy in (compressor, then):
        if not isinstance(policy, Policy):
            raise PolicyError(f"after_prefill(): {policy!r} is not a policy; give one such as snapkv(budget=256).")
    compressor, then = check(compressor), check(then)
    if compressor.then is None:
        raise PolicyError(
            f"after_prefill({compressor.name}): it evicts at every step; give a compressor of prompts such as snapkv."
        )
    if then.mask is not None:
        raise PolicyError(
            f"after_prefill(then={then.name}): it hides slots and evicts none; give a policy that evicts."
        )
    if then.parts:
        raise PolicyError(f"after_prefill(then={then.name}): its heads have caches of their own; use it by itself.")
    if then.then is not None:
        raise PolicyError(f"after_prefill(then={then.name}): it is for prompts only; give an eviction policy.")
    for field in ("positions", "group_reduce"):
        one, two = getattr(compressor, field), getattr(then, field)
        if one != two and (field == "positions" or (compressor.needs and then.needs)):
            raise PolicyError(
                f"after_prefill({compressor.name}, then={then.name}): {field} {one!r} and {two!r} differ; "
                "both share one cache and one attention."
            )
    if then.importance is not None and then.importance.aligned:
        raise PolicyError(
            f"after_prefill({compressor.name}, then={then.name}): its heads must all hold the same positions, and a "
            "compressor leaves each its own; use one that ranks every head by itself, such as tova(share_heads=False)."
        )

    def observe(stats: Stats, observation: Observation) -> Stats:
        return {
            "prompt": compressor.observe(stats["prompt"], observation),
            "then": then.observe(stats["then"], observation),
        }

    limits = compressor.limits
    return compressor._replace(
        init=lambda shape: {"prompt": compressor.init(shape), "then": then.init(shape)},
        observe=observe,
        priority=lambda stats, view: compressor.priority(stats["prompt"], view),
        limits=None if limits is None else lambda stats, view: limits(stats["prompt"], view),
        needs=compressor.needs | then.needs,
        group_reduce=compressor.group_reduce if compressor.needs else then.group_reduce,
        name=f"{compressor.name}>{then.name}",
        hand_over=lambda stats: stats["then"],
        importance=None,
        scope=None,
        # Its budget may be smaller than what the compressor leaves.
        then=then._replace(shrinks=True),
    )


def _one_head_at_a_time(name: str, policy: Policy) -> Policy:
    if not isinstance(policy, Policy):
        raise PolicyError(f"{name}(): {policy!r} is not a policy; give one such as h2o(budget=256).")
    if policy.parts:
        raise PolicyError(f"{name}({policy.name}): its heads are under policies of their own; apply it to these.")
    if policy.budget is None:
        raise PolicyError(f"{name}({policy.name}): a policy that keeps every token has nothing to choose.")
    if policy.mask is not None:
        raise PolicyError(f"{name}({policy.name}): it hides slots and evicts none; give a policy that evicts.")
    if policy.importance is not None and policy.importance.aligned:
        raise PolicyError(
            f"{name}({policy.name}): its heads must all hold the same positions, and here each would choose its own; "
            "use one that ranks every head by itself, such as tova(share_heads=False)."
        )
    return check(policy)
