"""The tokenizer of a Hugging Face folder: tokenizer.json, SentencePiece, or GPT-2's vocab.json with merges.txt."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kvjax.checkpoint.readers import read_json
from kvjax.errors import CheckpointError, InputError
from kvjax.models.config import DecoderConfig

#: The files that make a tokenizer, copied as they are when a model is saved.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
#: Families whose text begins with BOS unless the tokenizer's files say otherwise.
_ADD_BOS = frozenset({"llama", "mistral", "gemma", "opt"})
#: Entries of a byte-level vocabulary that are whole tokens wherever they stand in a text.
_MARKS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", "<|endoftext|>")


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to token ids and back.

    Attributes:
      size: tokens that the tokenizer knows.
      vocab_size: tokens that the model knows; ids from there on are refused.
      bos_id, eos_id: beginning and end of text, or None.
      adds_bos: whether the model expects its texts to begin with BOS.
      files: the files that it was made from, by name.
    """

    size: int
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    files: Mapping[str, bytes]
    _encode: Callable[[str], list[int]]
    _decode: Callable[[list[int]], str]

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Token ids of a text, after BOS if the model expects one and `bos` is true.

        Raises:
          InputError: no text, or a text with a token that was added beyond the model's vocabulary.
        """
        if not isinstance(text, str):
            raise InputError(f"encode() takes a text, but got a {type(text).__name__}.")
        ids = self._encode(text)
        if beyond := [i for i in ids if i >= self.vocab_size]:
            raise InputError(
                f"the text holds {self._decode([beyond[0]])!r}, token {beyond[0]}, but the model's vocabulary ends at "
                f"{self.vocab_size - 1}: the tokenizer has tokens that the model was not trained on."
            )
        return [self.bos_id, *ids] if bos and self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without special tokens; padding (-1) and ids that only fill up a table are skipped.

        Raises:
          InputError: an id that neither the tokenizer nor the model has.
        """
        ids = [int(i) for i in ids]
        top = max(self.size, self.vocab_size)
        if beyond := [i for i in ids if i >= top or i < -1]:
            raise InputError(f"token {beyond[0]} is outside the vocabulary of {top}.")
        return self._decode([i for i in ids if 0 <= i < self.size])

    def save(self, folder: Path) -> None:
        """Writes the files that it was made from."""
        for name, content in self.files.items():
            (Path(folder) / name).write_bytes(content)


def load_tokenizer(folder: Path, config: DecoderConfig) -> Tokenizer | None:
    """The tokenizer of a folder; None if it has no files of one.

    Raises:
      CheckpointError: files that are damaged.
    """
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= read_json(folder / name) if name in files else {}
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
    except Exception as error:  # the libraries raise all sorts for a damaged file
        reason = str(error).strip().split("\n")[0][:200]
        raise CheckpointError(f"the tokenizer files in {folder} are damaged: {reason}.") from None
    return None


def _from_json(files: dict[str, bytes], settings: dict[str, Any], config: DecoderConfig) -> Tokenizer:
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


def _from_merges(files: dict[str, bytes], settings: dict[str, Any], config: DecoderConfig) -> Tokenizer | None:
    """GPT-2's byte-level pairs (OPT has the same merges and other ids)."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    if config.family not in ("gpt2", "opt", "gpt_neox"):
        # others split words by rules that these two files do not hold
        warnings.warn(
            f"vocab.json and merges.txt say too little for {config.family}, which needs tokenizer.json: the model is "
            "loaded without a tokenizer.",
            stacklevel=4,
        )
        return None
    vocab = json.loads(files["vocab.json"].decode("utf-8"))
    lines = files["merges.txt"].decode("utf-8").split("\n")
    merges: Any = [tuple(line.split()) for line in lines if line and not line.startswith("#version")]
    backend = Backend(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space", False)))
    backend.decoder = decoders.ByteLevel()
    marks: set[Any] = {mark for mark in _MARKS if mark in vocab}
    marks |= {text for name in settings if name.endswith("_token") and (text := _content(settings[name])) in vocab}
    backend.add_special_tokens(sorted(marks, key=vocab.__getitem__))
    if "added_tokens.json" in files:
        added = json.loads(files["added_tokens.json"].decode("utf-8"))
        backend.add_tokens(sorted(added, key=added.__getitem__))
    return _from_backend(backend, files, settings, config, None, None)


def _from_backend(
    backend: Any,
    files: dict[str, bytes],
    settings: dict[str, Any],
    config: DecoderConfig,
    bos: int | None,
    adds: bool | None,
) -> Tokenizer:
    def token(name: str) -> int | None:
        content = _content(settings.get(name))
        return None if content is None else backend.token_to_id(content)

    return Tokenizer(
        size=max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        files=files,
        _encode=lambda text: backend.encode(text, add_special_tokens=False).ids,
        _decode=lambda ids: backend.decode(ids, skip_special_tokens=True),
        **_ends(settings, config, bos if bos is not None else token("bos_token"), token("eos_token"), adds),
    )


def _from_sentencepiece(files: dict[str, bytes], settings: dict[str, Any], config: DecoderConfig) -> Tokenizer:
    import sentencepiece

    backend = sentencepiece.SentencePieceProcessor(model_proto=files["tokenizer.model"])
    bos, eos = (None if i < 0 else i for i in (backend.bos_id(), backend.eos_id()))
    return Tokenizer(
        size=backend.vocab_size(),
        files=files,
        _encode=backend.encode,
        _decode=backend.decode,
        **_ends(settings, config, bos, eos, None),
    )


def _ends(
    settings: dict[str, Any], config: DecoderConfig, bos: int | None, eos: int | None, adds: bool | None
) -> dict[str, Any]:
    """BOS and EOS: as the tokenizer's files say, else its post-processor, else the config and the family's habit."""
    said = settings.get("add_bos_token")
    adds = said if isinstance(said, bool) else config.family in _ADD_BOS if adds is None else adds
    return {
        "vocab_size": config.vocab_size,
        "bos_id": config.bos_token_id if bos is None else bos,
        "eos_id": next(iter(config.eos_token_ids), None) if eos is None else eos,
        "adds_bos": adds,
    }


def _content(token: Any) -> str | None:
    """The text of a special token, which is given as such or as an object."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None
