"""`Tokenizer`: text to token ids and back, one at a time or in batches. `kvjax.checkpoint.tokenizer` makes them."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvjax.checkpoint import chat
from kvjax.errors import InputError
from kvjax.summary import one_line

PAD = -1  # `kvjax.generation.decoding.PAD`, which `Tokenizer.decode` skips


class EncodedBatch(NamedTuple):
    """Texts as token ids, as `kvjax.generate` takes them.

    Attributes:
      tokens: [B, T] int32, rows padded at the end with `PAD`.
      lengths: [B] int32, the number of tokens of each row.
    """

    tokens: np.ndarray
    lengths: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def padded(rows: Sequence[Sequence[int]]) -> EncodedBatch:
    """Pads rows of token ids at the end; T is the length of the longest one."""
    # [B]
    lengths = np.array([len(row) for row in rows], np.int32)
    # [B, T]
    tokens = np.full((len(rows), max(map(len, rows), default=0)), PAD, np.int32)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = ids
    return EncodedBatch(tokens, lengths)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Converts text to token ids and back.

    Attributes:
      size: the number of tokens of the tokenizer.
      vocab_size: the number of tokens of the model; larger ids are rejected.
      bos_id: id of the beginning-of-text token, or None.
      eos_id: id of the end-of-text token, or None.
      adds_bos: whether texts begin with BOS.
      files: name -> content of the files that the tokenizer was made from.
      special_tokens: the text of each special token that has a name, such as ``eos_token``; chat templates see them.
    """

    size: int
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    files: Mapping[str, bytes]
    special_tokens: Mapping[str, str]
    _encode: Callable[[str], list[int]]
    _decode: Callable[[list[int]], str]
    _token: Callable[[int], str | None]

    def __repr__(self) -> str:
        return one_line(self)

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Converts a text to token ids.

        Args:
          text: the text.
          bos: whether to begin with BOS if `adds_bos`. EOS is never added, also if the files ask for it: a text is a
            prompt, which is continued.

        Raises:
          InputError: if `text` is not a string that UTF-8 can hold, or contains a token outside the vocabulary of the
            model.
        """
        if not isinstance(text, str):
            raise InputError(f"encode() takes a string; got a {type(text).__name__}.")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"character {error.start} of the text is an unpaired surrogate.") from None
        ids = self._encode(text)
        if beyond := [i for i in ids if i >= self.vocab_size]:
            raise InputError(
                f"the text has {self._decode([beyond[0]])!r}, token {beyond[0]}, but the model's vocabulary ends at "
                f"{self.vocab_size - 1}: the tokenizer has tokens that the model was not trained on."
            )
        return [self.bos_id, *ids] if bos and self.adds_bos and self.bos_id is not None else ids

    @functools.cached_property
    def longest_token(self) -> int:
        """The most characters that a token stands for."""
        return max((len(self._token(i) or "") for i in range(self.size)), default=1)

    def decode(self, ids: Iterable[int]) -> str:
        """Converts token ids to text, without special tokens.

        Args:
          ids: the token ids. Padding (`kvjax.generation.decoding.PAD`), and ids that the model has but the tokenizer
            has not, are skipped.

        Raises:
          InputError: if an id is outside the vocabularies of both the tokenizer and the model.
        """
        ids = [int(i) for i in ids]
        top = max(self.size, self.vocab_size)
        if beyond := [i for i in ids if i >= top or i < PAD]:
            raise InputError(f"token {beyond[0]} is outside the vocabulary of {top}.")
        return self._decode([i for i in ids if 0 <= i < self.size])

    def encode_batch(self, texts: Sequence[str], bos: bool = True) -> EncodedBatch:
        """Converts texts to token ids and pads them at the end.

        ``kvjax.generate(model, batch.tokens, policy, lengths=batch.lengths, ...)`` takes the result.

        Args:
          texts: the texts.
          bos: see `encode`.

        Raises:
          InputError: see `encode`.
        """
        if isinstance(texts, str):
            raise InputError("encode_batch() takes a sequence of strings; use encode() for a single one.")
        return padded([self.encode(text, bos) for text in texts])

    def decode_batch(self, tokens: Iterable[Iterable[int]]) -> list[str]:
        """Converts rows of token ids to texts; see `decode`."""
        return [self.decode(row) for row in tokens]

    def apply_chat_template(
        self, messages: Sequence[chat.Message], *, answer: bool = True, template: str | None = None, **arguments: Any
    ) -> str:
        """Makes one text of a conversation by the chat template of the tokenizer.

        Encode it with ``encode(text, bos=False)``: a template writes BOS where it should be.

        Args:
          messages: "role" and "content" of each, and what else the template reads.
          answer: whether an answer of the model begins after the text; otherwise the text ends within the last message,
            so that the model goes on with it.
          template: the name of the template, if there are several; None for the default one, which is that for tools
            if there is one and ``tools`` are given.
          arguments: further variables of the template, such as ``tools``: data that JSON can hold.

        Raises:
          InputError: there is no template of that name, or it refuses the messages, or exceeds a limit on time, memory
            or output (`kvjax.checkpoint.chat.ChatTemplateError`).
          ConfigError: Jinja is not installed.
        """
        source = chat.template(self, template, tools=arguments.get("tools") is not None)
        return chat.render(self, source, messages, answer=answer, **arguments)

    def token(self, number: int) -> str:
        """Returns the text of a token, also of a special one, as its vocabulary has it; empty if it has none."""
        return self._token(int(number)) or ""

    def save(self, folder: Path) -> None:
        """Writes the files that the tokenizer was made from.

        Args:
          folder: the folder to write to.
        """
        for name, content in self.files.items():
            path = Path(folder) / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
