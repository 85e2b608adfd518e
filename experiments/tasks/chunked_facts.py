"""Facts in chunks that come in changing orders, and questions about them, for caches of chunks."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from experiments.tasks.words import HELD_OUT
from kvjax.errors import ConfigError

DIGITS = 4
FACT, OPENING = " The lock code of {name} is {code}.", " The lock code of {name} is"
KINDS = ("whole", "divided")


@dataclasses.dataclass(frozen=True)
class ChunkQuestion:
    """A request of some chunks and a question about one of them.

    Attributes:
      kind: ``whole`` = the fact is in one chunk; ``divided`` = a chunk ends with its beginning, and the next one begins
        with its end, which is lost where the chunks have not seen each other.
      chunks: [n] int32 each, in the order in which they are asked about.
      other_order: places of these chunks in an order in which they were read before.
      question: [n] int32.
      answer: the digits.
    """

    kind: str
    chunks: tuple[np.ndarray, ...]
    other_order: tuple[int, ...]
    question: np.ndarray
    answer: str


def make_questions(
    encode: Callable[..., Sequence[int]], text: str, *, count: int, chunks: int, tokens: int, seed: int
) -> list[ChunkQuestion]:
    """Makes requests of chunks of one length, half of which ask for a fact that two chunks share.

    Each pair of chunks has a fact of either kind. In another order, pairs change their places and stay together.

    Args:
      encode: of a tokenizer, with ``bos=``.
      text: what the facts are hidden in.
      count: the number of requests.
      chunks: of a request, an even number.
      tokens: of a chunk.
      seed: of names, codes and orders.

    Raises:
      ConfigError: an odd number of chunks, or a text that is too short.
    """
    if chunks < 2 or chunks % 2:
        raise ConfigError(f"chunks must be an even number of at least 2; got {chunks}.")
    filler = np.array(encode(text, bos=False), np.int32)
    if len(filler) < 2 * chunks * tokens:
        raise ConfigError(f"the text has {len(filler):,} tokens; at least {2 * chunks * tokens:,} are needed.")
    rng = np.random.default_rng(seed)
    return [_question(encode, filler, KINDS[number % 2], chunks, tokens, rng) for number in range(count)]


def _question(
    encode: Callable[..., Sequence[int]],
    filler: np.ndarray,
    kind: str,
    chunks: int,
    tokens: int,
    rng: np.random.Generator,
) -> ChunkQuestion:
    names = rng.choice(HELD_OUT.names, chunks, replace=False)
    codes = [str(each) for each in rng.choice(np.arange(10 ** (DIGITS - 1), 10**DIGITS), chunks, replace=False)]

    def ids(form: str, number: int) -> np.ndarray:
        own = form.format(name=names[number], code=codes[number])
        return np.array(encode(own, bos=False), np.int32)

    start = int(rng.integers(0, len(filler) - chunks * tokens))
    made: list[np.ndarray] = []
    for number in range(chunks):
        # Fact 2i is whole, in chunk 2i or 2i + 1; fact 2i + 1 begins in chunk 2i and ends in 2i + 1.
        pair = number // 2 * 2
        head = tail = np.zeros(0, np.int32)
        whole, opening = ids(FACT, pair + 1), ids(OPENING, pair + 1)
        if number == pair:
            tail = opening
        else:
            head = whole[len(opening) :]
        own = ids(FACT, pair) if (number - pair) == (pair // 2) % 2 else np.zeros(0, np.int32)
        room = tokens - len(head) - len(tail) - len(own)
        before = filler[start : start + room // 2]
        after = filler[start + room // 2 : start + room]
        start += room
        made.append(np.concatenate([head, before, own, after, tail]).astype(np.int32))
    pairs = rng.permutation(chunks // 2)
    order = [place for pair in pairs for place in (2 * pair, 2 * pair + 1)]
    asked = int(rng.integers(chunks // 2)) * 2 + (kind == "divided")
    other = [place for pair in rng.permutation(chunks // 2) for place in (2 * pair, 2 * pair + 1)]
    if other == order and chunks > 2:
        other = [*other[2:], *other[:2]]
    return ChunkQuestion(
        kind, tuple(made[place] for place in order), tuple(order.index(place) for place in other),
        np.array(encode("\n" + OPENING.strip().format(name=names[asked]), bos=False), np.int32), codes[asked],
    )  # fmt: skip
