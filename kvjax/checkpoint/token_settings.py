"""Checks the types of what the settings of a tokenizer say, before `kvjax.checkpoint.special_tokens` reads them.

Chat templates are checked when one is used (`kvjax.checkpoint.chat`): a model is of use without.
"""

from collections.abc import Mapping
from pathlib import Path

from kvjax.checkpoint.readers import json_object
from kvjax.checkpoint.special_tokens import ADDED_FILE, CONFIG_FILE, EXTRA, FORMER_EXTRA, MAP_FILE, NAMES
from kvjax.errors import ConfigError, shown

#: Settings that are true, false or null.
_SWITCHES = ("add_bos_token", "add_eos_token", "add_prefix_space", "legacy")
_TOKEN = "a text, or an object with a text under content"
_MAX_ID = 2**31 - 1


def check_settings(folder: Path, files: Mapping[str, bytes]) -> None:
    """Checks the files of a folder that say which tokens are special and how texts are split.

    Args:
      folder: the folder, for messages.
      files: name -> content.

    Raises:
      CheckpointError: a file is damaged.
      ConfigError: a setting of another type.
    """
    for name in (MAP_FILE, CONFIG_FILE, ADDED_FILE):
        for key, value in (json_object(files[name], folder / name) if name in files else {}).items():
            about, valid = (shown(key), _valid_id(value)) if name == ADDED_FILE else (key, _valid(key, value))
            if valid:
                raise ConfigError(f"{folder / name}: {about} must be {valid}, but is {shown(value)}.")


def _valid_id(value: object) -> str | None:
    sound = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_ID
    return None if sound else f"a whole number from 0 to {_MAX_ID}"


def _valid(key: str, value: object) -> str | None:
    """Returns what a setting must be; None if it is that, or not one that kvjax uses."""
    if value is None:
        return None
    if key in _SWITCHES:
        return None if isinstance(value, bool) else "true, false or null"
    if key in NAMES:
        return None if _is_token(value) else f"{_TOKEN}, or null"
    if key in (EXTRA, FORMER_EXTRA):
        listed = list(value.values()) if isinstance(value, dict) else value
        return None if isinstance(listed, list) and all(map(_is_token, listed)) else f"a list, each {_TOKEN}"
    if key == "added_tokens_decoder":
        sound = isinstance(value, dict) and all(
            number.isascii() and number.isdigit() and len(number) < 10 and isinstance(token, dict) and _is_token(token)
            for number, token in value.items()
        )
        return None if sound else "an object of ids, each an object with a text under content"
    return None


def _is_token(value: object) -> bool:
    return isinstance(value.get("content") if isinstance(value, dict) else value, str)
