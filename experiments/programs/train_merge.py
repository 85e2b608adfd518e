"""Trains the parameters of a policy's merge; see `experiments.train_merge`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import specs
from experiments.config import ExperimentConfig
from experiments.progress import print_status
from experiments.training.config import files
from experiments.tuning import comparison, parameters, training_run
from experiments.tuning.merge_config import TrainMergeConfig, check
from experiments.tuning.optimizer import State, likelihood_step, optimizer_of
from kvjax import policies
from kvjax.errors import ConfigError
from kvjax.generation.score_function import score_function
from kvjax.models.calibrate import calibrated
from kvjax.policies import Evict, Policy
from kvjax.training import merges
from kvjax.training.setup import calibration_of

BEFORE, MERGE = "before.json", "merge.safetensors"
FIRST, TRAINED = "merged, first parameters", "merged"  # names of caches in results


def train_merge(
    config: TrainMergeConfig, *, command: str = "", progress: bool | None = None, writers: Sequence[str] = ()
) -> Path:
    """Trains a merge, or continues a run; saves its parameters and writes the report.

    Args:
      config: the settings.
      command: the command line, for the log.
      progress: whether a bar is shown; None = on a terminal.
      writers: names of further writers of metrics; see `experiments.writers`.

    Returns:
      The folder of the run; the parameters are in its file ``merge.safetensors``.

    Raises:
      ConfigError: settings that cannot work, or an output folder that holds a run with others.
      KvjaxError: a policy without a merge that has parameters, or one that does not suit the model.
      Diverged: the loss or its gradient is not finite.
    """
    check(config)
    files(config)
    shape, policy = config.windows, policy_of(config)
    own = merges.merge_parameters(policy)
    with training_run.open_run(config, command=command, progress=progress, writers=writers) as run:
        model, size = run.model, run.size
        trained: Any = merges.initial_merge(model, policy, config.seed)
        ready = calibrated(model, policy, calibration_of(model, own, trained))
        function = score_function(
            ready, policy, rows=config.rows, prompt_length=shape.prompt_length, length=size,
            prefill_block=shape.prefill_block,
        )  # fmt: skip

        def measured(policy: Policy, layers: Any = None) -> list[float]:
            return comparison.nats(
                model, policy, run.held_out, prompt_length=shape.prompt_length, prefill_block=shape.prefill_block,
                calibration=None if layers is None else calibration_of(model, own, layers),
            )  # fmt: skip

        def measured_before() -> dict[str, list[float]]:
            print_status(
                f"measuring the full cache and {policy.name}, without a merge and with the first parameters ..."
            )
            return {
                "full": measured(policies.full()),
                "no merge": measured(dataclasses.replace(policy, merge=None)),
                FIRST: measured(policy, trained),
            }

        def evaluate(done: int, state: State) -> None:
            scores = comparison.means({**before, TRAINED: measured(policy, state["trained"])})
            log.write(kind="evaluation", step=done, **scores)
            print_status(f"step {done}, nats per token: {', '.join(f'{name} {x:.4f}' for name, x in scores.items())}")

        optimizer = optimizer_of(config)
        step = likelihood_step(optimizer, function, lambda params, layers: merges.with_layers(params, own.name, layers))
        state = run.restore({"trained": trained, "optimizer": optimizer.init(trained)})
        before = run.baselines(BEFORE, measured_before)
        log, environment = run.begin()
        numbers = f"{parameters.count(trained):,} numbers"
        print_status(f"training {numbers}, {config.rows} windows of {size} tokens a step; compiling ...")
        state = run.train(log, step, state, ready.params, evaluate=evaluate, evaluate_every=config.evaluate_every)
        calibration_of(model, own, state["trained"]).save(run.folder / MERGE)
        final = {**before, TRAINED: measured(policy, state["trained"])}
        log.close()
    about = f"{policy.name}: {numbers}"
    print(f"\n{comparison.write(run, final, about, config.policy.budget, environment)}\n", flush=True)
    return run.folder


def policy_of(config: TrainMergeConfig) -> Evict:
    """Returns the policy of a config.

    Raises:
      ConfigError: a policy that is made of several, whose merge cannot be left out.
    """
    policy = specs.build_spec(ExperimentConfig(policy=config.policy)).policy
    if not isinstance(policy, Evict):
        raise ConfigError(
            f"policy.name={config.policy.name!r} is made of several policies; give one with a merge, such as "
            "'h2o(every=32, merge=lococo(slots=64))'."
        )
    return policy
