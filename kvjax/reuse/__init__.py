"""Keys and values reused after another text than the one that they were computed after.

A request is a prefix, some chunks and a question. `compute` makes the cache of a chunk, once, after the prefix alone;
`blend` puts caches of chunks one after the other and recomputes the tokens whose values differ most from those of a
whole prefill (CacheBlend); `craft` chooses among caches of a chunk in several contexts, and recomputes tokens by how
much they attended to chunks that are missing now (Cache-Craft); `calibrate_alpha` chooses how many. `distances`
compares all of these with a whole prefill. `parallel` reads chunks that all begin at one position (APE). `edit`
replaces tokens within a context, whose later tokens move (PIE). Each makes a `kvjax.Context`, which further turns and
answers continue.

Two more are trained. `predict` lets a smaller model read a prompt, and maps its keys and values to those of the model
(KV prediction). `augment` appends slots to a context that a copy of the decoder computes from it (cache augmentation).
`kvjax.training` trains both.
"""

from typing import TYPE_CHECKING

from kvjax import lazy

if TYPE_CHECKING:
    from kvjax.reuse.augmentation import Coprocessor, augment, initial_coprocessor
    from kvjax.reuse.blending import Blended, blend
    from kvjax.reuse.cache import ChunkCache, compute
    from kvjax.reuse.calibrating import CalibratedAlpha, calibrate_alpha, smallest_alpha
    from kvjax.reuse.crafting import Crafted, craft
    from kvjax.reuse.editing import Edit, edit
    from kvjax.reuse.learned_files import load_coprocessor, load_predictor, save_coprocessor, save_predictor
    from kvjax.reuse.measures import Distances, distances
    from kvjax.reuse.parallel import parallel
    from kvjax.reuse.prediction import KVMaps, Predictor, fewer_layers, initial_predictor, predict
    from kvjax.reuse.store import ChunkStore
    from kvjax.reuse.variants import Variant, compute_variants
else:
    __getattr__, __dir__ = lazy.attach(
        __name__,
        {
            "kvjax.reuse.augmentation": ("Coprocessor", "augment", "initial_coprocessor"),
            "kvjax.reuse.blending": ("Blended", "blend"),
            "kvjax.reuse.cache": ("ChunkCache", "compute"),
            "kvjax.reuse.calibrating": ("CalibratedAlpha", "calibrate_alpha", "smallest_alpha"),
            "kvjax.reuse.crafting": ("Crafted", "craft"),
            "kvjax.reuse.editing": ("Edit", "edit"),
            "kvjax.reuse.learned_files": ("load_coprocessor", "load_predictor", "save_coprocessor", "save_predictor"),
            "kvjax.reuse.measures": ("Distances", "distances"),
            "kvjax.reuse.parallel": ("parallel",),
            "kvjax.reuse.prediction": ("KVMaps", "Predictor", "fewer_layers", "initial_predictor", "predict"),
            "kvjax.reuse.store": ("ChunkStore",),
            "kvjax.reuse.variants": ("Variant", "compute_variants"),
        },
    )

__all__ = [
    "Blended", "CalibratedAlpha", "ChunkCache", "ChunkStore", "Coprocessor", "Crafted", "Distances", "Edit", "KVMaps",
    "Predictor", "Variant", "augment", "blend", "calibrate_alpha", "compute", "compute_variants", "craft", "distances",
    "edit", "fewer_layers", "initial_coprocessor", "initial_predictor", "load_coprocessor", "load_predictor",
    "parallel", "predict", "save_coprocessor", "save_predictor", "smallest_alpha",
]  # fmt: skip
