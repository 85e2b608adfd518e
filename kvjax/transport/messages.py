"""Contexts as bytes: keys and values in CacheGen's codes, all else as it is.

A message is a header, everything that is exact, and a record for each row and chunk of tokens, which has a checksum of
its own and can be decoded by itself.
"""

import dataclasses
import itertools
import json
import math
import struct
import zlib
from typing import NamedTuple, Unpack

import jax
import numpy as np
from jax.typing import DTypeLike

from kvjax.arguments import plain_signature
from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer
from kvjax.contexts.description import describe, on_its_memory, restore, state_shapes
from kvjax.errors import CheckpointError, InputError, shown
from kvjax.generation.context import Context
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.base import Policy
from kvjax.transport import cachegen, entropy, records, varint, vectors
from kvjax.transport.cachegen import CHUNK
from kvjax.transport.records import Piece, Settings
from kvjax.transport.tables import Tables
from kvjax.typing import JsonObject

MAGIC = b"kvjax cachegen 1\n"
HEADER = struct.Struct("<II")  # bytes of the header, and the checksum of it and of the exact parts


@dataclasses.dataclass(frozen=True)
class Report:
    """The bytes of a message by part.

    Attributes:
      header: what describes the context.
      exact: logits, tokens, statistics, and all else that is not coded.
      positions: of the slots.
      ranges: of the vectors.
      tables: counts that are sent with the codes.
      codes: keys and values.
      numbers: how many numbers keys and values are.
      ideal_bits: the sum of -log2 p of their codes.
      original: bytes of these numbers in the model's dtype.
    """

    header: int
    exact: int
    positions: int
    ranges: int
    tables: int
    codes: int
    numbers: int
    ideal_bits: float
    original: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.header + self.exact + self.positions + self.ranges + self.tables + self.codes

    @property
    def bits_per_number(self) -> float:
        """Bits of ranges, tables and codes for each key's and value's number."""
        return 8 * (self.ranges + self.tables + self.codes) / max(self.numbers, 1)

    @property
    def ratio(self) -> float:
        """Bytes of the numbers in the model's dtype, divided by those of ranges, tables and codes."""
        return self.original / max(self.ranges + self.tables + self.codes, 1)


@plain_signature
def encode(
    context: Context,
    *,
    level: int = 2,
    delta: bool = True,
    chunk: int = CHUNK,
    tables: Tables | None = None,
) -> bytes:
    """Encodes a context, to be sent or stored.

    Args:
      context: a context of any policy whose keys and values are held as they are (`kvjax.storage.dense`).
      level: 1, 2 or 3, from the fewest bytes to the smallest error.
      delta: whether vectors are coded as differences from the first one of ten. The released code of CacheGen has no
        differences.
      chunk: vectors of a head that are coded independently of others.
      tables: of the model, from `kvjax.transport.make_tables`; None for those of each chunk, which are sent with it.

    Raises:
      InputError: arguments that are not valid, tables of another level, or numbers that are not finite.
    """
    if isinstance(chunk, bool) or not isinstance(chunk, int) or not 1 <= chunk <= cachegen.MAX_CHUNK:
        raise InputError(f"chunk must be a whole number from 1 to {cachegen.MAX_CHUNK}; got {shown(chunk)}.")
    if not isinstance(delta, bool):
        raise InputError(f"delta must be True or False; got {shown(delta)}.")
    if tables is not None and (tables.level, tables.delta) != (level, delta):
        raise InputError(f"the tables are of level={tables.level}, delta={tables.delta}; make others, or give these.")
    about = describe(context, "transport.encode")
    read = vectors.read(context)
    settings = Settings(
        cachegen.limits(len(read.layers), level), delta, chunk, entropy.coder(), read.num_heads, read.dim
    )
    positions = [np.asarray(own.position) for layer in read.state.layers for own in layer]
    exact = [context.logits, context.tokens, context.resolved, *jax.tree.leaves(vectors.without_slots(read.state))]
    parts = [
        zlib.compress(b"".join(np.ascontiguousarray(each).tobytes() for each in distributed.to_host(exact))),
        zlib.compress(b"".join(map(varint.encode, positions))),
    ]
    ideal, made = 0.0, []
    for row in range(len(positions[0])):
        for part in _chunks(read.most(row), chunk):
            layers = [
                [
                    Piece(side, head, own.sides[side][part])
                    for group in groups
                    for side in range(2)
                    for head, own in zip(group.heads, group.rows[row], strict=True)
                ]
                for groups in read.layers
            ]
            record, bits = records.write(layers, settings, None if tables is None else tables.layers)
            made.append(record)
            ideal += bits
    assert context.tokens is not None
    numbers = 2 * read.dim * sum(int((each >= 0).sum()) for each in positions)
    about |= {
        "level": level, "delta": delta, "chunk": chunk, "coder": settings.coder,
        "tables": None if tables is None else tables.digest, "tokens": list(context.tokens.shape),
        "parts": [len(each) for each in parts], "records": len(made), "ideal_bits": ideal, "numbers": numbers,
        "original": numbers * read.state.layers[0][0].key.dtype.itemsize,
    }  # fmt: skip
    header = json.dumps(about).encode()
    checksum = zlib.crc32(header + b"".join(parts))
    return b"".join([MAGIC, HEADER.pack(len(header), checksum), header, *parts, *made])


