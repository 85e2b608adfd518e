"""The largest batch that fits, with each of the caches of a config, and what its tokens cost.

python -m experiments.capacity --config=h2o_opt30b --topology=v5e:2x4 --config.baselines='full,h2o + int8'

For the full cache, the baselines and the config's own policy: the largest batch that fits into the memory of every
device, prompts included, to within 2 %; which of prompt and decoding needs more; bytes of weights and cache; the
collectives of a decoding step; the largest number of tokens a second that memory, arithmetic, the host link and the
interconnect allow; and, with a price of a chip's hour, dollars for a million new tokens. Nothing is allocated: programs
of three and of four layers are compiled for the topology, or for this machine, and extrapolated.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tabulate import tabulate

from experiments import cli
from experiments.resolve import codes_of, decoder_config, dtype_of, specs_of
from kvjax import processes
from kvjax.capacity import Capacity, capacity
from kvjax.errors import ConfigError, KvjaxError
from kvjax.units import si, size

HEADERS = (
    "cache", "mesh", "largest batch", "binds", "weights", "cache bytes", "needed", "collectives", "tokens/s at most",
    "limit", "$ per million",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    def define(values: flags.FlagValues) -> None:
        flags.DEFINE_string("topology", None, "a TPU, e.g. v5e:2x4; else this machine", flag_values=values)
        flags.DEFINE_float("price", None, "US dollars for an hour of a chip", lower_bound=0.0, flag_values=values)
        flags.DEFINE_string("output", None, "a file for the results as JSON", flag_values=values)

    config, values = cli.parse(argv, about=__doc__, define=define)
    processes.check_single("experiments.capacity")
    jax.config.update("jax_compilation_cache_dir", None)  # programs for a device that is not here are not read again
    decoder = decoder_config(config.model)
    if decoder is None:
        raise ConfigError(f"{config.model.path} is not here; name its --config.model.shape.")
    found: list[Capacity] = []
    refused: list[str] = []
    for spec in specs_of(config):
        print(f"{spec.name} ...", file=sys.stderr, flush=True)
        try:
            found.append(
                capacity(
                    decoder,
                    spec,
                    prompt_length=config.data.prompt_length,
                    new_tokens=config.data.new_tokens,
                    mesh_axes=config.mesh,
                    topology=values.topology,
                    price=values.price,
                    dtype=dtype_of(config.model, "tpu" if values.topology else None),
                    prefill_block=config.prefill_block,
                    implementation=config.implementation,
                    host_weights=config.model.host_weights,
                    weights=codes_of(config.model),
                )
            )
        except KvjaxError as error:
            if values.topology is None and not found:
                raise
            refused.append(f"{spec.name}: {error}")
    if not found:
        raise ConfigError("; ".join(refused))
    print(table(found))
    for line in refused:
        print(f"not planned: {line}")
    seconds = sum(each.compile_seconds for each in found)
    print(
        f"{config.name}, {config.data.prompt_length} + {config.data.new_tokens} tokens, {found[0].target}; bytes of "
        f"one device of {size(found[0].memory)}; compiled in {seconds:.0f} s."
    )
    if values.output:
        Path(values.output).write_text(json.dumps([each.as_dict() for each in found], indent=2) + "\n")
    return 0


def table(found: Sequence[Capacity]) -> str:
    """A row for each cache."""

    def row(each: Capacity) -> tuple[Any, ...]:
        axes = ",".join(f"{name}:{count}" for name, count in each.mesh.items())
        cost = "" if each.dollars_per_million is None else f"{each.dollars_per_million:.3g}"
        speed = "" if each.tokens_per_second is None else f"{each.tokens_per_second:,.0f}"
        asked = f"{each.collectives.number:.0f}, {si(each.collectives.moved, 'B')}" if each.collectives.number else ""
        return (
            each.policy, axes, f"{each.batch:,}", each.binds, size(each.weights), size(each.cache),
            size(max(each.decode, each.prefill)), asked, speed, each.limit or "", cost,
        )  # fmt: skip

    return tabulate([row(each) for each in found], headers=HEADERS, tablefmt="github", disable_numparse=True)


if __name__ == "__main__":
    cli.main(main)
