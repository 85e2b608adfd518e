"""Explanations and bytes of layouts, as golden text: losing a fast path shows.

After a change that is meant, ``python -m tests.cache.test_explain`` writes the file anew.
"""

from pathlib import Path

import numpy as np

from kvjax import policies, products, selection, storage
from kvjax.attention import Implementation
from kvjax.cache import CacheSpec, Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.errors import KvjaxError
from kvjax.models import shapes
from kvjax.policies.base import Policy

GOLDEN = Path(__file__).with_name("explain.txt")
OPT = shapes.by_name("opt-125m")
TABLE = tuple(tuple(head % 4 == 0 for head in range(12)) for _ in range(12))


def specs() -> dict[str, CacheSpec | Policy]:
    return {
        "full": policies.full(),
        "h2o": policies.h2o(0.2),
        "h2o in 512 slots": policies.h2o(512),
        "h2o, ring": policies.h2o(129, variant="ring"),
        "h2o, masked": policies.h2o(0.2, variant="masked"),
        "roco": policies.roco(0.2),
        "tova": policies.tova(0.2),
        "scissorhands over the last 400 queries": policies.scissorhands(0.2, history=400),
        "lazy": policies.lazy(0.2, every=1),
        "random": policies.random(0.2),
        "snapkv": policies.snapkv(0.2),
        "pyramidkv": policies.pyramidkv(0.2),
        "adakv": policies.adakv(policies.snapkv(0.2)),
        "snapkv, then roco": policies.after_prefill(policies.snapkv(0.2), then=policies.roco(0.1)),
        "razor_attention": policies.razor_attention(TABLE, 0.1),
        "longgen": policies.longgen(0.1),
        "the prompt, then at random": policies.phases(policies.full(), policies.random(0.2, every=64)),
        "gkv": policies.gkv(0.2),
        "learned with a threshold": policies.learned(0.2, recent=32, threshold=0.0),
        "h2o with d2o": policies.h2o(0.2, merge=policies.d2o()),
        "value_norm of h2o": policies.value_norm(policies.h2o(0.2)),
        "h2o, int8": CacheSpec(policies.h2o(0.2), storage.int8()),
        "full, int4 with the newest 64 exact": CacheSpec(policies.full(), storage.int4(residual=64)),
        "h2o, rotated int4": CacheSpec(policies.h2o(0.2), storage.rotated(storage.int4())),
        "full, kivi": CacheSpec(policies.full(), storage.kivi()),
        "full, gear": CacheSpec(policies.full(), storage.gear()),
        "snapkv, zipcache": CacheSpec(policies.snapkv(0.5), storage.zipcache(window=20)),
        "h2o, mikv": CacheSpec(policies.h2o(0.2), storage.mikv()),
        "full, fp8 of a fixed scale": CacheSpec(policies.full(), storage.fp8(1.0)),
        "full, fp16": CacheSpec(policies.full(), storage.fp16()),
        "full, quest": CacheSpec(policies.full(), selection=selection.quest(budget=128)),
        "full, quest in a prompt": CacheSpec(policies.full(), selection=selection.quest(budget=128, in_prompt=True)),
        "full, optimal": CacheSpec(policies.full(), selection=selection.optimal(64)),
        "snapkv, int8, quest": CacheSpec(policies.snapkv(0.5), storage.int8(), selection.quest(budget=128)),
    }


def explained(
    spec: CacheSpec | Policy,
    platform: str,
    dtype: str,
    block: int | None = None,
    implementation: Implementation = "auto",
) -> str:
    lengths = np.array([1000, 700])
    sizes = sizes_for(lengths, 63, width=1000, block=block, limits=Limits(1000, 64, shortest=700), last_fed=False)
    spec = spec if isinstance(spec, CacheSpec) else CacheSpec(spec)
    try:
        lowered = lower(spec, OPT, sizes, lengths, implementation=implementation, platform=platform, dtype=dtype)
        return lowered.layout.explain()
    except KvjaxError as error:
        return f"refused: {error}"


def golden() -> str:
    parts = [f"# {name}\n{explained(spec, 'cpu', 'float32')}" for name, spec in specs().items()]
    tpu = {name: explained(spec, "tpu", "bfloat16") for name, spec in specs().items()}
    parts += [f"# {name}, on a TPU\n{text}" for name, text in tpu.items()]
    for name in ("h2o", "snapkv", "full, int4 with the newest 64 exact"):
        parts.append(f"# {name}, on a GPU\n{explained(specs()[name], 'gpu', 'bfloat16')}")
    for name in ("h2o", "tova", "h2o, int8"):
        text = explained(specs()[name], "gpu", "bfloat16", implementation="pallas_gpu")
        parts.append(f"# {name}, on a GPU, implementation='pallas_gpu'\n{text}")
    parts.append(f"# h2o, in blocks of 256\n{explained(policies.h2o(0.2), 'cpu', 'float32', 256)}")
    return "\n\n".join(parts) + "\n"


def test_it_is_the_golden_text():
    assert golden() == GOLDEN.read_text()


if __name__ == "__main__":
    products.use("fixed")  # as in all tests
    GOLDEN.write_text(golden())