@cache_keywords()
def decode(
    data: bytes,
    model: Model,
    policy: Policy | CacheSpec | None = None,
    *,
    tables: Tables | None = None,
    options: CacheOptions | None = None,
    **cache: Unpack[CacheKeywords],
) -> Context:
    """Decodes a context that `encode` has encoded.

    Positions, statistics, logits and lengths are equal to the bit, and keys and values as the codes have them, so that
    the context is continued as one whose cache has these.

    Args:
      data: the bytes.
      model: that of the context.
      policy: that of the context, or its `CacheSpec`; None = as the bytes say, unless it is made of functions of the
        user's own.
      tables: those that `encode` was given.
      options: see `kvjax.CacheOptions`; limits and blocks are those of the context.
      cache: fields of the options.

    Raises:
      CheckpointError: the bytes are damaged, cut off, or of another model, cache or tables.
      ConfigError: they were coded by constriction, which is not installed.
    """
    options = (options or CacheOptions()).updated(cache, "decode")
    about, parts, found = _opened(data)
    if about["tables"] != (None if tables is None else tables.digest):
        raise CheckpointError("the message was encoded with other tables; give those that `encode` was given.")
    restored = restore(about, model, policy, options, "the message")
    layout, model = restored.layout, restored.made.model
    rows, width = about["tokens"]
    shapes = arranged_state(state_shapes(model, layout, rows), ())
    exact = _Arrays(parts[0])
    logits = exact.next((rows, model.config.vocab_size), np.float32)
    tokens, resolved = exact.next((rows, width), np.int32), exact.next((restored.rows, 2), np.int32)
    rest = jax.tree.map(lambda leaf: exact.next(leaf.shape, leaf.dtype), vectors.without_slots(shapes))
    exact.end()
    shaped = [own.position.shape for layer in shapes.layers for own in layer]
    positions = iter(varint.decode(_inflated(parts[1]), shaped))
    empty = [
        [_Slots(group, next(positions), np.zeros(own.key.shape, np.float32), np.zeros(own.key.shape, np.float32))
         for group, own in zip(groups, layer, strict=True)]
        for groups, layer in zip(layout.decode, shapes.layers, strict=True)
    ]  # fmt: skip
    settings = Settings(
        cachegen.limits(len(empty), about["level"]), about["delta"], about["chunk"], about["coder"],
        sum(len(group.heads) for group in empty[0]), model.config.head_dim,
    )  # fmt: skip
    used = 0
    for row in range(rows):
        live = [[group.live(row) for group in layer] for layer in empty]
        most = max(len(slots) for layer in live for heads in layer for slots in heads)
        for part in _chunks(most, settings.chunk):
            if used == len(found):
                raise CheckpointError("the message is cut off: a record is missing.")
            _fill(found[used], empty, live, row, part, settings, tables)
            used += 1
    if used != len(found):
        raise CheckpointError("the message is damaged: it has more records than its context.")
    layers = tuple(
        Layer(vectors.filled(own, each.position, *(side.astype(layout.dtype) for side in each.sides))
              for own, each in zip(layer, groups, strict=True))
        for layer, groups in zip(rest.layers, empty, strict=True)
    )  # fmt: skip
    state = on_its_memory(model.place(rest.replace(layers=layers)), layout)
    return Context(
        model.place(logits), arranged_state(state, restored.runs), layout, tokens, restored.rows, restored.boundaries,
        restored.made, resolved,
    )  # fmt: skip


