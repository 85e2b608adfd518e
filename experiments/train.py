"""Trains a small decoder on text files that recall tasks are inserted into, and exports it as a Hugging Face folder.

    python -m experiments.train --config=train_nano --config.texts=FILE,FOLDER,... [--config.FIELD=VALUE ...]

Writes one folder: config.json, metrics.jsonl (loss and held-out scores by step), checkpoints/ (Orbax), tokenizer.json,
and finally model/. The same command, run again, continues exactly from the last checkpoint. Training is data-parallel
over all devices of all processes (docs/clusters.md). --writers=tensorboard,wandb also sends the metrics to TensorBoard
and Weights & Biases.
"""

import shlex
from collections.abc import Sequence

from experiments import cli, writers
from experiments.training.config import TrainConfig


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=writers.define, cls=TrainConfig)
    names = writers.selected(values)
    # It imports jax, which `--help` does without.
    from experiments.programs.train import train

    command = shlex.join(["python", "-m", "experiments.train", *argv[1:]])
    model = train(config, command=command, writers=names)
    print(f"Wrote {model}/")
    return 0


if __name__ == "__main__":
    cli.main(main, interrupted="run the same command again to continue from the last checkpoint.")
