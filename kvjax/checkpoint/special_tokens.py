"""The tokens that the files of a tokenizer name in addition to its vocabulary, read as transformers 5 reads them.

They are spread over four files: tokenizer_config.json has ``added_tokens_decoder`` (an id and flags for each) and the
special tokens by name; in folders of older releases, which lack the former, added_tokens.json has the ids and
special_tokens_map.json the names, which then have precedence over those of tokenizer_config.json.
"""

import dataclasses
import json
import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from kvjax.checkpoint.readers import Json

if TYPE_CHECKING:
    import tokenizers

CONFIG_FILE, MAP_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
#: Names of special tokens. A tokenizer may have others, which end in ``_token`` as well.
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token
EXTRA, FORMER_EXTRA = "extra_special_tokens", "additional_special_tokens"  # lists of special tokens without names
MAX_LISTED = 5  # tokens that a warning names


def read_settings(files: Mapping[str, bytes]) -> Json:
    """Returns the contents of tokenizer_config.json, with those of special_tokens_map.json where these count."""
    settings = _object(files, CONFIG_FILE)
    return settings if "added_tokens_decoder" in settings else settings | _object(files, MAP_FILE)


@dataclasses.dataclass(frozen=True)
class SpecialTokens:
    """The tokens that the files name.

    Attributes:
      named: the special tokens that have a name, such as ``bos_token``: name -> text and flags.
      extra: the other special tokens, text and flags; None if no file lists any.
      mapped: the other special tokens of special_tokens_map.json, which count if there is no `extra`.
      added: tokens with an id: id -> text and flags.
    """

    named: dict[str, Json]
    extra: list[Json] | None
    mapped: list[Json]
    added: dict[int, Json]

    @classmethod
    def read(cls, files: Mapping[str, bytes]) -> "SpecialTokens":
        """Reads the files.

        Args:
          files: name -> content.
        """
        config, settings = _object(files, CONFIG_FILE), read_settings(files)
        named = {
            name: token for name, value in settings.items() if name.endswith("_token") and (token := _token(value))
        }
        listed = config.get(EXTRA) or config.get(FORMER_EXTRA, config.get(EXTRA))
        mapped: Json = {}
        if "added_tokens_decoder" in config:
            added = {int(number): _flagged(value) for number, value in config["added_tokens_decoder"].items()}
        else:
            mapped = _object(files, MAP_FILE)
            if isinstance(more := mapped.get(EXTRA), dict):
                listed = more
            elif more is not None:
                listed = [*(listed or []), *more]
            texts = {token["content"] for token in (*named.values(), *_tokens(listed))}
            added = {
                operator.index(number): {"content": text, "special": text in texts, "normalized": text not in texts}
                for text, number in _object(files, ADDED_FILE).items()
            }
        if isinstance(listed, dict):  # with names of their own
            named |= {name: token for name, value in listed.items() if (token := _token(value))}
            listed = None
        extra = None if listed is None else _tokens(listed)
        return cls(named, extra, _tokens(mapped.get(FORMER_EXTRA)), added)

    def text(self, name: str) -> str | None:
        """Returns the text of a special token, or None if no file names it."""
        return self.named[name]["content"] if name in self.named else None

    def with_defaults(self, named: Mapping[str, str], extra: list[Json] | None = None) -> "SpecialTokens":
        """Returns these tokens, and others where the files name none.

        Args:
          named: name -> text.
          extra: other tokens, text and flags, which also replace those of special_tokens_map.json.
        """
        defaults: dict[str, Json] = {name: {"content": text} for name, text in named.items()}
        return dataclasses.replace(self, named=defaults | self.named, extra=extra if self.extra is None else self.extra)

    def add_to(self, backend: "tokenizers.Tokenizer") -> None:
        """Adds the tokens to a tokenizer that lacks them: those with ids in their order, and then the others.

        A token that the vocabulary has keeps its id; another one takes the next id, as in transformers.
        """
        from tokenizers import AddedToken

        tokens = [self.added[number] for number in sorted(self.added)]
        known = {token.content for token in backend.get_added_tokens_decoder().values()}
        known |= {token["content"] for token in tokens}
        names = sorted(self.named, key=lambda name: NAMES.index(name) if name in NAMES else len(NAMES))
        new: list[Json] = []
        for token in (*(self.named[name] for name in names), *(self.mapped if self.extra is None else self.extra)):
            # Two tokens may have the same text and different flags; then the last one counts.
            if token["content"] not in known and token not in new:
                new.append(token)
        tokens += [{"special": True} | token for token in new]
        texts = {token["content"] for token in self.named.values()}
        made = []
        for token in tokens:
            special_too = bool(token.get("special")) or token["content"] in texts
            flags = {name: bool(token[name]) for name in FLAGS if name in token} | {"special": special_too}
            made.append(AddedToken(token["content"], **flags))
        backend.add_tokens(made)
        moved = [t["content"] for i, t in self.added.items() if t["content"] and backend.token_to_id(t["content"]) != i]
        if moved:
            warnings.warn(
                f"the added tokens {', '.join(map(repr, moved[:MAX_LISTED]))} have other ids than the tokenizer's "
                "files declare, as in transformers: a new token takes the next id after the vocabulary, and a token "
                "that is in the vocabulary keeps its id.",
                stacklevel=2,
            )


def _tokens(listed: "Sequence[object] | Mapping[str, object] | None") -> list[Json]:
    """Returns the text and flags of each token of a list, or of the values of an object."""
    values = listed.values() if isinstance(listed, Mapping) else listed or []
    return [token for value in values if (token := _token(value))]


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
