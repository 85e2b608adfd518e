"""Makes the calibration of a storage from a sample text, trains it if asked to, and saves it.

python -m experiments.calibrate --model=kvjax-tiny --storage='low_rank(key_rank=32, value_rank=48)' --steps=50 \\
  --output=results/kvjax-tiny-low-rank.safetensors
python -m experiments.run --config=matryoshka_tiny --config.model.calibration=results/kvjax-tiny-low-rank.safetensors

Training lowers the loss of the sample, whose rows go in in blocks, so that every token reads older ones as the storage
holds them (MatryoshkaKV, arXiv:2410.14731; CSKV, arXiv:2409.10593). Directions need not stay orthogonal.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

import kvjax
from experiments import cli, results
from experiments.config import DataConfig
from experiments.runs import data
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.policies import full
from kvjax.specs import parse
from kvjax.storage import Calibration, Storage

ROWS, TOKENS, BLOCK = 4, 512, 64  # rows of the sample, tokens of each, tokens of a block when training
RATE = 1e-3  # of Adam


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "a checkpoint folder or a hub id", flag_values=values)
    flags.DEFINE_string("storage", None, "what needs a calibration, such as low_rank(key_rank=32, value_rank=32)",
                        flag_values=values)  # fmt: skip
    flags.DEFINE_string("text", None, "the sample, a text file; a story is generated without one", flag_values=values)
    flags.DEFINE_integer("rows", ROWS, "rows of the sample", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("tokens", TOKENS, "tokens of a row", lower_bound=2, flag_values=values)
    flags.DEFINE_integer("steps", 0, "steps of training", lower_bound=0, flag_values=values)
    flags.DEFINE_float("rate", RATE, "learning rate of Adam", lower_bound=0.0, flag_values=values)
    flags.DEFINE_string("dtype", None, "of the weights", flag_values=values)
    flags.DEFINE_string("output", None, "the file to write", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if None in (values.model, values.storage, values.output):
        raise ConfigError("give --model=FOLDER, --storage='low_rank(...)' and --output=FILE.safetensors.")
    output, storage = results.make_file(values.output), parse.build("storage", values.storage)
    model = kvjax.load(values.model, dtype=values.dtype)
    width = min(values.tokens, model.config.max_positions)
    if values.text is None:
        tokens = data.calibration_sample(model, values.rows, width)
    else:
        text = DataConfig(text=values.text, num_sequences=values.rows, prompt_length=width - 1, new_tokens=1)
        tokens, _, _ = data.load(text, model, seed=0)
    made = kvjax.calibrate(model, tokens, storage)
    losses: list[float] = []
    if values.steps:
        made, losses = train(model, storage, made, tokens, steps=values.steps, rate=values.rate)
    made.save(output)
    trained = f"; {len(losses)} steps took the loss from {losses[0]:.4f} to {losses[-1]:.4f}" if losses else ""
    print(f"{output}: {made.method}, {made.nbytes} bytes from {tokens.size} tokens{trained}.")
    return 0


def train(
    model: Model, storage: Storage, calibration: Calibration, tokens: np.ndarray, *, steps: int, rate: float
) -> tuple[Calibration, list[float]]:
    """Trains a calibration on the log-probabilities of a text under its storage.

    Args:
      model: from `kvjax.load`; it is not trained.
      storage: what needs the calibration.
      calibration: where training starts.
      tokens: [rows, T] int32.
      steps: of Adam, each on all rows; at least 1.
      rate: its learning rate.

    Returns:
      The calibration, and the mean negative log-probability of a token before each step.
    """
    optimizer = optax.adam(rate)
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
    return calibration.replace(method=f"{calibration.method}; trained for {steps} steps"), losses


if __name__ == "__main__":
    cli.main(main)
