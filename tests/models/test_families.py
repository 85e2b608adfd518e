"""Reading and writing config.json, without torch."""

import dataclasses
import re

import pytest

from kvjax.errors import ConfigError
from kvjax.models import families
from kvjax.numerics.rope import Rope
from tests.checkpoint.folders import raw_config
from tests.conftest import ROOT

LONGROPE = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_write_inverts_read(family):
    tied = "tie_word_embeddings" not in families.FAMILIES[family].only
    config = families.read(raw_config(family, eos_token_id=[2, 3], tie_word_embeddings=tied))
    assert families.read(families.write(config)) == config
    assert hash(config) == hash(families.read(families.write(config)))


def test_the_page_lists_every_family():
    page = (ROOT / "docs" / "models.md").read_text()
    table = page[: page.index("\n## ")]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]*)\|", table, re.MULTILINE)))) == {
        *families.FAMILIES, "model_type",
    }  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [
        Rope(4, 500.0),
        Rope(4, 500.0, "linear", 2.0),
        Rope(4, 500.0, "dynamic", 2.0, 32),
        Rope(4, 500.0, "llama3", 8.0, 16, 1.0, 4.0),
        Rope(4, 500.0, "yarn", 4.0, 16, beta_fast=8.0, beta_slow=2.0, truncate=False, attention_factor=1.25),
        Rope(
            4, 500.0, "longrope", original_max_positions=16, short_factor=(1.0, 1.5), long_factor=(2.0, 4.0),
            attention_factor=1.25,
        ),
    ],
    ids=lambda rope: rope.scaling,
)  # fmt: skip
def test_every_rope_survives(rope):
    config = dataclasses.replace(families.read(raw_config("llama")), rope=rope)
    assert families.read(families.write(config)) == config


@pytest.mark.parametrize("dim", range(2, 82, 2))
def test_partial_rotary_survives_rounding(dim):
    config = families.read(raw_config("phi3", head_dim=80))
    config = dataclasses.replace(config, rope=Rope(dim))
    assert families.read(families.write(config)).rope == Rope(dim)


def test_old_and_new_keys_say_the_same():
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    old = raw_config("llama", rope_theta=500.0, rope_scaling={"rope_type": "llama3", **scaling})
    new = raw_config("llama", rope_parameters={"rope_theta": 500.0, "rope_type": "llama3", **scaling})
    assert families.read(old) == families.read(new)


def test_su_and_phi3_yarn_are_longrope():
    def read(kind):
        return families.read(
            raw_config("phi3", rope_scaling={"type": kind, **LONGROPE}, original_max_position_embeddings=16)
        )

    assert read("su") == read("yarn") == read("longrope")
    assert read("su").rope.scaling == "longrope"
    assert read("su").rope.attention_factor == pytest.approx((1 + 1 / 4) ** 0.5)  # ln(32 / 16) / ln 16


def test_qwen_windows():
    slides = {"use_sliding_window": True, "sliding_window": 8}
    assert families.read(raw_config("qwen2", sliding_window=8)).windows == (None, None)
    assert families.read(raw_config("qwen2", **slides, max_window_layers=1)).windows == (None, 8)
    types = ["sliding_attention", "full_attention"]
    config = families.read(raw_config("qwen2", **slides, layer_types=types))
    assert config.windows == (8, None)
    assert families.read(families.write(config)) == config


def test_gemma():
    config = families.read(raw_config("gemma", hidden_act="gelu"))
    assert (config.activation, config.norm_offset, config.embed_scale) == ("gelu_pytorch_tanh", 1.0, 4.0)
    assert families.read(raw_config("gemma", hidden_act="gelu", hidden_activation="gelu_new")).activation == "gelu_new"


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("falcon", {}, ["'falcon'", *families.FAMILIES]),
        ("mamba", {}, ["'mamba'", "no attention over the tokens before", "supported: opt"]),
        ("deepseek_v3", {}, ["'deepseek_v3'", "its attention is latent", "one compressed vector"]),
        ("gemma3", {}, ["images", "gemma3_text"]),
        ("gemma3_text", {"attn_logit_softcapping": 30.0}, ["attn_logit_softcapping", "30.0", "None only"]),
        ("gemma2", {"layer_types": ["full_attention"]}, ["layer_types", "2 layers", "need a sliding_window"]),
        ("gemma2", {"final_logit_softcapping": -1.0}, ["final_logit_softcapping", "above 0"]),
        ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, ["linear"]),
        ("smollm3", {"no_rope_layers": [1]}, ["no_rope_layers", "2 layers", "[1]"]),
        ("phi", {"tie_word_embeddings": True}, ["tie_word_embeddings", "False"]),
        ("qwen3_moe", {"mlp_only_layers": [0]}, ["mlp_only_layers", "[0]"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["9 of 3 experts"]),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "False"]),
        ("gpt2", {"reorder_and_upcast_attn": True}, ["reorder_and_upcast_attn"]),
        ("gpt2", {"scale_attn_weights": False}, ["scale_attn_weights", "True"]),
        ("gpt2", {"add_cross_attention": True}, ["add_cross_attention"]),
        ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
        ("llama", {"hidden_size": "16"}, ["hidden_size", "'16'"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ("llama", {"vocab_size": None}, ["vocab_size", "None"]),
        ("llama", {"num_key_value_heads": 3}, ["num_attention_heads 4", "num_key_value_heads 3"]),
        ("llama", {"head_dim": None, "hidden_size": 18}, ["hidden_size 18", "num_attention_heads 4"]),
        ("llama", {"hidden_act": "maxout"}, ["'maxout'", "silu", "relu"]),
        ("llama", {"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
        ("llama", {"eos_token_id": "x"}, ["eos_token_id"]),
        ("llama", {"rms_norm_eps": 0}, ["rms_norm_eps"]),
        ("llama", {"rope_scaling": {"type": "mrope"}}, ["'mrope'", "longrope", "llama3"]),
        ("llama", {"rope_scaling": {"type": "linear"}}, ["factor", "linear"]),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, ["factor", "-1"]),
        ("llama", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, ["short_factor", "2 numbers"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, ["rope_parameters"]),
        ("phi3", {"partial_rotary_factor": 0.75}, ["3 of 4", "even"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ["layer_types", "use_sliding_window"]),
        ("qwen2", {"layer_types": ["full_attention"]}, ["layer_types", "2 layers"]),
    ],
)
def test_bad_configs_are_named(family, changes, says):
    with pytest.raises(ConfigError) as caught:
        families.read(raw_config(family, **changes))
    for words in says:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)
