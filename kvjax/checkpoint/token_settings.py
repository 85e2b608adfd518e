"""Reads what special_tokens_map.json and tokenizer_config.json say, and checks the types of what kvjax uses of it."""

from collections.abc import Container
from pathlib import Path

from kvjax.checkpoint.readers import read_json
from kvjax.errors import ConfigError, shown
from kvjax.models.values import Json

FILES = ("special_tokens_map.json", "tokenizer_config.json")  # the last one has precedence
#: Settings that are true, false or null.
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space")


def read_settings(folder: Path, files: Container[str]) -> Json:
    """Returns the settings of a folder's tokenizer.

    Args:
      folder: the folder.
      files: the names of its files.

    Raises:
      CheckpointError: a file is damaged.
      ConfigError: a setting of another type.
    """
    settings: Json = {}
    for name in FILES:
        found = read_json(folder / name) if name in files else {}
        for key, value in found.items():
            if value is not None and (valid := _valid(key, value)):
                raise ConfigError(f"{folder / name}: {key} must be {valid} or null, but is {shown(value)}.")
        settings |= found
    return settings


def _valid(key: str, value: object) -> str | None:
    """Returns what a setting must be; None if it is that, or not one that kvjax uses."""
    if key in _SWITCHES:
        return None if isinstance(value, bool) else "true, false"
    if key.endswith("_token"):
        content = value.get("content") if isinstance(value, dict) else value
        return None if isinstance(content, str) else "a text, an object with a text under content,"
    if key == "chat_template":
        named = value if isinstance(value, list) else []
        sound = [
            isinstance(each, dict) and all(isinstance(each.get(part), str) for part in ("name", "template"))
            for each in named
        ]
        return None if isinstance(value, str) or (sound and all(sound)) else "a text, a list of named ones"
    return None
