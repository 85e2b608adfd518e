"""Contexts as bytes: keys and values in the codes of CacheGen or KVTC, all else as it is.

A message is a header, everything that is exact, and a record for each row and chunk of tokens, which has a checksum of
its own and can be decoded by itself.
"""

import dataclasses
import itertools
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple, Unpack

import jax
import numpy as np

from kvjax.arguments import plain_signature
from kvjax.cache.groups import Group
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.layout import CacheLayout
from kvjax.cache.spec import CacheSpec
from kvjax.cache.state import Layer
from kvjax.contexts.description import describe, on_its_memory, restore, state_shapes
from kvjax.errors import CheckpointError, InputError, shown
from kvjax.generation.context import Context, Made
from kvjax.generation.options import CacheKeywords, CacheOptions, cache_keywords, options_of
from kvjax.models.model import Model
from kvjax.parallel import distributed
from kvjax.policies.base import Policy
from kvjax.transport import entropy, records, varint, vectors
from kvjax.transport.cachegen import CHUNK
from kvjax.transport.codecs import CacheGen, Chunk, Codec, Coder, Shape
from kvjax.transport.inflate import inflate
from kvjax.transport.records import Parts, Piece
from kvjax.transport.tables import Tables
from kvjax.typing import JsonObject
from kvjax.units import size

MAGIC = b"kvjax context 2\n"
HEADER = struct.Struct("<II")  # bytes of the header, and the checksum of it and of the exact parts


@dataclasses.dataclass(frozen=True)
class Report:
    """The bytes of a message by part.

    Attributes:
      header: what describes the context.
      exact: logits, tokens, statistics, and all else that is not coded.
      positions: of the slots.
      ranges: of the vectors; under `KVTC`, the vectors that are exact.
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
    codec: Codec | None = None,
) -> bytes:
    """Encodes a context, to be sent or stored.

    Args:
      context: a context of any policy whose keys and values are held as they are (`kvjax.storage.dense`).
      level: see `kvjax.transport.CacheGen`.
      delta: see `kvjax.transport.CacheGen`.
      chunk: see `kvjax.transport.CacheGen`.
      tables: see `kvjax.transport.CacheGen`.
      codec: `kvjax.transport.CacheGen` or `kvjax.transport.KVTC`; None = CacheGen with the arguments before.

    Raises:
      InputError: arguments that are not valid, tables of another level, a transform of another model, or numbers that
        are not finite.
    """
    codec = CacheGen(level, delta, chunk, tables) if codec is None else codec
    about = describe(context, "transport.encode")
    read = vectors.read(context)
    shape = _shape(context.layout, read.num_heads, read.dim, read.state.layers[0][0].key.dtype, context.made)
    by = entropy.coder()
    coder = codec.coder(shape, by)
    positions = [np.asarray(own.position) for layer in read.state.layers for own in layer]
    exact = [context.logits, context.tokens, context.resolved, *jax.tree.leaves(vectors.without_slots(read.state))]
    parts = [
        zlib.compress(b"".join(np.ascontiguousarray(each).tobytes() for each in distributed.to_host(exact))),
        zlib.compress(b"".join(map(varint.encode, positions))),
    ]
    ideal, made = 0.0, []
    totals = np.asarray(read.state.total)
    for row in range(len(positions[0])):
        most = read.most(row)
        for part in _chunks(most, codec.chunk):
            layers = [
                [
                    Piece(side, head, own.sides[side][part], own.position[part])
                    for group in groups
                    for side in range(2)
                    for head, own in zip(group.heads, group.rows[row], strict=True)
                ]
                for groups in read.layers
            ]
            written, bits = coder.write(Chunk(layers, part.start, most, int(totals[row])))
            made.append(records.joined(written))
            ideal += bits
    assert context.tokens is not None
    numbers = 2 * read.dim * sum(int((each >= 0).sum()) for each in positions)
    about |= {
        "codec": codec.name, codec.name: codec.about(), "coder": by, "tokens": list(context.tokens.shape),
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
    codec: Codec | None = None,
    max_bytes: int | None = None,
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
      codec: the one that `encode` was given; None = CacheGen, as the bytes say, with these tables.
      max_bytes: the most bytes that the context may have; larger ones are refused before anything is decompressed. A
        message of unknown origin may be much smaller than its context. None = any number.
      options: see `kvjax.CacheOptions`; limits and blocks are those of the context.
      cache: fields of the options.

    Raises:
      CheckpointError: the bytes are damaged, cut off, or of another model, cache, codec or tables; or the context has
        more than `max_bytes`.
      ConfigError: they were coded by constriction, which is not installed.
    """
    options = options_of(options, cache, "decode")
    about, parts, found = _opened(data)
    codec = _codec_of(about, tables) if codec is None else codec
    if (about["codec"], about.get(codec.name)) != (codec.name, codec.about()):
        raise CheckpointError(
            f"the message was encoded by another codec: {about['codec']}, {shown(about.get(about['codec']))}; give the "
            "one that `encode` was given."
        )
    restored = restore(about, model, policy, options, "the message")
    layout, model = restored.layout, restored.made.model
    rows, width = _shape_of_tokens(about)
    shapes = arranged_state(state_shapes(model, layout, rows), ())
    leaves, tree = jax.tree.flatten(vectors.without_slots(shapes))
    exact = [
        jax.ShapeDtypeStruct((rows, model.config.vocab_size), np.float32),
        jax.ShapeDtypeStruct((rows, width), np.int32),
        jax.ShapeDtypeStruct((restored.rows, 2), np.int32),
        *leaves,
    ]
    slots = jax.tree.leaves([(own.position, own.stores) for layer in shapes.layers for own in layer])
    whole = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in (*exact, *slots))
    if max_bytes is not None and whole > max_bytes:
        raise CheckpointError(f"the context has {size(whole)}, more than max_bytes={size(max_bytes)}.")
    logits, tokens, resolved, *others = _arrays(parts[0], exact)
    rest = jax.tree.unflatten(tree, others)
    shaped = [own.position.shape for layer in shapes.layers for own in layer]
    positions = iter(varint.decode(inflate(parts[1], 5 * sum(map(math.prod, shaped))), shaped))
    empty = [
        [_Slots(group, next(positions), np.zeros(own.key.shape, np.float32), np.zeros(own.key.shape, np.float32))
         for group, own in zip(groups, layer, strict=True)]
        for groups, layer in zip(layout.decode, shapes.layers, strict=True)
    ]  # fmt: skip
    heads = sum(len(group.heads) for group in empty[0])
    shape = _shape(layout, heads, model.config.head_dim, np.dtype(layout.dtype), restored.made)
    coder = codec.coder(shape, about["coder"])
    totals = np.asarray(rest.total)
    used = 0
    for row in range(rows):
        live = [[group.live(row) for group in layer] for layer in empty]
        most = max(len(slots) for layer in live for heads in layer for slots in heads)
        for part in _chunks(most, codec.chunk):
            if used == len(found):
                raise CheckpointError("the message is cut off: a record is missing.")
            _fill(found[used], empty, live, row, part, coder, most, int(totals[row]))
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
    record: Parts,
    empty: list[list[_Slots]],
    live: list[list[list[np.ndarray]]],
    row: int,
    part: slice,
    coder: Coder,
    most: int,
    total: int,
) -> None:
    """Decodes a record into the slots of a row."""

    def piece(group: _Slots, side: int, place: int, head: int, slots: np.ndarray) -> Piece:
        dim = group.key.shape[3]
        return Piece(side, head, np.empty((len(slots), dim), np.float32), group.position[row, place, slots])

    targets = [
        [
            (group.sides[side], place, slots[part], piece(group, side, place, head, slots[part]))
            for group, heads in zip(layer, held, strict=True)
            for side in range(2)
            for place, (head, slots) in enumerate(zip(group.heads, heads, strict=True))
        ]
        for layer, held in zip(empty, live, strict=True)
    ]  # fmt: skip
    coder.read(record, Chunk([[own for *_, own in layer] for layer in targets], part.start, most, total))
    for array, place, slots, own in itertools.chain(*targets):
        array[row, place, slots] = own.x


