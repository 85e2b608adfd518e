"""One example of every entry of the registries, for prompts of some ten tokens. A new entry needs a line here."""

from typing import Any

from kvjax import policies as library
from kvjax import selection, storage
from kvjax.policies import Policy
from kvjax.selection import Selection
from kvjax.storage import Storage

#: Arguments of policies, besides their budget.
POLICIES: dict[str, dict[str, Any]] = {
    "full": {}, "window": {"sinks": 1}, "local_only": {}, "streaming_llm": {"sinks": 1}, "h2o": {}, "heavy_only": {},
    "h2o_decay": {}, "scissorhands": {"history": 5}, "tova": {}, "mean_attention": {}, "roco": {"guard": 2},
    "lazy": {"every": 1, "alpha": 0.1}, "ems": {"recent": 1, "window": 3, "threshold": 0.2},
    "random": {}, "strided": {"stride": 3, "local": 1}, "fixed": {"block": 2, "columns": 1},
    "snapkv": {"window": 2, "kernel": 3}, "pyramidkv": {"window": 2, "kernel": 3}, "knorm": {}, "keydiff": {},
    "rkv": {"every": 1, "window": 2, "kernel": 3}, "morphkv": {"window": 2},
    "gkv": {"every": 1, "window": 2}, "vase": {"every": 1, "sinks": 1, "kernel": 3},
    "ladder": {"span": 1, "sinks": 1, "every": 1, "layers": 2, "positions": "original"},
    "vase_dkv": {"every": 1, "rank": 3, "sinks": 1},
    "expected_attention": {"future": 8, "sinks": 1},
    "lagkv": {"lag": 2, "sinks": 1}, "leverage": {}, "cur": {"block": 3, "sinks": 1},
    "compactor": {"sinks": 1, "recent": 1, "chunk": 3}, "matched": {},
    "kvzip": {"chunk": 7, "sinks": 1}, "kvgrad": {"chunk": 7, "sinks": 1},
    "triattention": {"every": 1, "longest": 8}, "qfilters": {"recent": 1}, "learned": {"recent": 1},
    "fifo": {}, "lru": {"sinks": 1}, "counter": {},
}  # fmt: skip
#: Policies that a single layer cannot run: their prompts are run again by the whole model.
REPLAYED = ("kvzip", "kvgrad")
STORAGES: dict[str, dict[str, Any]] = {
    "dense": {}, "fp16": {},
    "int8": {}, "int4": {}, "int2": {}, "integer": {"bits": 3, "group": 4}, "fp8": {}, "bfp": {},
    "mxfp4": {}, "nvfp4": {}, "levels": {}, "turboquant": {}, "rotated": {"codec": storage.int4()},
    "think": {"recent": 4}, "low_rank": {"key_rank": 3, "value_rank": 4}, "kivi": {"group": 4, "residual": 8},
    "mikv": {}, "gear": {"block": 8, "rank": 2}, "kvarn": {"block": 8}, "kvquant": {}, "zipcache": {"window": 8},
    "cskv": {"rank": 4, "window": 8}, "kv_heads": {"heads": 2}, "minicache": {"start": 0},
}  # fmt: skip
SELECTIONS: dict[str, dict[str, Any]] = {
    "everything": {}, "optimal": {"n": 9}, "quest": {"page": 4, "budget": 16, "first_layer": 0},
    "infinigen": {"alpha": 4.0, "first_layer": 1, "sinks": 1, "recent": 2},
    "lserve": {"page": 4, "sub": 2, "every": 3, "budget": 16, "first_layer": 0},
    "retrieval": {"chunk": 4, "budget": 16}, "tokenselect": {"k": 6, "sinks": 2, "recent": 3},
    "shadowkv": {"rank": 5, "chunk": 4, "budget": 8, "local": 1, "outliers": 1},
    "alisa": {"budget": 9, "queries": 3}, "a2ats": {"k": 6, "codes": 4, "sinks": 1, "recent": 2},
    "sparf": {"r": 3, "k": 7}, "rekv": {"page": 4, "budget": 8, "recent": 4, "question": 3},
}  # fmt: skip
HALF = ((True, False), (False, True))  # of two layers of two KV heads


def policy(name: str, budget: Any = 0.5, *, package: Any = library, **more: Any) -> Any:
    """The policy `name` of the library, or of the reference.

    Args:
      name: in `kvjax.policies.POLICIES`.
      budget: if the policy has one.
      package: `kvjax.policies` or `tests.reference.policies`.
      more: in place of the example's arguments, or besides them.
    """
    given = {"budget": budget} if "budget" in library.accepts(name) else {}
    return package.by_name(name, **(given | POLICIES[name] | more))


def held(name: str) -> Storage:
    """The storage `name`."""
    return storage.by_name(name, **STORAGES[name])


def chosen(name: str) -> Selection:
    """The selection `name`."""
    return selection.by_name(name, **SELECTIONS[name])


def combined(budget: Any = 0.5) -> dict[str, Policy]:
    """An example of each combinator."""
    return {
        "with_heavy_hitters": library.with_heavy_hitters(policy("h2o", budget, recent=1), fraction=0.25),
        "value_norm": library.value_norm(policy("roco", budget)),
        "adakv": library.adakv(policy("pyramidkv", budget), safeguard=0.3, max_share=1.5),
        "after_prefill": library.after_prefill(policy("snapkv", budget), then=policy("roco", budget)),
        "from_layer": library.from_layer(policy("h2o", budget), first=1),
        "by_page": library.by_page(policy("h2o", budget), page=2),
        "caote": library.caote(policy("h2o", budget, every=2)),
        "critical": library.critical(policy("h2o", budget, every=2)),
        "value_aware": library.value_aware(policy("snapkv", budget), large=1),
        "chunkkv": library.chunkkv(policy("snapkv", budget), chunk=3),
        "phases": library.phases(library.full(), policy("h2o", budget)),
    }


def planned(budget: Any = 0.5, table: tuple[tuple[bool, ...], ...] = HALF) -> dict[str, Policy]:
    """An example of each plan of heads, layers or phases."""
    return {
        "split_heads": library.split_heads(table, policy("roco", budget), policy("tova", budget)),
        "duo_attention": library.duo_attention(table, sinks=1, recent=2),
        "razor_attention": library.razor_attention(table, budget, sinks=1),
        "split_layers": library.split_layers(policy("roco", budget), library.full(), shares=(1, 1)),
        "longgen": library.longgen(budget, sinks=1),
        "random_control": library.random_control(budget, every=2),
    }
