"""Reads and writes the rotary embedding of a ``config.json``.

New releases of ``transformers`` have it under ``rope_parameters``, old ones under ``rope_theta`` and ``rope_scaling``.
"""

import dataclasses
import math

from kvjax.errors import ConfigError, shown
from kvjax.models import values
from kvjax.models.config import DecoderConfig
from kvjax.models.values import Json
from kvjax.numerics.rope import Rope, Scaling

TYPES: tuple[Scaling, ...] = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")
THETA = 10_000.0  # default base of the frequencies
BETA_FAST, BETA_SLOW = 32.0, 1.0  # default band edges of YaRN, in rotations over the trained length
MAX_FACTOR = 1e6  # of settings of a scaling: dynamic subtracts products with it in float32
DYNAMIC_DIM = 2  # rotated features for which the exponent dim / (dim - 2) of dynamic scaling is not defined
YARN_SLOPE = 0.1  # growth of YaRN's attention factor with ln(factor) (arXiv:2309.00071, eq. 22)


@dataclasses.dataclass(frozen=True)
class RopeKeys:
    """The keys of a family's rotary embedding.

    Attributes:
      theta: key of the base of the frequencies, outside ``rope_parameters``.
      theta_default: that base if the key is absent.
      partial: key of the fraction of a head's features that is rotated; None if the family rotates all of them.
      partial_default: that fraction if the key is absent.
      original_default: the trained context length in tokens if its key is absent from the top level (Phi-3); None for
        ``max_position_embeddings``.
      local_theta: key of the base in layers with a sliding window, if they have their own (Gemma 3), outside
        ``rope_parameters``. Inside, each kind of layer then has an object of its own.
    """

    theta: str = "rope_theta"
    theta_default: float = THETA
    partial: str | None = None
    partial_default: float = 1.0
    original_default: int | None = None
    local_theta: str | None = None


DEFAULT = RopeKeys()


