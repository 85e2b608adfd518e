"""Scores a finished training run, and writes its model, its loss curve and a model card with data, recipe and scores.

    python -m experiments.card --run=results/train_tiny --output=kvjax/pretrained/kvjax-tiny --license=Apache-2.0

Held-out texts and settings are read from the run's config.json; the numbers in the card are those that this program
prints. If the run started from the model of another run (`start`) whose folder still exists, the card covers both.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("run", None, "the run's folder", flag_values=values)
    flags.DEFINE_string("output", None, "the folder to write the model and its card to", flag_values=values)
    flags.DEFINE_string("license", "Apache-2.0", "the license that the card names", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if values.run is None or values.output is None:
        raise ConfigError("give --run=FOLDER and --output=FOLDER.")
    run, output = Path(values.run), Path(values.output)
    if not (run / "model").is_dir():
        raise ConfigError(f"{run} is not a finished run: it has no model/.")
    # It imports jax, which `--help` does without.
    from experiments.programs import card

    return card.start(run, output, values.license)


if __name__ == "__main__":
    cli.main(main)
