"""The caches and the codes of weights that configs of experiments describe."""

import dataclasses
from typing import Any

from experiments.config import DENSE, EVERYTHING, JOINED, ExperimentConfig, ModelConfig, PolicyConfig
from kvjax.cache import CacheSpec
from kvjax.errors import ConfigError, KvjaxError
from kvjax.models.quantize import WeightCodes
from kvjax.policies import Fraction, Policy
from kvjax.specs import parse

STORED = "stored"  # weights as the codes that the checkpoint has
PLAIN: dict[parse.Axis, str] = {"storage": DENSE, "selection": EVERYTHING}


def build_policy(config: PolicyConfig, least_slots: int | None = None) -> Policy:
    """The policy that a config describes.

    Args:
      config: a policy and its settings.
      least_slots: what a budget that is a fraction keeps of short contexts; None = the fraction.

    Raises:
      PolicyError, ConfigError: an unknown policy, a setting that it does not take, or values that cannot work.
    """
    accepted = parse.accepts("policy", config.name)
    given = {key: value for key, value in dataclasses.asdict(config).items() if value is not None and key != "name"}
    # Every config carries a budget; `full` has no use for one.
    ignored = {"budget"} - accepted
    if refused := sorted(given.keys() - accepted - ignored):
        setting = f"policy.{refused[0]}={given[refused[0]]!r}"
        raise ConfigError(f"policy {config.name} does not take {setting}; it takes {', '.join(sorted(accepted))}.")
    taken = {key: value for key, value in given.items() if key in accepted}
    if least_slots is not None and isinstance(taken.get("budget"), float):
        taken["budget"] = Fraction(taken["budget"], min_slots=least_slots)
    policy: Policy = parse.build("policy", config.name, **taken)
    return policy


def build_spec(config: ExperimentConfig, least_slots: int | None = None) -> CacheSpec:
    """The policy, the storage and the selection that a config describes. `least_slots`: see `build_policy`.

    Raises:
      KvjaxError: as `build_policy`, or the same of a storage or a selection.
    """
    storage, selection = (parse.build(axis, getattr(config, axis)) for axis in ("storage", "selection"))
    return CacheSpec(build_policy(config.policy, least_slots), storage, selection)


def build_weights(config: ModelConfig) -> WeightCodes | None:
    """Returns the codes that weights are quantised to; None if they stay exact, or as the checkpoint has them.

    Raises:
      ConfigError: an unknown name, or values that cannot work.
    """
    if config.weights in (None, STORED):
        return None
    codes: WeightCodes = parse.build("weights", config.weights)
    return codes


def name_of(config: ExperimentConfig) -> str:
    """Returns the name of the config's policy in reports, with a storage and a selection that are no defaults."""
    try:
        return build_spec(config).name
    except KvjaxError:
        others = (text for text in (config.storage, config.selection) if text not in (DENSE, EVERYTHING))
        return JOINED.join((config.policy.name, *others))


def baseline(config: ExperimentConfig, text: str, least_slots: int | None = None) -> CacheSpec:
    """A cache to compare with: ``h2o``, or with a storage, a selection or both, ``full + int8 + quest(budget=64)``.

    Its policy has the config's own budget and positions, and is otherwise as the text has it. `least_slots`: see
    `build_policy`.

    Raises:
      KvjaxError: as `build_spec`; also a part that is neither a storage nor a selection.
    """
    name, *others = (part.strip() for part in text.split(JOINED))
    found: dict[parse.Axis, Any] = {}
    for part in others:
        axis = parse.axis_of(part, ("storage", "selection"))
        if axis in found:
            raise ConfigError(f"{text!r} has two parts that are a {axis}; give one of each.")
        found[axis] = parse.build(axis, part)
    defaults = {axis: parse.build(axis, plain) for axis, plain in PLAIN.items()}
    return CacheSpec(build_policy(_policy(config, name), least_slots), **(defaults | found))


def _policy(config: ExperimentConfig, name: str) -> PolicyConfig:
    """A policy to compare with: the same budget and positions, everything else its default."""
    if name == config.policy.name:
        return config.policy
    accepted = parse.accepts("policy", name)
    shared = {key: getattr(config.policy, key) for key in ("budget", "positions") if key in accepted and name != "full"}
    return PolicyConfig(name=name, **shared)
