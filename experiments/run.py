"""Runs one experiment: compares a policy with baselines on one model and one text.

    python -m experiments.run --config=h2o_tiny [--config.FIELD=VALUE ...]

Prints a table and writes one folder: config.json, metrics.jsonl, environment.json (the machine and, for every policy,
which kernels ran and why no faster ones did), report.md, report.png, and report.html, which shows the first row's text
with the tokens that each cache kept. If the model does not fit on this machine, a plan is printed instead and the exit
status is 3; --topology=v5e:2x4 plans for a TPU that you do not have. --config.storage=int8 sets how slots are stored,
--config.selection='quest(page=16, budget=512)' which of them a query reads, and --config.model.weights=int4 quantizes
the projections. --config.tasks.names='copa(shots=5),xsum' runs tasks from local files (docs/tasks.md); if the run is
interrupted, the same command continues after the answers so far. --writers=tensorboard,wandb also sends the metrics of
a finished run to TensorBoard and Weights & Biases.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli, writers


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("topology", None, "plan for a named TPU, e.g. v5e:2x4, without running", flag_values=values)
    writers.define(values)


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=define)
    # It imports jax, which `--help` does without.
    from experiments.programs import run

    return run.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main, "finished results and answers to tasks were kept; run the same command again to continue.")
