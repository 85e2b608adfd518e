"""Arrangements: a new one is one file and one line, and no other code asks which one a layer has."""

import ast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies
from kvjax.cache import CacheSpec
from kvjax.cache.arrangements import ARRANGEMENTS
from kvjax.cache.context_parallel import refusals
from kvjax.cache.groups import Group
from kvjax.cache.replay import read
from kvjax.errors import StorageError
from kvjax.storage import dense
from kvjax.storage.layouts import Layout
from tests import layers
from tests.cache.shared_scales import SharedScaleArrangement, SharedScales, shared_scales
from tests.conftest import ROOT

LENGTHS = np.array([9, 4])
#: Where code may ask for a layout: the layouts, and the arrangement of each.
ROOMS = ("kvjax/storage/layouts.py", "kvjax/cache/arrangements/")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(ARRANGEMENTS, SharedScales, SharedScaleArrangement())


def test_a_new_one_needs_one_file_and_one_line():
    case = layers.Case(layers.random_streams(range(2), 16), LENGTHS, LENGTHS + 6)
    spec = CacheSpec(policies.full(), shared_scales())
    made, exact = (layers.run(each, case) for each in (spec, CacheSpec(policies.full(), dense())))
    assert 0 < np.abs(made.output - exact.output).max() < 0.1
    assert made.layout.bytes() < exact.layout.bytes() / 2
    layer = jax.tree.map(lambda leaf: jnp.asarray(leaf[-1]), made.layers[0])
    key, _, position = read(spec.storage, layer)
    for row, end in enumerate(case.ends):
        held = np.asarray(position[row, 0])
        assert sorted(held[held >= 0]) == list(range(end))
        expected = case.streams.key[row, 0][held[held >= 0]]
        np.testing.assert_allclose(key[row, 0][held >= 0], expected, atol=2 * np.abs(expected).max() / 127)


def test_its_refusals_are_asked_for():
    case = layers.Case(layers.random_streams(range(2), 16), LENGTHS, LENGTHS + 6)
    with pytest.raises(StorageError, match="shares its scale"):
        layers.lowered(CacheSpec(policies.h2o(4), shared_scales()), case)
    group = Group(storage=shared_scales(), slots=(8,), decoding=True)
    assert "not divided" in refusals.refuses(group, 2, 8)


LAYOUTS = {kind.__name__ for kind in Layout.__subclasses__() if kind.__module__.startswith("kvjax.")}


def layouts_asked_for(source: str) -> list[str]:
    """Calls of `isinstance` and comparisons of types with a layout."""
    found = []
    for node in ast.walk(ast.parse(source)):
        asks = isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass")
        asks |= isinstance(node, ast.Compare | ast.MatchClass)
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        if asks and names & LAYOUTS:
            found.append(ast.unparse(node))
    return found


@pytest.mark.sampled(0)
def test_nobody_else_asks_which_layout_there_is():
    for path in (*(ROOT / "kvjax").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        assert name.startswith(ROOMS) or not layouts_asked_for(path.read_text()), name


def test_asking_would_be_seen():
    assert {"Blocks", "Pairs", "Segments", "SingleSlots", "Tiers"} == LAYOUTS
    for source in (
        "isinstance(storage.layout, Blocks | Tiers)", "type(x) == Pairs", "match x:\n    case Segments():\n        pass"
    ):  # fmt: skip
        assert layouts_asked_for(source), source
