"""Policies declare whether they rank by keys and values: a step does not decode what no policy reads."""

import jax
import jax.numpy as jnp
import pytest

from kvjax import policies
from kvjax.policies import Evict
from kvjax.policies.components import KeyFrame
from tests.parameters import of_layer
from tests.policies.test_values import VALUES

B, K, S, D = 2, 2, 12, 4


def evicting(value):
    """The eviction policies in a value of `VALUES`."""
    match value:
        case Evict():
            return [value]
        case policies.Phases():
            return [value.prompt, value.decode]
        case policies.Split():
            return [value.chosen, value.others]
        case policies.SplitLayers():
            return [each for own in value.policies for each in evicting(own)]
        case policies.WithSelection():
            return [value.keep]
    return []


POLICIES = {f"{name}, {i}": each for name, value in VALUES.items() for i, each in enumerate(evicting(value))}
MERGING = [name for name, policy in POLICIES.items() if policy.merge is not None]


def used(function, policy):
    """Which of the view's key and value the result of `function(stats, view)` depends on."""
    stats = {each.name: each.empty((B, K, S)) for each in policy.needs}
    stats |= {name: jnp.zeros((B, K, S)) for name in policy.remembers}
    position, rows = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, K, S)), jnp.full(B, 8, jnp.int32)

    memory = {each.name: each.bound(S, 2).empty((B, K, 2), D) for each in policy.memory}
    params = of_layer(policy.params, policies.ModelSizes(K, 2, D, 8, D), 0)

    def traced(key, value):
        newest = jnp.full(B, S - 1, jnp.int32)
        view = policies.View(position, key, value, newest, rows, rows, 0, True, None, KeyFrame(), memory, params=params)
        return function(stats, view._replace(priority=jnp.zeros((B, K, S))))

    jaxpr = jax.make_jaxpr(traced)(*(jnp.zeros((B, K, S, D)),) * 2).jaxpr
    live = {id(each) for each in jaxpr.outvars}
    for equation in reversed(jaxpr.eqns):
        if any(id(each) in live for each in equation.outvars):
            live |= {id(each) for each in equation.invars}
    return {name for name, each in zip(("key", "value"), jaxpr.invars, strict=True) if id(each) in live}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", POLICIES)
def test_what_ranking_reads_is_declared(name):
    policy = POLICIES[name]
    assert used(policy.importance.score, policy) == policy.importance.reads
    assert used(policy.scope.protected, policy) == policy.scope.reads
    limited = set() if policy.budget is None else used(policy.limit, policy)
    assert used(policy.priority, policy) | limited == policy.reads


@pytest.mark.parametrize("name", MERGING)
def test_a_merge_takes_keys_and_values_as_arguments(name):
    """And none from the view, whatever ranking reads."""
    policy, slots = POLICIES[name], jnp.ones((B, K, S, D))
    victim = jnp.zeros((B, K, S), bool).at[:, :, 1].set(True)
    assert not used(lambda stats, view: policy.merge.fold(slots, slots, victim, stats, view, 1), policy)


@pytest.mark.parametrize("reads", [(), ("key",), ("value",), ("key", "value")])
def test_what_is_not_declared_would_be_seen(reads):
    def score(stats, view):
        return sum((getattr(view, name)[..., 0] for name in reads), jnp.zeros((B, K, S)))

    importance = policies.Importance(needs=set(), score=score, reads=frozenset())
    assert used(policies.evict(importance=importance, budget=8).priority, policies.h2o(8)) == set(reads)


def test_every_importance_and_scope_has_an_example():
    def kinds(value):
        yield type(value)
        for each in vars(value).values():
            if isinstance(each, (Evict, policies.Importance, policies.Scope)):
                yield from kinds(each)

    found = {kind for policy in POLICIES.values() for kind in kinds(policy)}
    for base in (policies.Importance, policies.Scope):
        classes = {each for each in vars(policies).values() if isinstance(each, type) and issubclass(each, base)}
        assert classes - {base} <= found
