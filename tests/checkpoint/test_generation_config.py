"""generation_config.json: what it says, what is refused, and that it survives."""

import dataclasses
import json

import jax.numpy as jnp
import pytest
from safetensors.numpy import save_file

from kvjax.checkpoint.huggingface import load, save
from kvjax.errors import CheckpointError, ConfigError
from kvjax.generation.sampling import Greedy, Sample
from kvjax.models.generation_config import FILE, read
from tests.checkpoint.folders import folder_with, raw_config
from tests.models.test_odd_configs import ODD


@pytest.mark.parametrize(
    ("raw", "sampler"),
    [
        ({}, Greedy()),
        # Without do_sample, transformers ignores what is for sampling.
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, Greedy()),
        ({"repetition_penalty": 1.1, "do_sample": None}, Greedy(1.1)),
        ({"do_sample": True}, Sample(top_k=50)),
        ({"do_sample": True, "temperature": 0.0, "repetition_penalty": 1.1}, Greedy(1.1)),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "min_p": 0.0}, Sample()),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": None, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 2},
            Sample(temperature=0.6, top_k=50, top_p=0.9, min_p=0.1, repetition_penalty=2),
        ),
    ],
)
def test_how_tokens_are_chosen(raw, sampler):
    assert read(raw).sampler == sampler


def test_what_ends_a_text_and_what_is_not_supported():
    assert [read({"eos_token_id": ids}).eos_token_ids for ids in (None, 3, [4, 5])] == [None, (3,), (4, 5)]
    raw = {"num_beams": 1, "no_repeat_ngram_size": 3, "typical_p": 1.0, "min_length": None, "stop_strings": ["."]}
    assert read(raw | {"max_new_tokens": 7}).unsupported == ("no_repeat_ngram_size", "stop_strings")
    assert (read({}).max_new_tokens, read({"max_new_tokens": 7}).max_new_tokens) == (None, 7)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"eos_token_id": [1, -2]}, "eos_token_id must be a token id, a list of them or null"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number of at least 1"),
        ({"do_sample": True, "temperature": -1}, "temperature must be from"),
        ({"repetition_penalty": "much"}, "repetition_penalty must be a number or null"),
        ({"repetition_penalty": -1}, "repetition_penalty must be from"),
        ({"temperature": [0.5]}, "temperature must be a number or null"),
        ({"do_sample": "no"}, "do_sample must be true, false or null"),
        ({"do_sample": True, "top_k": 10**400}, "top_k must be at most"),
        ({"max_new_tokens": 2**31}, "max_new_tokens must be a whole number of at least 1 or null, and at most"),
        ({"eos_token_id": 2**31}, "eos_token_id must be a token id"),
    ],
)
def test_values_that_cannot_be(raw, message):
    with pytest.raises(ConfigError, match=rf"^generation_config\.json: {message}"):
        read(raw)


@pytest.mark.parametrize(
    "key", ["eos_token_id", "max_new_tokens", "do_sample", "temperature", "top_k", "top_p", "min_p", "num_beams",
            "repetition_penalty"],
)  # fmt: skip
def test_odd_values_of_every_key(key):
    """Each is refused, or gives settings that programs can be compiled with."""
    for value in ODD:
        for others in ({}, {"do_sample": True}):
            try:
                found = read(others | {key: value})
            except ConfigError:
                continue
            jnp.asarray([found.eos_token_ids or (0,)], jnp.int32)
            numbers = (found.max_new_tokens, *dataclasses.asdict(found.sampler).values())
            assert all(each is None or 0 < each <= 1e20 for each in numbers)
            assert all(not isinstance(each, list | dict | bool) for each in numbers)


def test_it_is_loaded_and_saved(tmp_path):
    _, _, found = folder_with(tmp_path / "one", raw_config("llama"))
    save_file(found, tmp_path / "one" / "model.safetensors")
    plain = load(tmp_path / "one")
    assert (plain.generation, plain.eos_token_ids) == (read({}), (2,))
    said = json.dumps({"eos_token_id": [7, 8], "do_sample": True, "transformers_version": "5"})
    (tmp_path / "one" / FILE).write_text(said)
    model = load(tmp_path / "one")
    assert model.eos_token_ids == (7, 8) and model.config == plain.config
    save(model, tmp_path / "two")
    assert (tmp_path / "two" / FILE).read_text() == said
    assert load(tmp_path / "two").generation == model.generation
    (tmp_path / "one" / FILE).write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object"):
        load(tmp_path / "one")
    (tmp_path / "one" / FILE).write_text('{"do_sample": true, "top_k": -1}')
    with pytest.raises(ConfigError, match=rf"^{tmp_path}/one: generation_config\.json: top_k must be"):
        load(tmp_path / "one")
