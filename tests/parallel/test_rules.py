"""Rules of sharding: what is checked, how they are written, and how evenly they divide models of published shapes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from kvjax import policies
from kvjax.cache import CacheSpec
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.errors import ConfigError
from kvjax.models import shapes
from kvjax.parallel import sharding
from kvjax.parallel.rules import Rules, rules, using
from kvjax.planning.roofline import decode_shapes, local_bytes


def test_rules_are_in_force_and_printable():
    given = Rules.parse("mlp=model, vocab=none")
    assert (given.mlp, given.vocab, given.heads) == (("model",), (), Rules().heads)
    assert Rules(mlp="model", vocab=None) == given == Rules.parse(str(given)) == eval(repr(given))
    assert Rules.parse("heads=context+model").heads == ("context", "model")
    assert str(Rules()) == ""
    with using(given):
        assert rules() == given
    assert rules() == Rules()


def test_a_program_depends_on_the_rules():
    traces = []

    @jax.jit
    def f(x):
        traces.append(rules().mlp)
        return x

    f(1)
    with using(Rules(mlp="model")):
        f(1)
    assert traces == [("model", "context"), ("model",)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("mlp", "write NAME=AXES"),
        ("width=model", "one of batch, kv_heads"),
        ("mlp=model,mlp=none", "each NAME once"),
        ("mlp=rows", "valid axes: data, model, context"),
        ("mlp=model+model", "twice"),
        ("slots=data", "batch=data and slots=data"),
    ],
)
def test_bad_rules_are_refused(text, says):
    with pytest.raises(ConfigError, match=says.replace("+", r"\+")):
        Rules.parse(text)


def test_overridden_rules_move_a_dimension():
    mesh = AbstractMesh((2, 4), ("model", "context"))
    path = ("layer_0", "mlp", "up", "kernel")
    assert tuple(sharding.parameter_spec(path, (64, 64), mesh)) == (None, ("model", "context"))
    with using(Rules(mlp="model", embed=None)):
        assert tuple(sharding.parameter_spec(path, (64, 64), mesh)) == (None, "model")
    with using(Rules(mlp="model")):
        assert tuple(sharding.parameter_spec(path, (64, 64), mesh)) == ("context", "model")
    # Of two axes that do not both divide, the one that does.
    assert tuple(sharding.parameter_spec(path, (63, 62), mesh)) == (None, "model")


@pytest.mark.parametrize(
    ("sizes", "kv_heads", "expected"),
    [
        ({"data": 1, "model": 8}, 8, {"data": 1, "model": 8}),
        ({"data": 1, "model": 16}, 8, {"data": 1, "model": 8, "context": 2}),
        ({"data": 2, "model": 16}, 56, {"data": 2, "model": 8, "context": 2}),
        ({"data": 1, "model": 8}, 1, {"data": 1, "model": 1, "context": 8}),
        ({"data": 1, "model": 4, "context": 2}, 2, {"data": 1, "model": 2, "context": 4}),
    ],
)
def test_heads_and_slots_are_divided(sizes, kv_heads, expected):
    assert sharding.fit_sizes(sizes, kv_heads) == expected
    assert sharding.fit_sizes(sizes, kv_heads, Rules(slots=None)) == sizes


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "sizes", "batch"),
    [
        ("llama2-70b", {"data": 1, "model": 16}, 4),
        ("opt-30b", {"data": 1, "model": 16}, 4),
        ("opt-66b", {"data": 1, "model": 16}, 4),
        ("llama2-7b", {"data": 8, "model": 2}, 15),
    ],
)
@pytest.mark.parametrize("policy", [policies.h2o(400), policies.full()], ids=lambda policy: policy.name)
def test_the_split_is_even(name, sizes, batch, policy):
    """Weights of a device are at most 1.03 of the even split, caches 1.05 for as many rows as there are arrays of."""
    # One layer of many is as any other.
    config = dataclasses.replace(shapes.by_name(name), num_layers=8, windows=())
    sizes = sharding.fit_sizes(sizes, config.num_kv_heads)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes))
    rows = sharding.padded_rows(batch, mesh)
    assert batch <= rows < batch + sizes["data"]
    prompts = np.full(rows, 1000)
    bounds = sizes_for(prompts, 23, width=1000, block=None, limits=Limits(1000, 24, shortest=1000), last_fed=False)

    def held(mesh):
        with sharding.on_mesh(mesh):
            layout = lower(CacheSpec(policy), config, bounds, prompts).layout
        found = decode_shapes(config, layout, jnp.bfloat16, rows, mesh)
        return local_bytes(found.params), local_bytes(found.carry.state)

    weights, cache = held(mesh)
    whole_weights, whole_cache = held(None)
    assert weights <= 1.03 * whole_weights * sizes["data"] / mesh.size
    assert cache <= 1.05 * whole_cache / mesh.size
