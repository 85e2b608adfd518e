"""Public functions on a model whose weights are in stacks give what they give for layers apart."""

import re

import jax
import numpy as np
import pytest

import kvjax
from kvjax import analysis, policies, reuse, storage
from kvjax.checkpoint import writer
from kvjax.models import skew, stacked_params
from tests.conftest import ROOT
from tests.parameters import without_parameters
from tests.tiny import in_stacks, random_tokens, tiny

APPLIED = re.compile(r'(?<!`)\b[dD]ecoder(\(.*\))?\.apply\(\s*\{"params": (?!unstacked)')
TOKENS = random_tokens(2, 24)
LAYERS = 3


def _skew(model):
    return skew.find_skew(model, TOKENS)


CALLS = {
    "skew": _skew,
    "skewed": lambda model: kvjax.generate(
        skew.skewed(model, _skew(tiny(layers=LAYERS).model), fold=False), TOKENS, policies.h2o(8), max_new_tokens=2
    ).tokens,
    "calibration": lambda model: kvjax.calibrate(model, TOKENS, storage.kvquant(4)).layers[1],
    "low rank": lambda model: kvjax.generate(
        model, TOKENS, kvjax.CacheSpec(policies.full(), storage.low_rank((8, 6, 4), (8, 8, 4))), max_new_tokens=2,
        calibration=kvjax.calibrate(tiny(layers=LAYERS).model, TOKENS, storage.low_rank((8, 6, 4), (8, 8, 4))),
    ).tokens,
    "gradients": lambda model: kvjax.generate(model, TOKENS, policies.kvgrad(8), max_new_tokens=2).tokens,
    "directions": lambda model: analysis.train_directions(
        model, TOKENS, kvjax.calibrate(tiny(layers=LAYERS).model, TOKENS, storage.low_rank(8, 8)), steps=1
    ).losses,
    "codes": lambda model: kvjax.quantize_weights(model, bits=8).params["layer_2"]["mlp"],
    "fewer layers": lambda model: reuse.fewer_layers(model, (0, 2)).params["layer_1"],
    "scores": lambda model: kvjax.log_likelihood(model, TOKENS, policies.roco(8), prompt_length=12).logprobs,
    "drafts": lambda model: kvjax.generate(
        model, TOKENS, policies.full(), max_new_tokens=4, speculate=kvjax.speculation.seen(policies.h2o(8))
    ).tokens,
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_the_same(name):
    model = tiny(layers=LAYERS).model
    expected, found = CALLS[name](model), CALLS[name](in_stacks(model))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=2e-4, atol=2e-5)


def test_flax_is_given_dicts():
    """It takes no other mapping; `kvjax.models.bound` gives it the layers that do not loop."""
    for folder in ("kvjax", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(
                r'(?<!`)\b[dD]ecoder(\(.*\))?\.apply\(\s*\{"params": (?!unstacked)', path.read_text()
            ), path


def test_each_array_is_sliced_once(tmp_path, monkeypatch):
    """To save and to quantize the model, and not at all to generate."""
    sizes, plain = [], stacked_params.slice_of
    model = in_stacks(tiny(layers=LAYERS).model)

    def counted(leaf, index, axis):
        sizes.append(leaf.nbytes // leaf.shape[0] if isinstance(leaf, jax.Array) else 0)
        return plain(leaf, index, axis)

    monkeypatch.setattr(stacked_params, "slice_of", counted)
    monkeypatch.setattr(writer, "slice_of", counted)
    layer = sum(x.nbytes // LAYERS for x in jax.tree.leaves(model.params.layers))
    kvjax.save(model, tmp_path / "m")
    # A checkpoint has no parameters of policies.
    counts = sum(sizes)
    saved = stacked_params.unstacked(without_parameters(model).params)
    assert counts == sum(x.nbytes for i in range(LAYERS) for x in jax.tree.leaves(saved[f"layer_{i}"]))
    sizes.clear()
    kvjax.quantize_weights(model, bits=8)
    assert sum(sizes) == LAYERS * layer
    sizes.clear()
    kvjax.generate(model, TOKENS, policies.h2o(8), max_new_tokens=1)
    assert not sum(sizes)
