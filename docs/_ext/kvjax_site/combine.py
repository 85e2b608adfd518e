"""Valid combinations of policies, storages and selections: lowers all, as tests/laws/test_products.py does.

`tests/laws/test_products.py` lowers the same products of the same examples (`tests/examples.py`), and fails if one
neither lowers nor is refused with a reason.
"""

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvjax import policies, storage
from kvjax.cache import CacheSpec
from kvjax.cache.context_parallel import refusals
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import Lowered, lower
from kvjax.errors import PolicyError, StorageError
from kvjax.generation.continuations import takes_blocks
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.policies import MERGES, POLICIES
from kvjax.policies.traits import evicting_in_prompt
from kvjax.selection import SELECTIONS, Selection
from kvjax.storage import STORAGES
from tests import examples

PROMPT, SHORTER, NEW, BLOCK = 160, 130, 8, 16  # tokens; with these, no budget of half of a prompt is too small
CONFIG = DecoderConfig(
    family="llama", vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64,
    max_positions=512, rope=Rope(dim=8),
)  # fmt: skip
PLAIN = ("full", "dense", "everything")
AXES = ("policy", "storage", "selection")
#: Where a reason names what was given, it is the same reason for others.
_ABOUT = re.compile(r"^(?:storage|policy) .*?: ")
_NESTED = r"\w+\((?:[^()]|\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))*\)"
_GIVEN = (
    (re.compile(rf"selection={_NESTED}"), "the selection"),
    (re.compile(rf"Storage{_NESTED[3:]}"), "the storage"),
    (re.compile(r"the policy \S+ (?=evicts|merges|each)"), "the policy "),
    (re.compile(r"^policy \S+ has"), "the policy has"),
    (re.compile(r"storage=\S+ no"), "the storage no"),
    (re.compile(r"^selection \S+ chooses"), "the selection chooses"),
    (re.compile(r"^storage .*? (?=holds|moves|is in)"), "the storage "),
)
Triple = tuple[str, str, str]


def policy_rows() -> dict[str, policies.Policy]:
    """Returns the policies of the tables: by name, variants, merges, combinators, and plans of heads or layers."""
    found = {name: examples.policy(name) for name in POLICIES}
    found |= {f"h2o[{variant}]": policies.h2o(0.5, variant=variant) for variant in ("masked", "global", "local")}
    found |= {f"h2o+{name}": policies.h2o(0.5, merge=merge()) for name, merge in MERGES.items()}
    found |= {f"{name}@cache": policies.by_name(name, budget=0.5, positions="cache") for name in ("h2o", "knorm")}
    return found | examples.combined() | examples.planned()


def storage_rows() -> dict[str, storage.Storage]:
    """Returns the storages of the tables: those by name, one with a residual, and one in host memory."""
    extra = {"int4+8": storage.int4(residual=8), "host": storage.dense(memory="host")}
    return {name: examples.held(name) for name in STORAGES} | extra


def selection_rows() -> dict[str, Selection]:
    """Returns the selections of the tables."""
    return {name: examples.chosen(name) for name in SELECTIONS}


def lowered(spec: CacheSpec, block: int | None = None) -> Lowered:
    """Lowers a cache for two prompts and some new tokens, or for whole texts if its selection is of these."""
    lengths, following = np.array([PROMPT, SHORTER]), 0 if spec.selection.whole_text else NEW
    sizes = sizes_for(lengths, following, width=PROMPT, block=block, limits=None, last_fed=True)
    return lower(spec, CONFIG, sizes, lengths)


