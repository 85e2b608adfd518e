"""Trains KV prediction or cache augmentation, and measures them on held-out texts.

    python -m experiments.train_reuse --config=train_prediction_tiny --config.texts=FILE,FOLDER
    python -m experiments.train_reuse --config=train_augmentation_tiny --config.texts=FILE [--config.FIELD=VALUE ...]

The model is not trained. --config.method=prediction trains auxiliary models, which begin as some layers of the model,
and maps of their keys and values to those of the model. --config.method=augmentation trains copies of the model with
input vectors, whose hidden states are appended to its cache at random points of texts.

Writes one folder: config.json, metrics.jsonl (losses by step, held-out losses), checkpoints/ (Orbax), what was trained
(predictor-*/ and coprocessor-*.safetensors, for kvjax.reuse), results.json, report.md and plot.png: perplexity by the
FLOPs of a prompt, or by the distance from the point. The same command, run again, continues exactly from the last
checkpoint. --writers=tensorboard,wandb also sends the metrics to TensorBoard and Weights & Biases.
"""

import shlex
from collections.abc import Sequence

from experiments import cli, writers
from experiments.tuning.reuse_config import TrainReuseConfig

#: Flags that do not change a result, or name files of this machine.
SILENT = ("--config.texts", "--config.output", "--writers")


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=writers.define, cls=TrainReuseConfig)
    names = writers.selected(values)
    # This module imports jax, which `--help` does not need.
    from experiments.programs.train_reuse import train_reuse

    own = [each for each in argv[1:] if not each.startswith(SILENT)]
    command = shlex.join(["python", "-m", "experiments.train_reuse", *own])
    folder = train_reuse(config, command=command, writers=names)
    print(f"Wrote {folder}/ (results.json, plot.png, report.md, metrics.jsonl, and what was trained)")
    return 0


if __name__ == "__main__":
    cli.main(main, interrupted="run the same command again to continue from the last checkpoint.")
