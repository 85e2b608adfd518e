"""Fine-tunes a model through the cache that it will run with, and measures the gap to the full cache before and after.

    python -m experiments.tune --config=tune_tiny --config.texts=FILE,FOLDER,... [--config.FIELD=VALUE ...]

The loss is that of texts whose tokens attend to the slots that the cache keeps, as they are stored. Gradients treat the
choice of slots as a constant. --config.method=lora trains low-rank updates, full trains all parameters.
--config.train_under=full is the control: ordinary fine-tuning, evaluated under the same caches.

Writes one folder: config.json, metrics.jsonl (loss by step), checkpoints/ (Orbax), model/ (a Hugging Face folder that
`kvjax.load` and transformers read), results.json, report.md and report.html (both caches on held-out windows, before
and after, with the gap). The same command, run again, continues exactly from the last checkpoint. Training is
data-parallel over all devices of all processes (docs/clusters.md). --writers=tensorboard,wandb also sends the metrics
to TensorBoard and Weights & Biases.
"""

import shlex
from collections.abc import Sequence

from experiments import cli, writers
from experiments.tuning.config import TuneConfig


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=writers.define, cls=TuneConfig)
    names = writers.selected(values)
    # This module imports jax, which `--help` does not need.
    from experiments.programs.tune import tune

    command = shlex.join(["python", "-m", "experiments.tune", *argv[1:]])
    folder = tune(config, command=command, writers=names)
    print(f"Wrote {folder}/ (model, results.json, report.md, report.html, metrics.jsonl)")
    return 0


if __name__ == "__main__":
    cli.main(main, interrupted="run the same command again to continue from the last checkpoint.")
