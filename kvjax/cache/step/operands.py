"""The operands of a step: the vectors of a pool, decoded and rotated for attention and for what ranks slots."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kvjax import attention
from kvjax.cache.groups import Group
from kvjax.cache.step.pool import KeyRotation, Pool
from kvjax.kernels.coded import Coded, as_array
from kvjax.numerics.rope import Rope
from kvjax.parallel.host_memory import HOST, gather
from kvjax.storage import store as held
from kvjax.storage.base import Codec, Exact, Storage
from kvjax.storage.dims import Chain
from kvjax.typing import PyTree

Array = jax.Array

#: Queries [B, H, n, D] and the keys [B, K, S_i, D] of each piece -> the same, rotated to their ranks.
RotateByRank = Callable[[Array, tuple[PyTree, ...]], tuple[Array, tuple[Array, ...]]]


class Part(NamedTuple):
    """The operands of one call of attention.

    Attributes:
      key: [B, K, S, D], rotated.
      value: [B, K, S, D'], where D' is D unless values are held shorter.
      position: [B, K, S] int32; -1 for a slot that is empty or not read.
    """

    key: Array | Coded
    value: Array | Coded
    position: Array


class Operands(NamedTuple):
    """The operands of attention.

    Attributes:
      query: [B, H, n, D], rotated.
      keys: [B, K, S_i, D] of each piece of the pool, arrays or `Coded`, rotated; possibly shorter vectors, see `Dims`.
        None for a store in host memory that is gathered.
      values: [B, K, S_i, D] of each piece, as `keys`.
      placed: `keys`, rotated to their positions if they are not rotated to ranks.
    """

    query: Array
    keys: tuple[PyTree, ...]
    values: tuple[PyTree, ...]
    placed: tuple[PyTree, ...]


def operands(
    pool: Pool,
    query: Array,
    group: Group,
    rotation: KeyRotation | None,
    by_rank: RotateByRank | None = None,
    *,
    whole: bool = False,
) -> Operands:
    """Decodes what must be decoded, and rotates what is held as it is before rotation.

    Args:
      pool: the slots.
      query: [B, H, n, D], rotated, unless ``positions="cache"``.
      group: the storage.
      rotation: of keys that are held as they are before it; or None.
      by_rank: rotates query and keys to their ranks; None unless ``positions="cache"``.
      whole: see `pieces`.
    """
    keys, values = pieces(pool, group, whole=whole)
    rotated_keys = at_positions = placed(pool, keys, rotation)
    if by_rank is not None:
        query, rotated_keys = by_rank(query, at_positions)
    return Operands(query, rotated_keys, values, at_positions)


def ranked_vectors(
    pool: Pool, group: Group, rotation: KeyRotation | None, made: Operands | None
) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
    """Returns the keys and values [B, K, S_i, D] of each piece as policies look at them: arrays with all features.

    Args:
      pool: the slots.
      group: the storage.
      rotation: of keys that are held as they are before it; or None.
      made: the operands of attention of the same pool, or None; used again where they have all features.
    """
    if made is None or group.storage.shortened:
        keys, values = pieces(pool, group, whole=True)
        keys = placed(pool, keys, rotation)
    else:
        keys, values = made.placed, made.values
    return tuple(map(as_array, keys)), tuple(map(as_array, values))


def problems(
    query: Array,
    parts: Sequence[Part],
    log_weights: Sequence[Array | None],
    pool: Pool,
    group: Group,
    **options: Any,
) -> tuple[list[attention.Problem], list[attention.Mapped] | None]:
    """Returns the problem of each part, and how its values are mapped (None = as they are).

    Args:
      query: [B, H, n, D], rotated.
      parts: the operands.
      log_weights: [B, K, S_i] float32 of each part, which a merge adds to logits, or None.
      pool: the slots.
      group: the storage and the statistics.
      options: further arguments of `kvjax.attention.problem`.
    """
    # Parts whose vectors are held shorter have queries of their own; see `Dims`.
    queries, maps = [query] * len(parts), None
    offsets: list[Array | None] = [None] * len(parts)
    if pool.new_tokens is not None and group.storage.shortened:
        queries[0], offsets[0], first = _mapped(query, pool, group, options["scale"])
        maps = [first, *[attention.Mapped()] * (len(parts) - 1)]
    made = [
        attention.problem(
            own, part.key, part.value, key_position=part.position, needs=group.reports, log_weight=weight,
            offset=offset, **options,
        )
        for own, part, weight, offset in zip(queries, parts, log_weights, offsets, strict=True)
    ]  # fmt: skip
    return made, maps


def _mapped(query: Array, pool: Pool, group: Group, scale: float) -> tuple[Array, Array | None, attention.Mapped]:
    """Returns how a step attends to the coded slots, whose vectors are shorter.

    Args:
      query: [B, H, n, D], rotated.
      pool: the slots.
      group: the storage.
      scale: of the logits.

    Returns:
      The queries [B, H, n, D'], what is added to the logits of each query ([B, K, G, n] float32 or None), and how the
      values are mapped.
    """
    storage, offset, output = group.storage, None, None
    if storage.key.dims is not None:
        # [B, K, G, n, D] float32
        grouped = by_kv_head(query, pool.position).astype(jnp.float32)
        short, more = storage.key.dims.query(grouped, held.aligned(storage, pool.sides, "key", grouped.ndim))
        query, offset = attention.ungroup(short).astype(query.dtype), more * scale
    if storage.value.dims is not None:
        # Of [B, K, G, n, D']
        side = held.aligned(storage, pool.sides, "value", 5)
        output = functools.partial(storage.value.dims.output, side=side)
    return query, offset, attention.Mapped(output)


def by_kv_head(query: Array, position: Array) -> Array:
    """Groups queries [B, H, n, D] by KV head: [B, K, G, n, D]."""
    return query.reshape(*position.shape[:2], -1, *query.shape[2:])


def decoded(pool: Pool, group: Group, *, whole: bool = False) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
    """Decodes the keys and values [B, K, S_i, D] of each piece; see `pieces`."""
    keys, values = pieces(pool, group, whole=whole)
    return tuple(map(as_array, keys)), tuple(map(as_array, values))


def pieces(pool: Pool, group: Group, *, whole: bool = False) -> tuple[tuple[PyTree, ...], tuple[PyTree, ...]]:
    """Returns the keys and values [B, K, S_i, D] of each piece: arrays, or `Coded` vectors on the device.

    Keys are rotated as they are stored, which is not at all if ``positions="cache"``. What is in host memory and will
    be gathered is None here: moving it to the device would take the time that gathering saves.

    Args:
      pool: the slots.
      group: the storage.
      whole: whether vectors that are held shorter are decoded to all D features; attention runs on the shorter ones.
    """
    if pool.new_tokens is None:
        return (pool.layer.key,), (pool.layer.value,)

    def piece(side: str, number: int) -> PyTree:
        storage = group.stores[number]
        if number == 0 and storage.memories[side] == HOST and group.gathered is not None:
            return None
        found = group.arrangement.decoded(group.storage, pool.layer, number, side, pool.dtype, pool.sides)
        return found if found is not None else _piece(storage, pool.layer.stores[number], side, pool, whole)

    found = [(piece("key", number), piece("value", number)) for number in range(len(group.stores))]
    # A query sees its own block exactly: its tokens are a piece of their own until they are encoded.
    keys, values = zip(*found, pool.new_tokens, strict=True)
    return keys, values


def _piece(storage: Storage, store: held.Store, side: str, pool: Pool, whole: bool) -> PyTree:
    """Returns the keys or the values of a store whose slots are held each by itself; see `pieces`."""
    codec, dim = storage.codecs[side], pool.layer.dim
    shared = held.aligned(storage, pool.sides, side, 4)
    if isinstance(codec, Chain) and not whole:
        codec, dim, shared = codec.codec, codec.dims.dim(dim), None
    if isinstance(codec, Exact) or storage.memories[side] == HOST:
        run = held.decode_side if whole else held.attended_side
        return run(storage, store, side, pool.layer.dim, pool.dtype, pool.sides)
    assert isinstance(codec, Codec)
    return Coded(parts=store[side], side=shared, codec=codec, dim=dim, dtype=pool.dtype)


def fetched(pool: Pool, group: Group, slots: Array, whole: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
    """Gathers the keys and values [B, K, W, D] of slots [B, K, W] of the first piece, for attention.

    Args:
      pool: the slots.
      group: the storage.
      slots: of the first piece.
      whole: keys and values [B, K, S, D] of the first piece, from `pieces`.

    Returns:
      Arrays, or `Coded` vectors.
    """
    store, storage = pool.layer.stores[0], group.stores[0]

    def fetch(side: str, x: object) -> PyTree:
        # Keys that were rotated in this step are nowhere else.
        if isinstance(x, Array):
            return gather(x, slots)
        own: held.Store = {side: {name: gather(part, slots) for name, part in store[side].items()}}
        return _piece(storage, own, side, pool, whole=False)

    return fetch("key", whole[0]), fetch("value", whole[1])


def placed(pool: Pool, keys: tuple[PyTree, ...], rotation: KeyRotation | None) -> tuple[PyTree, ...]:
    """Rotates the keys [B, K, S_i, D] of each piece to their positions; None = they are as attention takes them."""
    if rotation is None:
        return keys
    return tuple(rotation.apply(as_array(key), at) for key, at in zip(keys, pool.cut(pool.position), strict=True))


def rotate_to_ranks(
    query: Array,
    keys: tuple[PyTree, ...],
    query_rank: Array,
    key_ranks: Sequence[Array],
    longest: Array,
    rope: Rope,
    size: int | None = None,
) -> tuple[Array, tuple[Array, ...]]:
    """Rotates query and keys to their ranks among the live slots of their head (StreamingLLM).

    Args:
      query: [B, H, n, D], not rotated.
      keys: [B, K, S_i, D] of each piece, arrays or `Coded`, not rotated.
      query_rank: [B, K, n] int32.
      key_ranks: [B, K, S_i] int32 of each piece.
      longest: [B] int32, the number of live slots of the fullest head: frequencies may depend on it.
      rope: the layer's rotary embedding.
      size: the number of ranks of live slots; None = not known.
    """
    frequencies = rope.frequencies(longest)

    def turn(key: PyTree, at: Array) -> Array:
        x = as_array(key)
        return rope.rotate(x, at, frequencies) if size is None else rope.rotate_to_ranks(x, at, frequencies, size)

    turned = tuple(map(turn, keys, key_ranks))
    # The query heads of a group share their KV head's slots, and so its ranks.
    query_rank = jnp.repeat(query_rank, query.shape[1] // query_rank.shape[1], axis=1)
    return rope.rotate(query, query_rank, frequencies), turned