def read(family: str, raw: Json, keys: RopeKeys, head_dim: int, max_positions: int) -> Rope:
    """Reads the rotary embedding of a ``config.json``.

    Args:
      family: the ``model_type``.
      raw: the parsed ``config.json``.
      keys: the keys of the family.
      head_dim: the number of features of a head.
      max_positions: the context length in tokens.

    Raises:
      ConfigError: if the type is not supported, or a setting is missing or not valid.
    """
    if keys.local_theta:
        raw = _of_kind(raw, "full_attention")
    # A file that was saved by an old release and edited for a new one has both keys; transformers reads the old one.
    where = f"config.json of {family}"
    objects = {key: values.json_object(where, key, raw.get(key)) for key in ("rope_scaling", "rope_parameters")}
    name = "rope_scaling" if objects["rope_scaling"] else "rope_parameters"
    given = objects[name]
    if any(isinstance(value, dict) for value in given.values()):
        raise ConfigError(f"{where}: {name} must be one flat object, but is {shown(given)}.")
    asked = given.get("rope_type", given.get("type", "default"))
    # "su" is an earlier name of LongRoPE; the first release of Phi-3 called it "yarn".
    if asked == "su" or (asked == "yarn" and family == "phi3"):
        asked = "longrope"
    kind = values.choice(where, "rope type", asked, TYPES)

    def number(key: str, default: float | None = None, fallback: str | None = None) -> float:
        """Returns a setting, from `fallback` at the top level if it is absent, or the default."""
        value = given.get(key)
        value = raw.get(fallback) if value is None and fallback else value
        value = default if value is None else value
        # Frequencies fall with the powers of the base; YaRN divides by its logarithm.
        minimum, maximum = (1, values.LARGEST) if key == "rope_theta" else (0, MAX_FACTOR)
        if not values.is_number(value, maximum=maximum) or value <= minimum:
            raise ConfigError(
                f"{where}: {key} of a {kind} {name} must be a number above {minimum}, of at most {maximum:g}, but is "
                f"{shown(value)}."
            )
        return float(value)

    share = number("partial_rotary_factor", keys.partial_default, keys.partial or "partial_rotary_factor")
    if share != 1 and keys.partial is None:
        raise ConfigError(
            f"config.json of {family}: partial_rotary_factor is {share}, but {family} rotates whole heads (1.0)."
        )
    dim = int(head_dim * share)
    if dim % 2 or not 0 < dim <= head_dim:
        raise ConfigError(
            f"config.json of {family}: {dim} of {head_dim} features of a head are rotated; it must be an even number "
            f"from 2 to {head_dim}."
        )
    theta = number("rope_theta", keys.theta_default, keys.theta)
    if kind == "default":
        return Rope(dim, theta)
    key = "original_max_position_embeddings"
    original = max_positions if given.get(key) is None else given[key]
    if keys.original_default:
        original = keys.original_default
    original = original if raw.get(key) is None else raw[key]
    # LongRoPE divides by the logarithm of the trained length.
    minimum = 2 if kind == "longrope" else 1
    if not values.is_whole(original, minimum, values.MAX_SIZE):
        raise ConfigError(
            f"{where}: {key} must be a whole number from {minimum} to {values.MAX_SIZE}, but is {shown(original)}."
        )
    match kind:
        case "linear":
            return Rope(dim, theta, kind, number("factor"))
        case "dynamic":
            if dim <= DYNAMIC_DIM:
                raise ConfigError(
                    f"{where}: a dynamic {name} needs more than {DYNAMIC_DIM} rotated features of a head; there are "
                    f"{dim}."
                )
            # transformers uses max_position_embeddings as the trained length and ignores the other key.
            return Rope(dim, theta, kind, number("factor"), max_positions)
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            if high <= low:
                raise ConfigError(
                    f"{where}: high_freq_factor of a {kind} {name} must be above low_freq_factor, which is {low:g}, "
                    f"but is {high:g}."
                )
            return Rope(dim, theta, kind, number("factor"), original, low, high)
    stretch = max_positions / original
    factor = number("factor", stretch)
    scales = {key: number(key, 1.0) for key in ("mscale", "mscale_all_dim") if given.get(key)}
    attention = number("attention_factor", _attention_factor(kind, factor, original, scales))
    if kind == "yarn":
        fast, slow = number("beta_fast", BETA_FAST), number("beta_slow", BETA_SLOW)
        truncate = True if given.get("truncate") is None else given["truncate"]
        if not isinstance(truncate, bool):
            raise ConfigError(f"{where}: truncate of a {kind} {name} must be true or false, but is {shown(truncate)}.")
        return Rope(
            dim, theta, kind, factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention,
            truncate=truncate,
        )  # fmt: skip
    short, long = (_factors(family, name, key, given.get(key), dim // 2) for key in ("short_factor", "long_factor"))
    return Rope(
        dim, theta, "longrope", original_max_positions=original, short_factor=short, long_factor=long,
        attention_factor=attention,
    )  # fmt: skip


def read_local(family: str, raw: Json, keys: RopeKeys, head_dim: int, max_positions: int) -> Rope:
    """Reads the rotary embedding of layers with a sliding window, if these have their own; see `read`."""
    assert keys.local_theta is not None
    own = {key: value for key, value in _of_kind(raw, "sliding_attention").items() if key != "rope_scaling"}
    rope = read(family, own, RopeKeys(theta=keys.local_theta), head_dim, max_positions)
    if rope.scaling != "default":
        raise ConfigError(
            f"config.json of {family}: the rope of layers with a sliding window is {rope.scaling}; kvjax reads default "
            "there."
        )
    return rope


def _of_kind(raw: Json, kind: str) -> Json:
    """Returns a ``config.json`` whose ``rope_parameters`` are those of one kind of layers."""
    given = raw.get("rope_parameters")
    if not isinstance(given, dict) or not {"full_attention", "sliding_attention"} & set(given):
        # In the old form, which has no such objects, all settings but the base are of layers with full attention.
        return raw if kind == "full_attention" else raw | {"rope_parameters": None}
    return raw | {"rope_parameters": given.get(kind)}


def write(config: DecoderConfig, rope: Rope, keys: RopeKeys) -> Json:
    """Returns the keys of a rotary embedding, in the old form, which every release of ``transformers`` reads.

    Args:
      config: the decoder.
      rope: its rotary embedding.
      keys: the keys of its family.
    """
    raw: Json = {keys.theta: rope.theta}
    if keys.partial:
        share = rope.dim / config.head_dim
        # Readers truncate head_dim * share. Where rounding would lose a feature, half a feature is added to the share.
        raw[keys.partial] = share if int(config.head_dim * share) == rope.dim else (rope.dim + 0.5) / config.head_dim
    scaling: Json = {}
    match rope.scaling:
        case "default":
            return raw
        case "linear" | "dynamic":
            scaling = {"factor": rope.factor}
        case "llama3":
            scaling = {
                "factor": rope.factor,
                "low_freq_factor": rope.low_freq_factor,
                "high_freq_factor": rope.high_freq_factor,
            }
        case "yarn":
            scaling = {"factor": rope.factor, "beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
            if not rope.truncate:
                scaling["truncate"] = False
        case "longrope":
            scaling = {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    if rope.scaling in ("yarn", "longrope"):
        factor = rope.factor if rope.scaling == "yarn" else config.max_positions / rope.original_max_positions
        if rope.attention_factor != _attention_factor(rope.scaling, factor, rope.original_max_positions, {}):
            scaling["attention_factor"] = rope.attention_factor
    if keys.original_default:
        # For Phi-3, releases of transformers before 5 accept no other keys than type and the two lists of factors.
        return raw | {
            "original_max_position_embeddings": rope.original_max_positions,
            "rope_scaling": {"type": rope.scaling, **scaling},
        }
    if rope.scaling not in ("linear", "dynamic"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    return raw | {"rope_scaling": {"rope_type": rope.scaling, **scaling}}


def _attention_factor(kind: str, factor: float, original: int, given: Json) -> float:
    """Returns the default factor on cosine and sine for a context extension by the factor s.

    LongRoPE (arXiv:2402.13753) has sqrt(1 + ln s / ln L) for the trained length L, YaRN (arXiv:2309.00071, eq. 22) has
    0.1 ln s + 1.

    Args:
      kind: ``longrope`` or ``yarn``.
      factor: s.
      original: L in tokens.
      given: the settings, which may have ``mscale`` and ``mscale_all_dim`` (DeepSeek).
    """
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")
    if scale and scale_all:
        return (YARN_SLOPE * scale * math.log(factor) + 1) / (YARN_SLOPE * scale_all * math.log(factor) + 1)
    return YARN_SLOPE * math.log(factor) + 1


def _factors(family: str, name: str, key: str, value: object, count: int) -> tuple[float, ...]:
    """Returns the checked factors of LongRoPE, `count` numbers."""
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} values" if isinstance(value, list) else shown(value)
        raise ConfigError(f"config.json of {family}: {key} of {name} must list {count} numbers, but is {got}.")
    if wrong := [each for each in value if not values.is_number(each, maximum=MAX_FACTOR)]:
        raise ConfigError(
            f"config.json of {family}: {key} of {name} must list numbers above 0, but has {shown(wrong[0])}."
        )
    return tuple(float(x) for x in value)
