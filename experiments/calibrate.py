"""Computes the calibration of a storage from a sample text, optionally trains it, and saves it.

python -m experiments.calibrate --model=kvjax-tiny --storage='low_rank(key_rank=32, value_rank=48)' --steps=50 \\
  --output=results/kvjax-tiny-low-rank.safetensors
python -m experiments.run --config=matryoshka_tiny --config.model.calibration=results/kvjax-tiny-low-rank.safetensors

--objective selects the loss of the training on the sample; directions need not stay orthogonal:

  reconstruction  the squared error of keys and values as the storage holds them, layer by layer (CSKV,
                  arXiv:2409.10593). The model runs once. The default of cskv.
  distillation    the divergence of the next token's distribution from that of the full model, where each step draws a
                  rank for each head (MatryoshkaKV, arXiv:2410.14731; kvjax.analysis.train_directions). For low_rank,
                  whose first directions are saved.
  next_token      the mean negative log-likelihood of the next token. Rows are run in blocks, so that every token reads
                  older tokens as the storage holds them. The default of all others.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

ROWS, TOKENS = 4, 512  # rows of the sample, tokens of each
RATE = 1e-3  # of Adam
RECONSTRUCTION, DISTILLATION, NEXT_TOKEN = OBJECTIVES = ("reconstruction", "distillation", "next_token")
OWN = {"cskv": RECONSTRUCTION}  # name of a storage -> the objective of its paper


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "a checkpoint folder or a hub id", flag_values=values)
    flags.DEFINE_string("storage", None, "a storage that is calibrated, such as low_rank(key_rank=32, value_rank=32)",
                        flag_values=values)  # fmt: skip
    flags.DEFINE_string("text", None, "text file of the sample; default: a generated story", flag_values=values)
    flags.DEFINE_integer("rows", ROWS, "number of rows of the sample", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("tokens", TOKENS, "number of tokens of a row", lower_bound=2, flag_values=values)
    flags.DEFINE_integer("steps", 0, "number of training steps", lower_bound=0, flag_values=values)
    flags.DEFINE_enum(
        "objective", None, OBJECTIVES, f"the loss of the training; default: {RECONSTRUCTION} for "
        f"{', '.join(OWN)}, {NEXT_TOKEN} for others", flag_values=values,
    )  # fmt: skip
    flags.DEFINE_float("learning_rate", RATE, "learning rate of Adam", lower_bound=0.0, flag_values=values)
    flags.DEFINE_string("dtype", None, "dtype of the weights", flag_values=values)
    flags.DEFINE_string("output", None, "the file to write", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if None in (values.model, values.storage, values.output):
        raise ConfigError("give --model=FOLDER, --storage='low_rank(...)' and --output=FILE.safetensors.")
    # It imports jax, which `--help` does without.
    from experiments.programs import calibrate

    return calibrate.start(values)


if __name__ == "__main__":
    cli.main(main)