def report(data: bytes) -> Report:
    """Returns the bytes of a message by part.

    Args:
      data: from `encode`.

    Raises:
      CheckpointError: the bytes are damaged or cut off.
    """
    about, parts, found = _opened(data)
    ranges, tables, codes = (sum(len(each[place]) for each in found) for place in range(3))
    exact, positions = map(len, parts)
    header = len(data) - exact - positions - ranges - tables - codes
    return Report(
        header, exact, positions, ranges, tables, codes, about["numbers"], about["ideal_bits"], about["original"]
    )


class _Slots(NamedTuple):
    """The arrays of a group of heads: positions [B, K, S], keys and values [B, K, S, D]."""

    group: Group
    position: np.ndarray
    key: np.ndarray
    value: np.ndarray

    @property
    def heads(self) -> tuple[int, ...]:
        return vectors.heads_of(self.group, self.position.shape[1])

    @property
    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        return self.key, self.value

    def live(self, row: int) -> list[np.ndarray]:
        """Returns the live slots of each head of a row, in the order of their positions."""
        return [vectors.live_slots(own) for own in self.position[row]]


def _fill(
    record: tuple[bytes, bytes, bytes],
    empty: list[list[_Slots]],
    live: list[list[list[np.ndarray]]],
    row: int,
    part: slice,
    settings: Settings,
    tables: Tables | None,
) -> None:
    """Decodes a record into the slots of a row."""

    def piece(side: int, head: int, count: int) -> Piece:
        return Piece(side, head, np.empty((count, settings.dim), np.float32))

    targets = [
        [
            (group.sides[side], place, slots[part], piece(side, head, len(slots[part])))
            for group, heads in zip(layer, held, strict=True)
            for side in range(2)
            for place, (head, slots) in enumerate(zip(group.heads, heads, strict=True))
        ]
        for layer, held in zip(empty, live, strict=True)
    ]  # fmt: skip
    pieces = [[own for *_, own in layer] for layer in targets]
    records.read(record, pieces, settings, None if tables is None else tables.layers)
    for array, place, slots, own in itertools.chain(*targets):
        array[row, place, slots] = own.x


class _Arrays:
    """Arrays whose bytes follow each other."""

    def __init__(self, data: bytes) -> None:
        self._data, self._used = _inflated(data), 0

    def next(self, shape: tuple[int, ...], dtype: DTypeLike) -> np.ndarray:
        """Returns the next array."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        own = self._data[self._used : self._used + size]
        self._used += size
        if len(own) < size:
            raise CheckpointError("the message is damaged: its arrays are not those of the context.")
        return np.frombuffer(own, dtype).reshape(shape).copy()

    def end(self) -> None:
        """Checks that nothing is left."""
        if self._used != len(self._data):
            raise CheckpointError("the message is damaged: its arrays are not those of the context.")


def _opened(data: bytes) -> tuple[JsonObject, list[bytes], list[tuple[bytes, bytes, bytes]]]:
    """Returns the header, the exact parts and the records of a message, all of whose checksums are right."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise InputError(f"data must be bytes, from kvjax.transport.encode; got {shown(data)}.")
    view = memoryview(data)
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise CheckpointError("these bytes are no message of this version of kvjax.transport.encode.")
    place = len(MAGIC) + HEADER.size
    if len(view) < place:
        raise CheckpointError("the message is cut off within its header.")
    size, checksum = HEADER.unpack(view[len(MAGIC) : place])
    header = bytes(view[place : place + size])
    try:
        about = json.loads(header)
        ends = list(itertools.accumulate(about["parts"], initial=place + size))
    except (ValueError, KeyError, TypeError, RecursionError):
        raise CheckpointError("the message is damaged, or cut off within its header.") from None
    if zlib.crc32(view[place : ends[-1]]) != checksum or len(view) < ends[-1]:
        raise CheckpointError("the message is damaged, or cut off: the checksum of its header is wrong.")
    parts = [bytes(view[start:stop]) for start, stop in itertools.pairwise(ends)]
    found = list(records.split_records(view[ends[-1] :]))
    if len(found) != about["records"]:
        raise CheckpointError(f"the message is cut off: it has {len(found)} of {about['records']} records.")
    return about, parts, found


def _chunks(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]


def _inflated(data: bytes) -> bytes:
    try:
        return zlib.decompress(data)
    except zlib.error as error:
        raise CheckpointError(f"the message is damaged: {error}.") from None
