"""Finds the largest batch that fits with each cache of a config, and the cost of its tokens.

python -m experiments.capacity --config=h2o_opt30b --topology=v5e:2x4 --config.baselines='full,h2o + int8'

For the full cache, the baselines and the config's own policy, it prints: the largest batch that fits into the memory of
every device, prompts included, to within 2 %; which of prefill and decoding needs more memory; bytes of weights and
cache; the bytes that a decoding step exchanges between devices and moves from host memory, the experts that it reads,
and the time these take; the largest number of tokens per second that memory, arithmetic, the host link and the
interconnect allow; and dollars per million new tokens, by --price or by the dated table of
experiments/reports/prices.toml. Nothing is allocated: programs of three and four layers are compiled for the topology,
or for this machine, and extrapolated. For a TPU, programs of all layers that are slightly too large correct the result,
since the compiler reports how much memory they need. GPUs (h100:8) are planned from shapes alone. --verify compiles all
layers for the batches that were found. --output writes the results as JSON; --page=FOLDER makes a page of the JSON
files in that folder.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli

CONFIG = "--config=capacity"


def define(values: flags.FlagValues) -> None:
    where = "a TPU, e.g. v5e:2x4, or GPUs of one machine, e.g. h100:8; default: this machine"
    flags.DEFINE_string("topology", None, where, flag_values=values)
    about = "US dollars per chip hour; default: the price in experiments/reports/prices.toml, if the device is listed"
    flags.DEFINE_float("price", None, about, lower_bound=0.0, flag_values=values)
    flags.DEFINE_bool("verify", False, "compile all layers for every batch that was found", flag_values=values)
    flags.DEFINE_string("output", None, "write the results to this JSON file", flag_values=values)
    flags.DEFINE_string("page", None, "only write the page of the results in this folder", flag_values=values)


def main(argv: Sequence[str]) -> int:
    given = list(argv) if any(each.startswith("--config=") for each in argv) else [*argv[:1], CONFIG, *argv[1:]]
    page = any(each.startswith("--page") for each in argv)
    config, values = cli.parse(given if page else argv, about=str(__doc__), define=define)
    # It imports jax, which `--help` does without.
    from experiments.programs import capacity

    return capacity.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main)
