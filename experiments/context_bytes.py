"""Measures contexts as bytes: bits of a number, perplexity and greedy tokens, for transport codecs and storages.

python -m experiments.context_bytes --model=smollm2-135m-instruct --text=FILE.txt --output=results/context_bytes.json

The prompt of each row is read once by a full cache, encoded and decoded, and the tokens after it are scored. Tables,
transforms and calibrations of storages are computed from other rows of the text, after those that are scored. Storages
hold the prompt, and the tokens after it, in their own codes. Bits count everything that is sent, or held, of keys and
values; positions and logits are left out. "agreement" is the share of greedy tokens that equal, at the same place,
those after the context as it is. A second table has each storage beside the codec whose bits are nearest.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

ALL = "all"
RATIOS = ("3", "4", "6", "8", "12", "16", "20")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", "kvjax-tiny", "a checkpoint folder, a hub id or a model of kvjax", flag_values=values)
    flags.DEFINE_string("text", None, "the text file", flag_values=values)
    flags.DEFINE_integer("rows", 4, "rows that are scored", lower_bound=1, flag_values=values)
    flags.DEFINE_integer(
        "calibration", 4, "rows after these, for tables and transforms", lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer("prompt", 512, "tokens of a row that are its context", lower_bound=16, flag_values=values)
    flags.DEFINE_integer("scored", 128, "tokens of a row that are scored", lower_bound=1, flag_values=values)
    flags.DEFINE_list("ratios", list(RATIOS), "ratios of KVTC, relative to 16 bits", flag_values=values)
    flags.DEFINE_integer("generated", 64, "greedy tokens of a row that are compared", lower_bound=1, flag_values=values)
    storages = f"storages, separated by semicolons, such as int8;kivi(2); or {ALL}, for each that a full cache can have"
    flags.DEFINE_string("storages", ALL, storages, flag_values=values)
    flags.DEFINE_string("output", None, "write the results to this JSON file", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if values.text is None:
        raise ConfigError("give --text=FILE.txt.")
    # It imports jax, which `--help` does without.
    from experiments.programs import context_bytes

    return context_bytes.start(values, argv)


if __name__ == "__main__":
    cli.main(main)
