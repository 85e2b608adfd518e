"""Tokenizers of Hugging Face folders: tokenizer.json, SentencePiece, or vocab.json with merges.txt (GPT-2)."""

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.checkpoint import chat, sentencepiece_model
from kvjax.checkpoint.encoding import Tokenizer
from kvjax.checkpoint.readers import MAX_REASON, Json
from kvjax.checkpoint.special_tokens import ADDED_FILE, CONFIG_FILE, MAP_FILE, SpecialTokens, read_settings
from kvjax.checkpoint.token_settings import check_settings
from kvjax.errors import CheckpointError
from kvjax.models.config import DecoderConfig

if TYPE_CHECKING:
    import tokenizers

#: The files of a tokenizer, which are copied unchanged when a model is saved; also patterns, as of `pathlib.Path.glob`.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    CONFIG_FILE,
    MAP_FILE,
    ADDED_FILE,
    chat.TEMPLATE_FILE,
    f"{chat.TEMPLATES_FOLDER}/*{chat.SUFFIX}",
)
#: Files of tokenizers that kvjax does not read, and whose they are.
_OTHER_FILES = {"tekken.json": "Mistral's tekken", "tiktoken.model": "tiktoken", "qwen.tiktoken": "tiktoken"}
#: Families whose texts begin with BOS unless the files of the tokenizer specify otherwise.
_ADD_BOS = frozenset({"llama", "mistral", "gemma", "opt"})
#: Special tokens of byte-level vocabularies, which are not split into bytes.
_END = "<|endoftext|>"  # GPT-2's only one
_SPECIAL_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", _END)
#: A line of tiktoken's files: bytes in base64 and their rank.
_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def load_tokenizer(folder: Path, config: DecoderConfig) -> Tokenizer | None:
    """Loads the tokenizer of a folder.

    The tokens are those of transformers 5. Where tokenizer_config.json names no class, which transformers needs to know
    how a SentencePiece model is used, the model itself says whether a space is written before a text, and the family
    whether BOS is.

    Args:
      folder: the folder.
      config: the decoder.

    Returns:
      The tokenizer, or None if the folder has no files of one.

    Raises:
      CheckpointError: if a file is damaged, or a package is not installed.
      ConfigError: if a setting is of another type.
    """
    paths = [path for pattern in TOKENIZER_FILES for path in sorted(folder.glob(pattern)) if path.is_file()]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    if (made := make_tokenizer(folder, files, config)) is None and "tokenizer.model" not in files:
        for name, kind in _OTHER_FILES.items():
            if (folder / name).is_file():
                _warn_of_other(name, kind)
    return made


def make_tokenizer(folder: Path, files: dict[str, bytes], config: DecoderConfig) -> Tokenizer | None:
    """Makes a tokenizer of its files; see `load_tokenizer`.

    Args:
      folder: the folder or the file that they are from, for messages.
      files: name -> content.
      config: the decoder.
    """
    check_settings(folder, files)
    try:
        settings = read_settings(files)
        tokens = SpecialTokens.read(files)
        if "tokenizer.json" in files:
            return _from_json(files, settings, tokens, config)
        if "tokenizer.model" in files and _TIKTOKEN.match(files["tokenizer.model"]):
            _warn_of_other("tokenizer.model", "tiktoken")
        elif "tokenizer.model" in files:
            return _from_sentencepiece(files, settings, tokens, config)
        elif "vocab.json" in files and "merges.txt" in files:
            return _from_merges(files, settings, tokens, config)
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


def _warn_of_other(name: str, kind: str) -> None:
    warnings.warn(
        f"{name} is a vocabulary in the form of {kind}, which does not say how texts are split into words; kvjax needs "
        "tokenizer.json, which transformers makes from it (AutoTokenizer.from_pretrained, save_pretrained): the model "
        "is loaded without a tokenizer.",
        stacklevel=4,
    )


