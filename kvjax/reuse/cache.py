"""`ChunkCache`: the keys and values of a chunk of text, which are used wherever the chunk stands."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import plain_signature
from kvjax.cache.planning.limits import prompt_bucket
from kvjax.contexts.turns import same_weights
from kvjax.errors import InputError
from kvjax.inputs import check_batch, check_one_row
from kvjax.models.config import DecoderConfig
from kvjax.models.model import Model, check_model
from kvjax.reuse.layerwise import LayerResult, check_movable, run_tokens
from kvjax.summary import one_line

Array = jax.Array


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkCache:
    """The keys and values of a chunk.

    Attributes:
      tokens: [n] int32, of the chunk.
      key: [L, K, n, D] of each layer, not rotated, on the host.
      value: [L, K, n, D].
      prefix: the cache of the tokens that every chunk follows, which is exact; None = there are none.
      model: that the cache was computed with.
    """

    tokens: np.ndarray
    key: np.ndarray
    value: np.ndarray
    prefix: "ChunkCache | None"
    model: Model

    def __repr__(self) -> str:
        return one_line(self)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values, without those of the prefix."""
        return int(self.key.nbytes + self.value.nbytes)


@plain_signature
def compute(model: Model, tokens: ArrayLike, prefix: ChunkCache | None = None) -> ChunkCache:
    """Computes the cache of a chunk after a prefix, or that of a prefix.

    Args:
      model: without learned positions.
      tokens: [n] int, the chunk.
      prefix: the cache of the tokens that every chunk follows, such as a begin-of-text token; None = there are none.

    Raises:
      InputError: tokens that are not valid, a prefix of another model, or a model with learned positions.
    """
    check_model(model)
    ids = checked_tokens(model.config, "tokens", tokens)
    check_prefix(model, prefix)
    text = Text.of(model, [], prefix, tokens=ids)
    begun = 0 if prefix is None else len(prefix)
    held = Collected()
    run_tokens(
        model, ids, np.arange(begun, len(text), dtype=np.int32), text.key, text.value, text.known, total=len(text),
        record=held.add,
    )  # fmt: skip
    key, value = held.between(begun, len(text))
    return ChunkCache(ids, key, value, prefix, model)


class Collected:
    """The keys and values of the layers of a run, [1, K, S, D] each, by position and not rotated."""

    def __init__(self) -> None:
        self.key: list[Array] = []
        self.value: list[Array] = []

    def add(self, index: int, result: LayerResult, count: int) -> None:
        """Adds those of the next layer."""
        self.key.append(result.key)
        self.value.append(result.value)

    def between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys and values of some positions, [L, K, n, D] on the host."""
        key, value = (
            np.stack([np.asarray(each)[0, :, start:stop] for each in side]) for side in (self.key, self.value)
        )
        return key, value


class Text(NamedTuple):
    """Caches of a prefix and of chunks, one after the other, and tokens after them that have no keys and values yet.

    Attributes:
      tokens: [T] int32, of all.
      starts: of each chunk, the position of its first token.
      key: of each layer, [1, K, S, D] by position with S at least T, not rotated.
      value: of each layer, [1, K, S, D].
      known: [S] bool, the positions that have a key and value.
    """

    tokens: np.ndarray
    starts: tuple[int, ...]
    key: list[Array]
    value: list[Array]
    known: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(
        cls, model: Model, chunks: Sequence[ChunkCache], prefix: ChunkCache | None, tokens: np.ndarray | None = None
    ) -> "Text":
        """Puts chunks after a prefix, and tokens after the chunks."""
        config = model.config
        caches = [*([] if prefix is None else [prefix]), *chunks]
        ends = np.cumsum([0, *map(len, caches)])
        whole = np.concatenate([*(each.tokens for each in caches), [] if tokens is None else tokens]).astype(np.int32)
        size = prompt_bucket(max(len(whole), 1))
        made: list[list[Array]] = []
        for side in ("key", "value"):
            # [L, 1, K, S, D], on the host: a program would depend on the lengths
            array = np.zeros((config.num_layers, 1, config.num_kv_heads, size, config.head_dim), model.dtype)
            for start, stop, each in zip(ends, ends[1:], caches, strict=False):
                array[:, 0, :, start:stop] = getattr(each, side)
            made.append([jnp.asarray(layer) for layer in array])
        starts = ends[len(caches) - len(chunks) : -1]
        key, value = made
        return cls(whole, tuple(map(int, starts)), key, value, np.arange(size) < ends[-1])


def check_prefix(model: Model, prefix: ChunkCache | None) -> None:
    """Checks a prefix.

    Raises:
      InputError: it is of another model, or has a prefix itself.
    """
    if prefix is not None:
        check_chunks(model, [prefix])
        if prefix.prefix is not None:
            raise InputError("a prefix cannot have a prefix; compute it with all of its tokens.")


def check_chunks(model: Model, chunks: Sequence[ChunkCache]) -> ChunkCache | None:
    """Checks that chunks are of a model and follow one prefix, which is returned.

    Raises:
      InputError: they are not, there is none, or the model has learned positions.
    """
    check_movable(model.config)
    if not isinstance(chunks, Sequence):
        raise InputError(f"chunks must be a list of ChunkCache; got {type(chunks).__name__}.")
    if not chunks:
        raise InputError("chunks must have at least one ChunkCache, from kvjax.reuse.compute.")
    for each in chunks:
        if not isinstance(each, ChunkCache):
            raise InputError(f"a chunk must be a ChunkCache, from kvjax.reuse.compute; got {type(each).__name__}.")
        if each.prefix is not None and each.prefix.prefix is not None:
            raise InputError("a prefix cannot have a prefix; compute it with all of its tokens.")
        if not same_weights(each.model, model):
            raise InputError("a chunk belongs to another model; compute it with the model that reads it.")
    prefixes = [() if each.prefix is None else tuple(each.prefix.tokens.tolist()) for each in chunks]
    if len(set(prefixes)) > 1:
        raise InputError("the chunks were computed after different prefixes; compute them after one.")
    return chunks[0].prefix


def checked_tokens(config: DecoderConfig, name: str, tokens: ArrayLike) -> np.ndarray:
    """Returns one row of tokens, [n] int32.

    Raises:
      InputError: they are not valid.
    """
    check_movable(config)
    check_one_row(name, tokens)
    return check_batch(config, tokens, None, new_tokens=0).tokens[0].astype(np.int32)
