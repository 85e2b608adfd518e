"""The tokens that the files of a tokenizer name beside its vocabulary, read as transformers 5 reads them.

They are spread over four files: tokenizer_config.json has ``added_tokens_decoder`` (an id and flags for each) and the
special tokens by name; in folders of older releases, which lack the former, added_tokens.json has the ids and
special_tokens_map.json the names, which then have precedence over those of tokenizer_config.json.
"""

import dataclasses
import json
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvjax.checkpoint.readers import Json

if TYPE_CHECKING:
    import tokenizers

CONFIG_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
#: Names of special tokens. A tokenizer may have others, which end in ``_token`` as well.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
EXTRA = ("extra_special_tokens", "additional_special_tokens")  # lists of special tokens without names


def read_settings(files: Mapping[str, bytes]) -> Json:
    """Returns the contents of tokenizer_config.json, with those of special_tokens_map.json where these count."""
    settings = _object(files, CONFIG_FILE)
    return settings if "added_tokens_decoder" in settings else settings | _object(files, MAP_FILE)


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens that the files name.

    Attributes:
      named: the text of each special token that has a name, such as ``bos_token``.
      added: tokens with an id: id -> text and flags.
      special: the text and flags of each special token, with or without a name.
    """

    named: dict[str, str]
    added: dict[int, Json]
    special: list[Json]

    @classmethod
    def read(cls, files: Mapping[str, bytes], settings: Json) -> "SpecialTokens":
        """Reads the files.

        Args:
          files: name -> content.
          settings: from `read_settings`.
        """
        named = {name: token for name, value in settings.items() if _is_name(name) and (token := _token(value))}
        extra: Any = next((settings[name] for name in EXTRA if settings.get(name)), [])
        if isinstance(extra, dict):  # with names of their own
            named |= {name: token for name, value in extra.items() if (token := _token(value))}
            extra = []
        special = [*named.values(), *(token for value in extra if (token := _token(value)))]
        texts = {token["content"] for token in special}
        if "added_tokens_decoder" in settings:
            added = {int(number): _flagged(value) for number, value in settings["added_tokens_decoder"].items()}
        else:
            added = {
                number: {"content": text, "special": text in texts, "normalized": text not in texts}
                for text, number in _object(files, ADDED_FILE).items()
            }
        return cls({name: token["content"] for name, token in named.items()}, added, special)

    def with_defaults(self, defaults: Mapping[str, str]) -> "SpecialTokens":
        """Returns these tokens and those that have a name which the files do not mention.

        Args:
          defaults: name -> text.
        """
        new = {name: text for name, text in defaults.items() if name not in self.named}
        special = [*self.special, *({"content": text, "special": True} for text in new.values())]
        return dataclasses.replace(self, named=self.named | new, special=special)

    def add_to(self, backend: "tokenizers.Tokenizer") -> None:
        """Adds the tokens to a tokenizer that lacks them: those with ids in their order, and then the others.

        A token that the vocabulary has keeps its id; another one takes the next id, as in transformers.
        """
        from tokenizers import AddedToken

        texts = set(self.named.values())
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        tokens = [self.added[number] for number in sorted(self.added)]
        known |= {token["content"] for token in tokens}
        for token in self.special:
            if token["content"] not in known:
                tokens.append({"special": True} | token)
                known.add(token["content"])
        made = []
        for token in tokens:
            special = bool(token.get("special")) or token["content"] in texts
            flags = {name: bool(token[name]) for name in FLAGS if name in token} | {"special": special}
            made.append(AddedToken(token["content"], **flags))
        backend.add_tokens(made)
        moved = [t["content"] for i, t in self.added.items() if t["content"] and backend.token_to_id(t["content"]) != i]
        if moved:
            warnings.warn(
                f"the added tokens {', '.join(map(repr, moved[:5]))} have other ids than the tokenizer's files say: a "
                "token that is new takes the next id after the vocabulary, and one that the vocabulary has keeps its "
                "own, as in transformers.",
                stacklevel=2,
            )


def _is_name(name: str) -> bool:
    return name.endswith("_token")


def _token(value: object) -> Json | None:
    """Returns the text and flags of a special token, which is a text or an object; None if it is neither, or empty."""
    if isinstance(value, str):
        return {"content": value} if value else None
    if isinstance(value, dict) and isinstance(value.get("content"), str) and value["content"]:
        return _flagged(value)
    return None


def _flagged(token: Json) -> Json:
    return {name: token[name] for name in ("content", *FLAGS) if name in token}


def _object(files: Mapping[str, bytes], name: str) -> Json:
    """Returns the JSON object of a file, {} if there is none."""
    found: Json = json.loads(files.get(name, b"{}").decode("utf-8"))
    return found
