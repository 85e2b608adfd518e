"""Records: the codes of a row's keys and values for a chunk of tokens, with their checksum."""

import itertools
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvjax.errors import CheckpointError
from kvjax.transport import cachegen, entropy
from kvjax.transport.cachegen import ANCHOR_LIMIT, Codes
from kvjax.transport.inflate import inflate
from kvjax.transport.tables import Pair, add_counts, empty_pair, split

HEAD = struct.Struct("<IIII")  # bytes of ranges, tables and codes, and the checksum of all three
STREAM = struct.Struct("<I")  # bytes of a layer's codes


class Settings(NamedTuple):
    """How vectors are coded.

    Attributes:
      limits: the largest codes of keys, and of values, of each layer.
      delta: see `kvjax.transport.encode`.
      chunk: see `kvjax.transport.encode`.
      coder: see `kvjax.transport.entropy.coder`.
      heads: the number of KV heads of a layer.
      dim: the size of a head.
    """

    limits: tuple[tuple[int, ...], tuple[int, ...]]
    delta: bool
    chunk: int
    coder: str
    heads: int
    dim: int


class Piece(NamedTuple):
    """The vectors of a head of a layer in a chunk.

    Attributes:
      side: 0 = keys, 1 = values.
      head: the KV head.
      x: [n, D] float32, what is written, or is filled.
      position: [n] int32, of the tokens.
    """

    side: int
    head: int
    x: np.ndarray
    position: np.ndarray


Parts = tuple[bytes, bytes, bytes]  # of a record: ranges, tables and codes
Layers = Sequence[Sequence[Piece]]
LayerTables = Sequence[tuple[Pair, Pair]]


def joined(parts: Parts) -> bytes:
    """Returns a record of its parts."""
    return HEAD.pack(*map(len, parts), zlib.crc32(b"".join(parts))) + b"".join(parts)


def write(layers: Layers, settings: Settings, tables: LayerTables | None) -> tuple[Parts, float]:
    """Returns the parts of a record, and the bits that its codes have by the tables.

    Args:
      layers: the pieces of each layer.
      settings: how they are coded.
      tables: of the model; None for those of the chunk, which are then part of the record.
    """
    coded = [
        [
            cachegen.encode_vectors(
                each.x, settings.limits[each.side][layer], delta=settings.delta, chunk=settings.chunk
            )
            for each in pieces
        ]
        for layer, pieces in enumerate(layers)
    ]
    sent = b""
    if tables is None:
        own = [_empty(settings, layer) for layer in range(len(layers))]
        for layer, (pieces, codes) in enumerate(zip(layers, coded, strict=True)):
            for each, made in zip(pieces, codes, strict=True):
                limit = settings.limits[each.side][layer]
                add_counts(own[layer][each.side], each.head, made.codes, limit, settings.chunk)
        sent = zlib.compress(b"".join((each - 1).astype("<u2").tobytes() for each in _arrays(own)))
        tables = own
    ideal, codes_bytes = 0.0, []
    for layer, (pieces, codes) in enumerate(zip(layers, coded, strict=True)):
        streams = []
        for each, made in zip(pieces, codes, strict=True):
            pair, limit = tables[layer][each.side], settings.limits[each.side][layer]
            anchors, others = split(made.codes, limit, settings.delta, settings.chunk)
            if pair.anchors is not None:
                streams.append((anchors, pair.anchors[each.head]))
            streams.append((others, pair.differences[each.head]))
        ideal += sum(entropy.ideal_bits(*each) for each in streams)
        stream = entropy.compress(streams, settings.coder)
        codes_bytes += [STREAM.pack(len(stream)), stream]
    ranges = b"".join(made.ranges.astype("<f2").tobytes() for made in itertools.chain(*coded))
    return (ranges, sent, b"".join(codes_bytes)), ideal


def split_records(data: memoryview) -> Iterator[Parts]:
    """Yields the ranges, the tables and the codes of each record.

    Raises:
      CheckpointError: the data are cut off, or a checksum is wrong.
    """
    while data:
        if len(data) < HEAD.size:
            raise CheckpointError("the message is cut off within a record.")
        *sizes, checksum = HEAD.unpack(data[: HEAD.size])
        whole = data[HEAD.size : HEAD.size + sum(sizes)]
        if len(whole) < sum(sizes):
            raise CheckpointError("the message is cut off within a record.")
        if zlib.crc32(whole) != checksum:
            raise CheckpointError("a record of the message is damaged: its checksum is wrong.")
        ends = list(itertools.accumulate(sizes, initial=0))
        one, two, three = (bytes(whole[start:stop]) for start, stop in itertools.pairwise(ends))
        yield one, two, three
        data = data[HEAD.size + sum(sizes) :]


def read(record: Parts, layers: Layers, settings: Settings, tables: LayerTables | None) -> None:
    """Decodes a record into the arrays of its pieces; see `write`.

    Raises:
      CheckpointError: it does not fit the pieces.
    """
    ranges, sent, codes = record
    if tables is None:
        own = [_empty(settings, layer) for layer in range(len(layers))]
        limit = 2 * sum(array.size for array in _arrays(own))
        counts, used = np.frombuffer(inflate(sent, limit), "<u2").astype(np.int64), 0
        for array in _arrays(own):
            _check(used + array.size <= len(counts))
            array += counts[used : used + array.size].reshape(array.shape)
            used += array.size
        _check(used == len(counts))
        tables = own
    numbers = np.frombuffer(ranges, "<f2")
    place = begun = 0
    _check(len(numbers) == sum(len(each.x) for each in itertools.chain(*layers)))
    for layer, pieces in enumerate(layers):
        shapes = []
        for each in pieces:
            pair, limit = tables[layer][each.side], settings.limits[each.side][layer]
            count = len(each.x)
            first = int(cachegen.anchors(count, settings.chunk).sum()) if settings.delta else 0
            if pair.anchors is not None:
                shapes.append((first, ANCHOR_LIMIT, pair.anchors[each.head]))
            shapes.append((count - first, limit, pair.differences[each.head]))
        _check(begun + STREAM.size <= len(codes))
        (size,) = STREAM.unpack_from(codes, begun)
        begun += STREAM.size + size
        _check(begun <= len(codes))
        found = iter(entropy.decompress(codes[begun - size : begun], shapes, settings.coder))
        for each in pieces:
            count = len(each.x)
            anchors = cachegen.anchors(count, settings.chunk) if settings.delta else np.zeros(count, bool)
            whole = np.empty((count, settings.dim), np.int8)
            if settings.delta:
                whole[anchors] = next(found)
            whole[~anchors] = next(found)
            coded = Codes(whole, numbers[place : place + count].astype(np.float16))
            place += count
            each.x[...] = cachegen.decode_vectors(
                coded, settings.limits[each.side][layer], delta=settings.delta, chunk=settings.chunk
            )
    _check(begun == len(codes))


def _empty(settings: Settings, layer: int) -> tuple[Pair, Pair]:
    key, value = (empty_pair(settings.heads, settings.dim, limits[layer], settings.delta) for limits in settings.limits)
    return key, value


def _arrays(tables: LayerTables) -> Iterator[np.ndarray]:
    for pair in itertools.chain(*tables):
        if pair.anchors is not None:
            yield pair.anchors
        yield pair.differences


def _check(fits: bool) -> None:
    if not fits:
        raise CheckpointError("a record of the message is damaged: its sizes are not those of the context.")
