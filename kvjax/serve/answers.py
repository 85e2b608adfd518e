"""Responses of OpenAI's API, whole ones and the events of a stream."""

import dataclasses
import json
import time
import uuid
from typing import Any

from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.serve.engine import Piece
from kvjax.serve.protocol import Call, Served

DONE = b"data: [DONE]\n\n"  # ends a stream


@dataclasses.dataclass
class Choice:
    """What has come of one choice.

    Attributes:
      index: of the choice.
      text: so far.
      tokens: so far.
      logprobs: so far.
      reason: why it has ended; None before.
      prompt: the number of its prompt's tokens; 0 before it has ended.
    """

    index: int
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    reason: str | None = None
    prompt: int = 0

    def add(self, piece: Piece) -> None:
        """Adds a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if piece.result is not None:
            self.reason, self.prompt = piece.result.reason, piece.result.prompt


class Answer:
    """Makes the responses of one call.

    Attributes:
      choices: what has come so far.
    """

    def __init__(self, call: Call, served: Served):
        self._call, self._tokenizer = call, served.model.tokenizer
        self._chat = call.kind == "chat"
        about = {"created": int(time.time()), "model": served.name}
        prefix, name = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._whole = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name} | about
        self._part = self._whole | ({"object": "chat.completion.chunk"} if self._chat else {})
        self.choices = [Choice(index) for index in range(len(call.requests))]

    def whole(self) -> dict[str, Any]:
        """The response, when all choices have ended."""
        return self._whole | {"choices": [self._choice(each) for each in self.choices], "usage": self._usage()}

    def begin(self) -> bytes:
        """The first events of a stream: of a chat, who speaks."""
        if not self._chat:
            return b""
        deltas = [{"role": "assistant", "content": ""} for _ in self.choices]
        return b"".join(self._event(index, {"delta": delta}) for index, delta in enumerate(deltas))

    def part(self, index: int, piece: Piece) -> bytes:
        """The event of a piece of a choice; empty if it would say nothing."""
        choice = self.choices[index]
        before = len(choice.text)
        choice.add(piece)
        if not (piece.text or piece.result or (self._call.logprobs and piece.tokens)):
            return b""
        content = {"delta": {"content": piece.text} if piece.text else {}} if self._chat else {"text": piece.text}
        told = self._logprobs(piece.tokens, piece.logprobs, before) if self._call.logprobs else None
        return self._event(index, content, choice.reason, told)

    def end(self) -> bytes:
        """The last events of a stream."""
        if not self._call.usage:
            return DONE
        return _sent(self._part | {"choices": [], "usage": self._usage()}) + DONE

    def _choice(self, choice: Choice) -> dict[str, Any]:
        told = self._logprobs(choice.tokens, choice.logprobs, 0) if self._call.logprobs else None
        said = {"message": {"role": "assistant", "content": choice.text}} if self._chat else {"text": choice.text}
        return {"index": choice.index, "finish_reason": choice.reason, "logprobs": told} | said

    def _event(self, index: int, content: dict[str, Any], reason: str | None = None, told: Any = None) -> bytes:
        choice = {"index": index, "finish_reason": reason, "logprobs": told} | content
        return _sent(self._part | {"choices": [choice]})

    def _usage(self) -> dict[str, int]:
        # The prompt of several choices counts once.
        each = len(self.choices) // max(self._call.prompts, 1)
        prompt = sum(choice.prompt for choice in self.choices[::each])
        new = sum(len(choice.tokens) for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

    def _logprobs(self, tokens: list[int], logprobs: list[float], before: int) -> dict[str, Any]:
        """The log-probabilities of tokens, whose text begins after `before` characters."""
        texts = [_text(self._tokenizer, token) for token in tokens]
        if self._chat:
            return {
                "content": [
                    {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                    for text, logprob in zip(texts, logprobs, strict=True)
                ]
            }
        offsets = []
        for text in texts:
            offsets.append(before)
            before += len(text)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}


def error_event(body: dict[str, Any]) -> bytes:
    """The event of an error in a stream that has begun."""
    return _sent(body)


def _sent(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    """The text of one token, its number without a tokenizer."""
    return f"token_id:{token}" if tokenizer is None else tokenizer.decode([token])
