"""Measures contexts as bytes: bits of a number and perplexity after decoding, for transport codecs and storages.

python -m experiments.context_bytes --model=smollm2-135m-instruct --text=FILE.txt --output=results/context_bytes.json

The prompt of each row is read once by a full cache, encoded and decoded, and the tokens after it are scored. Tables and
transforms are computed from other rows of the text, after those that are scored. Storages hold the prompt, and the
scored tokens, in their own codes. Bits count everything that is sent of keys and values; positions and logits are left
out.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

STORAGES = ("int8", "int4", "kivi", "int2")
RATIOS = ("8", "12", "16", "20")


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
    flags.DEFINE_list("storages", list(STORAGES), "storages, by name", flag_values=values)
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
