"""Bytes that a decoding step moves from host memory, from shapes alone: the settings of InfiniGen's Figures 14 to 16.

Nothing is run or compiled. The time is what the link would take if nothing else took any.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.bench.contestants import shape
from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.devices import PCIE_3, PCIE_4
from kvjax.errors import ConfigError
from kvjax.models import offload
from kvjax.models.parameters import parameter_shapes
from kvjax.parallel import host_memory
from kvjax.planning.roofline import average_slots, local_bytes
from kvjax.typing import JsonObject

DTYPE = jnp.bfloat16
KEPT = 0.2  # of H2O, and the most that InfiniGen reads


class Setting(NamedTuple):
    """One column of a figure.

    Attributes:
      figure: of InfiniGen (arXiv:2406.19707).
      shape: a decoder of `kvjax.models.shapes`.
      batch: the number of rows.
      prompt: tokens of each prompt.
      new: tokens that follow.
      host_weights: the share of layers whose weights are in host memory too.
    """

    figure: str
    shape: str
    batch: int
    prompt: int
    new: int
    host_weights: float = 0.0


SETTINGS = (
    *(Setting("14, 15", "opt-13b", batch, 1920, 128) for batch in (4, 8, 12, 16, 20)),
    *(Setting("16 (a)", "opt-13b", 8, prompt, 128) for prompt in (384, 896, 1408, 1920)),
    Setting("16 (b)", "opt-6.7b", 4, 1920, 128),
    Setting("16 (b)", "opt-13b", 4, 1920, 128),
    Setting("16 (b)", "opt-30b", 4, 1920, 128, host_weights=0.3),
    *(Setting("", "opt-6.7b", batch, prompt, new) for batch in (4, 20) for prompt, new in ((512, 512), (1024, 128))),
)


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for every setting and way of holding a cache in host memory."""
    known = {setting.shape for setting in SETTINGS}
    if values.shape and values.shape not in known:
        raise ConfigError(f"--shape={values.shape!r} is not in these figures; known: {', '.join(sorted(known))}.")
    wanted = {values.shape} if values.shape else known
    return [row for setting in SETTINGS if setting.shape in wanted for row in one_setting(setting)]


def schemes() -> dict[str, CacheSpec]:
    """The systems of the figures, by name."""
    full = policies.full()
    return {
        "FlexGen": CacheSpec(full, storage.dense(memory=host_memory.HOST)),
        "FlexGen, INT4": CacheSpec(full, storage.int4(memory=host_memory.HOST)),
        "H2O, 20 %": CacheSpec(policies.h2o(KEPT), storage.dense(memory=host_memory.HOST)),
        "InfiniGen, at most 20 %": CacheSpec(
            full, storage.dense(memory=host_memory.HOST), selection.infinigen(cap=KEPT)
        ),
    }


def one_setting(setting: Setting) -> list[JsonObject]:
    """Bytes per step of the whole batch: of what is read at most, and of the arrays of fixed shapes that move."""
    config, batch = shape(setting.shape), setting.batch
    prompts = np.full((batch,), setting.prompt, np.int32)
    limits = Limits(setting.prompt, setting.new, shortest=setting.prompt)
    sizes = sizes_for(prompts, setting.new - 1, width=setting.prompt, block=None, limits=limits, last_fed=False)
    weights = host_bytes_of_weights(setting.shape, setting.host_weights)
    rows: list[dict[str, Any]] = []
    flexgen = 0.0
    for name, spec in schemes().items():
        lowered = lower(spec, config, sizes, prompts, implementation="xla", dtype=DTYPE)
        slots = average_slots(config, lowered, setting.prompt, setting.new)
        slot = batch * config.num_kv_heads * spec.storage.bytes_per_slot(config.head_dim, DTYPE, host_memory.HOST)
        # A layer reads all older tokens that it holds, or at most as many as are gathered.
        needed = slot * sum(min(own.held - 1, own.fetched) for own in slots)
        moved = slot * sum(own.fetched for own in slots)
        flexgen = flexgen or moved + weights
        rows.append(
            {
                "figure": setting.figure,
                "model": setting.shape,
                "batch": batch,
                "tokens": f"{setting.prompt} + {setting.new}",
                "cache": name,
                "at most needed MB": needed / 1e6,
                "moved MB": moved / 1e6,
                "weights MB": weights / 1e6,
                "PCIe 3 ms": 1e3 * (moved + weights) / PCIE_3,
                "PCIe 4 ms": 1e3 * (moved + weights) / PCIE_4,
                "of FlexGen": (moved + weights) / flexgen,
            }
        )
    return rows


def host_bytes_of_weights(name: str, share: float) -> int:
    """Returns the bytes of the weights that are in host memory, of a decoder of `kvjax.models.shapes`."""
    if not share:
        return 0
    config = shape(name)
    shapes = parameter_shapes(config, DTYPE)
    layers = offload.host_layers(config.num_layers, share)
    return local_bytes(offload.shapes_with_host_layers(shapes, layers), host_memory.HOST)
