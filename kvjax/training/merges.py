"""Trains the parameters of a merge, such as `kvjax.policies.lococo`, on tokens in memory.

``python -m experiments.train_merge`` reads files and resumes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import count_argument, number_argument
from kvjax.cache import shared_prefix
from kvjax.errors import PolicyError
from kvjax.generation.score_function import score_function
from kvjax.inputs import check_batch
from kvjax.models.calibrate import calibrated
from kvjax.models.config import model_sizes
from kvjax.models.decoder_layer import POLICY
from kvjax.models.model import Model
from kvjax.models.stacked_params import with_attention
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy
from kvjax.policies.parameters import Parameters
from kvjax.policies.traits import merge_parameters_of
from kvjax.training.setup import Gates, calibration_of
from kvjax.training.train import TrainedGate, optimizer_of

Array = jax.Array


def with_layers(params: Params, name: str, layers: Gates) -> Params:
    """Returns the parameters of a model with other parameters of a policy.

    Args:
      params: of the model.
      name: of the policy's `kvjax.policies.Parameters`.
      layers: of each layer, [K or 1, ...] each.
    """
    return with_attention(params, [{POLICY: {name: own}} for own in layers])


def merge_parameters(policy: Policy) -> Parameters:
    """Returns the description of the parameters of a policy's merge.

    Raises:
      PolicyError: a policy without a merge that has parameters.
    """
    found = merge_parameters_of(policy)
    if len(found) != 1:
        raise PolicyError(
            f"policy {policy.name} has no merge with parameters; give one such as "
            "kvjax.policies.h2o(256, every=32, merge=kvjax.policies.lococo(128))."
        )
    return found[0]


def initial_merge(model: Model, policy: Policy, seed: int = 0) -> list[dict[str, Array]]:
    """Returns the parameters of each layer's merge before training, [K or 1, ...] float32 each.

    Args:
      model: from `kvjax.load`.
      policy: with a merge that has parameters.
      seed: the random seed.

    Raises:
      PolicyError: a policy without such a merge.
    """
    own: Any = merge_parameters(policy)
    keys = jax.random.split(jax.random.key(seed), model.config.num_layers)
    return [own.initial(key, model_sizes(model.config)) for key in keys]


def train_merge(
    model: Model,
    policy: Policy,
    tokens: ArrayLike,
    *,
    prompt_length: int | None = None,
    prefill_block: int | None = 32,
    steps: int = 200,
    rows: int = 4,
    learning_rate: float = 1e-3,
    seed: int = 0,
) -> TrainedGate:
    """Trains the parameters of a policy's merge; the model is not trained.

    The loss is the mean negative log-likelihood of the next token under the cache, in nats, with the policy, the budget
    and the blocks that are given. Gradients pass through all merges of a text; the choice of slots is a constant. The
    authors of LoCoCo stop them at the cache before each block. The optimizer is that of `train_gate`.

    Args:
      model: from `kvjax.load`.
      policy: with a merge that has parameters, such as ``h2o(256, every=32, merge=lococo(128))``.
      tokens: [B, T] int, texts without padding.
      prompt_length: the number of tokens of a text that are read in blocks; the others are fed one at a time. None = T.
      prefill_block: the number of tokens of a block, after each of which slots are merged; None = one block.
      steps: the number of steps.
      rows: the number of texts of each step's batch; steps go through all texts in turn.
      learning_rate: the learning rate of the first step.
      seed: the random seed of the initial parameters.

    Returns:
      The calibration, for the same policy, and the losses.

    Raises:
      InputError: tokens that do not fit the model, or a prompt longer than a text.
      PolicyError: a policy without such a merge, or a number that is not valid.
      ConfigError: a model that is spread over several processes.
    """
    import optax

    distributed.check_alone(model.params, "kvjax.training.train_merge")
    shared_prefix.refuse(model.params, "kvjax.training.train_merge")
    own = merge_parameters(policy)
    steps, rows = (count_argument(*each, minimum=1) for each in (("steps", steps), ("rows", rows)))
    learning_rate = number_argument("learning_rate", learning_rate, minimum=0.0, maximum=float("inf"))
    texts = check_batch(model.config, tokens, None, new_tokens=0).tokens
    layers: Any = initial_merge(model, policy, seed)
    ready = calibrated(model, policy, calibration_of(model, own, layers))
    length = texts.shape[1]
    function = score_function(
        ready, policy, rows=rows, prompt_length=length if prompt_length is None else prompt_length, length=length,
        prefill_block=prefill_block,
    )  # fmt: skip
    optimizer = optimizer_of(learning_rate, steps)

    @jax.jit
    def step(params: Params, layers: Any, memory: optax.OptState, ids: Array) -> tuple[Any, optax.OptState, Array]:
        def loss_of(layers: Any) -> Array:
            return -jnp.mean(function.score(with_layers(params, own.name, layers), ids))

        loss, slope = jax.value_and_grad(loss_of)(layers)
        # optax multiplies integers by floats, which strict promotion refuses.
        with jax.numpy_dtype_promotion("standard"):
            change, memory = optimizer.update(slope, memory, layers)
            return optax.apply_updates(layers, change), memory, loss

    with model.on_mesh():
        memory, losses = optimizer.init(layers), []
        for number in range(steps):
            rows_of = (number * rows + np.arange(rows)) % len(texts)
            layers, memory, loss = step(ready.params, layers, memory, model.place(texts[rows_of]))
            losses.append(loss)
        return TrainedGate(calibration_of(model, own, layers, tokens=texts), np.asarray(losses, np.float32))
