"""The static description of a cache: the groups of heads of each layer, in each phase.

It is hashable, and compiled programs are keyed by it. The numbers of a batch (lengths, budgets) are data in the state.
"""

import dataclasses
import functools
from typing import Any

import jax

from kvjax.cache.empty import empty
from kvjax.cache.explain import explain
from kvjax.cache.groups import Extent, Group, Phase, keep_everything, stores_of
from kvjax.storage.calibration import side_shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """What `lower` returns.

    Attributes:
      prompt: the groups of each layer while the prompt goes in.
      decode: the groups of each layer while decoding.
      block: tokens of a block of the prompt; None = in one shot.
      name: of the spec, for reports: policy, storage and selection; see `CacheSpec.name`.
      kv_heads: KV heads of the model.
      head_dim: features of a head.
      dtype: of the model's keys and values.
      platform: ``cpu``, ``gpu`` or ``tpu``, for reports.
    """

    prompt: Phase
    decode: Phase
    block: int | None
    name: str = dataclasses.field(compare=False)
    kv_heads: int
    head_dim: int
    dtype: str
    platform: str = dataclasses.field(default="cpu", compare=False)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group of the decoding phase."""
        return tuple(group for layer in self.decode for group in layer)

    @property
    def keeps_all(self) -> bool:
        """Whether no group of heads ever evicts."""
        return not any(group.evicts for phase in (self.prompt, self.decode) for layer in phase for group in layer)

    def bytes(self, rows: int = 1, *, statistics: bool = False) -> int:
        """Returns the bytes that are allocated for decoding.

        Args:
          rows: the number of rows of the batch.
          statistics: whether to count positions, statistics and indices besides keys and values.
        """
        # The arrays themselves are the one source of sizes.
        layers = [
            jax.eval_shape(functools.partial(empty, group, rows, self.kv_heads, self.head_dim, self.dtype))
            for group in self.groups
        ]
        trees: Any = layers if statistics else [(layer.stores, layer.sides) for layer in layers]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(trees))

    def calibration_bytes(self) -> int:
        """Returns the bytes of what vectors share from a calibration, which rows have in common."""
        each = [
            side_shapes(
                group.storage, self.kv_heads if group.heads is None else len(group.heads), self.head_dim, self.dtype
            )
            for group in self.groups
        ]
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(each))

    def explain(self) -> str:
        """Describes each kind of layer in words: its slots, bytes and kernels, and why no faster kernel runs."""
        return explain(self)


__all__ = ["CacheLayout", "Extent", "Group", "Phase", "keep_everything", "stores_of"]
