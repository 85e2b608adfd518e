"""Finds the skew of a model from a sample text and saves it, for selections that guess the query (`kvjax.models.skew`).

python -m experiments.skew --model=kvjax-tiny --text=FILE.txt --output=results/kvjax-tiny-skew.safetensors
python -m experiments.run --config=infinigen_tiny --config.model.skew=results/kvjax-tiny-skew.safetensors
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

TOKENS = 2048  # of the sample; no longer than the model's context


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", None, "a checkpoint folder or a hub id", flag_values=values)
    flags.DEFINE_string("text", None, "text file of the sample", flag_values=values)
    flags.DEFINE_integer("tokens", TOKENS, "number of tokens of the sample", lower_bound=2, flag_values=values)
    flags.DEFINE_string("dtype", None, "dtype of the weights", flag_values=values)
    flags.DEFINE_string("output", None, "the file to write", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if None in (values.model, values.text, values.output):
        raise ConfigError("give --model=FOLDER, --text=FILE.txt and --output=FILE.safetensors.")
    # It imports jax, which `--help` does without.
    from experiments.programs import skew

    return skew.start(values)


if __name__ == "__main__":
    cli.main(main)
