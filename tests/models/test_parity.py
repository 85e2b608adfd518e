"""Every family says what ``transformers`` says, in float32, on tiny random checkpoints; and on a trained one."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.checkpoint.huggingface import load, save
from kvjax.models import families
from kvjax.models.decoder import Decoder
from tests.models import hf_models
from tests.models.hf_models import CASES, Case

TOLERANCE = 1e-4


@pytest.fixture(autouse=True, scope="module")
def need_transformers():
    pytest.importorskip("torch", reason="parity needs torch")
    pytest.importorskip("transformers", reason="parity needs transformers")


def log_probabilities(model, tokens) -> np.ndarray:
    apply = jax.jit(lambda params, x: Decoder(model.config).apply({"params": params}, x)[0])
    return np.asarray(jax.nn.log_softmax(apply(model.params, jnp.asarray(tokens))), np.float64)


def test_every_family_has_a_case():
    assert {case.family for case in CASES} == set(families.FAMILIES)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_log_probabilities_and_a_saved_folder_loads_in_transformers(case: Case, tmp_path):
    reference = hf_models.make(case, tmp_path / "from")
    tokens = hf_models.tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # e.g. a tied head taken for an untied one
        model = load(tmp_path / "from", dtype=jnp.float32)
    expected = hf_models.log_probabilities(reference, tokens)
    error = np.max(np.abs(log_probabilities(model, tokens) - expected))
    assert error < TOLERANCE
    assert expected.std() > 0.5  # the comparison is not between two flat distributions
    save(model, tmp_path / "to")
    assert load(tmp_path / "to", dtype=jnp.float32).config == model.config
    saved = hf_models.log_probabilities(hf_models.reload(tmp_path / "to"), tokens)
    np.testing.assert_array_equal(saved, expected)


def test_short_text_keeps_the_short_factors(tmp_path):
    """LongRoPE and dynamic scaling leave texts within the trained length alone."""
    for name in ("phi3-longrope", "llama-dynamic"):
        case = next(case for case in CASES if case.name == name)
        reference = hf_models.make(case, tmp_path / name)
        tokens = hf_models.tokens(length=12)
        error = log_probabilities(load(tmp_path / name), tokens) - hf_models.log_probabilities(reference, tokens)
        assert np.max(np.abs(error)) < TOLERANCE


@pytest.mark.parametrize("family", families.FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(family):
    """An empty config.json describes the same decoder as the one that transformers fills in."""
    import transformers

    filled = transformers.AutoConfig.for_model(family).to_dict()
    assert families.read({"model_type": family}) == families.read(filled)
