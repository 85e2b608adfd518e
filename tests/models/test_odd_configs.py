"""Every key of config.json that any family reads, with values that it cannot have: a ConfigError, or a sane config."""

import dataclasses
import json
import math
import time
import warnings

import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.errors import ConfigError
from kvjax.models import families, values
from kvjax.models.parameters import parameter_shapes
from kvjax.numerics.rope import Rope
from tests.checkpoint.folders import raw_config

SCALING = {
    "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0], "beta_fast": 32, "beta_slow": 1, "truncate": True,
    "attention_factor": 1.5,
}  # fmt: skip
TYPES = ("linear", "dynamic", "llama3", "yarn", "longrope")
#: Changes of the small config of a family that make it read other keys. A family that refuses one is tried without it.
VARIANTS = {
    "plain": {},
    "windows": {"use_sliding_window": True, "sliding_window": 4},
    "layer types": {
        "use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"],
        "no_rope_layers": [0, 1], "num_local_experts": 3,
    },
    "kinds of layers": {
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 2.0}, "sliding_attention": {"rope_type": "default"}
        }
    },
    "mscale": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5}},
    "type": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    **{
        f"{kind} in {name}": {name: {"rope_type": kind, **SCALING}}
        for kind in TYPES
        for name in ("rope_scaling", "rope_parameters")
    },
}  # fmt: skip
ODD = [
    10**12, 10**400, -(10**400), 2**31, 2**63, -1, -5, 0, 1, 3, 1.5, 4.0, 0.0, -2.5, 1e-300, 1e300, math.nan, math.inf,
    -math.inf, True, False, None, "", "4", "x" * 100_000, [], [1], [[]], [10**400] * 2, [math.nan] * 2, ["x", {}],
    [True, False], [0.0, 1.0], ["sliding_attention"] * 2, {}, {"a": 1}, {"rope_type": []}, {"full_attention": 5},
    {"a": {"b": {"c": [1]}}},
]  # fmt: skip


class Recording(dict):
    """An object that notes the keys that are read, of itself and of the objects in it."""

    def __init__(self, items, keys, path=()):
        super().__init__(items)
        self.keys_read, self.path = keys, path

    def get(self, key, default=None):
        self.keys_read.add((*self.path, key))
        value = super().get(key, default)
        return Recording(value, self.keys_read, (*self.path, key)) if isinstance(value, dict) else value

    def __getitem__(self, key):
        return self.get(key)

    def __or__(self, other):
        return Recording({**self, **other}, self.keys_read, self.path)


def cases():
    """(family, a config.json that it reads, the paths of the keys that it reads of it)."""
    for family in families.FAMILIES:
        for changes in VARIANTS.values():
            raw, keys = raw_config(family, **changes), set()
            try:
                families.read(Recording(raw, keys))
            except ConfigError:
                continue
            yield family, raw, sorted(keys)


def changed(raw, path, value):
    """The object with another value at a path of keys."""
    key, *rest = path
    return raw | {key: changed(raw.get(key) or {}, rest, value) if rest else value}


def check_sane(config):
    """Whole numbers are such, numbers are finite, nothing is beyond its bounds, and frequencies can be computed."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, bool | str | None | Rope):
            continue
        for each in value if isinstance(value, tuple) else (value,):
            assert each is None or isinstance(each, Rope) or values.is_number(each, 0, values.LARGEST), field.name
        if field.type is int:
            assert values.is_whole(value, 0, values.MAX_SIZE), field.name
    assert config.num_layers <= values.MAX_LAYERS
    hash(config)
    for rope in {config.rope, *config.ropes} - {None}:
        assert np.isfinite(rope.frequencies(jnp.array([1, 100]))).all(), rope
        assert math.isfinite(rope.attention_factor**2) and isinstance(rope.truncate, bool)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_odd_values_of_every_key(family):
    seen, messages, begun = set(), set(), time.monotonic()
    for name, raw, keys in cases():
        if name != family:
            continue
        for path in keys:
            for value in ODD:
                lie = changed(raw, path, value)
                try:
                    config = families.read(lie)
                except ConfigError as error:
                    messages.add(str(error))
                    continue
                if config not in seen:
                    seen.add(config)
                    with warnings.catch_warnings(action="error"):
                        check_sane(config)
    assert seen
    assert max(map(len, messages)) < 1500 and not any("\n" in each for each in messages)
    assert time.monotonic() - begun < 60  # thousands of files: nothing was allocated or looped over


def test_every_key_of_the_tables_is_tried():
    tried = {(family, path[-1]) for family, _, keys in cases() for path in keys}
    for name, family in families.FAMILIES.items():
        assert {(name, key) for key, _ in family.keys.values()} <= tried
    nested = {path[1:] for _, _, keys in cases() for path in keys if len(path) > 1}
    assert {(key,) for key in (*SCALING, "mscale", "mscale_all_dim", "rope_type", "type", "rope_theta")} <= nested
    assert {("full_attention",), ("sliding_attention",)} <= nested


@pytest.mark.parametrize(
    "lie",
    [
        {"num_hidden_layers": 1000, "num_attention_heads": 1 << 20, "num_key_value_heads": 1 << 20, "head_dim": 64},
        {"num_attention_heads": 1 << 16, "num_key_value_heads": 1 << 16, "head_dim": 1 << 16},
        {"hidden_size": 1 << 26, "intermediate_size": 1 << 26},
        {"vocab_size": 1 << 26, "hidden_size": 1 << 26},
    ],
)
def test_sizes_that_are_possible_one_by_one(lie):
    with pytest.raises(ConfigError, match="is not plausible: it describes"):
        families.read(raw_config("llama", **lie))
    with pytest.raises(ConfigError, match="is not plausible: it describes"):
        families.read(raw_config("qwen3_moe", num_experts=1 << 26, num_experts_per_tok=1))


def test_the_largest_sizes_can_be_described():
    raw = raw_config("llama", vocab_size=1 << 26, hidden_size=1 << 14, num_attention_heads=128, num_hidden_layers=1000,
                     intermediate_size=1 << 26)  # fmt: skip
    shapes = parameter_shapes(families.read(raw))
    assert shapes["layer_999"]["mlp"]["up"]["kernel"].shape == (1 << 14, 1 << 26)


@pytest.mark.parametrize("kind", [[], {}, 5, None, True, "LLAMA"])
def test_families_of_other_types(kind):
    with pytest.raises(ConfigError, match=r"^model_type .* is not supported"):
        families.read(json.loads(json.dumps({"model_type": kind})))
