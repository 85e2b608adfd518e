"""Products of the registries in numbers: a covering array of pairs, each of one layer against the float64 reference.

`test_products` has every product on shapes alone: it lowers, or it is refused with a reason.
"""

import dataclasses
import functools
import itertools
import zlib
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from kvjax import policies, selection, storage
from kvjax.cache import CacheSpec
from kvjax.errors import PolicyError
from kvjax.numerics.rope import Rope
from kvjax.policies import COMBINATORS, POLICIES
from kvjax.selection import SELECTIONS
from kvjax.storage import STORAGES, Storage
from kvjax.storage.base import Memory
from tests import examples, layers
from tests.laws import Pair, Triple, assert_same, covering, pairs, streams
from tests.laws import replay as quick_replay
from tests.policies.test_merge import REFERENCES as FOLDS
from tests.reference import policies as reference
from tests.reference import replay
from tests.reference import selection as looks
from tests.reference.base import COUNT, MASS, Policy, Ranking
from tests.reference.step import rotate
from tests.storage.against import of_reference

HEADS, KV_HEADS, DIM, WIDTH, STEPS, BLOCK, THETA = 4, 2, 8, 12, 10, 6, 10_000.0
LENGTHS = np.array([12, 6, 9])  # row 1 has no token in the second block
SEED = 4
MEMORIES: tuple[Memory, ...] = ("device", "host", ("device", "host"))

pytestmark = pytest.mark.thorough

# --- policies ---


#: A single layer cannot replay a prompt, and has neither parameters nor the weights of a model, which `critical` reads.
OF_MODELS = {"triattention", "qfilters", "learned", "critical", *examples.REPLAYED}
APART = {"random", *OF_MODELS}  # what chance keeps has another reference


def build(package: Any, name: str, **more: Any) -> Any:
    return examples.policy(name, package=package, **more)


def by_name(package: Any) -> dict[str, Any]:
    made = {
        "with_heavy_hitters": package.COMBINATORS["with_heavy_hitters"](build(package, "h2o", recent=1)),
        "value_norm": package.COMBINATORS["value_norm"](build(package, "roco")),
        "adakv": package.COMBINATORS["adakv"](build(package, "snapkv")),
        "after_prefill": package.COMBINATORS["after_prefill"](
            build(package, "keydiff"), then=package.by_name("scissorhands", budget=4, recent=1)
        ),
        "from_layer": package.COMBINATORS["from_layer"](build(package, "lru", recent=1), first=0),
        "by_page": package.COMBINATORS["by_page"](build(package, "h2o", budget=5), page=2),
        "by_page(counter)": package.COMBINATORS["by_page"](build(package, "counter", budget=6, saturate=3), page=2),
        "caote": package.COMBINATORS["caote"](build(package, "scissorhands", every=2)),
        "value_aware": package.COMBINATORS["value_aware"](build(package, "snapkv"), large=1),
        "chunkkv": package.COMBINATORS["chunkkv"](build(package, "snapkv"), chunk=3),
        "phases": package.COMBINATORS["phases"](build(package, "full"), build(package, "h2o", budget=4)),
        "h2o[masked]": build(package, "h2o", variant="masked"),
    }
    return {name: build(package, name) for name in POLICIES if name not in APART} | made


def by_chance(seed: int = 0) -> Policy:
    """Who is left is who drew the most; a draw is folded from layer, head and position."""

    @functools.cache
    def drawn(head: int, position: int) -> float:
        key = jax.random.key(seed)
        for part in (0, head, position):
            key = jax.random.fold_in(key, part)
        return float(jax.random.uniform(key))

    def of(head: int) -> Policy:
        return Policy(0.5, lambda view: Ranking(np.array([drawn(head, int(p)) for p in view.position])))

    return Policy(None, None, by_head=(tuple(of(head) for head in range(KV_HEADS)),))


def averaged(kept: replay.Tokens, gone: replay.Tokens) -> None:
    """The slot of position 1 becomes the mean of what it holds, as often as it stands for, and of what goes."""
    (slot,) = np.flatnonzero(kept.position == 1)
    standing = kept.stands_for.setdefault(1, [1])
    count = len(standing)
    for held, lost in ((kept.key, gone.key), (kept.value, gone.value)):
        held[slot] = (count * held[slot] + lost.sum(axis=0)) / (count + len(lost))
    standing += [1] * len(gone.position)


