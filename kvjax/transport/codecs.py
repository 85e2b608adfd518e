"""The codecs of messages: CacheGen's codes, head by head, and KVTC's principal components, token by token."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol, cast

import numpy as np

from kvjax.arguments import count_argument
from kvjax.cache.spec import CacheSpec
from kvjax.errors import CheckpointError, InputError, shown
from kvjax.generation.context import Context
from kvjax.generation.options import CacheOptions
from kvjax.models.model import Model
from kvjax.numerics.rope import Rope
from kvjax.policies.base import Policy
from kvjax.transport import cachegen, entropy, records
from kvjax.transport.entropy import Symbols
from kvjax.transport.records import Parts, Piece, Settings
from kvjax.transport.tables import Tables
from kvjax.transport.transform import SIDES, Component, Transform, limits_of, quantised
from kvjax.transport.vectors import turned
from kvjax.typing import JsonObject


class Shape(NamedTuple):
    """The keys and values of a cache.

    Attributes:
      heads: the number of KV heads of a layer.
      dim: the size of a head.
      dtype: of keys and values.
      ropes: of each layer, the rotation that its keys are held with; None = they are held as they are before it.
    """

    heads: int
    dim: int
    dtype: np.dtype
    ropes: tuple[Rope | None, ...]


class Chunk(NamedTuple):
    """Some tokens of a row.

    Attributes:
      layers: the pieces of each layer, which are written, or filled.
      start: the number of the first token among those that the row holds.
      length: the number of tokens that a head of the row holds, at the most.
      total: the number of tokens that RoPE is for.
    """

    layers: Sequence[Sequence[Piece]]
    start: int
    length: int
    total: int


class Coder(Protocol):
    """Writes and reads the chunks of a message."""

    def write(self, chunk: Chunk) -> tuple[Parts, float]:
        """Returns the parts of a record, and the bits that its codes have by their tables."""

    def read(self, parts: Parts, chunk: Chunk) -> None:
        """Decodes a record into the arrays of the pieces of a chunk.

        Raises:
          CheckpointError: it does not fit the pieces.
        """


class Codec(Protocol):
    """A codec of contexts.

    Attributes:
      name: of the codec.
      chunk: tokens of a head that are coded independently of others.
    """

    name: ClassVar[str]

    @property
    def chunk(self) -> int: ...

    def about(self) -> JsonObject:
        """Returns what a message says of the codec, which must be equal when it is decoded."""

    def coder(self, shape: Shape, by: str) -> Coder:
        """Returns the coder of a cache; `by` is the entropy coder."""


class ContextCodecMixin:
    """The methods that `kvjax.contexts.save` and `kvjax.contexts.load` call."""

    def encode(self, context: Context) -> bytes:
        """Returns a context as bytes; see `kvjax.transport.encode`."""
        from kvjax.transport import messages  # which imports this module

        return messages.encode(context, codec=cast(Codec, self))

    def decode(
        self,
        data: bytes,
        model: Model,
        policy: Policy | CacheSpec | None = None,
        options: CacheOptions | None = None,
    ) -> Context:
        """Returns the context of bytes; see `kvjax.transport.decode`."""
        from kvjax.transport import messages

        return messages.decode(data, model, policy, codec=cast(Codec, self), options=options)


def check_chunk(chunk: object) -> None:
    """Checks the number of tokens of a chunk.

    Raises:
      InputError: it is not valid.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= cachegen.MAX_CHUNK:
        raise InputError(f"chunk must be a whole number from 1 to {cachegen.MAX_CHUNK}; got {shown(chunk)}.")


