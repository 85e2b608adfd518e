"""The optimizer of trainings under a cache, and the part of their steps that follows a gradient."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from experiments.tuning.windows import TrainingConfig
from kvjax.generation.score_function import ScoreFunction
from kvjax.typing import PyTree

Array = jax.Array
#: "trained": what is trained; "optimizer": the optimizer's state. Some steps add "step", the number of finished steps.
State = dict[str, PyTree]


def optimizer_of(config: TrainingConfig) -> optax.GradientTransformation:
    """Returns AdamW after clipping by the global norm; its rate warms up linearly and falls to 0 as a cosine."""
    settings = config.optimizer
    rate = optax.warmup_cosine_decay_schedule(0.0, settings.learning_rate, settings.warmup_steps, config.steps)
    return optax.chain(optax.clip_by_global_norm(settings.clip), optax.adamw(rate, weight_decay=settings.weight_decay))


def apply_gradients(
    optimizer: optax.GradientTransformation, gradients: PyTree, opt_state: optax.OptState, trained: PyTree
) -> tuple[PyTree, optax.OptState]:
    """Returns the trained parameters and the optimizer's state after an update.

    Args:
      optimizer: from `optimizer_of`.
      gradients: the gradients of the loss, a tree like `trained`.
      opt_state: the optimizer's state before the update.
      trained: the parameters before the update.
    """
    # optax multiplies integers by floats, which strict promotion refuses.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state


def gradient_step(
    optimizer: optax.GradientTransformation, loss_of: Callable[[PyTree], Array], state: State
) -> tuple[State, dict[str, Array]]:
    """Returns the state after a step of the optimizer, the loss before it, and the global norm of the gradient.

    Args:
      optimizer: from `optimizer_of`.
      loss_of: what is trained -> the loss, [] float32.
      state: the state before the step.
    """
    loss, gradients = jax.value_and_grad(loss_of)(state["trained"])
    trained, opt_state = apply_gradients(optimizer, gradients, state["optimizer"], state["trained"])
    return {**state, "trained": trained, "optimizer": opt_state}, {"total": loss, "norm": optax.tree.norm(gradients)}


def likelihood_step(
    optimizer: optax.GradientTransformation,
    function: ScoreFunction,
    merged: Callable[[PyTree, PyTree], PyTree],
    place: NamedSharding | None = None,
) -> Any:
    """Returns a jitted step: state, parameters of the model and tokens [B, T] int32 -> state and losses.

    The loss is the mean negative log-likelihood of the tokens of the windows under a cache, in nats.

    Args:
      optimizer: from `optimizer_of`.
      function: the score of the tokens of windows under the cache.
      merged: parameters of the model, what is trained -> parameters of the model.
      place: the sharding of the results; None = no mesh.
    """

    @functools.partial(jax.jit, donate_argnames="state", out_shardings=place)
    def step(state: State, params: PyTree, tokens: Array) -> tuple[State, dict[str, Array]]:
        return gradient_step(
            optimizer, lambda trained: -jnp.mean(function.score(merged(params, trained), tokens)), state
        )

    return step