OURS = by_name(policies) | {"random": policies.random(budget=0.5)}
THEIRS = by_name(reference) | {"random": by_chance()}
MERGED = {name: (policies.MERGES[name](**arguments), fold) for name, (arguments, fold) in FOLDS.items()}
del MERGED["lococo"]  # has parameters of a model
MERGED["compensation"] = (policies.compensation(1), averaged)
for name, (merge, _) in MERGED.items():
    OURS[f"window+{name}"] = build(policies, "window", sinks=2, merge=merge)
    THEIRS[f"window+{name}"] = dataclasses.replace(
        build(reference, "window", sinks=2), statistics={"mass": MASS, "count": COUNT} if name == "cam" else {}
    )

# --- storages: two codecs each, of the families ---

#: What their vectors share depends on the prompt or on a calibration; `tests/storage/test_sides.py` has them.
OTHERS = {"think", "low_rank", "cskv", "kv_heads", "gear", "kivi", "kvarn", "kvquant", "mikv", "minicache", "zipcache"}

CODECS = {
    "int8": replay.integer(8),
    "int4": replay.integer(4),
    "int2": replay.integer(2),
    "integer": replay.integer(3, 4),
    "fp8": replay.fp8(),
} | {
    name: of_reference(storage.by_name(name).key) for name in ("fp16", "bfp", "mxfp4", "nvfp4", "levels", "turboquant")
}
CODECS["rotated"] = of_reference(storage.Rotated(storage.Integer(4)))
INTEGERS = ("int8", "int4", "int2", "integer", "bfp", "turboquant", "rotated")
FAMILIES = dict.fromkeys(INTEGERS, "integers") | dict.fromkeys(("fp16", "fp8", "mxfp4", "nvfp4", "levels"), "floats")
MIXED = (
    ("int8", "fp8"), ("fp8", "int4"), ("int2", "fp8"), ("fp8", "integer"), ("mxfp4", "turboquant"), ("bfp", "levels"),
    ("rotated", "nvfp4"), ("fp16", "int8"), ("dense", "dense"),
)  # fmt: skip


def held(codecs: tuple[str, str], residual: int) -> Storage:
    """Keys in the codec of one storage of the registry, values in that of another."""
    arguments = {"integer": {"bits": 3, "group": 4}, "rotated": {"codec": storage.int4()}}
    key, value = (storage.by_name(name, **arguments.get(name, {})) for name in codecs)
    return Storage(key=key.key, value=value.value, residual=residual, name="|".join(codecs))


# --- selections ---

SCALE = DIM**-0.5
#: Replay runs the first layer, in which InfiniGen does not guess; see tests/selection/test_pools.py.
LOOKS = {
    "everything": (selection.everything(), None),
    "optimal": (selection.optimal(3), lambda: looks.EachHead(looks.optimal(3, SCALE))),
    "quest": (selection.quest(2, 6, first_layer=0), lambda: looks.quest(2, 6, SCALE)),
    "lserve": (selection.lserve(2, 1, 3, 6, first_layer=0), lambda: looks.lserve(2, 1, 3, 6, SCALE)),
    "retrieval": (selection.retrieval(2, 6, every=2), lambda: looks.retrieval(2, 6, SCALE, 2)),
    "tokenselect": (selection.tokenselect(3, 1, 2, reuse=0.1), lambda: looks.TokenSelect(SCALE, 3, 1, 2, 0.1)),
    "shadowkv": (
        selection.shadowkv(5, 2, 4, local=1, outliers=1), lambda: looks.ShadowKV(SCALE, turned, 5, 2, 4, 1, 1),
    ),
    "alisa": (selection.alisa(5, queries=2), lambda: looks.Alisa(5, 2)),
    "a2ats": (selection.a2ats(3, codes=3), lambda: looks.Codebook(SCALE, 3, 3)),
    "sparf": (selection.sparf(3, 4), lambda: looks.SparF(SCALE, 3, 4)),
    "rekv": (
        selection.rekv(2, 2, recent=2, question=2),
        lambda: looks.ReKV(lambda x, at: turned(x, -at), 2, 1, question=2),
    ),
}  # fmt: skip


