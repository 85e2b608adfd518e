"""Finds the largest batches that fit, and what their tokens cost; see `experiments.capacity`."""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tabulate import tabulate

from experiments import results
from experiments.config import ExperimentConfig
from experiments.reports import capacity_page, prices
from experiments.runs import machine
from experiments.runs.resolve import codes_of, decoder_config, dtype_of, model_name, specs_of
from kvjax.errors import ConfigError, KvjaxError
from kvjax.planning.capacity import Capacity, capacity
from kvjax.planning.topologies import find_target
from kvjax.typing import JsonObject
from kvjax.units import size

PROGRAM = "python -m experiments.capacity"
#: Flags that do not change a result.
SILENT = ("--output", "--compilation_cache")


def start(config: ExperimentConfig, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Plans what a command line asks for.

    Returns:
      The exit status.
    """
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
        raise ConfigError(f"{config.model.path} is not on this machine; give its --config.model.shape.")
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
