"""A model of the tests that reads text, and writes a text that is known: its tokens are characters."""

import dataclasses
from typing import Any

import numpy as np

from kvjax.lm_eval.runner import Pair


class Characters:
    """A tokenizer whose tokens are characters' numbers; 0 begins and ends a text."""

    bos_id, eos_id, adds_bos, size = 0, 0, True, 0x110000

    def encode(self, text: str, bos: bool = True) -> list[int]:
        return [*([0] if bos else []), *map(ord, text)]

    def decode(self, ids: Any) -> str:
        return "".join(chr(int(i)) for i in ids if int(i) > 0)

    def token(self, number: int) -> str:
        return chr(number) if number else "<end>"


@dataclasses.dataclass
class Writer:
    """Stands for a `Runner`: answers are a function of what was read."""

    answer: Any
    max_length: int = 10_000
    model: Any = dataclasses.field(default_factory=lambda: _Model())
    read: list[str] = dataclasses.field(default_factory=list)

    def texts(self, contexts, *, new_tokens, stop, ended, done) -> None:
        for index, context in enumerate(contexts):
            done(index, self._written(Characters().decode(context), new_tokens, ended))

    def answers(self, contexts, questions, *, new_tokens, stop, ended, done) -> None:
        for index, (context, own) in enumerate(zip(contexts, questions, strict=True)):
            for place, question in enumerate(own):
                read = Characters().decode(context) + "|" + Characters().decode(question)
                done(index, place, self._written(read, new_tokens, ended))

    def scores(self, pairs: list[Pair], done) -> None:
        for index, pair in enumerate(pairs):
            text = Characters().decode(pair.context) + "|" + Characters().decode(pair.continuation)
            self.read.append(text)
            done(index, (float(self.answer(text)), False))

    def _written(self, read: str, new_tokens: int, ended) -> np.ndarray:
        self.read.append(read)
        ids = [*Characters().encode(self.answer(read), bos=False), 0][:new_tokens]
        return np.asarray(ids, np.int32)


class _Model:
    eos_token_ids = (0,)
