"""Bytes that a decoding step moves from the host's memory, where the cache is there: counted from shapes."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from experiments.bench.link import Setting, one_setting, schemes
from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes.plan import lowered_for
from experiments.papers.settings import Settings
from kvjax.models import shapes
from kvjax.models.parameters import parameter_count
from kvjax.parallel import host_memory
from kvjax.planning.roofline import average_slots

DTYPE = jnp.bfloat16
FULL, INT4, H2O, INFINIGEN = "FlexGen", "INT4", "H2O", "InfiniGen"  # InfiniGen's names of the systems, in order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved(Part):
    """Counts the bytes of a step of a published model, in two bytes per number.

    The result has, for the four systems in order, ``needed`` (of what is read at the most) and ``moved`` (of arrays of
    fixed shapes); ``offloaded``, of weights in the host's memory; and ``weights``, of all weights.

    Attributes:
      shape: of `kvjax.models.shapes`.
      batch: rows.
      prompt: tokens of each prompt.
      new: tokens after it.
      host_weights: the share of the layers whose weights are in the host's memory.
    """

    shape: str
    batch: int
    prompt: int
    new: int
    host_weights: float = 0.0

    def measure(self, lab: Lab) -> Result:
        setting = Setting("", self.shape, self.batch, self.prompt, self.new, self.host_weights)
        rows = one_setting(setting)
        return {
            "needed": np.array([1e6 * row["at most needed MB"] for row in rows]),
            "moved": np.array([1e6 * row["moved MB"] for row in rows]),
            "offloaded": np.asarray(1e6 * rows[0]["weights MB"]),
            "weights": np.asarray(2.0 * parameter_count(shapes.by_name(self.shape))),
        }


def moved(shape: str, batch: int, prompt: int, new: int, *, host_weights: float = 0.0) -> Moved:
    """A part; sizes are the paper's at every scale."""
    return Moved(shape=shape, batch=batch, prompt=prompt, new=new, host_weights=host_weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(Part):
    """Counts the slots of a step of the model itself, and the bytes of a slot, in two bytes per number.

    The result has, for the four systems in order, ``slots`` [4, L] that a head of a layer holds on average, without the
    new token, and ``bytes`` [4] of a slot of all heads of a layer; and ``partial``, the bytes of a slot's key in the
    columns that InfiniGen guesses by.

    Attributes:
      prompt: tokens of each prompt.
      new: tokens after it.
      ratio: of the columns.
    """

    prompt: int
    new: int
    ratio: float

    def measure(self, lab: Lab) -> Result:
        config = lab.model(self.model).config
        slots, sizes = [], []
        for cache, spec in zip(("full", "full + int4", "h2o", "full"), schemes().values(), strict=True):
            lowered = lowered_for(config, cache, 0.2, 1, self.prompt, self.new)
            slots.append([each.held - 1 for each in average_slots(config, lowered, self.prompt, self.new)])
            sizes.append(config.num_kv_heads * spec.storage.bytes_per_slot(config.head_dim, DTYPE, host_memory.HOST))
        partial = 2 * config.num_kv_heads * np.ceil(self.ratio * config.head_dim - 1e-9)
        return {"slots": np.array(slots), "bytes": np.array(sizes, np.float64), "partial": np.asarray(partial)}


def own(settings: Settings, ratio: float) -> Own:
    """A part for texts of the scale."""
    return Own(prompt=settings.scale.prompt, new=settings.scale.new, ratio=ratio)
