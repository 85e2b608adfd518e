"""Trains the gate of the policy `learned`; see `experiments.train_gate`."""

import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import kvjax
from experiments import fields, results
from experiments.config import ExperimentConfig, ModelConfig
from experiments.programs.train import METRICS, Log, removed_if_unused
from experiments.programs.tune import INPUTS, State, check_same_past, optimizer_of, run_steps
from experiments.runs import identity, machine
from experiments.runs.session import Session, describe
from experiments.tasks import score
from experiments.training import checkpoints
from experiments.training.config import files
from experiments.tuning import comparison, gate_config, least_squares, windows
from experiments.tuning.gate_config import TrainGateConfig, check
from kvjax import policies, training
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies import Gate, Policy
from kvjax.typing import JsonObject

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
    with removed_if_unused(Path(config.output)):
        return _train_gate(config, command, progress, writers)


def _train_gate(config: TrainGateConfig, command: str, progress: bool | None, writers: Sequence[str]) -> Path:
    """See `train_gate`."""
    folder, shape = Path(config.output), config.windows
    gate = gate_of(config)
    policy = policy_of(config, gate)
    results.make_folder(folder)
    own = ExperimentConfig(model=ModelConfig(path=config.model.path, dtype=config.model.dtype))
    model = Session().model(own)
    texts = windows.load(config, model)
    held_out = texts.evaluation(config.evaluation.windows, shape.prompt_length + config.evaluation.new_tokens)
    size = shape.prompt_length + shape.new_tokens
    setup = training.Setup(model.config, gate, _retentions(config, policy, model.config.num_layers))
    objective = _objective(config, model, size)
    objective.check(gate)
    inputs: JsonObject = {"texts": windows.checksums(config), "model": identity.of_weights(config.model.path)}
    first = first_gate(config, model, gate)
    if first is not None:
        inputs["start"] = first.hash
    asked = score.make_prompts(config.recall, model, config.seed)
    with checkpoints.manager(folder, config.checkpoint_every) as manager:
        start = manager.latest_step() or 0
        if start:
            check_same_past(config, folder, start, inputs)
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
        state: State = {"trained": trained, "optimizer": memory, "step": jnp.int32(0)}
        if start:
            state = manager.restore(start, args=ocp.args.StandardRestore(state))

        def measured(policy: Policy, gates: Any = None) -> list[float]:
            return _nats(model, policy, held_out, config, gates and training.calibration_of(model, gate, gates))

        def recalled(gates: Any) -> dict[str, float]:
            calibration = training.calibration_of(model, gate, gates)
            return score.exact_matches(
                model, asked, policy, prefill_block=config.windows.prefill_block, calibration=calibration
            )

        baselines = results.read_json(folder / BASELINES) if start else None
        if baselines is None:
            _say("measuring full, h2o and random ...")
            budget = config.keep.budget
            others = (policies.full(), policies.h2o(budget), policies.random(budget))
            baselines = {each.name: measured(each) for each in others}
        if distributed.is_first():
            results.write(folder / "config.json", results.to_json(fields.to_dict(config)))
            results.write(folder / INPUTS, results.to_json(inputs))
            results.write(folder / BASELINES, results.to_json(baselines))
        log = Log(folder / METRICS, start, config, writers)
        environment = machine.environment()
        log.write(kind="start", step=start, command=command, **environment, **inputs)

        def evaluate(done: int, state: State) -> None:
            scores = {name: float(np.mean(nats)) for name, nats in baselines.items()}
            scores["learned"] = float(np.mean(measured(policy, state["trained"])))
            found = recalled(state["trained"])
            log.write(kind="evaluation", step=done, **scores, **({"recall": found} if found else {}))
            shown = [f"{name} {x:.4f}" for name, x in scores.items()]
            shown += [f"{task} {share:.0%}" for task, share in found.items()]
            _say(f"step {done}, nats per token{' and recall' if found else ''}: {', '.join(shown)}")

        if not start:
            evaluate(0, state)
        count = sum(leaf.size for leaf in jax.tree.leaves(trained))
        _say(f"training {count:,} numbers by {config.objective}, {config.rows} windows of {size} tokens; compiling ...")
        state = run_steps(config, step, state, model, texts, start, (manager, log, progress), evaluate=evaluate)
    training.calibration_of(model, gate, state["trained"]).save(folder / GATE)
    final = {**baselines, "learned": measured(policy, state["trained"])}
    log.close()
    about = [
        describe(model, own.model),
        f"{gate!r} trained by {config.objective} ({config.solver}): {count:,} numbers, {config.steps} steps of "
        f"{config.rows} windows of {size} tokens; {len(held_out)} held-out windows of {shape.prompt_length} prompt "
        f"tokens and {config.evaluation.new_tokens} scored ones, under a budget of {config.keep.budget}.",
        f"On {environment['device']} ({environment['cpu']}); jax {environment['jax']}.",
    ]
    print(f"\n{comparison.write(folder, config.name, final, about, command)}\n", flush=True)
    return folder


def first_gate(config: TrainGateConfig, model: Model, gate: Gate) -> kvjax.Calibration | None:
    """Returns the initial parameters that the config names.

    Raises:
      KvjaxError: a file that cannot be read, or parameters of another model or gate.
    """
    if not config.start:
        return None
    found = kvjax.load_calibration(config.start)
    kvjax.calibrated(model, policy_of(config, gate), found)
    return found


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

        loss, gradient = jax.value_and_grad(loss_of)(state["trained"])
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            updates, after = optimizer.update(gradient, state["optimizer"], state["trained"])
            trained = optax.apply_updates(state["trained"], updates)
        made = {"trained": trained, "optimizer": after, "step": state["step"] + 1}
        return made, {"total": loss, "norm": optax.tree.norm(gradient)}

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


def _say(text: str) -> None:
    if distributed.is_first():
        print(text, file=sys.stderr, flush=True)
