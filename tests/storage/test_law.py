"""The codec law: a step over coded slots is a step of the float64 reference that stores what they decode to."""

import dataclasses
import functools
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.cache import Block, CacheSpec
from kvjax.cache.layout import stores_of
from kvjax.cache.state import EMPTY
from kvjax.cache.step import step_layer
from kvjax.storage import Exact, Fp8, Integer, Storage
from tests import layers
from tests.conformance import assert_same, covering, held_in, live, pairs
from tests.conformance import replay as quick_replay
from tests.reference import policies as reference
from tests.reference import replay as law
from tests.test_merge import REFERENCES as MERGES

HEADS = {"mha": 4, "gqa": 2, "mqa": 1}  # KV heads of four query heads
DIM, WIDTH, STEPS, BLOCK = 8, 12, 10, 6
LENGTHS = np.array([12, 6, 9])  # row 1 has no token in the second block
FIXED = 0.005  # a scale that some numbers exceed 448 times
SEED = 0


@pytest.fixture(autouse=True)
def optimised():
    """Here programs are many; `test_codecs` has the roundings of an optimising compiler."""


def random(seed: int = SEED, dtype: Any = np.float32) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """Queries, keys and values of prompts and of decoding steps, of four heads each."""
    rng = np.random.default_rng(seed)
    return tuple(tuple(rng.normal(size=(3, 4, n, DIM)).astype(dtype) for _ in range(3)) for n in (WIDTH, STEPS))


def of_heads(given: tuple[np.ndarray, ...], heads: str) -> tuple[np.ndarray, ...]:
    query, key, value = given
    return query, key[:, : HEADS[heads]], value[:, : HEADS[heads]]


CODECS = {
    "int8": (Integer(8), law.integer(8)),
    "int4": (Integer(4), law.integer(4)),
    "int2": (Integer(2), law.integer(2)),
    "fp8": (Fp8(), law.fp8()),
    "fp8 fixed": (Fp8(FIXED), law.fp8(FIXED)),
    "dense": (Exact(), law.exact),
}
#: Of keys and of values: a program has two codecs.
MIXED = (("int8", "fp8"), ("fp8 fixed", "int4"), ("int2", "dense"))
RESIDUALS = (0, 3, WIDTH + STEPS)


def by_name(package: Any) -> dict[str, Any]:
    return {
        "full": package.full(),
        "window": package.window(budget=0.5, sinks=1),
        "h2o": package.h2o(budget=0.5),
        "roco": package.roco(budget=0.5, guard=2),
        "value_norm(tova)": package.COMBINATORS["value_norm"](package.tova(budget=0.5, share_heads=False)),
        "knorm": package.knorm(budget=0.5),
    }


OURS, THEIRS = by_name(policies), by_name(reference)


class Case(NamedTuple):
    policy: str
    codecs: tuple[str, str]
    residual: int
    block: int | None
    heads: str

    def covers(self) -> set:
        own = [("policy", self.policy), ("residual", self.residual), ("block", self.block), ("heads", self.heads)]
        return set().union(*(pairs([*own, ("codec", name)]) for name in self.codecs))

    @property
    def held(self) -> Storage:
        key, value = (CODECS[name][0] for name in self.codecs)
        return Storage(key=key, value=value, residual=self.residual, name="|".join(self.codecs))

    @property
    def reference(self) -> law.Storage:
        return law.Storage(*(CODECS[name][1] for name in self.codecs), self.residual)

    def run(self) -> tuple[jax.Array, Any]:
        prompt, decode = (of_heads(given, self.heads) for given in random())
        return quick_replay(self.held, prompt, decode, LENGTHS, OURS[self.policy], prefill_block=self.block)

    def expected(self, stored: law.Storage | None = None, **changes: Any) -> list[law.Row]:
        prompt, decode = (of_heads(given, self.heads) for given in random())
        arrays = {"prompt": prompt, "decode": decode} | changes
        return law.replay(
            stored or self.reference, **arrays, lengths=LENGTHS, policy=THEIRS[self.policy], block=self.block
        )


CASES = covering(
    [Case(*each) for each in itertools.product(OURS, MIXED, RESIDUALS, (None, BLOCK), HEADS)], Case.covers
)


def capacities(case: Case) -> tuple[int, ...]:
    """The least number of slots that STORAGE.md asks for, of coded slots and of exact ones."""
    policy, total = OURS[case.policy], WIDTH + STEPS
    budget = None if policy.budget is None else max(policy.budget.slots(int(n), 1)[0] for n in LENGTHS)
    r = case.residual
    if budget is None:
        slots = max(total - r, 0), min(r, total)
    elif policy.when == "step":
        slots = budget, min(r, budget)
    else:
        most = budget + STEPS
        slots = max(budget, most - r), min(r, most)
    return slots if r else slots[:1]


def describe(case: Case) -> str:
    return f"{case.policy}-{'|'.join(case.codecs)}-{case.residual}-{case.block}-{case.heads}".replace(" ", "_")


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_a_step_is_one_on_what_was_stored(case):
    output, layer = case.run()
    assert_same(output, layer, case.expected(), case.held)
    # Bytes are what the codecs say of each slot.
    sizes = [jax.tree.leaves(store)[0].shape[2] for store in layer.stores]
    expected = 0
    for held, size in zip(stores_of(case.held), sizes, strict=True):
        for codec in (held.key, held.value):
            parts = codec.parts(DIM, jnp.dtype("float32")).values()
            expected += 3 * HEADS[case.heads] * size * sum(math.prod(shape) * each.itemsize for shape, each in parts)
    assert storage.nbytes(layer) == expected
