"""A decoding step of every policy that evicts while decoding, on the same slots."""

import jax
import numpy as np
from absl import flags

from experiments.bench.contestants import in_turns, ours, random_model, random_prompt, ratio, shape
from kvjax import policies
from kvjax.models.calibrate import calibrate, calibrated
from kvjax.models.config import model_sizes
from kvjax.models.model import Model
from kvjax.policies import Policy
from kvjax.policies.traits import one_at_every_step, parameters_of
from kvjax.training import calibration_of
from kvjax.typing import JsonObject

EVERY = 64  # slots that a round evicts, where a policy has no default
ROTATING = ("triattention",)  # policies of models with a rotary embedding


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Times in milliseconds a step."""
    rounds, tokens, budget = values.rounds, values.tokens, values.slots
    prompt_length = budget + 1
    config = shape(values.shape or "opt-125m")
    model = random_model(config, prompt_length + (rounds + 1) * tokens, values.dtype)
    prompt = random_prompt(config, values.batch or 1, prompt_length)
    sides = {
        name: ours(with_parameters(model, policy, prompt), prompt, policy, tokens, implementation=values.implementation)
        for name, policy in evicting(budget, config.learned_positions).items()
    }
    times = in_turns(sides, rounds)
    return [
        {
            "policy": name,
            "slots": budget,
            "ms/step": 1e3 * float(np.median(each)),
            "times h2o": ratio(each, times["h2o"]),
        }
        for name, each in times.items()
    ]


def with_parameters(model: Model, policy: Policy, tokens: np.ndarray) -> Model:
    """Returns the model with the parameters of a policy, of a text of random tokens; trained ones are random."""
    own = parameters_of(policy)
    if not own:
        return model
    if not any(each.trained for each in own):
        return calibrated(model, policy, calibrate(model, tokens, policy))
    (trained,) = own
    keys = jax.random.split(jax.random.key(0), model.config.num_layers)
    layers = [trained.initial(key, model_sizes(model.config)) for key in keys]
    return calibrated(model, policy, calibration_of(model, trained, layers))


def evicting(budget: int, learned_positions: bool) -> dict[str, Policy]:
    """Policies by name, h2o first; those that rotate keys by rank need a model that rotates."""
    names = ["h2o", *(name for name in policies.POLICIES if name not in ("h2o", "full"))]
    # What has no default.
    needed = {
        "strided": {"stride": 4}, "fixed": {"block": min(64, budget // 2), "columns": min(8, budget // 8)},
        "lazy": {"every": 16}, "ladder": {"span": 1, "every": 16}, "vase": {"every": 16}, "vase_dkv": {"every": 16},
    }  # fmt: skip
    built = {name: policies.by_name(name, budget=budget, **needed.get(name, {})) for name in names}
    made = {
        name: policy
        for name, policy in built.items()
        if one_at_every_step(policy) and not (learned_positions and (policy.positions == "cache" or name in ROTATING))
    }
    # Compressors that evict in rounds if `every` is given, scores of another policy, and the control of scores.
    rounds = {name: policies.by_name(name, budget=budget, every=EVERY) for name in ("lagkv", "leverage")}
    if not learned_positions:
        rounds |= {
            name: policies.by_name(name, budget=budget, every=EVERY) for name in ("expected_attention", "qfilters")
        }
    made |= {f"{name}(every={EVERY})": policy for name, policy in rounds.items()}
    for combine in (policies.caote, policies.critical, policies.value_aware):
        made[f"{combine.__name__}(h2o)"] = combine(made["h2o"])
    made[f"random(every={EVERY})"] = policies.random(budget, every=EVERY)
    made["scissorhands, history 400"] = policies.scissorhands(budget=budget, history=400)
    made["value_norm(h2o)"] = policies.value_norm(made["h2o"])
    made["with_heavy_hitters(window)"] = policies.with_heavy_hitters(made["window"])
    merged = {f"h2o(merge={name})": policies.h2o(budget=budget, merge=m()) for name, m in policies.MERGES.items()}
    return made | merged
