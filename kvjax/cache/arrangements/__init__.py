"""How the slots of a layer lie in arrays, for each layout of a storage.

A new one inherits from `Arrangement`, and is one line of `ARRANGEMENTS`, whose key is the `kvjax.storage.Layout` that a
storage names. Nothing else tests for it.
"""

from kvjax.cache.arrangements.base import Arrangement
from kvjax.cache.arrangements.blocks_with_residual import BlockArrangement
from kvjax.cache.arrangements.layer_pairs import PairArrangement
from kvjax.cache.arrangements.segments import SegmentArrangement
from kvjax.cache.arrangements.single_slots import SlotArrangement
from kvjax.cache.arrangements.tiers import TierArrangement
from kvjax.storage.base import Storage
from kvjax.storage.layouts import Blocks, Layout, Pairs, Segments, SingleSlots, Tiers

ARRANGEMENTS: dict[type[Layout], Arrangement] = {
    SingleSlots: SlotArrangement(),
    Blocks: BlockArrangement(),
    Segments: SegmentArrangement(),
    Tiers: TierArrangement(),
    Pairs: PairArrangement(),
}


def arrangement_of(storage: Storage) -> Arrangement:
    """Returns the arrangement of a storage's slots."""
    return ARRANGEMENTS[type(storage.resolved_layout)]


__all__ = ["ARRANGEMENTS", "Arrangement", "arrangement_of"]
