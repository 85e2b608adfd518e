"""Trains the gate of the policy `learned`, and compares it with other policies of the same budget.

    python -m experiments.train_gate --config=train_gate_tiny --config.texts=FILE,FOLDER,... [--config.FIELD=VALUE ...]

The model is not trained. A step runs whole windows of texts, because the scores alone determine the slots that each
query sees under the budget (kvjax.training). --config.objective=next_token trains on the loss under the budget, with
gradients straight through the evictions. The other objectives are those of papers: replay (KVzap), replay_share (Fast
KVzip), distill (TRIM-KV) and answer (Locret).

Writes one folder: config.json, metrics.jsonl (loss by step, and the held-out loss of the policy), checkpoints/ (Orbax),
gate.safetensors (a calibration: calibration= of the library, --config.model.calibration=FILE of commands), results.json
and report.md (held-out loss of learned, full, h2o and random). The same command, run again, continues exactly from the
last checkpoint. --writers=tensorboard,wandb also sends the metrics to TensorBoard and Weights & Biases.
"""

import shlex
from collections.abc import Sequence

from experiments import cli, writers
from experiments.tuning.gate_config import TrainGateConfig


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=writers.define, cls=TrainGateConfig)
    names = writers.selected(values)
    # This module imports jax, which `--help` does not need.
    from experiments.programs.train_gate import train_gate

    command = shlex.join(["python", "-m", "experiments.train_gate", *argv[1:]])
    folder = train_gate(config, command=command, writers=names)
    print(f"Wrote {folder}/ (gate.safetensors, results.json, report.md, metrics.jsonl)")
    return 0


if __name__ == "__main__":
    cli.main(main, interrupted="run the same command again to continue from the last checkpoint.")