def _from_json(files: dict[str, bytes], settings: Json, tokens: SpecialTokens, config: DecoderConfig) -> Tokenizer:
    """Loads tokenizer.json. Its post-processor determines whether texts begin with BOS, and not ``add_bos_token``."""
    from tokenizers import Tokenizer as Backend

    backend = Backend.from_buffer(files["tokenizer.json"])
    backend.no_truncation()
    backend.no_padding()
    bos: int | None = None
    adds = False if "tokenizer_class" in settings else None
    if backend.post_processor is not None:
        plain, processed = (backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        adds = processed[:1] != plain[:1]
        bos = processed[0] if adds else None
    return _from_backend(backend, files, settings, tokens, config, bos=bos, adds=adds)


def _from_merges(
    files: dict[str, bytes], settings: Json, tokens: SpecialTokens, config: DecoderConfig
) -> Tokenizer | None:
    """Loads the byte-level BPE of GPT-2. OPT has the same merges with other ids."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    if config.family not in ("gpt2", "opt", "gpt_neox"):
        # Other families split text into words by rules that these two files do not contain.
        warnings.warn(
            f"vocab.json and merges.txt do not suffice for {config.family}, which needs tokenizer.json: the model is "
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
    backend.add_special_tokens(sorted((each for each in _SPECIAL_TOKENS if each in vocab), key=vocab.__getitem__))
    if config.family != "opt" and _END in vocab:
        tokens = tokens.with_defaults(dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END))
    return _from_backend(backend, files, settings, tokens, config)


def _from_sentencepiece(
    files: dict[str, bytes], settings: Json, tokens: SpecialTokens, config: DecoderConfig
) -> Tokenizer:
    """Loads a SentencePiece model."""
    model = sentencepiece_model.Model(files["tokenizer.model"], settings, tokens)
    tokens = tokens.with_defaults(model.named, model.extra)
    return _from_backend(model.backend, files, settings, tokens, config, encode=model.encode)


def _from_backend(
    backend: "tokenizers.Tokenizer",
    files: dict[str, bytes],
    settings: Json,
    tokens: SpecialTokens,
    config: DecoderConfig,
    *,
    bos: int | None = None,
    adds: bool | None = None,
    encode: Callable[[str], list[int]] | None = None,
) -> Tokenizer:
    """Wraps a tokenizer of the package ``tokenizers``.

    The post-processor has precedence over ``add_bos_token``, and that over the family.

    Args:
      backend: the tokenizer, without the tokens that only other files name.
      files: see `Tokenizer`.
      settings: from `read_settings`.
      tokens: the tokens that the other files name.
      config: the decoder.
      bos: id of BOS from the post-processor, or None if that adds none.
      adds: whether the post-processor adds BOS, or None if there is no post-processor.
      encode: what makes ids of a text; None for the tokenizer itself.
    """
    tokens.add_to(backend)

    def token(name: str) -> int | None:
        """Returns the id of a special token, or None if it has none."""
        return None if (text := tokens.text(name)) is None else backend.token_to_id(text)

    if adds is None:
        # A class of transformers adds none unless it is asked to; a folder that names no class leaves it to the family.
        usual = "tokenizer_class" not in settings and config.family in _ADD_BOS
        adds = bool(given) if isinstance(given := settings.get("add_bos_token"), bool) else usual
    bos = token("bos_token") if bos is None else bos
    eos = token("eos_token")
    return Tokenizer(
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        vocab_size=config.vocab_size,
        bos_id=config.bos_token_id if bos is None else bos,
        eos_id=next(iter(config.eos_token_ids), None) if eos is None else eos,
        adds_bos=adds,
        files=files,
        special_tokens={name: token["content"] for name, token in tokens.named.items()},
        _encode=encode or (lambda text: backend.encode(text, add_special_tokens=False).ids),
        _decode=lambda ids: backend.decode(ids, skip_special_tokens=True),
        _token=backend.id_to_token,
    )


__all__ = ["TOKENIZER_FILES", "Tokenizer", "load_tokenizer", "make_tokenizer"]
