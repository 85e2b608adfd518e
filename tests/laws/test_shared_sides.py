"""The law of a step for storages whose vectors share something: it equals the float64 step on what was stored."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvjax import policies
from kvjax.cache import LayerKV
from kvjax.numerics.rope import Rope
from kvjax.storage import Calibration, Samples, Storage, low_rank, think
from tests.laws import assert_same, replay, streams
from tests.reference import policies as reference
from tests.reference import replay as law
from tests.reference import shared

DIM, LENGTHS, STEPS, BLOCK, THETA = 8, np.array([12, 5, 9]), 8, 5, 10_000.0
HEADS, KV_HEADS = 4, 2
ROPE = Rope(dim=DIM, theta=THETA)


@functools.cache
def samples() -> Samples:
    key, value = np.random.default_rng(1).normal(size=(2, 60, KV_HEADS, DIM)).astype(np.float32)
    return Samples(own=key, query=None, key=key, value=value)


@functools.cache
def random() -> tuple[law.Triple, law.Triple]:
    return streams(3, (HEADS, KV_HEADS), DIM, LENGTHS, STEPS, [])


class Case(NamedTuple):
    """A storage with its reference, a policy with its own, and blocks of the prompt."""

    held: Storage
    stored: Any
    policy: Any
    block: int | None = None
    fold: Any = None
    cached: bool = False

    @property
    def calibration(self) -> Calibration | None:
        return Calibration.of(self.held, [samples()], ROPE) if self.held.sides_of("calibration") else None


def shorter(key_rank: int, value_rank: int, residual: int = 0) -> tuple[Storage, Any]:
    own = samples()
    return low_rank(key_rank, value_rank, residual), shared.low_rank(
        own.key, own.value, (key_rank, value_rank), residual
    )


def fewer(ratio: float, window: int, recent: int) -> tuple[Storage, Any]:
    return think(ratio, window, recent), shared.think(ratio, window, recent)


def both(name: str, **arguments: Any) -> Any:
    """A policy of the library and the reference's."""
    return policies.by_name(name, **arguments), reference.by_name(name, **arguments)


def values(name: str, **arguments: Any) -> Any:
    return tuple(
        package.COMBINATORS["value_norm"](package.by_name(name, **arguments)) for package in (policies, reference)
    )


CASES = {
    "think-full": Case(*fewer(0.4, 4, 3), both("full")),
    "think-h2o-all": Case(*fewer(0.4, 4, 0), both("h2o", budget=6)),
    "think-snapkv": Case(*fewer(0.6, 20, 2), both("snapkv", budget=5, window=2, kernel=3)),
    "think-knorm": Case(*fewer(0.3, 4, 2), both("knorm", budget=0.5)),
    "low_rank-full-blocks": Case(*shorter(4, 5, 3), both("full"), BLOCK),
    "low_rank-h2o": Case(*shorter(3, 6), both("h2o", budget=6)),
    "low_rank-keydiff-blocks": Case(*shorter(6, 4, 2), both("keydiff", budget=0.5), BLOCK),
    "low_rank-values": Case(*shorter(5, 5), values("tova", budget=6, share_heads=False)),
}


def check(case: Case, prompt: law.Triple, decode: law.Triple) -> LayerKV:
    """Compares a case with its reference, and returns the layer."""
    own, theirs = case.policy
    merge, fold = case.fold or (None, None)
    if merge is not None:
        own = dataclasses.replace(own, merge=merge)
    made = case.calibration
    given = prompt, decode, LENGTHS
    output, layer = replay(case.held, *given, own, ROPE, prefill_block=case.block, calibration=made)
    rows = law.replay(case.stored, *given, theirs, theta=THETA, block=case.block, fold=fold)
    turned = THETA if case.held.frame == "unrotated" and not case.cached else None
    assert_same(output, layer, rows, case.held, calibration=made, theta=turned)
    return layer


@pytest.mark.sampled(2)
@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_one_on_what_was_stored(name):
    case = CASES[name]
    layer = check(case, *random())
    assert set(layer.sides) == ({"key"} if "think" in name else set())
    for channels in layer.sides.get("key", {}).values():
        assert channels.shape[2] == DIM - math.floor(case.held.key.dims.ratio * DIM + 1e-9)
