"""Trains a small decoder on text files, with recall tasks hidden in them, and exports it as a Hugging Face folder.

    python -m experiments.train --config=train_nano --config.texts=FILE,FOLDER,... [--config.FIELD=VALUE ...]

Writes one folder: config.json, metrics.jsonl (loss and held-out scores by step), checkpoints/ (Orbax), tokenizer.json,
and at the end model/. Started again with the same settings it goes on from its last checkpoint, exactly. Data-parallel
over all devices, of all processes (docs/clusters.md).
"""

import shlex
from collections.abc import Sequence

from experiments import cli
from experiments.training.config import TrainConfig


def main(argv: Sequence[str]) -> int:
    config, _ = cli.parse(argv, about=str(__doc__), cls=TrainConfig)
    # It imports jax, which `--help` does without.
    from experiments.programs.train import train

    model = train(config, command=shlex.join(["python", "-m", "experiments.train", *argv[1:]]))
    print(f"Wrote {model}/")
    return 0


if __name__ == "__main__":
    cli.main(main, interrupted="the same command goes on from the last checkpoint.")
