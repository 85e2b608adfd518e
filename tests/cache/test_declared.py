"""What a user's own policy, storage or selection computes is checked before anything is traced for a program."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, statistics
from kvjax.cache import CacheSpec, declared
from kvjax.errors import PolicyError, SelectionError, StorageError
from kvjax.policies import Importance, Scope, evict
from kvjax.policies.components import Merge
from kvjax.selection import Selection
from kvjax.statistics import Statistic
from kvjax.storage import Codec, Side, Storage
from tests.tiny import random_tokens, tiny

SHAPE = r"a jax array of float32 \[2, 2, 320\]"


def run(spec):
    return kvjax.generate(tiny().model, random_tokens(2, 12), spec, max_new_tokens=3)


def scored(score, needs=("mass",), **fields):
    return evict(importance=Importance(needs=frozenset(needs), score=score), budget=6, name="mine", **fields)


def held(**functions):
    usual = {
        "parts": lambda dim, dtype: {"code": ((dim,), jnp.int8)},
        "encode": lambda x, side, dtype: {"code": x.astype(jnp.int8)},
        "decode": lambda parts, side, dim: parts["code"].astype(jnp.float32),
    }
    codec = Codec(**usual | functions)
    return CacheSpec(policies.h2o(6), Storage(key=codec, value=codec, name="mine"))


@dataclasses.dataclass(frozen=True)
class Look(Selection):
    mark: object
    name: str = "mine"

    def chosen(self, index, query, view):
        return self.mark(index, query, view)


def looking(mark):
    return CacheSpec(policies.full(), selection=Look(mark))


@dataclasses.dataclass(frozen=True)
class Keys(Importance):
    needs = frozenset()

    def score(self, stats, view):
        return jnp.sum(view.key.astype(jnp.float32), axis=-1)


@dataclasses.dataclass(frozen=True)
class Fold(Merge):
    def fold(self, key, value, victim, stats, view, tokens):
        return policies.components.Folded(key[..., :2], value, stats)


@dataclasses.dataclass(frozen=True)
class Indexed(Look):
    def init(self, shape, dim, dtype):
        return {"mine": jnp.zeros(shape)}

    def settle(self, index, columns, view):
        return {"mine": index["mine"].astype(jnp.int32)}


WRONG = {
    "undeclared statistic": (scored(lambda stats, view: stats["count"]), "reads statistic 'count', .* declares mass"),
    "undeclared key": (evict(importance=Keys(), budget=6, name="mine"), r"reads view.key, .* add 'key' to `reads`"),
    "shape": (scored(lambda stats, view: stats["mass"][:, :, 0]), rf"returned .* \[2, 2\]; expected {SHAPE}"),
    "broadcast": (scored(lambda stats, view: stats["mass"][:, :1]), rf"returned .* \[2, 1, 320\]; expected {SHAPE}"),
    "dtype": (scored(lambda stats, view: view.position), rf"returned a jax array of int32 .*; expected {SHAPE}"),
    "float": (scored(lambda stats, view: 1.0), rf"returned 1.0 of type float; expected {SHAPE}"),
    "bool": (scored(lambda stats, view: True), rf"returned True of type bool; expected {SHAPE}"),
    "numpy": (
        scored(lambda stats, view: np.zeros(view.position.shape, np.float32)),
        rf"returned a numpy.ndarray of float32 .*; expected {SHAPE}",
    ),
    "nothing": (scored(lambda stats, view: None), rf"returned None of type NoneType; expected {SHAPE}"),
    "raises": (scored(lambda stats, view: 1 // 0), r"raised ZeroDivisionError: .* \(.*test_declared.py, line \d+\)"),
    "branches": (scored(lambda stats, view: stats["mass"] if stats["mass"].sum() else 0), "raised TracerBool"),
    "scope": (
        scored(
            lambda stats, view: stats["mass"],
            scope=Scope(needs=frozenset(), protected=lambda stats, view: view.position, count=lambda budget: 0),
        ),
        r"scope.protected returned a jax array of int32 .*; expected a jax array of bool",
    ),
    "merge": (scored(lambda stats, view: stats["mass"], merge=Fold()), r"merge.fold: `key` returned .* 320, 2\]"),
    "inside a combinator": (
        policies.value_norm(scored(lambda stats, view: stats["count"])), "reads statistic 'count', which it does not"
    ),
    "decoding": (
        policies.after_prefill(policies.snapkv(6, window=2), then=scored(lambda stats, view: stats["count"])),
        "reads statistic 'count', which it does not",
    ),
    "one name": (
        scored(lambda stats, view: stats["mass"], needs=(Statistic("mass", accumulate="max"), statistics.MASS)),
        "have one name; rename one",
    ),
    "parts": (held(parts=lambda dim, dtype: [1]), r"parts returned \[1\]; expected a dict of name"),
    "parts raise": (held(parts=lambda dim, dtype: {}["x"]), "parts raised KeyError: 'x'"),
    "names": (held(encode=lambda x, side, dtype: {"other": x}), r"encode returned \['other'\]; .*: \['code'\]"),
    "encoded dtype": (held(encode=lambda x, side, dtype: {"code": x}), "'code' returned .* float32 .*; .* int8"),
    "encoded shape": (
        held(encode=lambda x, side, dtype: {"code": x.astype(jnp.int8)[..., :2]}), r"'code' returned .* 2\]; .* 8\]"
    ),
    "decoded dtype": (held(decode=lambda parts, side, dim: parts["code"]), "decode returned .* int8 .*; .* float32"),
    "decoded shape": (
        held(decode=lambda parts, side, dim: parts["code"].astype(jnp.float32)[..., :2]),
        r"decode returned .* 2\]; .* 8\]",
    ),
    "decoding raises": (held(decode=lambda parts, side, dim: parts["x"]), "decode raised KeyError: 'x'"),
    "marks dtype": (looking(lambda index, query, view: view.visible.astype(jnp.float32)), "chosen returned .* float32"),
    "marks shape": (looking(lambda index, query, view: view.visible[:, :1]), r"chosen returned .* \[2, 1, 320\]"),
    "marks of numpy": (
        looking(lambda index, query, view: np.ones(view.position.shape, bool)), "chosen returned a numpy.ndarray"
    ),
    "no index": (looking(lambda index, query, view: index["x"]), "raised KeyError: 'x'"),
    "index": (
        CacheSpec(policies.full(), selection=Indexed(lambda index, query, view: view.visible)),
        "settle returned an index of .*int32.*; expected that of `init`: .*float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_errs_is_an_error_that_says_what_was_expected(name, monkeypatch):
    def traced(*arguments, **options):
        raise AssertionError("a program was traced")

    monkeypatch.setattr(sys.modules["kvjax.prefill"], "run_prompts", traced)
    spec, message = WRONG[name]
    with pytest.raises(PolicyError, match=message) as raised:
        run(spec)
    kind = (
        StorageError if "storage" in str(raised.value) else SelectionError if "selection" in str(raised.value) else None
    )
    assert kind is None or isinstance(raised.value, kind)
    assert "mine" in str(raised.value)


def test_what_is_right_runs_and_is_asked_once():
    calls = []

    def score(stats, view):
        calls.append(view.position.shape)
        return stats["mass"]

    side = Side(
        prepare=lambda view: {"scale": jnp.max(jnp.abs(view.own), axis=2)},
        parts=lambda dim, dtype: {"scale": ((dim,), jnp.float32)},
    )
    codec = Codec(
        parts=lambda dim, dtype: {"code": ((dim,), jnp.int8)},
        encode=lambda x, side, dtype: {"code": (127 * x / side["scale"]).astype(jnp.int8)},
        decode=lambda parts, side, dim: parts["code"].astype(jnp.float32) * side["scale"] / 127,
        side=side,
    )
    spec = CacheSpec(scored(score), Storage(key=codec, value=codec, name="mine"))
    assert run(spec).lengths.tolist() == [3, 3]
    whole = (declared.ROWS, 2, 320)
    assert calls.count(whole) == 1
    run(spec)
    assert calls.count(whole) == 1
    assert run(looking(lambda index, query, view: view.visible)).lengths.tolist() == [3, 3]


def test_nothing_is_computed():
    """The check is of shapes, whatever they are: no array of this size could be made."""
    declared.check_policy(policies.roco(6).traced(), 64, 1 << 24, 128, "bfloat16")
    assert not jax.live_arrays() or max(x.size for x in jax.live_arrays()) < 1 << 24
