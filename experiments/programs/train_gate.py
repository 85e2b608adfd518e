"""Trains the gate of the policy `learned`; see `experiments.train_gate`."""

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import kvjax
from experiments.progress import print_status
from experiments.tasks import score
from experiments.training.config import files
from experiments.tuning import comparison, gate_config, least_squares, parameters, training_run
from experiments.tuning.gate_config import TrainGateConfig, check
from experiments.tuning.optimizer import State, gradient_step, optimizer_of
from kvjax import policies, training
from kvjax.models.model import Model
from kvjax.policies import Gate, Policy

Array = jax.Array
BASELINES, GATE = "baselines.json", "gate.safetensors"
CHUNK = 256  # tokens of a chunk of a replay


def train_gate(
    config: TrainGateConfig, *, command: str = "", progress: bool | None = None, writers: Sequence[str] = ()
) -> Path:
    """Trains a gate, or continues a run; saves the gate and writes the report.

    Args:
      config: the settings.
      command: the command line, for the log.
      progress: whether a bar is shown; None = on a terminal.
      writers: names of further writers of metrics; see `experiments.writers`.

    Returns:
      The folder of the run; the gate is in its file ``gate.safetensors``.

    Raises:
      ConfigError: settings that cannot work, or an output folder that holds a run with others.
      KvjaxError: a budget or a gate that does not suit the model or the objective.
      Diverged: the loss or its gradient is not finite.
    """
    check(config)
    files(config)
    gate = gate_of(config)
    policy = policy_of(config, gate)
    first = kvjax.load_calibration(config.start) if config.start else None
    sources = {} if first is None else {"start": first.hash}
    with training_run.open_run(config, sources=sources, command=command, progress=progress, writers=writers) as run:
        model, size = run.model, run.size
        setup = training.Setup(model.config, gate, _retentions(config, policy, model.config.num_layers))
        objective = _objective(config, model, size)
        objective.check(gate)
        if first is not None:
            kvjax.calibrated(model, policy, first)  # refuses parameters of another model or gate
        asked = score.make_prompts(config.recall, model, config.seed)

        def measured(policy: Policy, gates: Any = None) -> list[float]:
            calibration = gates and training.calibration_of(model, gate, gates)
            return _nats(model, policy, run.held_out, config, calibration)

        def measured_baselines() -> dict[str, list[float]]:
            print_status("measuring full, h2o and random ...")
            others = (policies.full(), policies.h2o(config.keep.budget), policies.random(config.keep.budget))
            return {each.name: measured(each) for each in others}

        def evaluate(done: int, state: State) -> None:
            scores = comparison.means({**baselines, "learned": measured(policy, state["trained"])})
            calibration = training.calibration_of(model, gate, state["trained"])
            found = score.exact_matches(
                model, asked, policy, prefill_block=config.windows.prefill_block, calibration=calibration
            )
            log.write(kind="evaluation", step=done, **scores, **({"recall": found} if found else {}))
            shown = [f"{name} {x:.4f}" for name, x in scores.items()]
            shown += [f"{task} {share:.0%}" for task, share in found.items()]
            print_status(f"step {done}, nats per token{' and recall' if found else ''}: {', '.join(shown)}")

        trained = setup.initial(jax.random.key(config.seed), objective.bias)
        if first is not None:
            trained = [dict(layer[gate.name]) for layer in first.layers]
        if config.solver == gate_config.LEAST_SQUARES:
            assert isinstance(objective, training.ReplayedScore)
            memory, step = least_squares.initial(setup), least_squares.make_step(config, setup, objective)
            trained = jax.device_get(trained)
        else:
            optimizer = optimizer_of(config)
            memory, step = optimizer.init(trained), make_step(config, setup, objective, optimizer)
        state = run.restore({"trained": trained, "optimizer": memory, "step": jnp.int32(0)})
        baselines = run.baselines(BASELINES, measured_baselines)
        log, environment = run.begin()
        if not run.start:
            evaluate(0, state)
        numbers = f"{parameters.count(trained):,} numbers"
        print_status(f"training {numbers} by {config.objective}, {config.rows} windows of {size} tokens; compiling ...")
        state = run.train(log, step, state, model.params, evaluate=evaluate, evaluate_every=config.evaluate_every)
        training.calibration_of(model, gate, state["trained"]).save(run.folder / GATE)
        final = {**baselines, "learned": measured(policy, state["trained"])}
        log.close()
    about = f"{gate!r} trained by {config.objective} ({config.solver}): {numbers}"
    print(f"\n{comparison.write(run, final, about, config.keep.budget, environment)}\n", flush=True)
    return run.folder


