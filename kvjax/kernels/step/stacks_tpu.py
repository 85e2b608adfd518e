"""Slots of a decoding step's TPU kernel as stacks, of one layer or of all layers of a loop."""

from collections.abc import Sequence

import jax
from jax.experimental.pallas import tpu as pltpu

from kvjax.kernels.decode import append_tpu
from kvjax.kernels.decode.codes_tpu import LANES
from kvjax.numerics.slices import AXIS
from kvjax.typing import PyTree

Array = jax.Array


__all__ = ["LANES", "in_main_memory", "takes_parts"]


def in_main_memory(stacks: Sequence[Array]) -> list[Array]:
    """Returns operands of a kernel, [B, L, ...] each, that remain in the main memory if they are of several layers.

    XLA would move whole stacks into a core's memory for each layer if they fit there.
    """
    return [pltpu.with_memory_space_constraint(x, pltpu.HBM) if x.shape[AXIS] > 1 else x for x in stacks]


def takes_parts(parts: PyTree) -> bool:
    """Returns whether the kernel writes all parts of codes in a stack of layers.

    XLA, which writes the others, would copy their stacks.

    Args:
      parts: shapes of the codes of a number of vectors that fills the lanes.
    """
    return all(map(append_tpu.takes, jax.tree.leaves(parts)))
