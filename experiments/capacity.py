"""The largest batch that fits, with each of the caches of a config, and what its tokens cost.

python -m experiments.capacity --config=h2o_opt30b --topology=v5e:2x4 --config.baselines='full,h2o + int8'

For the full cache, the baselines and the config's own policy: the largest batch that fits into the memory of every
device, prompts included, to within 2 %; which of prompt and decoding needs more; bytes of weights and cache; what a
decoding step exchanges between devices, moves from host memory and reads of experts, and how long these take; the
largest number of tokens a second that memory, arithmetic, the host link and the interconnect allow; and dollars for a
million new tokens, by --price or by the dated table of experiments/reports/prices.toml. Nothing is allocated: programs
of three and of four layers are compiled for the topology, or for this machine, and extrapolated; of a TPU, programs of
all layers that are slightly too large correct them, since the compiler says how much these need. GPUs (h100:8) are
planned from shapes alone. --verify compiles all layers for the very batches that are found. --output keeps the results
as JSON, and --page=FOLDER makes the page of those in a folder.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli

CONFIG = "--config=capacity"


def define(values: flags.FlagValues) -> None:
    where = "a TPU, e.g. v5e:2x4, or GPUs of one machine, e.g. h100:8; else this machine"
    flags.DEFINE_string("topology", None, where, flag_values=values)
    about = "US dollars for an hour of a chip; else that of experiments/reports/prices.toml, if it has the device"
    flags.DEFINE_float("price", None, about, lower_bound=0.0, flag_values=values)
    flags.DEFINE_bool("verify", False, "compile all layers for every batch that was found", flag_values=values)
    flags.DEFINE_string("output", None, "a file for the results as JSON", flag_values=values)
    flags.DEFINE_string("page", None, "write the page of the results in a folder, and plan nothing", flag_values=values)


def main(argv: Sequence[str]) -> int:
    given = list(argv) if any(each.startswith("--config=") for each in argv) else [*argv[:1], CONFIG, *argv[1:]]
    page = any(each.startswith("--page") for each in argv)
    config, values = cli.parse(given if page else argv, about=str(__doc__), define=define)
    # It imports jax, which `--help` does without.
    from experiments.programs import capacity

    return capacity.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main)