def gate_of(config: TrainGateConfig) -> Gate:
    """Returns the gate of a config, with the output that its objective needs."""
    output, kind = config.gate.output, config.gate.kind
    if output == "auto":
        # A sink gate returns a share without an output function.
        share = kind == gate_config.SINK and config.objective == gate_config.SHARE
        output = "none" if share else gate_config.OUTPUTS.get(config.objective, "none")
    width = {} if config.gate.width is None else {"width": config.gate.width}
    return policies.GATES[kind](output=output, **width)


def policy_of(config: TrainGateConfig, gate: Gate) -> policies.Evict:
    """Returns the policy that runs with the gate."""
    keep = config.keep
    return policies.learned(
        keep.budget, gate=gate, every=None if config.objective == gate_config.PROMPT else keep.every,
        recent=keep.recent, sinks=keep.sinks,
        threshold=gate_config.threshold(config), age=config.objective == gate_config.DISTILL,
    )  # fmt: skip


def _retentions(config: TrainGateConfig, policy: policies.Evict, layers: int) -> tuple[training.Retention, ...]:
    """Returns the slots of a window that each layer keeps."""
    assert policy.budget is not None
    keep, slots = config.keep, policy.budget.slots(config.windows.prompt_length, layers)
    threshold = gate_config.threshold(config)
    prompt = config.windows.prompt_length if config.objective == gate_config.PROMPT else None
    return tuple(training.Retention(each, keep.recent, keep.sinks, threshold, keep.every, prompt) for each in slots)


def _objective(config: TrainGateConfig, model: Model, size: int) -> training.Objective:
    if config.objective == gate_config.NEXT_TOKEN:
        return training.NextToken(config.relax)
    if config.objective == gate_config.DISTILL:
        return training.Distillation(config.capacity)
    if config.objective == gate_config.ANSWER:
        return training.AnswerAttention(config.windows.prompt_length)
    if config.objective == gate_config.DELAYED:
        return training.DelayedEviction()
    if config.objective == gate_config.ADMISSION:
        return training.Admission(config.sparsity)
    if config.objective == gate_config.PROMPT:
        return training.PromptEviction(config.capacity)
    log = config.objective == gate_config.REPLAY
    policy = policies.kvzip(max(size // 2, 1), chunk=CHUNK, plus=log)
    replayer = training.Replayer.of(model, policy, config.rows, size)
    return training.ReplayedScore(replayer, "log" if log else "cross_entropy")


def make_step(
    config: TrainGateConfig, setup: training.Setup, objective: training.Objective,
    optimizer: optax.GradientTransformation,
) -> Any:  # fmt: skip
    """Returns a step: state, parameters of the model and tokens [B, T] int32 -> state and losses."""
    fall = math.log(config.last_temperature / config.temperature) / max(config.steps - 1, 1)
    shared = objective if config.batches is not None and isinstance(objective, training.ReplayedScore) else None

    @functools.partial(jax.jit, donate_argnames="state")
    def step(state: State, params: Any, given: Any) -> tuple[State, dict[str, Array]]:
        number = state["step"].astype(jnp.float32)
        key = jax.random.fold_in(jax.random.key(config.seed + 1), state["step"])
        progress = training.Progress(config.temperature * jnp.exp(fall * number), (number + 1) / config.steps, key)

        def loss_of(gates: Any) -> Array:
            if shared is not None:
                return shared.error(setup, gates, given)
            return objective.loss(setup, params, gates, given, progress)

        after, losses = gradient_step(optimizer, loss_of, state)
        return {**after, "step": state["step"] + 1}, losses

    if shared is None:
        return step
    examples_of = jax.jit(functools.partial(shared.examples, setup))
    known: dict[bytes, training.Examples] = {}

    def step_of_known(state: State, params: Any, tokens: Array) -> tuple[State, dict[str, Array]]:
        batch = np.asarray(tokens).tobytes()
        if batch not in known:
            known[batch] = examples_of(params, tokens)
        updated: tuple[State, dict[str, Array]] = step(state, {}, known[batch])
        return updated

    return step_of_known


def _nats(
    model: Model, policy: Policy, tokens: np.ndarray, config: TrainGateConfig, calibration: kvjax.Calibration | None
) -> list[float]:
    """Returns the mean negative log-likelihood per token after each prompt, in nats."""
    shape = config.windows
    # A compressor of prompts is compared where all policies evict when the prompt ends.
    block = None if config.objective == gate_config.PROMPT else shape.prefill_block
    return comparison.nats(
        model, policy, tokens, prompt_length=shape.prompt_length, prefill_block=block, calibration=calibration
    )
