"""The table of Hugging Face model families: the keys of their ``config.json`` and the names of their tensors.

To support another family, add an entry to a table of `kvjax.models.tables`. `read` converts a ``config.json`` to a
`DecoderConfig`, `write` converts it back, and `kvjax.checkpoint.names` derives the tensors of a checkpoint from
`Names`.
"""

from kvjax.errors import ConfigError, shown
from kvjax.models import family
from kvjax.models.config import DecoderConfig
from kvjax.models.family import Family
from kvjax.models.tables import cohere, experts, gemma, layer_norm, llama
from kvjax.models.values import Json

#: ``model_type`` -> family.
FAMILIES: dict[str, Family] = layer_norm.FAMILIES | llama.FAMILIES | gemma.FAMILIES | cohere.FAMILIES | experts.FAMILIES

_LATENT = (
    "its attention is latent (DeepSeek-V2, arXiv:2405.04434, section 2.1): a token has one compressed vector for all "
    "heads instead of keys and values, which are what policies rank and storages hold"
)
#: ``model_type`` -> why kvjax does not read it, for families that it is often asked for.
REFUSED: dict[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "minicpm3"), _LATENT),
    **dict.fromkeys(
        ("gemma3", "gemma3n", "mistral3", "llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"),
        "it reads images too; of Gemma 3, kvjax reads gemma3_text",
    ),
    **dict.fromkeys(("mamba", "mamba2", "recurrent_gemma", "rwkv"), "it has no attention over the tokens before"),
}


def read(raw: Json) -> DecoderConfig:
    """Converts a ``config.json`` to a `DecoderConfig`. Absent keys have the defaults of ``transformers``.

    Args:
      raw: the parsed ``config.json``.

    Raises:
      ConfigError: if the family is unknown, an option is not supported or a value is not valid.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        reason = f": {REFUSED[name]}" if isinstance(name, str) and name in REFUSED else ""
        raise ConfigError(
            f"model_type {shown(name)} in config.json is not supported{reason}; supported: {', '.join(FAMILIES)}."
        )
    return family.read(name, FAMILIES[name], raw)


def write(config: DecoderConfig) -> Json:
    """Converts a `DecoderConfig` to a ``config.json``; inverts `read`.

    Args:
      config: the decoder.

    Returns:
      The JSON object, with keys that old and new releases of ``transformers`` read.

    Raises:
      ConfigError: if the family is not in the table.
    """
    if config.family not in FAMILIES:
        raise ConfigError(f"family {config.family!r} is not one that kvjax can write: {', '.join(FAMILIES)}.")
    return family.write(FAMILIES[config.family], config)
