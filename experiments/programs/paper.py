"""Measures entries of papers and writes their page; see `experiments.paper`."""

import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags

from experiments.papers import generated, runner
from experiments.papers.config import OUTPUT, PaperConfig
from experiments.papers.entry import registry
from experiments.papers.settings import LARGE, SCALES, Scale, Settings, find_data
from experiments.runs.resolve import decoder_config
from kvjax import products
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_count
from kvjax.parallel import distributed
from kvjax.products import native

SOME_FAILED = 1
TRIAL = "trial"
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
    scale = scale_of(decoder, values.sizes, fast=values.fast)
    output = Path(values.output or (f"{OUTPUT}-fast" if scale.trial else OUTPUT))
    compared = [Path(folder) for folder in values.compare]
    if values.page:
        settings = Settings(config.model, Path(), values.seed, scale)
        print(
            f"Wrote {output}/{runner.PAGE}: {len(runner.write_page(output, settings.described(), compared))} entries."
        )
        return 0
    data = find_data(values.data)
    if data is None:
        data, own = generated.make(output / TEXTS_FOLDER), True
        print(
            f"Note: the papers' texts were found neither in --data=FOLDER nor in $KVJAX_SHARED/data; generated stories "
            f"and questions in {data} are used instead. To get the texts: {generated.SOURCES}."
        )
    else:
        own = False
    settings = Settings(config.model, data, values.seed, scale, own)
    products.use(form_of(decoder))
    if scale.trial:
        # Nearly all of a trial is compiling.
        jax.config.update("jax_disable_most_optimizations", True)
    failed = runner.run(names, settings, output, rerun=values.rerun, compared=compared)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return SOME_FAILED if failed else 0


def scale_of(decoder: DecoderConfig | None, sizes: str | None, *, fast: bool) -> Scale:
    """Returns the sizes of a run.

    Args:
      decoder: the model; None for one that is not on this machine yet.
      sizes: a key of `SCALES`; None for those of a model of this many parameters.
      fast: whether --fast was given.

    Raises:
      ConfigError: both were given, and differ.
    """
    if fast and sizes not in (None, TRIAL):
        raise ConfigError(f"--fast means --sizes={TRIAL}, but --sizes={sizes} was given; give only one of them.")
    chosen = sizes or (TRIAL if fast else "half" if _is_large(decoder) else "full")
    return SCALES[chosen].within(decoder.max_positions if decoder else None)


def form_of(decoder: DecoderConfig | None) -> str:
    """Returns the form of products; the fastest form depends on the machine, and digits depend on the form.

    kvjax's own products have the same bits wherever vectors are as wide, and allow that the layers of a deep model are
    compiled as a loop, in a third of the time.
    """
    if not _is_large(decoder) or jax.default_backend() != "cpu":
        return products.FIXED
    products.await_native()
    return "native" if native.load() is None else products.FIXED


def _is_large(decoder: DecoderConfig | None) -> bool:
    """Whether a model has many parameters; one that is on the hub has."""
    return decoder is None or parameter_count(decoder) >= LARGE
