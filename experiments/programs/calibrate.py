"""Makes, trains and saves a calibration; see `experiments.calibrate`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import kvjax
from experiments import calibrate, results
from experiments.config import DataConfig
from experiments.runs import data
from kvjax import analysis, training
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.policies import full
from kvjax.specs import parse
from kvjax.storage import Calibration, Storage, low_rank
from kvjax.storage.low_rank import LowRank

BLOCK = 64  # tokens of a block when training
ENDS = 10  # steps at the beginning and at the end whose mean losses are shown, where steps draw ranks


def start(values: flags.FlagValues) -> int:
    """Makes what a command line asks for.

    Returns:
      The exit status.
    """
    output, storage = results.make_file(values.output), parse.build("storage", values.storage)
    model = kvjax.load(values.model, dtype=values.dtype)
    width = min(values.tokens, model.config.max_positions)
    if values.text is None:
        tokens = data.calibration_sample(model, values.rows, width)
    else:
        text = DataConfig(text=values.text, num_sequences=values.rows, prompt_length=width - 1, new_tokens=1)
        tokens, _, _ = data.load(text, model, seed=0)
    made = kvjax.calibrate(model, tokens, storage)
    trained = ""
    if values.steps:
        name = values.storage.partition("(")[0].strip()
        objective = values.objective or calibrate.OWN.get(name, calibrate.NEXT_TOKEN)
        made, losses = TRAIN[objective](
            model, storage, made, tokens, steps=values.steps, learning_rate=values.learning_rate
        )
        trained = _shown(objective, losses)
    made.save(output)
    print(f"{output}: {made.method}, {made.nbytes} bytes from {made.text}{trained}.")
    return 0


def _shown(objective: str, losses: Sequence[float]) -> str:
    """Returns the losses of a training as text."""
    if objective != calibrate.DISTILLATION:
        return f"; {len(losses)} steps took the {objective} loss from {losses[0]:.6f} to {losses[-1]:.6f}"
    # The losses of two steps are of different ranks, and cannot be compared.
    count = min(ENDS, len(losses))
    first, last = np.mean(losses[:count]), np.mean(losses[-count:])
    return (
        f"; {len(losses)} steps of {objective}, each of which draws ranks at random: the mean loss of the first "
        f"{count} steps is {first:.6f}, and of the last {count} {last:.6f}"
    )


def train(
    model: Model,
    storage: Storage,
    calibration: Calibration,
    tokens: np.ndarray,
    *,
    steps: int,
    learning_rate: float,
) -> tuple[Calibration, list[float]]:
    """Trains a calibration on the log-probabilities of a text under its storage.

    Args:
      model: from `kvjax.load`; it is not trained.
      storage: what needs the calibration.
      calibration: where training starts.
      tokens: [rows, T] int32.
      steps: of Adam, each on all rows; at least 1.
      learning_rate: of Adam.

    Returns:
      The calibration, and the mean negative log-probability of a token before each step.
    """
    optimizer, text = optax.adam(learning_rate), calibration.text
    width = tokens.shape[1]

    def loss(calibration: Calibration) -> jax.Array:
        scored = kvjax.log_likelihood(
            model, tokens, full(), prompt_length=width, prefill_block=min(BLOCK, max(width // 2, 1)), storage=storage,
            calibration=calibration,
        )  # fmt: skip
        return -jnp.mean(scored.logprobs)

    @jax.jit
    def step(calibration: Calibration, memory: optax.OptState) -> tuple[Calibration, optax.OptState, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(calibration)
        change, memory = optimizer.update(gradient, memory)
        return optax.apply_updates(calibration, change), memory, value

    memory, losses = optimizer.init(calibration), []
    for _ in range(steps):
        calibration, memory, value = step(calibration, memory)
        losses.append(float(value))
    trained = calibration.replace(method=f"{calibration.method}; trained for {steps} steps")
    return trained.with_text(text), losses


def reconstruct(
    model: Model,
    storage: Storage,
    calibration: Calibration,
    tokens: np.ndarray,
    *,
    steps: int,
    learning_rate: float,
) -> tuple[Calibration, list[float]]:
    """Trains a calibration to reconstruct keys and values; see `train` and `kvjax.training.train_reconstruction`."""
    found = training.train_reconstruction(
        model, tokens, storage, calibration, steps=steps, learning_rate=learning_rate
    )  # fmt: skip
    return found.calibration, found.losses.tolist()


def distill(
    model: Model,
    storage: Storage,
    calibration: Calibration,
    tokens: np.ndarray,
    *,
    steps: int,
    learning_rate: float,
) -> tuple[Calibration, list[float]]:
    """Trains nested directions, and returns the first ones; see `train` and `kvjax.analysis.train_directions`.

    Raises:
      ConfigError: a storage that is not of low rank, head by head.
    """
    codecs = {name: codec.dims for name, codec in storage.codecs.items()}
    key, value = codecs["key"], codecs["value"]
    if not isinstance(key, LowRank) or not isinstance(value, LowRank):
        raise ConfigError(
            f"objective={calibrate.DISTILLATION} does not fit storage {storage.name}: it trains directions of single "
            f"heads, of which any number of the first ones can be kept; give low_rank(...), or another objective."
        )
    config = model.config
    whole = low_rank(config.head_dim, config.head_dim, center=key.center, basis=key.basis)
    first = kvjax.calibrate(model, tokens, whole)
    found = analysis.train_directions(model, tokens, first, steps=steps, learning_rate=learning_rate)
    layers, heads = config.num_layers, config.num_kv_heads

    def ranks(own: LowRank) -> np.ndarray:
        """[L, K]."""
        found = [[own.of_layer(layer, layers).of_head(head, heads) for head in range(heads)] for layer in range(layers)]
        return np.array([[each.dim(config.head_dim) for each in layer] for layer in found])

    made = analysis.shortened(found.calibration, analysis.Ranks(ranks(key), ranks(value), float(found.losses[-1])))
    made = made.replace(method=f"{calibration.method}; trained for {steps} steps").with_text(made.text)
    return made, found.losses.tolist()


TRAIN = {
    calibrate.RECONSTRUCTION: reconstruct, calibrate.DISTILLATION: distill, calibrate.NEXT_TOKEN: train,
}  # fmt: skip
