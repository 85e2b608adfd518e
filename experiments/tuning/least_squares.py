"""Steps of `experiments.train_gate` that fit a linear gate in closed form; see `kvjax.training.least_squares`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tuning.gate_config import TrainGateConfig
from kvjax import training
from kvjax.models.config import model_sizes
from kvjax.parallel import distributed
from kvjax.training import least_squares
from kvjax.training.least_squares import Moments
from kvjax.typing import PyTree

Sums = dict[str, list[Moments]]
TEXTS, VALIDATION = "texts", "validation"


def initial(setup: training.Setup) -> Sums:
    """Returns the sums of each layer over no window, of windows to fit to and of those that choose the ridge."""
    sizes = model_sizes(setup.config)
    zeros = [Moments.zeros(sizes.hidden, sizes.kv_heads)] * setup.config.num_layers
    return {TEXTS: zeros, VALIDATION: zeros}


def make_step(config: TrainGateConfig, setup: training.Setup, objective: training.ReplayedScore) -> Any:
    """Returns a step: state, parameters of the model and tokens [B, T] int32 -> state and losses.

    The state's "optimizer" is that of `initial`. The gates are fitted when a log line or an evaluation is due. The loss
    is the mean squared error on the windows that choose the ridge.
    """
    examples_of = jax.jit(lambda params, tokens: objective.examples(setup, params, tokens))

    def step(state: dict[str, PyTree], params: Any, tokens: jax.Array) -> tuple[dict[str, PyTree], dict[str, Any]]:
        done, sums = int(state["step"]) + 1, state["optimizer"]
        use = VALIDATION if least_squares.validates(done - 1) else TEXTS
        own = least_squares.moments(distributed.to_host(examples_of(params, tokens)))
        sums = {**sums, use: least_squares.added(sums[use], own)}
        state = {**state, "optimizer": sums, "step": jnp.int32(done)}
        if not (done % config.log_every == 0 or done % config.evaluate_every == 0 or done == config.steps):
            return state, {}
        # The first window alone has no other to validate with.
        found = least_squares.fit(sums[TEXTS], sums[VALIDATION] if done > 1 else sums[TEXTS])
        return {**state, "trained": found.gates}, {"total": found.loss, "ridge": np.exp(np.mean(np.log(found.ridge)))}

    return step
