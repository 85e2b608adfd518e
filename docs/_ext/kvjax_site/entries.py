"""The entries of the registries that get a page, each with an example that is drawn, measured or lowered."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from kvjax import policies, selection, storage

SLOTS = 64  # of a head, in the pictures of policies
HEADS = "[[1, 0]] * 6"  # the first of two KV heads of six layers, in the pictures of plans of heads

#: Examples that are not the name with a budget of `SLOTS`, or without arguments.
EXAMPLES: Mapping[str, str] = {
    "strided": "strided(64, stride=8, local=24)",
    "fixed": "fixed(64, block=32, columns=4)",
    "scissorhands": "scissorhands(64, history=64)",
    "snapkv": "snapkv(64, window=16)",
    "pyramidkv": "pyramidkv(64, window=16)",
    "lagkv": "lagkv(64, lag=16)",
    "compactor": "compactor(64, chunk=64)",
    "ems": "ems(64, window=16)",
    "lazy": "lazy(64, every=8)",
    "rkv": "rkv(64, every=8)",
    "morphkv": "morphkv(64, window=16)",
    "ladder": "ladder(64, span=2, every=8)",
    "gkv": "gkv(64, every=8)",
    "vase": "vase(64, every=16)",
    "vase_dkv": "vase_dkv(64, every=16)",
    "triattention": "triattention(64, every=8)",
    "caote": "caote(h2o(64))",
    "critical": "critical(h2o(64))",
    "value_aware": "value_aware(h2o(64))",
    "chunkkv": "chunkkv(snapkv(64, window=16))",
    "phases": "phases(full(), h2o(16, every=8))",
    "with_heavy_hitters": "with_heavy_hitters(strided(64, stride=8, local=16))",
    "value_norm": "value_norm(h2o(64))",
    "adakv": "adakv(snapkv(64, window=16))",
    "after_prefill": "after_prefill(snapkv(64, window=16), then=window(64))",
    "from_layer": "from_layer(h2o(64), first=2)",
    "by_page": "by_page(h2o(64), page=8)",
    "split_heads": f"split_heads({HEADS}, h2o(96), window(32))",
    "duo_attention": f"duo_attention({HEADS}, sinks=4, recent=28)",
    "razor_attention": f"razor_attention({HEADS}, 32)",
    "split_layers": "split_layers(window(64), h2o(64), shares=(1, 2))",
    "integer": "integer(3)",
    "low_rank": "low_rank(64, 64)",
    "cskv": "cskv(64, heads=2)",
    "kv_heads": "kv_heads(2)",
    "rotated": "rotated(int4())",
    "minicache": "minicache(start=0)",
    "optimal": "optimal(64)",
    "quest": "quest(page=16, budget=512)",
    "lserve": "lserve(page=64, sub=16, every=4, budget=512)",
    "retrieval": "retrieval(chunk=8, budget=512)",
    "tokenselect": "tokenselect(k=512)",
    "shadowkv": "shadowkv(budget=512)",
    "alisa": "alisa(512)",
    "a2ats": "a2ats(512)",
    "sparf": "sparf(32, 512)",
    "rekv": "rekv(page=16, budget=512)",
}
#: Further examples whose bytes are shown.
MORE: Mapping[str, tuple[str, ...]] = {
    "int8": ("int8(32)",), "int4": ("int4(32)",), "int2": ("int2(32)",), "fp8": ("fp8(scale=1)",),
    "bfp": ("bfp(4)",), "levels": ("levels(3)",), "integer": ("integer(4, key_bits=5)",),
    "turboquant": ("turboquant(3)", "turboquant(2)"), "kivi": ("kivi(4)",), "kvarn": ("kvarn(4, 4)", "kvarn(2, 2)"),
    "mikv": ("mikv(4)",), "kvquant": ("kvquant(4)",), "nvfp4": ("nvfp4(scale=1)",),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Entry:
    """A factory of a registry.

    Attributes:
      axis: ``policies``, ``storages`` or ``selections``.
      kind: its noun, such as ``policy`` or ``combinator``.
      name: in the registry.
      factory: the function.
    """

    axis: str
    kind: str
    name: str
    factory: Callable[..., Any]

    @property
    def module(self) -> ModuleType:
        """The package whose names an example may have."""
        return {"policies": policies, "storages": storage, "selections": selection}[self.axis]

    @property
    def full_name(self) -> str:
        return f"{self.module.__name__}.{self.name}"

    @property
    def doc(self) -> str:
        return inspect.getdoc(self.factory) or ""

    @property
    def example(self) -> str:
        """A call, as Python in the namespace of the package."""
        if self.name in EXAMPLES:
            return EXAMPLES[self.name]
        return f"{self.name}({SLOTS})" if "budget" in inspect.signature(self.factory).parameters else f"{self.name}()"

    def build(self, text: str | None = None) -> Any:
        """Returns what an example makes."""
        return eval(text or self.example, dict(vars(self.module)))


def policy_entries() -> list[Entry]:
    """Returns the policies: those by name, those of heads, layers and phases, those made of others, and merges."""
    kinds: dict[str, Mapping[str, Callable[..., Any]]] = {
        "policy": policies.POLICIES, "plan of heads, layers or phases": policies.HEAD_PLANS,
        "combinator": policies.COMBINATORS, "merge": policies.MERGES,
    }  # fmt: skip
    return [Entry("policies", kind, name, make) for kind, table in kinds.items() for name, make in table.items()]


def storage_entries() -> list[Entry]:
    """Returns the storages by name."""
    return [Entry("storages", "storage", name, make) for name, make in storage.STORAGES.items()]


def selection_entries() -> list[Entry]:
    """Returns the selections by name."""
    return [Entry("selections", "selection", name, make) for name, make in selection.SELECTIONS.items()]


def all_entries() -> list[Entry]:
    """Returns every entry that gets a page."""
    return policy_entries() + storage_entries() + selection_entries()
