"""BYTES and PLAN: what a cache of a published model holds, and the tokens per second that a device's memory allows.

Both are counted from shapes; nothing is allocated, and nothing is compiled. `kvjax.planning` compiles the same step.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from experiments.papers.parts import Cached, Lab, Result
from experiments.papers.recipes import caches
from experiments.papers.settings import Settings
from kvjax.cache import Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.devices import DEVICES, GIGA, PCIE_3, PCIE_4, TERA, Device
from kvjax.models import shapes
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_count
from kvjax.planning.roofline import average_slots, decode_shapes, roofline

A100 = DEVICES["NVIDIA A100-SXM4-80GB"]
SHEET = "NVIDIA's data sheet of the product"
#: The devices of the papers.
PLATFORMS: dict[str, Device] = {
    "T4": Device("NVIDIA T4", 16 * GIGA, 320 * GIGA, 65 * TERA, SHEET, PCIE_3),
    "A100": A100,
    "A6000": Device("NVIDIA RTX A6000", 48 * GIGA, 768 * GIGA, 155 * TERA, SHEET, PCIE_4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Cached):
    """Counts bytes and speed of a decode step, in two bytes per number.

    The result has ``weights`` and ``cache``, bytes that are held; ``moved``, bytes of a step; ``speed``, tokens per
    second of the whole batch that the device's memory and arithmetic allow; and ``slots``, per head.

    Attributes:
      shape: of `kvjax.models.shapes`.
      batch: rows.
      prompt: tokens of each row's prompt.
      new: tokens after it.
      device: a key of `PLATFORMS`.
    """

    shape: str
    batch: int
    prompt: int
    new: int
    device: str

    def measure(self, lab: Lab) -> Result:
        config = _longer(shapes.by_name(self.shape), self.prompt + self.new)
        lowered = lowered_for(config, self.cache, self.budget, self.batch, self.prompt, self.new)
        slots = average_slots(config, lowered, self.prompt, self.new)
        held = decode_shapes(config, lowered.layout, "bfloat16", self.batch, None)
        step = roofline(config, held, slots, PLATFORMS[self.device])
        assert step.tokens_per_second is not None  # every platform's speeds are known
        values = {
            "weights": 2 * parameter_count(config), "cache": lowered.layout.bytes(self.batch),
            "moved": step.weights_moved + step.cache_moved, "speed": step.tokens_per_second,
            "slots": max(group.capacity for group in lowered.layout.groups),
        }  # fmt: skip
        return {name: np.asarray(value, np.float64) for name, value in values.items()}


def plan(cache: str, budget: int | float, *, shape: str, batch: int, prompt: int, new: int, device: str) -> Plan:
    """A part; sizes are the paper's at every scale."""
    return Plan(cache=cache, budget=budget, shape=shape, batch=batch, prompt=prompt, new=new, device=device)


def lowered_for(
    config: DecoderConfig, cache: str, budget: int | float, batch: int, prompt: int, new: int, dtype: str = "bfloat16"
) -> Lowered:
    """The layout of a cache, as `kvjax.generate` would allocate it for exactly these sizes."""
    lengths = np.full((batch,), prompt, np.int32)
    limits = Limits(prompt, new, shortest=prompt)
    sizes = sizes_for(lengths, new - 1, width=prompt, block=None, limits=limits, last_fed=False)
    return lower(caches.exact_spec(cache, budget), config, sizes, lengths, dtype=dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Held(Cached):
    """Counts the bytes of keys and values of a row of the model itself, in float32, as the column ``KV held`` of a run.

    The result has ``bytes``.

    Attributes:
      prompt: tokens of the prompt.
      new: tokens after it.
    """

    prompt: int
    new: int

    def measure(self, lab: Lab) -> Result:
        lowered = lowered_for(
            lab.model(self.model).config, self.cache, self.budget, 1, self.prompt, self.new, "float32"
        )
        return {"bytes": np.asarray(lowered.layout.bytes(1), np.float64)}


def held(settings: Settings, cache: str, budget: int | float) -> Held:
    """A part for texts of the scale."""
    full = cache.startswith("full")
    return Held(
        cache=cache, budget=1.0 if full else budget, prompt=settings.scale.prompt, new=settings.scale.new
    )  # fmt: skip


def value(result: Result, name: str) -> float:
    """A number of a result."""
    return float(result[name])


def largest_batch(one: Result, memory: float, weights: float = 1.0) -> int:
    """The most rows whose cache fits beside the weights; 0 if the weights do not fit.

    Args:
      one: the result of one row.
      memory: of the device, in bytes.
      weights: the share of their bytes that weights take.
    """
    return max(0, math.floor((memory - weights * value(one, "weights")) / value(one, "cache")))


def _longer(config: DecoderConfig, tokens: int) -> Any:
    """A decoder whose position table has room for some tokens, as in runs that measure speed alone."""
    return dataclasses.replace(config, max_positions=max(config.max_positions or tokens, tokens))
