"""Named decoder shapes are the published ones."""

import dataclasses

import pytest

from kvjax.errors import ConfigError
from kvjax.models import families, shapes
from kvjax.models.parameters import parameter_count


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("opt-125m", 125_239_296),
        ("opt-175b", 174_604_468_224),
        ("llama2-7b", 6_738_415_616),
        ("llama2-70b", 68_976_648_192),
        ("qwen2-72b", 72_706_203_648),
        ("gemma2-9b", 9_241_705_984),
        ("gemma3-1b", 999_885_952),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("olmo2-7b", 7_298_617_344),
        ("smollm3-3b", 3_075_098_624),
        ("granite3-8b", 8_170_848_256),
        ("starcoder2-3b", 3_030_371_328),
        ("stablelm-3b", 2_795_443_200),
        ("phi-2", 2_779_683_840),
        ("command-r", 34_980_831_232),
        ("command-r7b", 8_028_033_024),
    ],
)
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


def test_layers_that_differ():
    gemma = shapes.by_name("gemma3-1b")
    assert gemma.windows[:7] == (512, 512, 512, 512, 512, None, 512)
    assert [gemma.kind(layer).rope.theta for layer in (4, 5)] == [1e4, 1e6]
    smollm = shapes.by_name("smollm3-3b")
    assert [smollm.kind(layer).rope is None for layer in range(5)] == [False, False, False, True, False]


def test_an_unknown_shape_names_the_known_ones():
    with pytest.raises(ConfigError, match="known shapes: tiny, opt-125m"):
        shapes.by_name("gpt-5")


def test_windows_are_of_every_layer():
    config = shapes.by_name("opt-125m")
    with pytest.raises(ConfigError, match="windows has 12 entries for 4 layers; give one for each, or"):
        dataclasses.replace(config, num_layers=4)
    assert dataclasses.replace(config, num_layers=4, windows=()).windows == (None,) * 4
