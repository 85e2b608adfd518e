"""Trains the parameters of a merge (LoCoCo, arXiv:2406.05317), and compares it with the policy without a merge.

    python -m experiments.train_merge --config=train_merge_tiny --config.texts=FILE,FOLDER,... [--config.FIELD=VALUE]

The model is not trained. The loss is that of the next token under the cache: a prompt is read in blocks, slots are
merged after each of them, and gradients pass through all merges of a window. The choice of slots is a constant.

Writes one folder: config.json, metrics.jsonl (loss by step, and held-out losses), checkpoints/ (Orbax),
merge.safetensors (a calibration: calibration= of the library, --config.model.calibration=FILE of commands),
results.json and report.md (held-out loss of the full cache, of the policy without its merge, and of the merge before
and after training). The same command, run again, continues exactly from the last checkpoint.
--writers=tensorboard,wandb also sends the metrics to TensorBoard and Weights & Biases.
"""

import shlex
from collections.abc import Sequence

from experiments import cli, writers
from experiments.tuning.merge_config import TrainMergeConfig


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=writers.define, cls=TrainMergeConfig)
    names = writers.selected(values)
    # This module imports jax, which `--help` does not need.
    from experiments.programs.train_merge import train_merge

    command = shlex.join(["python", "-m", "experiments.train_merge", *argv[1:]])
    folder = train_merge(config, command=command, writers=names)
    print(f"Wrote {folder}/ (merge.safetensors, results.json, report.md, metrics.jsonl)")
    return 0


if __name__ == "__main__":
    cli.main(main, interrupted="run the same command again to continue from the last checkpoint.")
