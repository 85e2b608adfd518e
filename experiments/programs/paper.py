"""Measures entries of papers and writes their page; see `experiments.paper`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from experiments.papers import generated, runner
from experiments.papers.config import OUTPUT, PaperConfig
from experiments.papers.entry import registry
from experiments.papers.settings import FAST, FULL, Settings, find_data
from experiments.runs.resolve import decoder_config
from kvjax import products
from kvjax.parallel import distributed

SOME_FAILED = 1
TEXTS_FOLDER = "texts"  # of generated stories, below the output


def start(config: PaperConfig, values: flags.FlagValues, names: Sequence[str]) -> int:
    """Measures the entries of these names, or does what a flag asks for instead.

    Returns:
      The exit status.
    """
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