@dataclasses.dataclass(frozen=True)
class CacheGen(ContextCodecMixin):
    """CacheGen's codes (arXiv:2310.07240): differences from the first vector of ten, in few whole numbers.

    Attributes:
      level: 1, 2 or 3, from the fewest bytes to the smallest error.
      delta: whether vectors are coded as differences. The released code of CacheGen has none.
      chunk: vectors of a head that are coded independently of others.
      tables: of the model, from `kvjax.transport.make_tables`; None for those of each chunk, which are sent with it.

    Raises:
      InputError: a field that is not valid, or tables of another level.
    """

    level: int = 2
    delta: bool = True
    chunk: int = cachegen.CHUNK
    tables: Tables | None = None
    name: ClassVar[str] = "cachegen"

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        if not isinstance(self.delta, bool):
            raise InputError(f"delta must be True or False; got {shown(self.delta)}.")
        cachegen.limits(1, self.level)
        if self.tables is not None and (self.tables.level, self.tables.delta) != (self.level, self.delta):
            raise InputError(
                f"the tables are of level={self.tables.level}, delta={self.tables.delta}; make others, or give these."
            )

    def about(self) -> JsonObject:
        digest = None if self.tables is None else self.tables.digest
        return {"level": self.level, "delta": self.delta, "chunk": self.chunk, "tables": digest}

    def coder(self, shape: Shape, by: str) -> "CacheGenCoder":
        limits = cachegen.limits(len(shape.ropes), self.level)
        return CacheGenCoder(self, Settings(limits, self.delta, self.chunk, by, shape.heads, shape.dim))


@dataclasses.dataclass(frozen=True)
class CacheGenCoder:
    """See `Coder`."""

    codec: CacheGen
    settings: Settings

    def write(self, chunk: Chunk) -> tuple[Parts, float]:
        tables = self.codec.tables
        return records.write(chunk.layers, self.settings, None if tables is None else tables.layers)

    def read(self, parts: Parts, chunk: Chunk) -> None:
        tables = self.codec.tables
        records.read(parts, chunk.layers, self.settings, None if tables is None else tables.layers)


@dataclasses.dataclass(frozen=True)
class KVTC(ContextCodecMixin):
    """KVTC (arXiv:2511.01815): principal components of the keys before rotation, and of the values, of all heads.

    The first and the newest tokens are held exactly. All heads must hold the same positions.

    Attributes:
      transform: of the model, from `kvjax.transport.fit_transform`.
      sinks: first tokens that are exact.
      recent: newest tokens that are exact.
      chunk: tokens that are coded independently of others.

    Raises:
      InputError: a field that is not valid.
    """

    transform: Transform
    sinks: int = 4
    recent: int = 128
    chunk: int = cachegen.CHUNK
    name: ClassVar[str] = "kvtc"

    def __post_init__(self) -> None:
        check_chunk(self.chunk)
        if not isinstance(self.transform, Transform):
            raise InputError(f"transform must be from kvjax.transport.fit_transform; got {shown(self.transform)}.")
        count_argument("sinks", self.sinks, minimum=0, error=InputError)
        count_argument("recent", self.recent, minimum=0, error=InputError)

    def about(self) -> JsonObject:
        return {
            "sinks": self.sinks, "recent": self.recent, "chunk": self.chunk, "transform": self.transform.digest,
            "ratio": self.transform.ratio,
        }  # fmt: skip

    def coder(self, shape: Shape, by: str) -> "KVTCCoder":
        sizes = {len(own.mean) for pair in self.transform.layers for own in pair}
        if len(self.transform.layers) != len(shape.ropes) or sizes != {shape.heads * shape.dim}:
            raise InputError("the transform belongs to another model; compute one from contexts of this model.")
        return KVTCCoder(self, shape, by)


def load_codec(path: str | Path) -> CacheGen | KVTC:
    """Returns the codec of a file: CacheGen's with tables, or KVTC's with a transform.

    Args:
      path: a file that `Tables.save` or `Transform.save` has written.

    Raises:
      CheckpointError: it is missing or damaged, or has neither.
    """
    try:
        tables = Tables.load(path)
    except CheckpointError:
        try:
            return KVTC(Transform.load(path))
        except CheckpointError as error:
            raise CheckpointError(f"{path} has neither tables nor a transform: {error}") from None
    return CacheGen(tables.level, tables.delta, tables=tables)


