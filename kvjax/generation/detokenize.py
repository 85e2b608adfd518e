"""Tokens to text, one token at a time: the text of new tokens is that of all tokens less that of their prompt.

A token decoded alone loses the space before its word (SentencePiece, Metaspace), and one that is part of a character
is no text at all; to decode all tokens again after each of them takes quadratic time. Here a token is decoded after the
last one that had text, and tokens that stand for bytes (byte-level vocabularies, and ``<0xE2>`` where a vocabulary
falls back to bytes) are joined as UTF-8. So every token is given to the decoder a fixed number of times.

The result is what the tokenizer decodes all tokens to, with one exception: the byte fallback of ``tokenizers`` replaces
every byte of a run of which one character is not whole. Here whole characters stay, since a stream has shown them.
"""

import codecs
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvjax.checkpoint.encoding import Tokenizer

REPLACEMENT = "\ufffd"  # stands for bytes that are no character
LONGEST_CHARACTER = 4  # bytes
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
EACH_BYTE = "kvjax.each_byte"  # the error handler of byte fallback, which replaces each byte that is no character

codecs.register_error(EACH_BYTE, lambda error: (REPLACEMENT * (error.end - error.start), error.end))  # type: ignore[attr-defined]


def _byte_level() -> dict[str, int]:
    """The characters that byte-level vocabularies are written in, and the byte that each stands for (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


class Decoded(NamedTuple):
    """The text that a token adds.

    Attributes:
      text: the characters of which it has the last byte.
      data: its bytes; those of several tokens may be one character. With the first new token come the bytes of a
        character that the prompt has begun.
      special: the token as its vocabulary has it, if it is a special token, which has no text; otherwise empty.
    """

    text: str
    data: bytes
    special: str


class Detokenizer:
    """Makes text of tokens that follow a prompt, one at a time."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()):
        """Begins after a prompt.

        Args:
          tokenizer: of the model.
          prompt: token ids before the text, of which the last few are read; () if the text begins with the new tokens.
        """
        self._tokenizer = tokenizer
        self._errors = "replace"
        self._before: int | None = None  # the last token that had text
        self._left = b""  # a character that is not whole
        self._carried = 0  # bytes of it that are the prompt's
        self._alone: dict[int, str] = {}
        self._bytes: dict[int, bytes | None] = {}
        for token in self._end_of(prompt):
            self.add(token)
        self._carried = len(self._left)

    @property
    def incomplete(self) -> int:
        """The number of bytes at the end that are not a whole character yet."""
        return len(self._left)

    def add(self, token: int) -> Decoded:
        """Adds a token.

        Args:
          token: its id. Ids that the tokenizer does not have, such as padding, have no text.
        """
        token = int(token)
        data = self._data(token)
        if data is None:
            return Decoded("", b"", self._tokenizer.token(token) if self._known(token) else "")
        # Some decoders leave out all spaces at the beginning, so that a space is no context for another.
        if self._before is None or self._text(token):
            self._before = token
        before, whole = self._left, self._left + data
        if self._carried and _broken(whole):
            # The text of the prompt has the replacement of its bytes.
            before, whole = b"", whole[self._carried :]
            self._carried = 0
        text, used = codecs.utf_8_decode(whole, self._errors, False)
        first = self._carried == len(before) > 0
        self._left = whole[used:]
        self._carried = 0 if used else self._carried
        return Decoded(text, before + data if first else data, "")

    def finish(self) -> str:
        """Returns the text of a character that is not whole, when no token follows."""
        rest, self._left = self._left[self._carried :], b""
        return codecs.utf_8_decode(rest, self._errors, True)[0]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt: one with text, or as many as the bytes of a character."""
        end: list[int] = []
        size = 0
        for token in map(int, reversed(prompt)):
            if self._known(token) and self._has_text(token):
                end.append(token)
                data = self._own_bytes(token)
                size += LONGEST_CHARACTER if data is None else len(data)
            if size >= LONGEST_CHARACTER:
                break
        return end[::-1]

    def _known(self, token: int) -> bool:
        return 0 <= token < self._tokenizer.size

    def _has_text(self, token: int) -> bool:
        # The first space of a text is left out, a second one is not.
        return bool(self._text(token) or self._tokenizer.decode([token, token]))

    def _text(self, token: int) -> str:
        """The text of a token alone."""
        if token not in self._alone:
            self._alone[token] = self._tokenizer.decode([token])
        return self._alone[token]

    def _data(self, token: int) -> bytes | None:
        """The bytes of a token after the ones before it; None if it has no text there."""
        if not self._known(token):
            return None
        own, alone = self._own_bytes(token), self._text(token)
        if self._before is None:
            if not self._has_text(token):
                return None
            return alone.encode() if own is None or not alone else own
        if own is not None:
            return own
        whole, before = self._tokenizer.decode([self._before, token]), self._text(self._before)
        # A decoder may change the end of a text when another token follows.
        same = sum(1 for _ in itertools.takewhile(bool, map(str.__eq__, whole, before)))
        return whole[same:].encode() or None

    def _own_bytes(self, token: int) -> bytes | None:
        """The bytes of a token whatever is before it, if it stands for bytes and not for characters."""
        if token not in self._bytes:
            self._bytes[token] = self._read_bytes(token)
        return self._bytes[token]

    def _read_bytes(self, token: int) -> bytes | None:
        name, alone = self._tokenizer.token(token), self._text(token)
        if (match := BYTE_TOKEN.fullmatch(name)) is not None:
            data = bytes([int(match[1], 16)])
            # The first space of a text is left out.
            if alone == data.decode(errors="replace") or (data == b" " and self._has_text(token) and not alone):
                self._errors = EACH_BYTE
                return data
        elif REPLACEMENT in alone and all(character in BYTE_LEVEL for character in name):
            data = bytes(BYTE_LEVEL[character] for character in name)
            return data if data.decode(errors="replace") == alone else None
        return None


class MarkedText(NamedTuple):
    """A text in which special tokens are written out, so that stop texts can be found that are or hold one.

    Attributes:
      text: with special tokens.
      shown: one byte a character: 0 for those of special tokens, which are no part of the text that is shown.
    """

    text: str = ""
    shown: bytes = b""

    def __add__(self, other: "MarkedText") -> "MarkedText":  # type: ignore[override]
        return MarkedText(self.text + other.text, self.shown + other.shown)

    def part(self, start: int, stop: int | None = None) -> "MarkedText":
        """Returns the characters from `start` to `stop`, special tokens included."""
        return MarkedText(self.text[start:stop], self.shown[start:stop])

    @property
    def visible(self) -> str:
        """The text without special tokens."""
        return "".join(itertools.compress(self.text, self.shown))

    def find(self, stops: Iterable[str]) -> int:
        """Where the first of some texts begins; -1 if there is none."""
        return min((place for stop in stops if (place := self.text.find(stop)) >= 0), default=-1)

    def before(self, stops: Iterable[str]) -> "MarkedText":
        """Returns what is before the first of some texts; all of it if there is none."""
        place = self.find(stops)
        return self if place < 0 else self.part(0, place)

    def after_last(self, text: str) -> "MarkedText":
        """Returns what is after the last occurrence of a text; all of it if there is none."""
        place = self.text.rfind(text)
        return self if place < 0 else self.part(place + len(text))

    def stripped(self) -> "MarkedText":
        """Returns the text without the white space that it begins with."""
        return self.part(len(self.text) - len(self.text.lstrip()))


def mark(decoded: Decoded) -> MarkedText:
    """Returns what a token adds to a text, its name if it is a special token."""
    if decoded.special:
        return MarkedText(decoded.special, bytes(len(decoded.special)))
    return MarkedText(decoded.text, b"\1" * len(decoded.text))


def marked_text(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> MarkedText:
    """Returns the text of tokens after a prompt, with special tokens written out; see `Detokenizer`."""
    detokenizer = Detokenizer(tokenizer, prompt)
    parts = [mark(detokenizer.add(token)) for token in tokens]
    parts.append(mark(Decoded(detokenizer.finish(), b"", "")))
    return MarkedText("".join(part.text for part in parts), b"".join(part.shown for part in parts))


def text_after(tokenizer: Tokenizer, prompt: Sequence[int], tokens: Iterable[int]) -> str:
    """Returns the text of tokens after a prompt, without special tokens.

    Args:
      tokenizer: of the model.
      prompt: token ids before them; () if the text begins with them.
      tokens: token ids.
    """
    return marked_text(tokenizer, prompt, tokens).visible


def _broken(data: bytes) -> bool:
    """Whether bytes do not begin with a character, and will not when more follow."""
    try:
        codecs.utf_8_decode(data, "strict", False)
    except UnicodeDecodeError as error:
        return error.start == 0
    return False