def refusal(make: Callable[[], CacheSpec], block: int | None = None) -> str | None:
    """Returns why a cache cannot be, without the names of what was given; None if it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            lowered(make(), block)
    except (PolicyError, StorageError) as error:
        return reason_of(str(error))
    return None


def reason_of(message: str) -> str:
    """Returns the reason that a message gives, for any policy, storage and selection."""
    reason = _ABOUT.sub("", message)
    for pattern, text in _GIVEN:
        reason = pattern.sub(text, reason)
    return reason


@dataclasses.dataclass(frozen=True)
class Products:
    """Which products can be; (policy, storage, selection) -> why not, or None.

    Attributes:
      one_shot: with prompts in one shot, every triple.
      blocks: with prompts in blocks, triples of which at least two are the plain ones.
    """

    one_shot: Mapping[Triple, str | None]
    blocks: Mapping[Triple, str | None]

    @functools.cached_property
    def axes(self) -> tuple[list[str], ...]:
        """The names of each axis, in the order of the tables."""
        return tuple(list(dict.fromkeys(names)) for names in zip(*self.one_shot, strict=True))

    def axis(self, number: int) -> list[str]:
        """Returns the names of an axis, in the order of the tables."""
        return self.axes[number]

    def pair(self, one: tuple[int, str], two: tuple[int, str]) -> str | None:
        """Returns why two values of different axes do not go with each other, whatever the third is; None if they do.

        Args:
          one: (number of an axis, name).
          two: the same.
        """
        found: list[str | None] = []
        (third,) = {0, 1, 2} - {one[0], two[0]}
        names = self.axis(third)
        for name in sorted(names, key=lambda each: each != PLAIN[third]):
            triple = _triple(one, two, (third, name))
            if self.one_shot[triple] is None:
                return None
            # The plain third value says most, unless it does not go with one of the two either.
            alone = [self.one_shot[_triple(each, (third, name), (other, PLAIN[other]))] for each, other in
                     ((one, two[0]), (two, one[0]))]  # fmt: skip
            if not any(alone):
                found.append(self.one_shot[triple])
        return next(iter(found), self.one_shot[_triple(one, two, (third, PLAIN[third]))])

    def exceptions(self) -> dict[Triple, str]:
        """Returns the triples that are refused although each two of the three go with each other."""
        pairs = {
            (a, x, b, y): self.pair((a, x), (b, y))
            for a, b in itertools.combinations(range(3), 2)
            for x in self.axis(a)
            for y in self.axis(b)
        }
        return {
            triple: reason
            for triple, reason in self.one_shot.items()
            if reason is not None
            and all(pairs[a, triple[a], b, triple[b]] is None for a, b in itertools.combinations(range(3), 2))
        }


def _triple(*named: tuple[int, str]) -> Triple:
    one, two, three = (name for _, name in sorted(named))
    return one, two, three


@functools.cache
def products() -> Products:
    """Lowers every product of the three axes, in some ten seconds."""
    held, read = storage_rows(), selection_rows()
    tables: tuple[dict[Triple, str | None], ...] = ({}, {})
    for (name, policy), stored, chosen in itertools.product(policy_rows().items(), held, read):
        triple = (name, stored, chosen)
        make = functools.partial(CacheSpec, policy, held[stored], read[chosen])
        tables[0][triple] = refusal(make)
        if sum(one == plain for one, plain in zip(triple, PLAIN, strict=True)) >= 1:
            tables[1][triple] = refusal(make, BLOCK)
    return Products(*tables)


class Traits(NamedTuple):
    """How a cache goes with prompts in blocks, with saved states and with meshes.

    Attributes:
      blocks: of a prompt: ``yes``, ``other`` if what is kept depends on them, or why they are refused.
      prefix: how the tokens that continue a saved state are fed: ``block``, ``step``, or why none can follow.
      mesh: why slots are not divided over devices by kvjax while decoding, or None; ``XLA`` if XLA divides them.
    """

    blocks: str
    prefix: str
    mesh: str | None


def traits(make: Callable[[], CacheSpec]) -> Traits:
    """Returns how a cache goes with blocks, saved states and meshes."""
    reason, spec = refusal(make, BLOCK), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        layout = lowered(spec).layout
    blocks = reason or ("other" if evicting_in_prompt(spec.policy) else "yes")
    if spec.selection.whole_text or layout.decode[-1][0].selection.whole_text:
        prefix = "it looks at all queries of a text, so that no token can follow"
    else:
        prefix = "block" if takes_blocks(layout.decode) else "step"
    mesh = None
    for group in layout.decode[-1]:
        heads = CONFIG.num_kv_heads if group.heads is None else len(group.heads)
        if found := refusals.refuses(group, heads, CONFIG.head_dim):
            mesh = "XLA" if refusals.divided_by_xla(group) else reason_of(found)
    return Traits(blocks, prefix, mesh)


def alike(names: Sequence[str], row_of: Callable[[str], Any]) -> dict[Any, list[str]]:
    """Returns the rows of a table, each with the names that have it."""
    found: dict[Any, list[str]] = {}
    for name in names:
        found.setdefault(row_of(name), []).append(name)
    return found
