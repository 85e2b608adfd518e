"""The results of a user's own policy, storage or selection are checked before a program is traced."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies
from kvjax.cache import CacheSpec
from kvjax.cache.planning import declared
from kvjax.errors import PolicyError, SelectionError, StorageError
from kvjax.numerics import statistics
from kvjax.numerics.statistics import Statistic
from kvjax.policies import Importance, Scope, evict
from kvjax.policies.components import Merge
from kvjax.selection import Selection
from kvjax.storage import Codec, Side, Storage
from tests.tiny import random_tokens, tiny

SHAPE = r"a jax array of float32 \[2, 2, 320\]"


def run(spec):
    return kvjax.generate(tiny().model, random_tokens(2, 12), spec, max_new_tokens=3)


def scored(score, needs=("mass",), reads=("key", "value"), **fields):
    return evict(importance=Importance(needs=needs, score=score, reads=reads), budget=6, name="mine", **fields)


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
    change: object

    def fold(self, key, value, victim, stats, view, tokens):
        return self.change(policies.components.Folded(key, value, stats))


def folding(change):
    return scored(lambda stats, view: stats["mass"], merge=Fold(change))


def scoped(**functions):
    usual = {"needs": frozenset(), "protected": lambda stats, view: view.live, "count": lambda budget: 0}
    return scored(lambda stats, view: stats["mass"], scope=Scope(**usual | functions))


@dataclasses.dataclass(frozen=True)
class Weighted(Importance):
    weights: object
    needs = frozenset()

    def score(self, stats, view):
        return view.position.astype(jnp.float32)


class Unfinished(Importance):
    needs = frozenset()


@dataclasses.dataclass(frozen=True)
class Shifted(Codec):
    by: object = 0

    def parts(self, dim, dtype):
        return {"code": ((dim,), jnp.int8)}

    def encode(self, x, side, dtype):
        return {"code": x.astype(jnp.int8)}


def selected(**attributes):
    return CacheSpec(policies.full(), selection=type("Mine", (Selection,), {"name": "mine"} | attributes)())


def sided(prepare):
    return held(side=Side(prepare=prepare, parts=lambda dim, dtype: {"scale": ((dim,), jnp.float32)}))


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
    "prompts alone": (scored(lambda stats, view: stats["mass"] if view.decoding else None), "returned None"),
    "decoding alone": (scored(lambda stats, view: None if view.decoding else stats["mass"]), "returned None"),
    "layers": (scored(lambda stats, view: stats["mass"] * [1.0, 2.0][view.layer]), "raised TracerIntegerConversion"),
    "a function of one argument": (scored(lambda stats: stats["mass"]), r"raised TypeError: .* 2 were given\.$"),
    "an attribute": (
        scored(lambda stats, view: view.positions), r"no attribute 'positions' \(.*test_declared.py, line \d+\)"
    ),
    "unread key of a copy": (
        scored(lambda stats, view: view._replace(newest=view.prompt).key, reads=()), "importance reads view.key"
    ),
    "scope": (
        scored(
            lambda stats, view: stats["mass"],
            scope=Scope(needs=frozenset(), protected=lambda stats, view: view.position, count=lambda budget: 0),
        ),
        r"scope.protected returned a jax array of int32 .*; expected a jax array of bool",
    ),
    "merge": (folding(lambda made: made._replace(key=made.key[..., :2])), r"merge.fold: `key` returned .* 320, 2\]"),
    "merge of a tuple": (folding(tuple), "merge.fold returned tuple; expected a kvjax.policies.Folded"),
    "merge without statistics": (folding(lambda made: made._replace(stats={})), r"`stats` is \[\]; .* \['mass'\]"),
    "merge of statistics": (
        folding(lambda made: made._replace(stats={"mass": made.stats["mass"][:, :1]})), r"`stats\['mass'\]` returned"
    ),
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
    "parts of a fraction": (held(parts=lambda dim, dtype: {"code": ((dim / 2,), jnp.int8)}), r"parts returned .*4\.0"),
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
    "side raises": (sided(lambda view: {}["x"]), "side.prepare raised KeyError: 'x'"),
    "side of another shape": (sided(lambda view: {"scale": view.own}), "codec's side .* prepare returned shapes"),
    "no index": (looking(lambda index, query, view: index["x"]), "raised KeyError: 'x'"),
    "index": (
        CacheSpec(policies.full(), selection=Indexed(lambda index, query, view: view.visible)),
        "settle returned an index of .*int32.*; expected that of `init`: .*float32",
    ),
}  # fmt: skip


#: Those that are refused when they are made.
UNMADE = {
    "no score": (lambda: Importance(needs={"mass"}), "score=None must be a function"),
    "no method": (lambda: evict(importance=Unfinished(), budget=6), "score=None must be a function of Unfinished"),
    "an array": (
        lambda: evict(importance=Weighted(np.ones(3)), budget=6), r"Weighted is not hashable \(TypeError: .*ndarray"
    ),
    "a scope's text": (lambda: scoped(count=lambda budget: "6"), "scope.count raised TypeError: .*; expected a whole"),
    "a scope's fraction": (lambda: scoped(count=lambda budget: 1.5), "scope.count raised TypeError: .*float"),
    "a scope's negative": (lambda: scoped(count=lambda budget: -3), "scope.count returned -3; expected a whole number"),
    "a scope that raises": (lambda: scoped(count=lambda budget: 1 // 0), "scope.count raised ZeroDivisionError"),
    "no decode": (lambda: Storage(key=Shifted(), value=Shifted()), "decode=None must be a function of Shifted"),
    "no decoding": (lambda: held(decode=None), "decode=None must be a function"),
    "a codec's list": (
        lambda: Storage(key=type("Own", (Shifted,), {"decode": len})([1]), value=Shifted()), "Own is not hashable"
    ),
    "a selection's list": (lambda: looking([1]), "selection mine: Look is not hashable"),
    "a selection's unit": (lambda: selected(unit=0), "unit must be a whole number of at least 1; got 0"),
    "a selection's name": (lambda: selected(name=None), "name=None must be a non-empty string"),
    "a selection's needs": (lambda: selected(needs=frozenset({"mass"})), r"needs=.*mass.* not a frozenset of stat"),
}  # fmt: skip
WIDTHS = {"text": "8", "negative": -1, "fraction": 1.5}


@pytest.mark.parametrize("name", UNMADE)
def test_what_cannot_work_is_not_made(name):
    make, message = UNMADE[name]
    with pytest.raises(PolicyError if "codec" not in name and "decod" not in name else StorageError, match=message):
        make()


@pytest.mark.parametrize("name", WIDTHS)
def test_widths_that_are_no_numbers(name):
    with pytest.raises(SelectionError, match=f"width returned {WIDTHS[name]!r} .*; expected a whole number of slots"):
        run(selected(width=lambda self, capacity: WIDTHS[name]))


@pytest.mark.parametrize("init", [lambda *_: 1 // 0, lambda *_: {"a": 0.0}, lambda *_: {"a": jnp.zeros(3)}])
def test_an_index_that_is_none(init):
    with pytest.raises(SelectionError, match=r"selection mine: its (choice raised ZeroDivision|init: 'a' is)"):
        run(selected(init=init))


@pytest.mark.parametrize("name", WRONG)
def test_what_errs_is_an_error_that_says_what_was_expected(name, monkeypatch):
    def traced(*arguments, **options):
        raise AssertionError("a program was traced")

    monkeypatch.setattr(sys.modules["kvjax.generation.prefill"], "run_prompts", traced)
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
    assert calls.count(whole) == 2  # as a policy of the prompt, and of decoding
    run(spec)
    assert calls.count(whole) == 2
    assert run(looking(lambda index, query, view: view.visible)).lengths.tolist() == [3, 3]


def test_nothing_is_computed():
    """The check is of shapes, whatever they are: no array of this size could be made."""
    declared.check_policy(policies.roco(6).traced(), True, 64, 1 << 24, 128, "bfloat16")
    assert not jax.live_arrays() or max(x.size for x in jax.live_arrays()) < 1 << 24
