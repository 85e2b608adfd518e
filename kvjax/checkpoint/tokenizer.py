"""Tokenizers of Hugging Face folders: tokenizer.json, SentencePiece, or vocab.json with merges.txt (GPT-2)."""

import json
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from kvjax.checkpoint import chat
from kvjax.checkpoint.encoding import Tokenizer
from kvjax.checkpoint.readers import MAX_REASON, Json
from kvjax.checkpoint.token_settings import read_settings
from kvjax.errors import CheckpointError
from kvjax.models.config import DecoderConfig

if TYPE_CHECKING:
    import tokenizers

#: The files of a tokenizer, which are copied unchanged when a model is saved.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    chat.TEMPLATE_FILE,
)
#: Families whose texts begin with BOS unless the files of the tokenizer specify otherwise.
_ADD_BOS = frozenset({"llama", "mistral", "gemma", "opt"})
#: Special tokens of byte-level vocabularies, which are not split into bytes.
_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")


def load_tokenizer(folder: Path, config: DecoderConfig) -> Tokenizer | None:
    """Loads the tokenizer of a folder.

    Args:
      folder: the folder.
      config: the decoder.

    Returns:
      The tokenizer, or None if the folder has no files of one.

    Raises:
      CheckpointError: if a file is damaged, or a package is not installed.
      ConfigError: if a setting is of another type.
    """
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    settings = read_settings(folder, files)
    try:
        if "tokenizer.json" in files:
            return _from_json(files, settings, config)
        if "tokenizer.model" in files:
            return _from_sentencepiece(files, settings, config)
        if "vocab.json" in files and "merges.txt" in files:
            return _from_merges(files, settings, config)
    except ImportError as error:
        raise CheckpointError(
            f"the tokenizer in {folder} needs the package {error.name}: pip install {error.name}."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:  # the libraries raise errors of many types for a damaged file
        reason = str(error).strip().split("\n")[0][:MAX_REASON]
        raise CheckpointError(f"the tokenizer files in {folder} are damaged: {reason}.") from None
    return None


def _from_json(files: dict[str, bytes], settings: Json, config: DecoderConfig) -> Tokenizer:
    """Loads tokenizer.json. Its post-processor determines whether texts begin with BOS."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_buffer(files["tokenizer.json"])
    backend.no_truncation()
    backend.no_padding()
    bos, adds = None, None
    if backend.post_processor is not None:
        plain, processed = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        adds = processed[:1] != plain[:1]
        bos = processed[0] if adds else None
    return _from_backend(backend, files, settings, config, bos, adds)


def _from_merges(files: dict[str, bytes], settings: Json, config: DecoderConfig) -> Tokenizer | None:
    """Loads the byte-level BPE of GPT-2. OPT has the same merges with other ids."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    if config.family not in ("gpt2", "opt", "gpt_neox"):
        # Other families split text into words by rules that these two files do not contain.
        warnings.warn(
            f"vocab.json and merges.txt say too little for {config.family}, which needs tokenizer.json: the model is "
            "loaded without a tokenizer.",
            stacklevel=4,
        )
        return None
    vocab = json.loads(files["vocab.json"].decode("utf-8"))
    lines = files["merges.txt"].decode("utf-8").split("\n")
    pairs = [line.split() for line in lines if line and not line.startswith("#version")]
    merges = [(first, second) for first, second in pairs]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    special = {token for token in _SPECIAL_TOKENS if token in vocab}
    named = [_content(token) for name, token in settings.items() if name.endswith("_token")]
    special |= {token for token in named if token is not None and token in vocab}
    backend.add_special_tokens(sorted(special, key=vocab.__getitem__))
    if "added_tokens.json" in files:
        added = json.loads(files["added_tokens.json"].decode("utf-8"))
        backend.add_tokens(sorted(added, key=added.__getitem__))
    return _from_backend(backend, files, settings, config, None, None)


def _from_backend(
    backend: "tokenizers.Tokenizer",
    files: dict[str, bytes],
    settings: Json,
    config: DecoderConfig,
    bos: int | None,
    adds: bool | None,
) -> Tokenizer:
    """Wraps a tokenizer of the package ``tokenizers``.

    Args:
      backend: the tokenizer.
      files: see `Tokenizer`.
      settings: the contents of special_tokens_map.json and tokenizer_config.json.
      config: the decoder.
      bos: id of BOS from the post-processor, or None if that adds none.
      adds: whether the post-processor adds BOS, or None if there is no post-processor.
    """

    def token(name: str) -> int | None:
        """Returns the id of a special token of the settings."""
        content = _content(settings.get(name))
        return None if content is None else backend.token_to_id(content)

    return Tokenizer(
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        files=files,
        _encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        _decode=lambda ids: backend.decode(ids, skip_special_tokens=True),
        _token=backend.id_to_token,
        **_special_ids(settings, config, bos if bos is not None else token("bos_token"), token("eos_token"), adds),
    )


def _from_sentencepiece(files: dict[str, bytes], settings: Json, config: DecoderConfig) -> Tokenizer:
    """Loads a SentencePiece model."""
    import sentencepiece

    backend = sentencepiece.SentencePieceProcessor(model_proto=files["tokenizer.model"])
    bos, eos = (None if i < 0 else i for i in (backend.bos_id(), backend.eos_id()))
    special = {backend.id_to_piece(i): i for i in range(backend.vocab_size()) if backend.is_control(i)}
    between = re.compile("(" + "|".join(map(re.escape, special)) + ")") if special else None

    def encode(text: str) -> list[int]:
        """Special tokens of the text become themselves, as in the other kinds of files; SentencePiece splits them."""
        parts = [text] if between is None else between.split(text)
        return [i for part in parts if part for i in ([special[part]] if part in special else backend.encode(part))]

    return Tokenizer(
        size=backend.vocab_size(),
        files=files,
        _encode=encode,
        _decode=backend.decode,
        _token=lambda number: backend.id_to_piece(number) if number < backend.vocab_size() else None,
        **_special_ids(settings, config, bos, eos, None),
    )


class _SpecialIds(TypedDict):
    """The attributes of a `Tokenizer` that several files determine."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool


def _special_ids(
    settings: Json, config: DecoderConfig, bos: int | None, eos: int | None, adds: bool | None
) -> _SpecialIds:
    """Determines BOS and EOS.

    The settings have precedence over the post-processor or SentencePiece model (`bos`, `eos`, `adds`), and that over
    the configuration and the default of the family.
    """
    setting = settings.get("add_bos_token")
    adds = setting if isinstance(setting, bool) else config.family in _ADD_BOS if adds is None else adds
    return {
        "vocab_size": config.vocab_size,
        "bos_id": config.bos_token_id if bos is None else bos,
        "eos_id": next(iter(config.eos_token_ids), None) if eos is None else eos,
        "adds_bos": adds,
    }


def _content(token: object) -> str | None:
    """Returns the text of a special token, which is a string or an object in the settings."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


__all__ = ["TOKENIZER_FILES", "Tokenizer", "load_tokenizer"]
