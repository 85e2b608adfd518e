"""Runs the product of some fields' values: one result a combination, and only those that are missing.

    python -m experiments.sweep --config=h2o_tiny --sweep=policy.budget=0.1,0.2,0.5 --sweep=policy.name=h2o,window

The table begins with the full cache, which is measured once for each text; --nofull leaves it out. It has 95 %
intervals over rows and prompts, and warnings where these are too few to tell caches apart.

Any field can be swept: --sweep='storage=dense,int8,int4(residual=32)', --sweep='selection=everything,optimal(64)'.
Where storages are swept the plot shows quality against the bytes held, otherwise against the budget; if dense is one of
them, sweep.md has what each of the others costs against it, text by text (seed by seed). sweep.html is one file with
the table, the plot and links to a page of each run, beside the runs' results; sweep.json has the numbers.
Where nothing is timed (--config.repeats=0), budgets of one sweep share compiled programs: arrays have room for the
largest, and the bytes that are reported are those of each.
Results are JSON files in OUTPUT/NAME-sweep/, named by a hash of the resolved config and of the contents of the files
that it names, and of those that a user's own Python file imports from its folder (`kvjax.specs.user_files`); called
again, it runs what is missing or failed, and everything with --rerun. Results of other code are marked.
--sweep=seed=0,1,2 gives the mean and the standard deviation over seeds. Values are separated by commas, or by
semicolons if there are any: --sweep='mesh=data:2;data:1,model:2'.

Several workers, on machines that share the folder, may be given the same command: each run is claimed by one of them, a
run of a worker that died is taken over, and the last one writes the report. --shard=2/8 runs every eighth instead, from
the second on, without claims. docs/clusters.md has recipes for SLURM, Kubernetes, SkyPilot and Ray.
"""

import signal
from collections.abc import Sequence

from absl import flags

from experiments import cli


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("sweep", [], "FIELD=VALUE,VALUE,...; may be repeated", flag_values=values)
    about = "measure the full cache too, once for each text, and put it first in the table"
    flags.DEFINE_bool("full", True, about, flag_values=values)
    flags.DEFINE_bool("rerun", False, "run what there is a result of too", flag_values=values)
    about = "I/N: run every N-th combination from the I-th on, without claims, as in 2/8"
    flags.DEFINE_string("shard", None, about, flag_values=values)
    about = "stay until other workers have done what they claimed, and take over what they leave"
    flags.DEFINE_bool("wait", False, about, flag_values=values)


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=define)
    # It imports jax, which `--help` does without.
    from experiments.programs import sweep

    return sweep.start(config, values, argv)


if __name__ == "__main__":
    # A scheduler's request to end gives the claim up, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cli.main(main)