def turned(keys, position):
    return rotate(keys, position, THETA)


#: Policies by what they rank by, which is all that a storage or a selection makes a difference to, and the merges.
KINDS = {
    "full": ("full",),
    "positions": ("window", "streaming_llm", "local_only", "fifo", "strided", "fixed", "random", "ladder"),
    "attention": (
        "h2o", "h2o_decay", "scissorhands", "mean_attention", "roco", "lazy", "ems", "tova", "heavy_only",
        "with_heavy_hitters", "value_norm", "caote", "phases",
    ),
    "hidden": ("h2o[masked]",),
    "fetches": ("lru", "counter", "from_layer"),
    "prompts": ("snapkv", "pyramidkv", "adakv", "after_prefill", "value_aware", "chunkkv"),
    "keys": (
        "knorm", "keydiff", "expected_attention", "rkv", "morphkv", "gkv", "vase", "vase_dkv", "lagkv", "leverage",
        "cur",
        "matched", "compactor",
    ),
    "pages": ("by_page", "by_page(counter)"),
    "merges": tuple(f"window+{name}" for name in MERGED),
}  # fmt: skip
KIND = {name: kind for kind, names in KINDS.items() for name in names}


class Case(NamedTuple):
    policy: str
    codecs: tuple[str, str]
    residual: int
    look: str
    block: int | None
    positions: str

    def covers(self) -> set[Pair]:
        """A kind of policies meets all else; each policy that ranks by keys, which may be decoded ones, meets codes.

        What a policy makes of statistics, of a block or of positions by rank it makes of dense slots too: `test_slots`
        has each, and `test_merge` each merge. What storages and selections make of a ranking depends on what is ranked
        by, which is the kind; and a selection looks at decoded keys, however they were encoded.
        """
        kind = KIND[self.policy]
        own = [("look", self.look), ("block", self.block), ("positions", self.positions)]
        covered = pairs([*own, ("kind", kind)])
        for name in self.codecs:
            family = FAMILIES.get(name, "dense")
            covered |= pairs([*own, ("family", family), ("residual", self.residual)])
            covered |= pairs([("storage", name), ("residual", self.residual)])
            if family != "dense":
                covered |= pairs([("kind", kind), ("family", family)])
                covered |= pairs([("policy", self.policy), ("family", "any")]) if kind == "keys" else set()
        return covered

    @property
    def is_apart(self) -> bool:
        """Whether it is not another case too, or left to `test_merge`, which has merges of what is held exactly."""
        dense = self.codecs == ("dense", "dense")
        hardest = (self.residual, self.block, self.positions) == (3, BLOCK, "cache")
        return hardest and not dense if "+" in self.policy else not (dense and self.residual)

    @property
    def spec(self) -> CacheSpec:
        stored = dataclasses.replace(held(self.codecs, self.residual), memory=self.memory)
        return CacheSpec(OURS[self.policy], stored, LOOKS[self.look][0], self.positions)

    @property
    def memory(self) -> Memory:
        """Where slots are, which changes no result: in host memory in two of three cases that allow it."""
        policy = OURS[self.policy]
        if "+" in self.policy or (self.look != "everything" and getattr(policy, "reads", True)):
            return "device"
        keys_stay = LOOKS[self.look][0].ranks_by_keys
        chosen = MEMORIES[zlib.crc32(repr(self._replace(codecs=())).encode()) % len(MEMORIES)]
        return ("device", "host") if chosen == "host" and keys_stay else chosen

    def run(self) -> tuple[jax.Array, Any]:
        spec = self.spec
        read = None if self.policy == "h2o[masked]" else spec.selection
        prompt, decode = random()
        return quick_replay(
            spec.storage, prompt, decode, LENGTHS, spec.policy, Rope(dim=DIM, theta=THETA), selection=read,
            prefill_block=self.block,
        )  # fmt: skip

    def expected(self) -> list[replay.Row]:
        policy = dataclasses.replace(THEIRS[self.policy], positions=self.positions)
        if policy.then is not None:
            policy = dataclasses.replace(policy, then=dataclasses.replace(policy.then, positions=self.positions))
        key, value = (CODECS.get(name, replay.exact) for name in self.codecs)
        stored = replay.Storage(key, value, None if self.spec.storage.exact else self.residual)
        fold = MERGED[self.policy.removeprefix("window+")][1] if "+" in self.policy else None
        prompt, decode = random()
        return replay.replay(
            stored, prompt, decode, LENGTHS, policy, theta=THETA, look=LOOKS[self.look][1], block=self.block, fold=fold
        )


