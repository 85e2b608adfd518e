"""Storages: how slots hold keys and values. A new one is a factory in its family's file and one line of `STORAGES`."""

from typing import TYPE_CHECKING, Any

from kvjax.arguments import Registry
from kvjax.errors import StorageError
from kvjax.storage.base import Codec, Exact, Storage, round_trip
from kvjax.storage.bfp import Bfp, bfp
from kvjax.storage.block_codec import BlockCodec, SegmentCodec
from kvjax.storage.calibration import Calibration
from kvjax.storage.dense import dense
from kvjax.storage.dims import Chain, Dims, chain
from kvjax.storage.fitting import kmeans_levels
from kvjax.storage.fp8 import Fp8, Fp8Layers, fp8
from kvjax.storage.fp16 import Fp16, fp16
from kvjax.storage.gear import Gear, gear
from kvjax.storage.integer import Integer, int2, int4, int8, integer
from kvjax.storage.joint import Joint, JointBlocks, cskv, kv_heads
from kvjax.storage.kivi import Channels, kivi
from kvjax.storage.kvarn import VarianceNormalized, kvarn
from kvjax.storage.kvquant import kvquant
from kvjax.storage.layouts import Blocks, Pairs, Segments, Tiers, slots
from kvjax.storage.levels import Levels, levels
from kvjax.storage.low_rank import LowRank, low_rank
from kvjax.storage.mikv import Balance, Halves, mikv
from kvjax.storage.minicache import Merged, merged_vectors, minicache
from kvjax.storage.mxfp4 import Mxfp4, mxfp4
from kvjax.storage.nvfp4 import Nvfp4, nvfp4
from kvjax.storage.packing import pack, unpack
from kvjax.storage.permuted import Permuted, permuted
from kvjax.storage.rotated import Rotated, rotated
from kvjax.storage.scaled import Scaled, scaled
from kvjax.storage.side import PromptView, Samples, Side
from kvjax.storage.sparse import Sparse, sparse
from kvjax.storage.tables import normal_levels
from kvjax.storage.think import ThinK, think
from kvjax.storage.turboquant import TurboQuant, turboquant
from kvjax.storage.zipcache import ChannelRoots, Divided, zipcache

blocks = Blocks  # ``layout=blocks(n)``
tiers = Tiers  # ``layout=tiers(high)``
pairs = Pairs  # ``layout=pairs(start)``

#: Every named storage: the command line, sweeps and conformance tests take the list from here.
STORAGES: Registry[Storage] = Registry(
    "storage",
    "storages",
    StorageError,
    {
        "dense": dense,
        "fp16": fp16,
        "int8": int8,
        "int4": int4,
        "int2": int2,
        "integer": integer,
        "fp8": fp8,
        "bfp": bfp,
        "mxfp4": mxfp4,
        "nvfp4": nvfp4,
        "levels": levels,
        "turboquant": turboquant,
        "rotated": rotated,
        "think": think,
        "low_rank": low_rank,
        "cskv": cskv,
        "kv_heads": kv_heads,
        "kivi": kivi,
        "gear": gear,
        "kvarn": kvarn,
        "mikv": mikv,
        "kvquant": kvquant,
        "zipcache": zipcache,
        "minicache": minicache,
    },
)
by_name, accepts, names = STORAGES.by_name, STORAGES.accepts, STORAGES.names


if TYPE_CHECKING:
    from kvjax.cache.replay import breakdown, nbytes, ratios, read, replay


def __getattr__(name: str) -> Any:
    """Imports `replay`, `read`, `nbytes` and others when they are used: the cache is built on this package."""
    if name in ("breakdown", "nbytes", "ratios", "read", "replay"):
        from kvjax.cache import replay as module

        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "STORAGES", "Balance", "Bfp", "BlockCodec", "Blocks", "Calibration", "Chain", "ChannelRoots", "Channels", "Codec",
    "Dims", "Divided", "Exact", "Fp8", "Fp8Layers", "Fp16", "Gear", "Halves", "Integer", "Joint", "JointBlocks",
    "Levels", "LowRank", "Merged", "Mxfp4", "Nvfp4", "Pairs", "Permuted", "PromptView", "Rotated", "Samples", "Scaled",
    "SegmentCodec", "Segments", "Side", "Sparse", "Storage", "ThinK", "Tiers", "TurboQuant", "VarianceNormalized",
    "accepts", "bfp", "blocks", "breakdown", "by_name", "chain", "cskv", "dense", "fp8", "fp16", "gear", "int2", "int4",
    "int8", "integer", "kivi", "kmeans_levels", "kv_heads", "kvarn", "kvquant", "levels", "low_rank", "merged_vectors",
    "mikv", "minicache", "mxfp4", "names", "nbytes", "normal_levels", "nvfp4", "pack", "pairs", "permuted", "ratios",
    "read", "replay", "rotated", "round_trip", "scaled", "slots", "sparse", "think", "tiers", "turboquant", "unpack",
    "zipcache",
]  # fmt: skip