@dataclasses.dataclass(frozen=True)
class KVTCCoder:
    """See `Coder`."""

    codec: KVTC
    shape: Shape
    by: str

    def write(self, chunk: Chunk) -> tuple[Parts, float]:
        streams: list[tuple[Symbols, np.ndarray]] = []
        exact: list[bytes] = []
        for layer, pieces in enumerate(chunk.layers):
            for side in range(len(SIDES)):
                own, heads = self.codec.transform.layers[layer][side], _of_side(pieces, side)
                if any(not np.array_equal(each.position, heads[0].position) for each in heads):
                    raise InputError("heads hold different positions, which KVTC codes together; use CacheGen's codes.")
                # [K, n, D]
                x = np.stack([each.x for each in heads])
                coded = self._coded(chunk, x.shape[1])
                exact.append(x[:, ~coded].astype(self.shape.dtype).tobytes())
                if side == 0 and (rope := self.shape.ropes[layer]) is not None:
                    x = turned(rope, x, heads[0].position, chunk.total, back=True)
                # [n, C]
                joined = x[:, coded].swapaxes(0, 1).reshape(int(coded.sum()), len(own.mean))
                codes = quantised((joined - own.mean) @ own.basis, own.step, limits_of(own.bits))
                streams += _streams(codes, own)
        ideal = sum(entropy.ideal_bits(*each) for each in streams)
        return (b"".join(exact), b"", entropy.compress(streams, self.by)), ideal

    def read(self, parts: Parts, chunk: Chunk) -> None:
        raw, _, data = parts
        shapes, places = [], []
        for layer, pieces in enumerate(chunk.layers):
            for side in range(len(SIDES)):
                own, heads = self.codec.transform.layers[layer][side], _of_side(pieces, side)
                coded = self._coded(chunk, len(heads[0].position))
                places.append((layer, side, heads, coded, own))
                shapes += [(int(coded.sum()), limit, table) for _, limit, table in _tables(own)]
        found = iter(entropy.decompress(data, shapes, self.by))
        used = 0
        for layer, side, heads, coded, own in places:
            count = int(coded.sum())
            codes = np.zeros((count, len(own.mean)), np.float32)
            for at, _, _ in _tables(own):
                codes[:, at] = next(found)
            joined = (codes * own.step) @ own.basis.T + own.mean
            # [K, n, D]
            x = np.empty((len(heads), len(coded), self.shape.dim), np.float32)
            x[:, coded] = joined.reshape(count, len(heads), self.shape.dim).swapaxes(0, 1)
            if side == 0 and (rope := self.shape.ropes[layer]) is not None:
                x[:, ~coded] = 0
                x = turned(rope, x, heads[0].position, chunk.total, back=False)
            size = len(heads) * int((~coded).sum()) * self.shape.dim * self.shape.dtype.itemsize
            if used + size > len(raw):
                raise CheckpointError("a record of the message is damaged: its sizes are not those of the context.")
            rest = np.frombuffer(raw[used : used + size], self.shape.dtype).astype(np.float32)
            x[:, ~coded] = rest.reshape(len(heads), int((~coded).sum()), self.shape.dim)
            used += size
            for own_head, made in zip(heads, x, strict=True):
                own_head.x[...] = made
        if used != len(raw):
            raise CheckpointError("a record of the message is damaged: its sizes are not those of the context.")

    def _coded(self, chunk: Chunk, count: int) -> np.ndarray:
        """Marks the tokens of a chunk that are in codes, [n] bool."""
        number = chunk.start + np.arange(count)
        return (number >= self.codec.sinks) & (number < chunk.length - self.codec.recent)


def _of_side(pieces: Sequence[Piece], side: int) -> list[Piece]:
    """Returns the keys, or the values, of all heads in their order."""
    return sorted((each for each in pieces if each.side == side), key=lambda each: each.head)


def _tables(own: Component) -> list[tuple[np.ndarray, int, np.ndarray]]:
    """Returns the components of each number of bits: their places, the largest code, and the tables."""
    found = []
    limits = limits_of(own.bits)
    for limit in sorted({*limits.tolist()} - {0}):
        at = np.flatnonzero(limits == limit)
        found.append((at, int(limit), own.counts[at, 127 - limit : 128 + limit]))
    return found


def _streams(codes: np.ndarray, own: Component) -> list[tuple[Symbols, np.ndarray]]:
    return [(Symbols(codes[:, at], limit), table) for at, limit, table in _tables(own)]
