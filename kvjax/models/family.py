"""What an entry of the table of families says, and how it reads and writes a ``config.json``."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models import rope_keys
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import ACTIVATIONS

Json = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Names:
    """What a family calls its modules (each holds a ``weight`` and perhaps a ``bias``).

    Attributes:
      prefix: of every module but the output head; a model saved without its head lacks the first word of it.
      layers: name of the list of layers.
      top, layer: their module -> ours, outside and inside a layer; several of ours are one tensor, one after another.
      head: the output head's module.
      in_first: a layer's matrices are stored [in, out] (GPT-2's Conv1D).
      interleaved: a fused tensor goes head by head: query, key, value of head 0, then of head 1 (GPT-NeoX).
      buffers: suffixes of tensors that old releases saved although they are no parameters.
    """

    prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str | tuple[str, ...]]
    layers: str = "layers"
    head: str = "lm_head"
    in_first: bool = False
    interleaved: bool = False
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Family:
    """One family.

    Attributes:
      architecture: the ``transformers`` class of its language model.
      keys: `DecoderConfig` field -> its key in ``config.json`` and the value that ``transformers`` gives an absent key.
      fixed: fields that never vary.
      names: its tensors.
      rope: its rotary keys, or None.
      windows: how sliding windows are written: ``all`` layers share one, ``some`` layers do (Qwen), or None.
      window_default: the window when ``config.json`` does not say.
      only: options that change the model, each with the one value that kvjax has.
      finish: what a table cannot say: (config.json, fields so far) -> more fields.
      unfinish: its inverse: config -> more keys.
    """

    architecture: str
    keys: Mapping[str, tuple[str, Any]]
    fixed: Mapping[str, Any]
    names: Names
    rope: rope_keys.RopeKeys | None = rope_keys.DEFAULT
    windows: str | None = None
    window_default: int | None = 4096
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    finish: Callable[[Json, dict[str, Any]], dict[str, Any]] = lambda raw, fields: {}
    unfinish: Callable[[DecoderConfig], dict[str, Any]] = lambda config: {}


def read(name: str, family: Family, raw: Json) -> DecoderConfig:
    """The decoder that the ``config.json`` of a family describes; see `kvjax.models.families.read`."""
    for key, only in {"quantization_config": None, **family.only}.items():
        if raw.get(key) is not None and raw[key] != only:
            has = "unquantised weights" if only is None else f"{only!r}"
            raise ConfigError(f"{key} of {name} is {raw[key]!r} in config.json; kvjax has {has} only.")
    types = {field.name: field.type for field in dataclasses.fields(DecoderConfig)}
    fields: dict[str, Any] = {"family": name, **family.fixed}
    for field, (key, default) in family.keys.items():
        fields[field] = setting(name, raw, key, default, types[field])
    hidden, heads = fields["hidden_size"], fields["num_heads"]
    if fields.get("head_dim") is None:
        if hidden % heads:
            raise ConfigError(
                f"config.json of {name}: hidden_size {hidden} is not a multiple of num_attention_heads {heads}."
            )
        fields["head_dim"] = hidden // heads
    fields["num_kv_heads"] = fields.get("num_kv_heads") or heads
    fields["mlp_size"] = fields["mlp_size"] or 4 * hidden
    fields["embed_size"] = fields.get("embed_size") or hidden
    if heads % fields["num_kv_heads"]:
        raise ConfigError(
            f"config.json of {name}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {fields['num_kv_heads']}."
        )
    fields |= family.finish(raw, fields)
    if fields["activation"] not in ACTIVATIONS:
        raise ConfigError(
            f"activation {fields['activation']!r} of {name} in config.json is unknown; valid: {', '.join(ACTIVATIONS)}."
        )
    if family.rope is not None:
        fields["rope"] = rope_keys.read(name, raw, family.rope, fields["head_dim"], fields["max_positions"])
    if family.windows:
        fields["windows"] = _windows(name, family, raw, fields["num_layers"])
    return DecoderConfig(**fields)


def write(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` of a decoder; see `kvjax.models.families.write`."""
    raw: dict[str, Any] = {"architectures": [family.architecture], "model_type": config.family}
    raw |= {key: getattr(config, field) for field, (key, _) in family.keys.items()}
    eos = config.eos_token_ids
    raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    if config.rope is not None and family.rope is not None:
        raw |= rope_keys.write(config, config.rope, family.rope)
    sliding = [window is not None for window in config.windows]
    if family.windows:
        raw["sliding_window"] = next((window for window in config.windows if window is not None), None)
    if family.windows == "some":
        raw["use_sliding_window"] = any(sliding)
        raw["max_window_layers"] = sliding.index(True) if any(sliding) else config.num_layers
        raw["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in sliding]
    return raw | dict(family.only) | family.unfinish(config)


def setting(family: str, raw: Json, key: str, default: Any, kind: Any) -> Any:
    """One key's value, of the type that its `DecoderConfig` field has."""
    value = raw.get(key, default)
    valid: str | None = None
    if key == "eos_token_id":
        values = [] if value is None else value if isinstance(value, list) else [value]
        if all(_whole(v) and v >= 0 for v in values):
            return tuple(values)
        valid = "a token id, a list of them or null"
    elif kind is bool:
        valid = None if isinstance(value, bool) else "true or false"
    elif kind is str:
        valid = None if isinstance(value, str) else "a name"
    elif kind is float:
        valid = None if isinstance(value, int | float) and value > 0 and value is not True else "a number above 0"
    elif key.endswith("_token_id"):
        # -1 is how some old configs say "none"
        value = None if value == -1 else value
        valid = None if value is None or (_whole(value) and value >= 0) else "a token id or null"
    elif not (_whole(value) and value > 0) and not (value is None and key in _NULLABLE):
        valid = "a whole number above 0"
    if valid:
        raise ConfigError(f"config.json of {family}: {key} must be {valid}, but is {value!r}.")
    return value


_NULLABLE = {"num_key_value_heads", "head_dim", "n_inner", "word_embed_proj_dim", "sliding_window"}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _windows(name: str, family: Family, raw: Json, num_layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer."""
    window = setting(name, raw, "sliding_window", family.window_default, int)
    if family.windows == "all":
        return (window,) * num_layers
    if not setting(name, raw, "use_sliding_window", False, bool):
        window = None
    first, types = raw.get("max_window_layers", 28), raw.get("layer_types")
    if types is None:
        if not _whole(first):
            raise ConfigError(f"config.json of {name}: max_window_layers must be a whole number, but is {first!r}.")
        types = ["full_attention" if i < first or not window else "sliding_attention" for i in range(num_layers)]
    valid = {"full_attention", "sliding_attention"} if window else {"full_attention"}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= valid:
        raise ConfigError(
            f"config.json of {name}: layer_types must list {' or '.join(sorted(valid))} for each of the {num_layers} "
            f"layers (sliding ones need use_sliding_window and a sliding_window), but is {types!r}."
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)
