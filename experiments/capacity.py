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

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tabulate import tabulate

from experiments import cli, results
from experiments.config import ExperimentConfig
from experiments.reports import capacity_page, prices
from experiments.runs import machine
from experiments.runs.resolve import codes_of, decoder_config, dtype_of, model_name, specs_of
from kvjax.errors import ConfigError, KvjaxError
from kvjax.planning.capacity import Capacity, capacity
from kvjax.planning.topologies import find_target
from kvjax.typing import JsonObject
from kvjax.units import size

PROGRAM, CONFIG = "python -m experiments.capacity", "--config=capacity"
#: Flags that do not change a result.
SILENT = ("--output", "--compilation_cache")


def main(argv: Sequence[str]) -> int:
    def define(values: flags.FlagValues) -> None:
        where = "a TPU, e.g. v5e:2x4, or GPUs of one machine, e.g. h100:8; else this machine"
        flags.DEFINE_string("topology", None, where, flag_values=values)
        about = "US dollars for an hour of a chip; else that of experiments/reports/prices.toml, if it has the device"
        flags.DEFINE_float("price", None, about, lower_bound=0.0, flag_values=values)
        flags.DEFINE_bool("verify", False, "compile all layers for every batch that was found", flag_values=values)
        flags.DEFINE_string("output", None, "a file for the results as JSON", flag_values=values)
        flags.DEFINE_string(
            "page", None, "write the page of the results in a folder, and plan nothing", flag_values=values
        )

    given = list(argv) if any(each.startswith("--config=") for each in argv) else [*argv[:1], CONFIG, *argv[1:]]
    page = any(each.startswith("--page") for each in argv)
    config, values = cli.parse(given if page else argv, about=__doc__, define=define)
    if values.page:
        print(f"Wrote {capacity_page.write(Path(values.page))}.")
        return 0
    if values.output:
        results.make_file(values.output)
    jax.config.update("jax_compilation_cache_dir", None)  # programs for a device that is not here are not read again
    kept = dict(described(config, values), command=command(argv), caches=[], refused={})
    start = time.process_time()
    found: list[Capacity] = []
    for spec in specs_of(config):
        print(f"{spec.name} ...", file=sys.stderr, flush=True)
        try:
            found.append(planned(config, spec, values, kept["price"], found[-1] if found else None))
            kept["caches"].append(found[-1].as_dict())
        except KvjaxError as error:
            if values.topology is None and not found:
                raise
            kept["refused"][spec.name] = str(error)
        kept["cpu_seconds"] = time.process_time() - start
        if values.output and found:
            # After every cache: what is killed leaves those that are done.
            results.write(Path(values.output), results.to_json(kept))
    if not found:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in kept["refused"].items()))
    rows = capacity_page.rows(kept["caches"])
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
    for name, reason in kept["refused"].items():
        print(f"not planned: {name}: {reason}")
    print(
        f"{kept['model']}, {kept['prompt_length']} + {kept['new_tokens']} tokens, {kept['dtype']}, {found[0].target}; "
        f"bytes of one device of {size(found[0].memory)}; {sum(each.programs for each in found)} programs, "
        f"{kept['cpu_seconds'] / 60:.1f} CPU minutes."
    )
    print(capacity_page.price_line(kept["price"]))
    return 0


def planned(
    config: ExperimentConfig, spec: Any, values: flags.FlagValues, price: JsonObject | None, like: Capacity | None
) -> Capacity:
    """Finds the largest batch of one cache."""
    decoder = decoder_config(config.model)
    assert decoder is not None
    return capacity(
        decoder,
        spec,
        prompt_length=config.data.prompt_length,
        new_tokens=config.data.new_tokens,
        mesh_axes=config.mesh,
        topology=values.topology,
        price=price["amount"] if price else None,
        like=like,
        verify=values.verify,
        dtype=dtype_of(config.model, find_target(values.topology).platform),
        prefill_block=config.prefill_block,
        implementation=config.implementation,
        host_weights=config.model.host_weights,
        weights=codes_of(config.model),
    )


def described(config: ExperimentConfig, values: flags.FlagValues) -> JsonObject:
    """Returns the settings that all results of a run share, as JSON values.

    Raises:
      ConfigError: a checkpoint that is not here, of which no shape is named.
    """
    if decoder_config(config.model) is None:
        raise ConfigError(f"{config.model.path} is not here; name its --config.model.shape.")
    target, price = find_target(values.topology), None
    if values.price is not None:
        price = {"amount": values.price, "currency": "USD", "source": "--price"}
    elif target.device and (listed := prices.table().get(target.device.kind)):
        price = listed.as_dict()
    codes = codes_of(config.model)
    return {
        "config": config.name, "model": model_name(config.model), "prompt_length": config.data.prompt_length,
        "new_tokens": config.data.new_tokens, "prefill_block": config.prefill_block,
        "dtype": str(dtype_of(config.model, target.platform)), "weights": codes and codes.name,
        "topology": values.topology, "price": price, "environment": machine.compilers(),
    }  # fmt: skip


def command(argv: Sequence[str]) -> str:
    """The command that gives the same results."""
    return shlex.join([*PROGRAM.split(), *(each for each in argv[1:] if not each.startswith(SILENT))])


if __name__ == "__main__":
    cli.main(main)
