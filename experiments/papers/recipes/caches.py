"""Caches as text, with arrays that several budgets share."""

import dataclasses

from experiments import config as configs
from experiments import specs
from experiments.config import ExperimentConfig, PolicyConfig
from experiments.papers import own
from experiments.papers.settings import Settings
from kvjax.cache import CacheSpec
from kvjax.policies import Evict, Fraction, Slots, padded
from kvjax.specs import parse

HALF = 0.5  # a tier of its own


def exact_spec(cache: str, budget: int | float, seed: int = 0) -> CacheSpec:
    """The cache that a text describes, with arrays of exactly its budget.

    Args:
      cache: see `experiments.papers.parts.Cached`.
      budget: of its policy.
      seed: of a policy that draws.

    Raises:
      KvjaxError: no such cache.
    """
    policy, *others = (part.strip() for part in cache.split(configs.JOINED))
    if policy.startswith(own.PREFIX):
        return CacheSpec(own.build(policy, own.POLICIES, budget=budget))
    if others and others[0].startswith(own.PREFIX):
        return CacheSpec(parse.build("policy", policy), selection=own.build(others[0], own.SELECTIONS))
    if seed and policy == "random":
        cache = cache.replace("random", f"random(seed={seed})", 1)
    return specs.baseline(ExperimentConfig(policy=PolicyConfig(name="full", budget=budget)), cache)


def build(cache: str, budget: int | float, settings: Settings, prompt: int) -> CacheSpec:
    """The cache that a text describes, with arrays for the smallest tier that holds its budget.

    What it computes is that of `exact_spec`.

    Args:
      cache: see `experiments.papers.parts.Cached`.
      budget: of its policy.
      settings: of the run.
      prompt: tokens of the longest prompt.

    Raises:
      KvjaxError: no such cache.
    """
    spec = exact_spec(cache, budget, settings.seed)
    given = spec.policy.budget
    if not isinstance(spec.policy, Evict) or not isinstance(given, Fraction | Slots):
        return spec
    slots = given.slots(prompt, 1)[0]
    # Arrays of twice the slots take twice the time; programs matter more in a trial.
    tiers = settings.scale.tiers if settings.scale.trial else sorted({*settings.scale.tiers, HALF})
    tier = next((each for each in tiers if slots <= each * prompt), None)
    if tier is None:
        return spec
    return dataclasses.replace(spec, policy=padded(spec.policy, tier))


def takes(cache: str, argument: str) -> bool:
    """Whether a policy as text has an argument."""
    return argument in parse.accepts("policy", cache)
