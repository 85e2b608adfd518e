"""Responses of OpenAI's API, whole ones and the events of a stream."""

import dataclasses
import json
import time
import uuid

from kvjax.serve.engine import StreamChunk
from kvjax.serve.protocol import Call, ServerInfo
from kvjax.serve.text_stream import TokenText
from kvjax.typing import JsonObject

DONE = b"data: [DONE]\n\n"  # ends a stream


@dataclasses.dataclass
class Choice:
    """One choice of an answer so far.

    Attributes:
      index: of the choice.
      text: so far.
      tokens: so far.
      logprobs: so far.
      token_texts: what the first tokens have of the text; without a tokenizer, their numbers.
      reason: why it has ended; None before.
      prompt: the number of its prompt's tokens; 0 before it has ended.
      found: the number of those that were not computed, since the state of an earlier prompt had them.
    """

    index: int
    text: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    token_texts: list[TokenText] = dataclasses.field(default_factory=list)
    reason: str | None = None
    prompt: int = 0
    found: int = 0

    def add(self, piece: StreamChunk) -> None:
        """Adds a piece."""
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        if piece.token_texts is None:
            self.token_texts += [TokenText(f"token_id:{token}", 0, b"") for token in piece.tokens]
        else:
            self.token_texts += piece.token_texts
        if piece.result is not None:
            self.reason, self.prompt, self.found = piece.result.reason, piece.result.prompt, piece.result.found


class Answer:
    """Makes the responses of one call.

    Attributes:
      choices: what has come so far.
    """

    def __init__(self, call: Call, served: ServerInfo):
        self._call = call
        self._chat = call.kind == "chat"
        about: JsonObject = {"created": int(time.time()), "model": served.name}
        if call.conversation is not None:
            about["conversation"] = {"id": call.conversation}
        prefix, name = ("chatcmpl", "chat.completion") if self._chat else ("cmpl", "text_completion")
        self._whole = {"id": f"{prefix}-{uuid.uuid4().hex}", "object": name} | about
        self._part = self._whole | ({"object": "chat.completion.chunk"} if self._chat else {})
        self.choices = [Choice(index) for index in range(len(call.requests))]

    def whole(self) -> JsonObject:
        """The response, when all choices have ended."""
        return self._whole | {"choices": [self._choice(each) for each in self.choices], "usage": self._usage()}

    def begin(self) -> bytes:
        """The first events of a stream: of a chat, who speaks."""
        if not self._chat:
            return b""
        deltas = [{"role": "assistant", "content": ""} for _ in self.choices]
        return b"".join(self._event(index, {"delta": delta}) for index, delta in enumerate(deltas))

    def part(self, index: int, piece: StreamChunk) -> bytes:
        """The event of a piece of a choice; empty if it would say nothing."""
        choice = self.choices[index]
        before = len(choice.token_texts)
        choice.add(piece)
        if not (piece.text or piece.result or (self._call.logprobs and len(choice.token_texts) > before)):
            return b""
        content = {"delta": {"content": piece.text} if piece.text else {}} if self._chat else {"text": piece.text}
        logprobs = self._logprobs(choice, before) if self._call.logprobs else None
        return self._event(index, content, choice.reason, logprobs)

    def end(self) -> bytes:
        """The last events of a stream."""
        if not self._call.usage:
            return DONE
        return _sent(self._part | {"choices": [], "usage": self._usage()}) + DONE

    def _choice(self, choice: Choice) -> JsonObject:
        logprobs = self._logprobs(choice, 0) if self._call.logprobs else None
        content = {"message": {"role": "assistant", "content": choice.text}} if self._chat else {"text": choice.text}
        return {"index": choice.index, "finish_reason": choice.reason, "logprobs": logprobs} | content

    def _event(self, index: int, content: JsonObject, reason: str | None = None, logprobs: object = None) -> bytes:
        choice = {"index": index, "finish_reason": reason, "logprobs": logprobs} | content
        return _sent(self._part | {"choices": [choice]})

    def _usage(self) -> JsonObject:
        # The prompt of several choices counts once.
        each = len(self.choices) // max(self._call.prompts, 1)
        prompt = sum(choice.prompt for choice in self.choices[::each])
        new = sum(len(choice.tokens) for choice in self.choices)
        made: JsonObject = {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}
        found = sum(choice.found for choice in self.choices[::each])
        return made | ({"prompt_tokens_details": {"cached_tokens": found}} if found else {})

    def _logprobs(self, choice: Choice, start: int) -> JsonObject:
        """The log-probabilities of the tokens from `start` on whose text is there."""
        tokens = choice.token_texts[start:]
        logprobs = choice.logprobs[start : start + len(tokens)]
        if self._chat:
            return {
                "content": [
                    {"token": token.text, "logprob": logprob, "bytes": list(token.data), "top_logprobs": []}
                    for token, logprob in zip(tokens, logprobs, strict=True)
                ]
            }
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": [token.offset for token in tokens],
        }


def error_event(body: JsonObject) -> bytes:
    """The event of an error in a stream that has begun."""
    return _sent(body)


def _sent(value: JsonObject) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"
