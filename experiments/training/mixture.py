"""Training batches: windows of text with recall episodes hidden in every one of them.

A batch is a pure function of the seed and the step: a run that was stopped goes on exactly where it was.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from experiments.tasks import recall
from experiments.tasks.wording import invent
from experiments.tasks.words import Words

#: Each task's difficulties in training, without the one that evaluations ask for (recall.DIFFICULTY).
DIFFICULTY = {
    "passkey": (3, 4, 6, 7),
    "multi_key": (2, 3, 5, 6),
    "associative": (2, 3, 5, 6, 8),
    "copy": (4, 5, 7, 9, 12),
    "variable": (0, 2),
}


class Kind(enum.IntEnum):
    """The kind of a token of a window. Facts and questions are given, not taught: most cannot be predicted."""

    GIVEN = 0
    TEXT = 1
    ANSWER = 2
    REPEAT = 3


class Piece(NamedTuple):
    """Attributes:
    place: in the text, from 0 to 1.
    tokens: [n] int32; kind: [n] int8, a `Kind` each.
    """

    place: float
    tokens: np.ndarray
    kind: np.ndarray


def _all(count: int, kind: Kind) -> np.ndarray:
    return np.full(count, kind, np.int8)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Attributes:
    texts: [N] int32 each, tokens of the training texts; a text is drawn as often as it is long.
    encode: texts -> their tokens, without special ones.
    ends_sentence: [V] bool, the tokens after which a sentence may be inserted.
    words: what the tasks are made of.
    bos: the token that opens every window.
    recall_fraction: share of a window that is facts, questions and answers.
    task_shares: how often each of recall.TASKS is drawn; of their sum.
    """

    texts: Sequence[np.ndarray]
    encode: Callable[[list[str]], list[list[int]]]
    ends_sentence: np.ndarray
    words: Words
    bos: int
    recall_fraction: float
    task_shares: Sequence[float]
    seed: int

    def batch(
        self,
        step: int,
        rows: int,
        context: int,
        *,
        repeat_fraction: float = 0.0,
        invented_fraction: float = 0.0,
        wordy_fraction: float = 0.5,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [rows, context + 1] int32, and the `Kind` of each, int8.

        Args:
          repeat_fraction: share of the rows that are a `repeat`; invented_fraction: of the episodes whose wording is
            made up; wordy_fraction: of these, those joined by words.
        """
        rng = np.random.default_rng((self.seed, step))
        repeats = round(repeat_fraction * rows)
        windows = [self.window(rng, context + 1, invented_fraction, wordy_fraction) for _ in range(rows - repeats)]
        windows += [self.repeat(rng, context + 1) for _ in range(repeats)]
        return np.stack([tokens for tokens, _ in windows]), np.stack([kind for _, kind in windows])

    def repeat(self, rng: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
        """A sequence of tokens over and over, half of the time arbitrary ones, half of the time shuffled text.

        Nothing in it can be predicted but by looking back: it exercises the induction head of the first parameters at
        almost every token, where a window of tasks does so at a few answers.
        """
        # As many short ones as long ones: what was learned at one length is what the next is learned from.
        length = int(np.exp(rng.uniform(np.log(3), np.log(max(4, size // 3)))))
        if rng.random() < 0.5:
            # Ids after the special token and the bytes, most of which never occur.
            sequence = rng.integers(min(257, self.ends_sentence.size - 1), self.ends_sentence.size, length)
        else:
            shortest = min(text.size for text in self.texts)
            sequence = rng.permutation(self.text(rng, min(8 * length, shortest)))[:length]
        tokens = np.concatenate([[self.bos], np.tile(sequence, -(-size // length))])[:size].astype(np.int32)
        return tokens, np.concatenate([_all(length + 1, Kind.GIVEN), _all(size - length - 1, Kind.REPEAT)])

    def window(
        self, rng: np.random.Generator, size: int, invented_fraction: float = 0.0, wordy_fraction: float = 0.5
    ) -> tuple[np.ndarray, np.ndarray]:
        """One window of `size` tokens, and their kinds."""
        pieces: list[Piece] = []
        left = int(self.recall_fraction * size)
        while left > 0:
            episode = self.pieces(rng, invented_fraction, wordy_fraction)
            length = sum(piece.tokens.size for piece in episode)
            # One that would not fit is left out, and with it this window's remainder.
            if length > max(left, size // 2) or length + sum(piece.tokens.size for piece in pieces) > size - 2:
                break
            pieces += episode
            left -= length
        pieces.sort(key=lambda piece: piece.place)
        text = self.text(rng, size - 1 - sum(piece.tokens.size for piece in pieces))
        # Where sentences end; a text without any takes its pieces anywhere.
        ends = np.flatnonzero(self.ends_sentence[text]) + 1
        ends = ends if ends.size else np.arange(text.size + 1)
        tokens, kinds, at = [np.full(1, self.bos, np.int32)], [_all(1, Kind.GIVEN)], 0
        for piece in pieces:
            end = int(ends[min(int(np.searchsorted(ends, piece.place * text.size)), ends.size - 1)])
            tokens += [text[at:end], piece.tokens]
            kinds += [_all(end - at, Kind.TEXT), piece.kind]
            at = end
        tokens.append(text[at:])
        kinds.append(_all(text.size - at, Kind.TEXT))
        return np.concatenate(tokens), np.concatenate(kinds)

    def text(self, rng: np.random.Generator, size: int) -> np.ndarray:
        sizes = np.array([text.size for text in self.texts], np.float64)
        chosen = self.texts[rng.choice(len(sizes), p=sizes / sizes.sum())]
        start = rng.integers(0, chosen.size - size + 1)
        return chosen[start : start + size]

    def pieces(
        self, rng: np.random.Generator, invented_fraction: float = 0.0, wordy_fraction: float = 0.5
    ) -> list[Piece]:
        """One episode: its facts together or scattered, then up to three of its questions."""
        words = self.words
        # Nothing is drawn where nothing is made up: a stage without leaves the one before it as it was.
        if invented_fraction and rng.random() < invented_fraction:
            words = invent(rng, words, wordy_fraction)
        shares = np.asarray(self.task_shares)
        name = str(rng.choice(list(recall.TASKS), p=shares / shares.sum()))
        episode = recall.TASKS[name](rng, words, int(rng.choice(DIFFICULTY[name])))
        count = len(episode.facts)
        adjacent = rng.random() < 0.6
        # Half of the questions stand at the end: far from most facts.
        places = np.full(count, 0.85 * rng.random()) if adjacent else np.sort(0.85 * rng.random(count))
        last = places[-1]
        asked = rng.permutation(len(episode.questions))[: rng.integers(1, 4)]
        texts = [f" {fact}" for fact in episode.facts]
        for index in asked:
            texts += [f" {episode.questions[index].text}", episode.questions[index].answer]
        encoded = [np.asarray(ids, np.int32) for ids in self.encode(texts)]
        pieces = [Piece(place, ids, _all(ids.size, Kind.GIVEN)) for place, ids in zip(places, encoded, strict=False)]
        for question, answer in zip(encoded[count::2], encoded[count + 1 :: 2], strict=True):
            place = rng.uniform(0.9, 1.0) if rng.random() < 0.5 else rng.uniform(last, 1.0)
            kind = np.concatenate([_all(question.size, Kind.GIVEN), _all(answer.size, Kind.ANSWER)])
            pieces.append(Piece(place, np.concatenate([question, answer]), kind))
        return pieces
