"""Trains the parameters of a policy's merge; see `experiments.train_merge`."""

import dataclasses
import functools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from experiments import fields, results, specs
from experiments.config import ExperimentConfig, ModelConfig
from experiments.programs.train import METRICS, Log, removed_if_unused
from experiments.programs.tune import INPUTS, State, check_same_past, optimizer_of, run_steps
from experiments.runs import identity, machine
from experiments.runs.session import Session, describe
from experiments.training import checkpoints
from experiments.training.config import files
from experiments.tuning import comparison, windows
from experiments.tuning.merge_config import TrainMergeConfig, check
from kvjax import policies
from kvjax.errors import ConfigError
from kvjax.generation.score_function import ScoreFunction, score_function
from kvjax.models.calibrate import calibrated
from kvjax.parallel import distributed
from kvjax.policies import Evict, Policy
from kvjax.training import merges
from kvjax.training.setup import calibration_of
from kvjax.typing import JsonObject

Array = jax.Array
BEFORE, MERGE = "before.json", "merge.safetensors"
FIRST, TRAINED = "merged, first parameters", "merged"  # names of caches in results


def start(config: TrainMergeConfig, names: Sequence[str], argv: Sequence[str]) -> int:
    """Runs the command `train_merge`.

    Args:
      config: the settings.
      names: of the writers.
      argv: the command line.

    Returns:
      The exit status.
    """
    command = shlex.join(["python", "-m", "experiments.train_merge", *argv[1:]])
    folder = train_merge(config, command=command, writers=names)
    print(f"Wrote {folder}/ ({MERGE}, results.json, report.md, metrics.jsonl)")
    return 0


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
    with removed_if_unused(Path(config.output)):
        return _train_merge(config, command, progress, writers)


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


def _train_merge(config: TrainMergeConfig, command: str, progress: bool | None, writers: Sequence[str]) -> Path:
    """See `train_merge`."""
    folder, shape = Path(config.output), config.windows
    policy = policy_of(config)
    own = merges.merge_parameters(policy)
    results.make_folder(folder)
    described = ExperimentConfig(model=ModelConfig(path=config.model.path, dtype=config.model.dtype))
    model = Session().model(described)
    texts = windows.load(config, model)
    held_out = texts.evaluation(config.evaluation.windows, shape.prompt_length + config.evaluation.new_tokens)
    size = shape.prompt_length + shape.new_tokens
    trained: Any = merges.initial_merge(model, policy, config.seed)
    ready = calibrated(model, policy, calibration_of(model, own, trained))
    function = score_function(
        ready, policy, rows=config.rows, prompt_length=shape.prompt_length, length=size,
        prefill_block=shape.prefill_block,
    )  # fmt: skip
    inputs: JsonObject = {"texts": windows.checksums(config), "model": identity.of_weights(config.model.path)}

    def measured(policy: Policy, layers: Any = None) -> list[float]:
        return comparison.nats(
            model, policy, held_out, prompt_length=shape.prompt_length, prefill_block=shape.prefill_block,
            calibration=None if layers is None else calibration_of(model, own, layers),
        )  # fmt: skip

    optimizer = optimizer_of(config)
    step = make_step(own.name, function, optimizer)
    with model.on_mesh(), checkpoints.manager(folder, config.checkpoint_every) as manager:
        begun = manager.latest_step() or 0
        if begun:
            check_same_past(config, folder, begun, inputs)
        state: State = {"trained": trained, "optimizer": optimizer.init(trained)}
        if begun:
            state = manager.restore(begun, args=ocp.args.StandardRestore(state))
        before = results.read_json(folder / BEFORE) if begun else None
        if before is None:
            _say(f"measuring the full cache and {policy.name}, without a merge and with the first parameters ...")
            before = {
                "full": measured(policies.full()),
                "no merge": measured(dataclasses.replace(policy, merge=None)),
                FIRST: measured(policy, trained),
            }
        if distributed.is_first():
            results.write(folder / "config.json", results.to_json(fields.to_dict(config)))
            results.write(folder / INPUTS, results.to_json(inputs))
            results.write(folder / BEFORE, results.to_json(before))
        log = Log(folder / METRICS, begun, config, writers)
        environment = machine.environment()
        log.write(kind="start", step=begun, command=command, **environment, **inputs)

        def evaluate(done: int, state: State) -> None:
            scores = {name: float(np.mean(nats)) for name, nats in before.items()}
            scores[TRAINED] = float(np.mean(measured(policy, state["trained"])))
            log.write(kind="evaluation", step=done, **scores)
            _say(f"step {done}, nats per token: {', '.join(f'{name} {x:.4f}' for name, x in scores.items())}")

        count = sum(leaf.size for leaf in jax.tree.leaves(trained))
        _say(f"training {count:,} numbers, {config.rows} windows of {size} tokens a step; compiling ...")
        state = run_steps(config, step, state, ready, texts, begun, (manager, log, progress), evaluate=evaluate)
        calibration_of(model, own, state["trained"]).save(folder / MERGE)
        final = {**before, TRAINED: measured(policy, state["trained"])}
    log.close()
    about = [
        describe(model, described.model),
        f"{policy.name}: {count:,} numbers, {config.steps} steps of {config.rows} windows of "
        f"{size} tokens; {len(held_out)} held-out windows of {shape.prompt_length} prompt tokens and "
        f"{config.evaluation.new_tokens} scored ones, under a budget of {config.policy.budget}.",
        f"On {environment['device']} ({environment['cpu']}); jax {environment['jax']}.",
    ]
    print(f"\n{comparison.write(folder, config.name, final, about, command)}\n", flush=True)
    return folder


def make_step(name: str, function: ScoreFunction, optimizer: optax.GradientTransformation) -> Any:
    """Returns a jitted step: state, parameters of the model and tokens [B, T] int32 -> state and losses.

    Args:
      name: of the merge's parameters.
      function: the score of the tokens of windows under the cache.
      optimizer: of the parameters.
    """

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state: State, params: Any, tokens: Array) -> tuple[State, dict[str, Array]]:
        def loss_of(layers: Any) -> Array:
            return -jnp.mean(function.score(merges.with_layers(params, name, layers), tokens))

        loss, gradient = jax.value_and_grad(loss_of)(state["trained"])
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, after = optimizer.update(gradient, state["optimizer"], state["trained"])
            trained = optax.apply_updates(state["trained"], updates)
        return {"trained": trained, "optimizer": after}, {"total": loss, "norm": optax.tree.norm(gradient)}

    return step


def _say(text: str) -> None:
    if distributed.is_first():
        print(text, file=sys.stderr, flush=True)
