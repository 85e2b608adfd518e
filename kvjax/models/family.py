"""`Family`: the description of a Hugging Face model family, and how its ``config.json`` is read and written."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import ConfigError, shown
from kvjax.models import rope_config, values
from kvjax.models.config import DecoderConfig
from kvjax.models.layers import ACTIVATIONS
from kvjax.models.values import Json
from kvjax.numerics.rope import Rope

Fields = dict[str, Any]  # DecoderConfig field -> value
#: DecoderConfig field -> its key in ``config.json``, and the value that ``transformers`` uses if the key is absent.
Keys = dict[str, tuple[str, Any]]
MLP_RATIO = 4  # hidden features of the MLP per feature of the residual stream, if ``config.json`` has no size
FULL, SLIDING = "full_attention", "sliding_attention"  # of ``layer_types``


@dataclasses.dataclass(frozen=True)
class Names:
    """The names of a family's modules in a checkpoint. Each module has a ``weight`` and possibly a ``bias``.

    Attributes:
      prefix: prefix of every module except the output head. A model that was saved without its head lacks the first
        component of the prefix.
      top: modules outside the layers: name in the checkpoint -> name in kvjax.
      layer: modules inside a layer: name in the checkpoint -> name in kvjax, or several names if the checkpoint fuses
        these modules into one tensor. ``*`` stands for 0, 1, ..., where the checkpoint has a tensor for each entry of a
        parameter, such as each expert's.
      layers: name of the list of layers.
      head: name of the output head.
      in_first: whether the matrices of a layer are stored [in, out] (Conv1D in GPT-2).
      interleaved: whether a fused tensor is ordered by head: query, key and value of head 0, then of head 1 (GPT-NeoX).
      neighbours: whether the rotary embedding turns pairs of neighbouring features (Cohere). In kvjax a pair is half a
        head apart; the features of queries and keys, whose products are the same in any order, are rearranged.
      buffers: suffixes of tensors that old releases saved and that are not parameters.
    """

    prefix: str
    top: Mapping[str, str]
    layer: Mapping[str, str | tuple[str, ...]]
    layers: str = "layers"
    head: str = "lm_head"
    in_first: bool = False
    interleaved: bool = False
    neighbours: bool = False
    buffers: tuple[str, ...] = (".rotary_emb.inv_freq",)


@dataclasses.dataclass(frozen=True)
class Family:
    """One Hugging Face model family.

    Attributes:
      architecture: the ``transformers`` class of the language model.
      keys: the keys of ``config.json``; see `Keys`.
      fixed: `DecoderConfig` fields that have the same value in every model of the family.
      names: the names of the tensors.
      rope: the keys of the rotary embedding, or None.
      windows: which layers have the sliding window of ``config.json``: ``all``, ``listed`` for those that
        ``layer_types`` lists, or None.
      window_default: the sliding window in tokens, or None, if the key is absent from ``config.json``.
      window_switch: whether layers have it only if ``use_sliding_window`` is true.
      layer_types: (``model_type``, config.json, number of layers) -> the value of ``layer_types`` if it is absent.
      ropes: (config.json, fields so far) -> the rotary embedding or None of each layer, if layers differ in it.
      only: options that change the model, each with the only value that kvjax supports.
      finish: (config.json, fields so far) -> further fields, for what `keys` cannot express.
      unfinish: config -> further keys of ``config.json``; the inverse of `finish`.
    """

    architecture: str
    keys: Keys
    fixed: Fields
    names: Names
    rope: rope_config.RopeKeys | None = rope_config.DEFAULT
    windows: str | None = None
    window_default: int | None = 4096
    window_switch: bool = False
    layer_types: Callable[[str, Json, int], list[str]] = lambda name, raw, layers: [FULL] * layers
    ropes: Callable[[Json, Fields], tuple[Rope | None, ...]] | None = None
    only: Json = dataclasses.field(default_factory=dict)
    finish: Callable[[Json, Fields], Fields] = lambda raw, fields: {}
    unfinish: Callable[[DecoderConfig], Json] = lambda config: {}


def read(name: str, family: Family, raw: Json) -> DecoderConfig:
    """Reads the ``config.json`` of a family.

    Args:
      name: the ``model_type``.
      family: the family of that name.
      raw: the parsed ``config.json``.

    Raises:
      ConfigError: see `kvjax.models.families.read`.
    """
    for key, only in family.only.items():
        # In Python, 1 equals true.
        if raw.get(key) is not None and (raw[key] != only or type(raw[key]) is not type(only)):
            raise ConfigError(f"{key} of {name} is {shown(raw[key])} in config.json; kvjax has {only!r} only.")
    types = {field.name: field.type for field in dataclasses.fields(DecoderConfig)}
    fields: Fields = {"family": name, **family.fixed}
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
    fields["mlp_size"] = fields["mlp_size"] or MLP_RATIO * hidden
    fields["embed_size"] = fields.get("embed_size") or hidden
    if heads % fields["num_kv_heads"]:
        raise ConfigError(
            f"config.json of {name}: num_attention_heads {heads} is not a multiple of "
            f"num_key_value_heads {fields['num_kv_heads']}."
        )
    _check_sizes(name, fields)
    fields |= family.finish(raw, fields)
    _check_sizes(name, fields)
    if fields["activation"] not in ACTIVATIONS:
        raise ConfigError(
            f"activation {shown(fields['activation'])} of {name} in config.json is unknown; valid: "
            f"{', '.join(ACTIVATIONS)}."
        )
    if family.rope is not None:
        fields["rope"] = rope_config.read(name, raw, family.rope, fields["head_dim"], fields["max_positions"])
    if family.windows:
        fields["windows"] = _windows(name, family, raw, fields["num_layers"])
    if family.ropes is not None:
        ropes = family.ropes(raw, fields)
        fields["ropes"] = () if all(rope == fields["rope"] for rope in ropes) else ropes
    return DecoderConfig(**fields)


def write(family: Family, config: DecoderConfig) -> Json:
    """Returns the ``config.json`` of a decoder; see `kvjax.models.families.write`.

    Args:
      family: the decoder's family.
      config: the decoder.
    """
    raw: Json = {"architectures": [family.architecture], "model_type": config.family}
    raw |= {key: getattr(config, field) for field, (key, _) in family.keys.items()}
    eos = config.eos_token_ids
    raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
    if config.rope is not None and family.rope is not None:
        raw |= rope_config.write(config, config.rope, family.rope)
    sliding = [window is not None for window in config.windows]
    if family.windows:
        raw["sliding_window"] = next((window for window in config.windows if window is not None), None)
    if family.window_switch:
        raw["use_sliding_window"] = any(sliding)
    if family.windows == "listed":
        raw["layer_types"] = [SLIDING if slides else FULL for slides in sliding]
    return raw | family.only | family.unfinish(config)


def setting(family: str, raw: Json, key: str, default: object, kind: object) -> Any:
    """Returns the checked value of one key.

    Args:
      family: the ``model_type``, for the message.
      raw: the parsed ``config.json``.
      key: the key.
      default: the value if the key is absent.
      kind: the type of the `DecoderConfig` field: bool, str, float, str or None, float or None, or another for whole
        numbers.

    Raises:
      ConfigError: if the value is not valid for the key.
    """
    value = raw.get(key, default)
    valid: str | None = None
    if key == "eos_token_id":
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if all(values.is_whole(each, 0, values.MAX_ID) for each in ids):
            return tuple(ids)
        valid = "a token id, a list of them or null"
    elif kind is bool:
        valid = None if isinstance(value, bool) else "true or false"
    elif kind in (float | None, str | None) and value is None:
        return None
    elif kind in (str, str | None):
        valid = None if isinstance(value, str) else "a name"
    elif kind in (float, float | None):
        largest = values.MAX_EPSILON if key.endswith(_EPSILON) else values.LARGEST
        valid = None if values.is_number(value, maximum=largest) else f"a number above 0, of at most {largest:g}"
    elif key.endswith("_token_id"):
        # Some old files have -1 for null.
        value = None if values.is_whole(value, -1, -1) else value
        valid = None if value is None or values.is_whole(value, 0, values.MAX_ID) else "a token id or null"
    elif not (value is None and key in _NULLABLE):
        maximum = values.MAX_LAYERS if key in _LAYERS else values.MAX_SIZE
        valid = None if values.is_whole(value, 1, maximum) else f"a whole number above 0, of at most {maximum}"
    if valid:
        raise ConfigError(f"config.json of {family}: {key} must be {valid}, but is {shown(value)}.")
    return value


#: Keys for which null is valid.
_NULLABLE = {"num_key_value_heads", "head_dim", "n_inner", "word_embed_proj_dim", "sliding_window"}
#: Keys that count layers.
_LAYERS = {"num_hidden_layers", "n_layer"}
#: Endings of keys of a norm's constant.
_EPSILON = ("_eps", "_epsilon")


def _check_sizes(name: str, fields: Fields) -> None:
    """Raises ConfigError if sizes that are possible one by one cannot be true of one decoder."""
    layers, hidden, heads, mlp = (fields[key] for key in ("num_layers", "hidden_size", "num_heads", "mlp_size"))
    experts, dim, vocabulary = fields.get("num_experts", 0), fields["head_dim"], fields["vocab_size"]
    rows = max(vocabulary, fields["max_positions"] if fields.get("learned_positions") else 0)
    largest = max(hidden * heads * dim, max(experts, 1) * hidden * mlp, rows * max(hidden, fields["embed_size"]))
    entries = layers * max(heads, experts)
    if entries > values.MAX_ENTRIES or max(heads * dim, mlp) > values.MAX_SIZE or largest > values.MAX_ELEMENTS:
        raise ConfigError(
            f"config.json of {name} is not plausible: it describes {layers} layers, {experts} experts, a vocabulary of "
            f"{vocabulary}, hidden size {hidden}, MLP size {mlp}, {heads} heads of {dim} and "
            f"{fields['max_positions']} positions."
        )


def _windows(name: str, family: Family, raw: Json, num_layers: int) -> tuple[int | None, ...]:
    """Returns the sliding window of each layer in tokens, or None for a layer with full attention."""
    window = setting(name, raw, "sliding_window", family.window_default, int)
    if family.window_switch and not setting(name, raw, "use_sliding_window", False, bool):
        window = None
    if family.windows == "all":
        return (window,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        usual = family.layer_types(name, raw, num_layers)
        types = usual if window else [FULL] * num_layers
    valid = (FULL, SLIDING) if window else (FULL,)
    if not isinstance(types, list) or len(types) != num_layers or not all(each in valid for each in types):
        needs = "use_sliding_window and a sliding_window" if family.window_switch else "a sliding_window"
        raise ConfigError(
            f"config.json of {name}: layer_types must list {' or '.join(valid)} for each of the {num_layers} "
            f"layers (sliding ones need {needs}), but is {shown(types)}."
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def periodic(period: int) -> Callable[[str, Json, int], list[str]]:
    """Returns a `Family.layer_types` under which the last layer of each period has full attention.

    Args:
      period: the number of layers of a period, if ``sliding_window_pattern`` is absent from ``config.json``.
    """

    def layer_types(name: str, raw: Json, layers: int) -> list[str]:
        every = setting(name, raw, "sliding_window_pattern", period, int)
        return [FULL if (i + 1) % every == 0 else SLIDING for i in range(layers)]

    return layer_types
