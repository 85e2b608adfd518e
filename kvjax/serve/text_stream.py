"""The text of a request as its tokens come: characters are shown when they are whole, and stop texts end it."""

import dataclasses
from collections.abc import Iterable, Sequence

from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.generation.detokenize import Decoded, Detokenizer, MarkedText, mark


@dataclasses.dataclass
class TokenText:
    """The text of a token. The tokens of a text have all of its characters and bytes, in their order.

    Attributes:
      text: the characters of which it has the last byte; empty for a special token, and for what a stop text cuts off.
      offset: the number of characters of the text before the one that the token begins in.
      data: its bytes. Where these are no UTF-8, the text has U+FFFD.
      begun: how many of its bytes are a character that later tokens end.
    """

    text: str
    offset: int
    data: bytes
    begun: int = 0

    @property
    def end(self) -> int:
        """The number of characters of the text up to the last one of which the token has a byte."""
        return self.offset + len(self.text) + bool(self.begun)

    def cut(self, size: int) -> None:
        """Removes what is beyond `size` characters of the text."""
        if self.end > size:
            kept = max(0, size - self.offset)
            removed = len(self.text[kept:].encode()) + self.begun
            self.text, self.data, self.begun = self.text[:kept], self.data[: max(0, len(self.data) - removed)], 0
            self.offset = min(self.offset, size)


class TextStream:
    """Makes text of tokens, a few at a time.

    `Runner` takes `take` as `Request.until`. The texts of all calls of `pop` are together `text`.

    Attributes:
      stopped: whether a stop text was found; it is not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, prompt: Sequence[int] = ()):
        """Begins an empty text.

        Args:
          tokenizer: of the model.
          stops: texts that end the request, none of them empty. Special tokens are found by their names, such as
            "<|im_end|>", and may be part of a stop text.
          prompt: token ids that the text follows; () if it begins a text of its own, as the answer of a chat does.
        """
        self.stopped = False
        self._detokenizer, self._stops = Detokenizer(tokenizer, prompt), tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = MarkedText()  # the end of the text, which may begin a stop text
        self._found = 0  # characters, those of `_held` included
        self._parts: list[str] = []  # of what may be shown
        self._size = 0  # characters of it
        self._tokens: list[TokenText] = []
        self._finished = False
        self._popped_parts = self._popped_tokens = 0

    @property
    def text(self) -> str:
        """The text that may be shown so far."""
        return "".join(self._parts)

    def take(self, tokens: Iterable[int]) -> int | None:
        """Adds tokens.

        Args:
          tokens: new token ids.

        Returns:
          How many of them there are up to the end of a stop text; None if there is none.
        """
        for number, token in enumerate(tokens):
            if self._add(token):
                return number + 1
        return None

    def pop(self) -> str:
        """Returns what `text` has more than at the last call."""
        new, self._popped_parts = self._parts[self._popped_parts :], len(self._parts)
        return "".join(new)

    def pop_tokens(self) -> list[TokenText]:
        """Returns the tokens since the last call of which all characters may be shown; all when the text has ended."""
        start = end = self._popped_tokens
        ended = self.stopped or self._finished
        while end < len(self._tokens) and (ended or self._tokens[end].end <= self._size):
            end += 1
        self._popped_tokens = end
        return self._tokens[start:end]

    def finish(self) -> None:
        """Takes all tokens as they are: none follows."""
        self._finished = True
        if self.stopped:
            return
        if rest := self._detokenizer.finish():
            last = next(each for each in reversed(self._tokens) if each.begun)
            last.text += rest
        self._show(self._held + mark(Decoded(rest, b"", "")))
        self._held = MarkedText()

    def _add(self, token: int) -> bool:
        """Adds a token; returns whether a stop text has ended."""
        decoded = self._detokenizer.add(token)
        begun = min(self._detokenizer.incomplete, len(decoded.data))
        self._tokens.append(TokenText(decoded.text, self._found, decoded.data, begun))
        self._found += len(decoded.text)
        held = self._held + mark(decoded)
        place = held.find(self._stops)
        self.stopped = place >= 0
        if not self.stopped:
            place = len(held.text) - self._begins_stop(held.text)
        self._show(held.part(0, place))
        self._held = MarkedText() if self.stopped else held.part(place)
        if self.stopped:
            for each in self._tokens[self._popped_tokens :]:
                each.cut(self._size)
        return self.stopped

    def _show(self, text: MarkedText) -> None:
        if visible := text.visible:
            self._parts.append(visible)
            self._size += len(visible)

    def _begins_stop(self, text: str) -> int:
        """The number of characters at the end that may begin a stop text."""
        starts = range(max(0, len(text) - self._longest + 1), len(text))
        return next((len(text) - i for i in starts if any(stop.startswith(text[i:]) for stop in self._stops)), 0)
