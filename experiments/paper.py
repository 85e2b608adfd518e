"""Measures tables and figures of H2O, RoCo and InfiniGen by name, on a small model, beside the papers' numbers.

    python -m experiments.paper h2o_table6 [--config.model.path=FOLDER]
    python -m experiments.paper all --fast

Names are those of --list, a paper (h2o, roco, infinigen) or all. Each entry prints what the paper has, what was
measured, every comparison and a verdict: CONFIRM, CONTRADICT or INCONCLUSIVE. --fast takes few rows, and decides
nothing. Results, figures and a page of all entries go to --output; measurements are kept below it, in parts/, so that a
run that is killed goes on where it was, and entries share them. --page makes the page of what is in --output. The texts
are found in --data; without any, generated stories take their place.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from experiments import cli
from experiments.papers import generated, runner
from experiments.papers.config import PaperConfig
from experiments.papers.entry import registry
from experiments.papers.settings import FAST, FULL, Settings, find_data
from experiments.runs.resolve import decoder_config
from kvjax import products
from kvjax.parallel import distributed

SOME_FAILED = 1
CONFIG = "--config=papers"
OUTPUT = "results/papers"
TEXTS_FOLDER = "texts"  # of generated stories, below the output


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool("fast", False, "few rows: all entries in a quarter of an hour, no verdict", flag_values=values)
    flags.DEFINE_bool("list", False, "print the entries and run nothing", flag_values=values)
    flags.DEFINE_bool("page", False, "write the page of the results in --output, and run nothing", flag_values=values)
    flags.DEFINE_bool("rerun", False, "measure what there is a result of, too", flag_values=values)
    flags.DEFINE_integer("seed", 0, "of prompts, draws and bootstraps", lower_bound=0, flag_values=values)
    where = "folder of the texts; else data/ of $KVJAX_SHARED, or of shared/ in or beside the project"
    flags.DEFINE_string("data", None, where, flag_values=values)
    flags.DEFINE_string("output", None, f"folder of results; else {OUTPUT}, or {OUTPUT}-fast", flag_values=values)


def main(argv: Sequence[str]) -> int:
    names = [argument for argument in argv[1:] if not argument.startswith("-")]
    given = [argument for argument in argv[1:] if argument.startswith("-")]
    config, values = cli.parse([*argv[:1], CONFIG, *given], about=__doc__, define=define, cls=PaperConfig)
    distributed.check_single("experiments.paper")
    if values.list:
        for name, entry in registry().items():
            print(f"{name}: {entry.question}")
        return 0
    if not values.page:
        runner.entries_of(names)
    decoder = decoder_config(config.model)
    scale = (FAST if values.fast else FULL).within(decoder.max_positions if decoder else None)
    output = Path(values.output or (f"{OUTPUT}-fast" if values.fast else OUTPUT))
    if values.page:
        settings = Settings(config.model, Path(), values.seed, scale)
        print(f"Wrote {output}/{runner.PAGE}: {len(runner.write_page(output, settings.described()))} entries.")
        return 0
    data = find_data(values.data)
    if data is None:
        data, own = generated.make(output / TEXTS_FOLDER), True
        print(
            f"Note: the papers' texts are not here, neither by --data=FOLDER nor in data/ of $KVJAX_SHARED; generated "
            f"stories and questions in {data} take their place. To have them: {generated.SOURCES}."
        )
    else:
        own = False
    settings = Settings(config.model, data, values.seed, scale, own)
    # Which form of a product is the fastest depends on the machine, and its digits on the form.
    products.use("fixed")
    if values.fast:
        # Nearly all of a trial is compiling.
        jax.config.update("jax_disable_most_optimizations", True)
    failed = runner.run(names, settings, output, rerun=values.rerun)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return SOME_FAILED if failed else 0


if __name__ == "__main__":
    cli.main(main, interrupted="finished measurements were kept; the same command goes on.")
