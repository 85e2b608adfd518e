"""Rotary embeddings as ``config.json`` writes them: ``rope_parameters``, or ``rope_theta`` with ``rope_scaling``."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.rope import Rope

TYPES = ("default", "linear", "dynamic", "llama3", "longrope", "yarn")


@dataclasses.dataclass(frozen=True)
class RopeKeys:
    """Where a family keeps its rotary settings.

    Attributes:
      theta: key of the base, outside ``rope_parameters``.
      partial: key of the share of a head's features that is rotated; None = the family always rotates all of them.
      partial_default: that share when the key is absent.
      original_default: trained length before stretching when absent (Phi-3, which keeps it at the top level);
        None = ``max_position_embeddings``.
    """

    theta: str = "rope_theta"
    partial: str | None = None
    partial_default: float = 1.0
    original_default: int | None = None


DEFAULT = RopeKeys()


def read(family: str, raw: Mapping[str, Any], keys: RopeKeys, head_dim: int, max_positions: int) -> Rope:
    """The rotary embedding that a ``config.json`` describes.

    Raises:
      ConfigError: a type that kvjax does not have, a setting that is missing or cannot be.
    """
    # A config that was saved by an old release and edited for a new one has both; transformers takes the old key.
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    given = raw.get(name) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ConfigError(f"config.json of {family}: {name} must be one flat object, but is {given!r}.")
    kind = given.get("rope_type", given.get("type", "default"))
    # "su" is LongRoPE's first name; Phi-3's first release called it "yarn" too.
    if kind == "su" or (kind == "yarn" and family == "phi3"):
        kind = "longrope"
    if kind not in TYPES:
        raise ConfigError(f"config.json of {family}: rope type {kind!r} is unknown; valid types: {', '.join(TYPES)}.")

    def number(key: str, default: float | None = None, fallback: str | None = None) -> float:
        value = given.get(key)
        value = raw.get(fallback) if value is None and fallback else value
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise ConfigError(
                f"config.json of {family}: {key} of a {kind} {name} must be a number above 0, but is {value!r}."
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
    theta = number("rope_theta", 10_000.0, keys.theta)
    if kind == "default":
        return Rope(dim, theta)
    original = given.get("original_max_position_embeddings") or max_positions
    if keys.original_default:
        original = keys.original_default
    original = raw.get("original_max_position_embeddings") or original
    if not isinstance(original, int) or original < 1:
        raise ConfigError(
            f"config.json of {family}: original_max_position_embeddings must be a whole number above 0, "
            f"but is {original!r}."
        )
    match kind:
        case "linear":
            return Rope(dim, theta, kind, number("factor"))
        case "dynamic":
            # transformers stretches from max_position_embeddings, whatever else the config says
            return Rope(dim, theta, kind, number("factor"), max_positions)
        case "llama3":
            low, high = number("low_freq_factor"), number("high_freq_factor")
            return Rope(dim, theta, kind, number("factor"), original, low, high)
    stretch = max_positions / original
    factor = number("factor", stretch)
    attention = number("attention_factor", _attention_factor(kind, factor, original, given))
    if kind == "yarn":
        fast, slow = number("beta_fast", 32.0), number("beta_slow", 1.0)
        return Rope(
            dim, theta, kind, factor, original, beta_fast=fast, beta_slow=slow, attention_factor=attention,
            truncate=given.get("truncate", True),
        )  # fmt: skip
    short, long = (_factors(family, name, key, given.get(key), dim // 2) for key in ("short_factor", "long_factor"))
    return Rope(
        dim, theta, "longrope", original_max_positions=original, short_factor=short, long_factor=long,
        attention_factor=attention,
    )  # fmt: skip


def write(config: DecoderConfig, rope: Rope, keys: RopeKeys) -> dict[str, Any]:
    """The keys of a rotary embedding, in the old spelling, which every release of ``transformers`` reads."""
    raw: dict[str, Any] = {keys.theta: rope.theta}
    if keys.partial:
        share = rope.dim / config.head_dim
        # the reader truncates head_dim * share, so a share that rounds down must be nudged
        raw[keys.partial] = share if int(config.head_dim * share) == rope.dim else (rope.dim + 0.5) / config.head_dim
    scaling: dict[str, Any] = {}
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
        # releases of transformers before 5 want exactly these three keys of Phi-3
        return raw | {
            "original_max_position_embeddings": rope.original_max_positions,
            "rope_scaling": {"type": rope.scaling, **scaling},
        }
    if rope.scaling not in ("linear", "dynamic"):
        scaling["original_max_position_embeddings"] = rope.original_max_positions
    return raw | {"rope_scaling": {"rope_type": rope.scaling, **scaling}}


def _attention_factor(kind: str, factor: float, original: int, given: Mapping[str, Any]) -> float:
    """What cosine and sine are multiplied by when the config does not say.

    LongRoPE (arXiv:2402.13753): sqrt(1 + ln s / ln L); YaRN (arXiv:2309.00071, eq. 22): 0.1 ln s + 1.
    """
    if factor <= 1:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")
    if scale and scale_all:
        return (0.1 * scale * math.log(factor) + 1) / (0.1 * scale_all * math.log(factor) + 1)
    return 0.1 * math.log(factor) + 1


def _factors(family: str, name: str, key: str, value: Any, count: int) -> tuple[float, ...]:
    if not isinstance(value, list) or len(value) != count or not all(isinstance(x, int | float) for x in value):
        got = f"{len(value)} values" if isinstance(value, list) else repr(value)
        raise ConfigError(f"config.json of {family}: {key} of {name} must list {count} numbers, but is {got}.")
    return tuple(float(x) for x in value)
