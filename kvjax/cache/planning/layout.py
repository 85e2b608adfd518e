"""The static description of a cache: the groups of heads of each layer, in each phase.

It is hashable, and compiled programs are keyed by it. The numbers of a batch (lengths, budgets) are data in the state.
"""

import dataclasses
import functools
import numbers

import jax
import numpy as np

from kvjax.cache.empty import empty
from kvjax.cache.groups import ArraySizes, Group, Phase, keep_everything
from kvjax.cache.layer_stack import LayerRuns, positions_of
from kvjax.cache.planning.explain import explain
from kvjax.cache.state import KVState, LayerKV
from kvjax.errors import InputError
from kvjax.parallel import distributed
from kvjax.policies.parameters import ModelSizes, distinct
from kvjax.policies.parameters import empty as empty_parameters
from kvjax.policies.prompt_replay import Replay
from kvjax.storage.calibration import side_shapes
from kvjax.typing import PyTree
from kvjax.units import size


@jax.tree_util.register_static  # it is a part of results, and has no arrays
@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheLayout:
    """The groups of heads of each layer, which programs are compiled for; `lower` returns it.

    Attributes:
      prompt: the groups of each layer while the prompt goes in.
      decode: the groups of each layer while decoding.
      block: tokens of a block of the prompt; None = in one shot.
      name: of the spec, for reports: policy, storage and selection; see `CacheSpec.name`.
      kv_heads: KV heads of the model.
      head_dim: features of a head.
      dtype: of the model's keys and values.
      platform: ``cpu``, ``gpu`` or ``tpu``, for reports.
      sizes: of the model, for the parameters of policies; None = not known.
      runs: the layers that run as loops, with their caches in stacks; see `kvjax.models.layer_loop`.
      calls_layers: whether prompts call a program for each layer; see `kvjax.generation.layer_calls`.
    """

    prompt: Phase
    decode: Phase
    block: int | None
    name: str = dataclasses.field(compare=False)
    kv_heads: int
    head_dim: int
    dtype: str
    platform: str = dataclasses.field(default="cpu", compare=False)
    sizes: ModelSizes | None = dataclasses.field(default=None, compare=False, repr=False)
    runs: LayerRuns = ()
    calls_layers: bool = dataclasses.field(default=False, compare=False)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Every group of the decoding phase."""
        return tuple(group for layer in self.decode for group in layer)

    @property
    def replay(self) -> Replay | None:
        """How prompts are replayed when they end, before anything is evicted; None = no replay."""
        return next((group.replay for layer in self.prompt for group in layer), None)

    @property
    def shares_layers(self) -> bool:
        """Whether the heads of all layers share the slots that are left of a prompt."""
        policies = (group.policy for layer in self.prompt for group in layer)
        return any(policy.budget is not None and policy.budget.over_layers for policy in policies)

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
        layers = self._shapes(rows)
        return _bytes_of(layers if statistics else [(layer.stores, layer.sides) for layer in layers])

    def index_bytes(self, rows: int = 1) -> int:
        """Returns the bytes of what selections keep to find slots, such as InfiniGen's partial keys."""
        return _bytes_of([layer.index for layer in self._shapes(rows)])

    def _shapes(self, rows: int) -> list[LayerKV]:
        """Returns the shapes of every group's arrays, which are the one source of sizes."""
        return [
            jax.eval_shape(functools.partial(empty, group, rows, self.kv_heads, self.head_dim, self.dtype))
            for group in self.groups
        ]

    def calibration_bytes(self) -> int:
        """Returns the bytes of what rows have in common: what vectors share, and the parameters of policies."""
        each = [
            side_shapes(
                group.storage, self.kv_heads if group.heads is None else len(group.heads), self.head_dim, self.dtype
            )
            for group in self.groups
        ]
        return _bytes_of(each) + _bytes_of(self._parameters())

    def _parameters(self) -> PyTree:
        """Returns the shapes of the parameters of each layer's policies."""
        if self.sizes is None:
            return []
        layers = ((*early, *late) for early, late in zip(self.prompt, self.decode, strict=True))
        own = (distinct(each for group in groups for each in group.policy.params) for groups in layers)
        return [empty_parameters(each, self.sizes) for each in own]

    def kept(self, state: KVState, layer: int, rows: int | None = None) -> list[list[np.ndarray]]:
        """Returns the positions that a layer holds: for each row and KV head [n] int32, ascending, on the host.

        Args:
          state: the cache.
          layer: the number of the layer; negative ones count from the last.
          rows: the number of rows that are not padding; None = all.

        Raises:
          InputError: there is no such layer.
        """
        layers = len(self.decode)
        if isinstance(layer, bool) or not isinstance(layer, numbers.Integral) or not -layers <= layer < layers:
            raise InputError(f"layer must be a whole number from 0 to {layers - 1}; got {layer!r}.")
        # [B, k, S] each, of the k heads of a group
        held = distributed.to_host(list(positions_of(state.layers, int(layer))))
        heads = [head for group in self.decode[layer] for head in group.heads or range(self.kv_heads)]
        # [B, S] each
        slots = [group[:, number] for group in held for number in range(group.shape[1])]
        ordered = [own for _, own in sorted(zip(heads, slots, strict=True), key=lambda pair: pair[0])]
        count = len(held[0]) if rows is None else rows
        return [[np.sort(own[row][own[row] >= 0]) for own in ordered] for row in range(count)]

    def __repr__(self) -> str:
        """One line; `explain` says more."""
        return f"CacheLayout({self.name}, {len(self.decode)} layers, {size(self.bytes())} of keys and values per row)"

    def explain(self) -> str:
        """Describes each kind of layer in words: its slots, bytes and kernels, and why no faster kernel runs."""
        return explain(self)


def _bytes_of(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def kept(layout: CacheLayout | None, state: KVState, layer: int, rows: int) -> list[list[np.ndarray]]:
    """See `CacheLayout.kept`.

    Raises:
      InputError: there is no such layer, or no layout.
    """
    if layout is None:
        raise InputError("this result was made without its layout=, which says which heads a layer's arrays have.")
    return layout.kept(state, layer, rows)


__all__ = ["ArraySizes", "CacheLayout", "Group", "Phase", "keep_everything", "kept"]
