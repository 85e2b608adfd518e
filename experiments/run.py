"""Runs one experiment: a policy against its baselines on one model and one text.

    python -m experiments.run --config=h2o_tiny [--config.FIELD=VALUE ...]

Prints a table and writes one folder: config.json, metrics.jsonl, environment.json (the machine, and for every policy
which kernels ran and why nothing faster), report.md, report.png, and report.html, which shows the first row's text with
the tokens that each cache holds. A model that this machine cannot hold is planned instead of run, with exit status 3;
--topology=v5e:2x4 plans for a TPU that you do not have. --config.storage=int8 and
--config.selection='quest(page=16, budget=512)' say how the policy's slots are held, and which of them a query reads;
--config.model.weights=int4 holds the projections in codes. --config.tasks.names='copa(shots=5),xsum' runs tasks of
local files (docs/tasks.md); a run that is ended goes on from the answers that there are. --writers=tensorboard,wandb
also gives the finished run's metrics to these.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli, writers


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("topology", None, "plan for a named TPU, e.g. v5e:2x4, and run nothing", flag_values=values)
    writers.define(values)


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=define)
    # It imports jax, which `--help` does without.
    from experiments.programs import run

    return run.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main, "no unfinished result was kept; answers to tasks were, and the same command goes on from them.")
