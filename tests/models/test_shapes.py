"""Named decoder shapes are the published ones."""

import dataclasses

import pytest

from kvjax.errors import ConfigError
from kvjax.models import families, shapes
from kvjax.models.parameters import parameter_count


@pytest.mark.parametrize(("name", "parameters"), [("opt-125m", 125_239_296), ("llama2-7b", 6_738_415_616)])
def test_parameter_counts(name, parameters):
    assert parameter_count(shapes.by_name(name)) == parameters


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("opt-30b", {
            "model_type": "opt", "vocab_size": 50272, "hidden_size": 7168, "num_hidden_layers": 48,
            "num_attention_heads": 56, "ffn_dim": 28672, "max_position_embeddings": 2048, "word_embed_proj_dim": 7168,
            "do_layer_norm_before": True, "activation_function": "relu", "bos_token_id": 2, "eos_token_id": 2,
            "pad_token_id": 1,
        }),
        ("llama2-7b", {
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 11008, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        }),
    ],
)  # fmt: skip
def test_shapes_are_what_the_checkpoints_say(name, raw):
    assert shapes.by_name(name) == families.read(raw)


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(ConfigError, match="known shapes: tiny, opt-125m"):
        shapes.by_name("gpt-5")


def test_windows_are_of_every_layer():
    config = shapes.by_name("opt-125m")
    with pytest.raises(ConfigError, match="windows has 12 entries for 4 layers; give one for each, or"):
        dataclasses.replace(config, num_layers=4)
    assert dataclasses.replace(config, num_layers=4, windows=()).windows == (None,) * 4