def _shape(layout: CacheLayout, heads: int, dim: int, dtype: np.dtype, made: Made | None) -> Shape:
    """Returns the shape of keys and values, and how keys are rotated."""
    assert made is not None
    config = made.model.config
    ropes = tuple(
        config.kind(index).rope if vectors.unrotates(groups[0]) else None for index, groups in enumerate(layout.decode)
    )
    return Shape(heads, dim, np.dtype(dtype), ropes)


def _codec_of(about: JsonObject, tables: Tables | None) -> Codec:
    """Returns the codec that a message says, with tables that it does not bring."""
    if about["codec"] != CacheGen.name:
        raise CheckpointError(f"the message was encoded by {about['codec']}; give its codec=.")
    own = about[CacheGen.name]
    if own["tables"] != (None if tables is None else tables.digest):
        raise CheckpointError("the message was encoded with other tables; give those that `encode` was given.")
    return CacheGen(own["level"], own["delta"], own["chunk"], tables)


def _shape_of_tokens(about: JsonObject) -> tuple[int, int]:
    rows, width = about["tokens"]
    if not all(isinstance(each, int) and each >= 0 for each in (rows, width)) or not rows:
        raise CheckpointError("the message is damaged: its tokens have no shape.")
    return rows, width


def _arrays(data: bytes, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[np.ndarray]:
    """Returns arrays of some shapes, whose bytes follow each other."""
    sizes = [math.prod(each.shape) * each.dtype.itemsize for each in shapes]
    whole = inflate(data, sum(sizes))
    if len(whole) != sum(sizes):
        raise CheckpointError("the message is damaged: its arrays are not those of the context.")
    ends = itertools.accumulate(sizes, initial=0)
    return [
        np.frombuffer(whole[start:stop], each.dtype).reshape(each.shape).copy()
        for each, (start, stop) in zip(shapes, itertools.pairwise(ends), strict=True)
    ]


def _opened(data: bytes) -> tuple[JsonObject, list[bytes], list[Parts]]:
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