@functools.cache
def random() -> tuple[Triple, Triple]:
    """Queries, keys and values of prompts and of decoding steps."""
    return streams(SEED, (HEADS, KV_HEADS), DIM, LENGTHS, STEPS, CODECS.values(), THETA)


@functools.cache
def lowers(case: Case) -> bool:
    """Whether it is not refused, which depends on whether slots are held in codecs, not on which."""
    if case.codecs not in (MIXED[0], MIXED[-1]):
        return lowers(case._replace(codecs=MIXED[0]))
    # What is refused as it is, is refused in codes.
    plain = case._replace(codecs=MIXED[-1], residual=0)
    if case != plain and not lowers(plain):
        return False
    shapes = ((len(LENGTHS), heads, WIDTH, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    given = layers.Case(layers.Streams(*map(np.zeros, shapes)), LENGTHS, LENGTHS + STEPS, case.block, Rope(dim=DIM))
    try:
        layers.lowered(case.spec, given)
    except PolicyError:
        return False
    return True


@functools.cache
def cases() -> list[Case]:
    """Each product of a kind has one of two policies, which change from product to product; or each that reads keys."""
    valid = []
    for about in itertools.product(MIXED, (0, 3), LOOKS, (None, BLOCK), ("original", "cache")):
        for kind, names in KINDS.items():
            first = zlib.crc32(repr(about).encode()) % len(names)
            tried = names if kind == "keys" else (*names[first:], *names[:first])[:2]
            fit = [case for case in (Case(name, *about) for name in tried) if case.is_apart and lowers(case)]
            valid += fit if kind == "keys" else fit[:1]
    # In any order: of cases that cover as many pairs the first is taken, which should not always be the plainest.
    return covering([valid[i] for i in np.random.default_rng(0).permutation(len(valid))], Case.covers)


#: Of `cases`, which take seconds to find: the first test that runs does, not every process that lists the tests.
COUNT = 61


@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(COUNT))
def test_a_layer_is_the_reference(number):
    case = cases()[number]
    print(case)
    output, layer = case.run()
    assert_same(output, layer, case.expected(), case.spec.storage)


def test_chunks_beside_a_store_of_newest_tokens():
    """It is the reference, or it is refused as pages are."""
    case = Case("full", ("int8", "fp8"), 3, "shadowkv", None, "original")
    if lowers(case):
        output, layer = case.run()
        assert_same(output, layer, case.expected(), case.spec.storage)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("look", ["quest", "lserve", "retrieval"])
def test_pages_that_are_evicted_and_coded(look):
    """Arrays have b + p slots; the page of a step's token is the page that it is written to."""
    case = Case("by_page(counter)", ("int8", "fp8"), 0, look, None, "original")
    if lowers(case):
        output, layer = case.run()
        assert_same(output, layer, case.expected(), case.spec.storage)


def test_the_registries_are_covered():
    """With every name of a storage and a selection, every kind of policies, and every policy that ranks by keys."""
    assert len(cases()) == COUNT, "set COUNT to the number of cases"
    assert set(POLICIES) - OF_MODELS < set(OURS) == set(THEIRS) == set(KIND)
    others = 2  # h2o[masked], by_page(counter)
    assert len(OURS) == len(POLICIES) + len(COMBINATORS) - len(OF_MODELS) + len(MERGED) + others
    assert set(STORAGES) - OTHERS == {name for case in cases() for name in case.codecs} == {"dense", *CODECS}
    assert set(SELECTIONS) - {"infinigen"} == set(LOOKS) == {case.look for case in cases()}
    assert {KIND[case.policy] for case in cases()} == set(KINDS)
    met = set().union(*(case.covers() for case in cases()))
    best = [[("kind", kind), ("look", "optimal")] for kind in set(KINDS) - {"hidden", "merges"}]
    coded = [[("policy", name), ("family", "any")] for name in KINDS["keys"]]
    assert {pair for two in best + coded for pair in pairs(two)} < met
