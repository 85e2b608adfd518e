"""Makes the generated tables of docs/storages.md; see `experiments.storage_tables`.

A storage of the registry that needs arguments, or more than one row, has them in `EXAMPLES`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvjax import policies
from kvjax.cache import CacheSpec
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.errors import PolicyError, StorageError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.specs import parse
from kvjax.storage import STORAGES, Storage

PAGE = Path(__file__).parents[2] / "docs" / "storages.md"
DIM, DTYPE, ITEMSIZE = 128, "bfloat16", 2
PROMPT, NEW, BLOCK = 512, 64, 64

#: Rows of a storage, as text; otherwise its name alone. The table of what composes has the first.
EXAMPLES: Mapping[str, Sequence[str]] = {
    "integer": ("integer(3)",),
    "int2": ("int2", "int2(32)"),
    "fp8": ("fp8", "fp8(scale=1)"),
    "bfp": ("bfp", "bfp(4)"),
    "levels": ("levels(4)", "levels(3)"),
    "low_rank": ("low_rank(64, 64)",),
    "cskv": ("cskv(64, heads=2)",),
    "kv_heads": ("kv_heads(2)",),
    "minicache": ("minicache(start=0)",),
    "rotated": ("rotated(int4)",),
    "turboquant": ("turboquant(4)", "turboquant(3)", "turboquant(2)"),
}

#: Further rows of the table of what composes, which are not as the first of their storage.
UNLIKE = {text: text for text in ("mikv(balance=False)",)}

Spec = Callable[[Storage], CacheSpec]


def under(policy: policies.Policy, **options: Any) -> Spec:
    return lambda held: CacheSpec(policy, held, **options)


NEWEST = policies.compress(importance=policies.recency, budget=0.5, name="newest")
POLICIES: Mapping[str, Spec] = {
    "full": under(policies.full()),
    "snapkv": under(policies.snapkv(0.5)),
    "one by position": under(NEWEST),
    "h2o": under(policies.h2o(0.5)),
    "window": under(policies.window(0.5)),
    "tova": under(policies.tova(0.5)),
}
#: Columns that are about policies alone.
OF_POLICIES = ("`full`", "prompt compressor", "evicts while decoding")
#: Column -> what a storage meets there: policy -> (its cache, tokens of a block of the prompt).
COLUMNS: Mapping[str, Mapping[str, tuple[Spec, int | None]]] = {
    "`full`": {"full": (POLICIES["full"], None)},
    "prompt compressor": {name: (POLICIES[name], None) for name in ("snapkv", "one by position")},
    "evicts while decoding": {name: (POLICIES[name], None) for name in ("h2o", "window", "tova")},
    "`merge=`": {"h2o": (under(policies.h2o(0.5, merge=policies.d2o())), None)},
    '`positions="cache"`': {
        "full": (under(policies.full(), positions="cache"), None),
        "h2o": (under(policies.h2o(0.5), positions="cache"), None),
    },
    "`prefill_block`": {name: (POLICIES[name], BLOCK) for name in ("full", "h2o")},
}
CONFIG = DecoderConfig(
    family="llama", vocab_size=64, hidden_size=4 * DIM, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=DIM,
    mlp_size=64, max_positions=4096, rope=Rope(dim=DIM),
)  # fmt: skip


def rows() -> dict[str, list[str]]:
    """Every storage of the registry, as it is written."""
    return {name: list(EXAMPLES.get(name, (name,))) for name in STORAGES}


def build(text: str) -> Storage:
    storage: Storage = parse.build("storage", text)
    return storage


def sizes() -> str:
    """The table of bytes of a slot."""
    dense = 2 * DIM * ITEMSIZE
    lines = [f"| storage | bytes of a slot, from {dense} | bits a number |", "|---|---|---|"]
    for text in (text for texts in rows().values() for text in texts):
        count = build(text).bytes_per_slot(DIM, DTYPE)
        lines.append(f"| `{text}` | {count} | {8 * count / (2 * DIM):g} |")
    return "\n".join(lines)


def refusal(spec: Spec, held: Storage, block: int | None) -> str | None:
    """Why a cache cannot be built, or None."""
    lengths = np.array([PROMPT, PROMPT // 2])
    try:
        lower(
            spec(held), CONFIG, sizes_for(lengths, NEW, width=PROMPT, block=block, limits=None, last_fed=True), lengths
        )
    except (PolicyError, StorageError) as error:
        return str(error)
    return None


def composes() -> str:
    """The table of what a storage goes with, and why not where it does not."""
    reasons: list[str] = []

    def cell(held: Storage, column: str) -> str:
        cases = COLUMNS[column]
        # A policy that is refused in any case says nothing about another column.
        known = {name: case for name, case in cases.items() if refusal(POLICIES[name], held, None) is None}
        met = cases if column in OF_POLICIES else known or cases
        refused = {name: refusal(spec, held, block) for name, (spec, block) in met.items()}
        works = [name for name, reason in refused.items() if reason is None]
        first = next((reason for reason in refused.values() if reason is not None), None)
        if first is None:
            return "yes"
        if first not in reasons:
            reasons.append(first)
        return f"{'only ' + ', '.join(works) if works else 'refused'} ({reasons.index(first) + 1})"

    lines = [f"| | {' | '.join(COLUMNS)} |", "|---|" + "---|" * len(COLUMNS)]
    shown = {name: texts[0] for name, texts in rows().items()} | UNLIKE
    for name, text in sorted(shown.items(), key=lambda pair: list(STORAGES).index(pair[0].partition("(")[0])):
        lines.append(f"| `{name}` | " + " | ".join(cell(build(text), column) for column in COLUMNS) + " |")
    notes = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(lines + (["", *notes] if notes else []))


TABLES: Mapping[str, Callable[[], str]] = {"sizes": sizes, "composes": composes}


def regenerated(text: str) -> str:
    """A page with its tables as the code has them now.

    A table stands between the lines ``<!-- NAME: ... -->`` and ``<!-- end -->``.
    """
    for name, table in TABLES.items():
        pattern = rf"(<!-- {name}:[^\n]*-->\n)(.*?)(<!-- end -->)"
        text, count = re.subn(
            pattern, lambda found: f"{found[1]}\n{table()}\n\n{found[3]}", text, flags=re.DOTALL  # noqa: B023
        )  # fmt: skip
        assert count == 1, f"{PAGE} has {count} places for the table {name}"
    return text
