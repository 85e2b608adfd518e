"""Trains a gate on tokens in memory; ``python -m experiments.train_gate`` reads files and resumes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import count_argument, number_argument
from kvjax.cache import shared_prefix
from kvjax.errors import PolicyError
from kvjax.inputs import check_batch
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies.gates import Gate
from kvjax.storage.calibration import Calibration
from kvjax.summary import one_line
from kvjax.training.objectives import NextToken
from kvjax.training.retention import Retention
from kvjax.training.setup import Objective, Progress, Setup, calibration_of

Array = jax.Array
CLIP = 1.0  # the largest global norm of a gradient


class TrainedGate(NamedTuple):
    """The result of `train_gate` and of `train_merge`.

    Attributes:
      calibration: the trained parameters, for ``learned(..., gate=gate)`` or for the policy of the merge.
      losses: [steps] float32, the loss before each step.
    """

    calibration: Calibration
    losses: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def optimizer_of(learning_rate: float, steps: int) -> Any:
    """Returns AdamW (optax) with a cosine schedule, after clipping to a global norm of 1.

    Args:
      learning_rate: the learning rate of the first step.
      steps: the number of steps.
    """
    import optax

    schedule = optax.cosine_decay_schedule(learning_rate, steps)
    return optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(schedule, weight_decay=0.0))


def train_gate(
    model: Model,
    gate: Gate,
    tokens: ArrayLike,
    retention: Retention | Sequence[Retention],
    *,
    objective: Objective | None = None,
    steps: int = 200,
    rows: int = 4,
    learning_rate: float = 3e-3,
    temperature: float = 0.5,
    seed: int = 0,
) -> TrainedGate:
    """Trains the gate of the policy `learned`; the model is not trained.

    The optimizer is AdamW (optax) with a cosine schedule, after clipping to a global norm of 1.

    Args:
      model: from `kvjax.load`.
      gate: scores the tokens.
      tokens: [B, T] int, texts without padding.
      retention: the slots that stay, for all layers or one per layer.
      objective: the loss; None = `NextToken`.
      steps: the number of steps.
      rows: the number of texts of each step's batch; steps go through all texts in turn.
      learning_rate: the learning rate of the first step.
      temperature: the temperature of soft gates; see `soft_gates`.
      seed: the random seed of the initial parameters, and of the noise of an objective.

    Raises:
      InputError: tokens that do not fit the model.
      PolicyError: a gate that does not suit the objective, a retention for another number of layers, or a number that
        is not valid.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    distributed.check_alone(model.params, "kvjax.training.train_gate")
    shared_prefix.refuse(model.params, "kvjax.training.train_gate")
    objective = NextToken() if objective is None else objective
    objective.check(gate)
    layers = model.config.num_layers
    of_layers = (retention,) * layers if isinstance(retention, Retention) else tuple(retention)
    if len(of_layers) != layers:
        raise PolicyError(f"retention has {len(of_layers)} layers, and the model {layers}; give one per layer.")
    steps, rows = (count_argument(*each, minimum=1) for each in (("steps", steps), ("rows", rows)))
    learning_rate = number_argument("learning_rate", learning_rate, minimum=0.0, maximum=float("inf"))
    temperature = number_argument("temperature", temperature, minimum=1e-6, maximum=float("inf"))
    texts = check_batch(model.config, tokens, None, new_tokens=0).tokens
    setup = Setup(model.config, gate, of_layers)
    optimizer = optimizer_of(learning_rate, steps)

    @jax.jit
    def step(
        params: Params, gates: Any, memory: optax.OptState, ids: Array, number: Array
    ) -> tuple[Any, optax.OptState, Array]:
        part = (number + 1).astype(jnp.float32) / steps
        progress = Progress(jnp.float32(temperature), part, jax.random.fold_in(jax.random.key(seed + 1), number))
        loss, slope = jax.value_and_grad(lambda gates: objective.loss(setup, params, gates, ids, progress))(gates)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory, gates)
            return optax.apply_updates(gates, change), memory, loss

    with model.on_mesh():
        gates: Any = setup.initial(jax.random.key(seed), objective.bias)
        memory, losses = optimizer.init(gates), []
        for number in range(steps):
            own = (number * rows + np.arange(rows)) % len(texts)
            gates, memory, loss = step(model.params, gates, memory, model.place(texts[own]), jnp.int32(number))
            losses.append(loss)
        return TrainedGate(calibration_of(model, gate, gates, tokens=texts), np.asarray(losses, np.float32))
