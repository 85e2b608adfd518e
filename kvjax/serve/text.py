"""The text of a request as its tokens come: characters are shown when they are whole, and stop texts end it."""

from collections.abc import Sequence

from kvjax.checkpoint.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what tokens decode to whose bytes are not a whole character
CONTEXT = 8  # tokens before the new ones that are decoded with them, since some depend on what is before them
MOST_HELD = 8  # tokens that may begin a character; what is not whole after them never will be


class TextStream:
    """Makes text of tokens, a few at a time.

    `Runner` takes `take` as `Request.until`. The texts of all calls of `pop` are together `text`.

    Attributes:
      text: what may be shown so far.
      stopped: whether a stop text was found; it is not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), *, hidden: Sequence[int] = ()):
        """Begins an empty text.

        Args:
          tokenizer: of the model.
          stops: texts that end the request, none of them empty.
          hidden: tokens that have no text, such as stop tokens.
        """
        self._tokenizer, self._stops, self._hidden = tokenizer, tuple(stops), frozenset(hidden)
        self._before: list[int] = []  # tokens whose text is known
        self._new: list[int] = []  # tokens whose characters may not be whole
        self._found = ""  # the text that is known, of which the end may begin a stop text
        self._searched = 0  # characters of it that begin no stop text
        self._shown = 0
        self.stopped = False

    @property
    def text(self) -> str:
        return self._found[: self._searched]

    def take(self, tokens: Sequence[int]) -> int | None:
        """Adds tokens.

        Args:
          tokens: new token ids.

        Returns:
          How many of them there are up to the end of a stop text; None if there is none.
        """
        for number, token in enumerate(tokens):
            if token not in self._hidden and self._add(token):
                return number + 1
        return None

    def pop(self) -> str:
        """Returns what `text` has more than at the last call."""
        new = self.text[self._shown :]
        self._shown += len(new)
        return new

    def finish(self) -> None:
        """Takes all tokens as they are: none follows."""
        if self.stopped:
            return
        self._decode(whole=True)
        self._searched = len(self._found)

    def _add(self, token: int) -> bool:
        """Adds a token; returns whether a stop text has ended."""
        self._new.append(int(token))
        self._decode(whole=len(self._new) > MOST_HELD)
        ends = [place for stop in self._stops if (place := self._found.find(stop, self._searched)) >= 0]
        if ends:
            self._searched, self.stopped = min(ends), True
            return True
        self._searched = len(self._found) - self._held()
        return False

    def _decode(self, whole: bool) -> None:
        """Makes text of the new tokens, if their characters are whole, or if what is not whole never will be."""
        before = self._tokenizer.decode(self._before)
        text = self._tokenizer.decode(self._before + self._new)[len(before) :]
        if text.endswith(REPLACEMENT) and not whole:
            return
        self._found += text
        self._before = (self._before + self._new)[-CONTEXT:]
        self._new = []

    def _held(self) -> int:
        """The number of characters at the end that may begin a stop text."""
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        tail = self._found[max(self._searched, len(self._found) - longest) :]
        return next((len(tail) - i for i in range(len(tail)) if any(s.startswith(tail[i:]) for s in self._stops)), 0)
