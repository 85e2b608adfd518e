"""The slots of a step and its own tokens: joined, decoded, and rotated for attention."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from kvjax.cache.groups import Group
from kvjax.cache.slots import append, constrain, empty_stats, longest, ranks, slots_of, transient
from kvjax.cache.state import Block, LayerKV
from kvjax.kernels.coded import Coded, as_array
from kvjax.numerics.rope import Rope
from kvjax.parallel.host_memory import HOST, gather
from kvjax.storage import store as held
from kvjax.storage.base import Codec, Exact, Storage
from kvjax.storage.dims import Chain
from kvjax.storage.side import Sides

if TYPE_CHECKING:
    from kvjax.cache.step.interface import LayerArgs, StepInputs

Array = jax.Array
T = TypeVar("T")


class KeyRotation(NamedTuple):
    """The rotation of keys that are held as they are before it to their positions.

    Attributes:
      rope: the model's rotary embedding.
      frequencies: of the rows, see `Rope.frequencies`.
    """

    rope: Rope
    frequencies: Array

    def apply(self, key: Array, position: Array) -> Array:
        """Rotates keys [B, K, S, D] to positions [B, K, S]."""
        return self.rope.rotate(key, position, self.frequencies)

    def invert(self, key: Array, position: Array) -> Array:
        """Inverts `apply`."""
        return self.rope.unrotate(key, position, self.frequencies).astype(key.dtype)


class Pool(NamedTuple):
    """The slots of a layer and the tokens of a step.

    The step's own tokens are appended to the layer, or follow its slots; see `Storage.new_tokens_separate`.

    Attributes:
      layer: the layer, with the step's tokens if it is dense.
      own: key and value [B, K, n, D] of the step's tokens that follow the layer's slots, or None.
      position: [B, K, S'] int32 of all slots.
      stats: statistic name -> [B, K, S', ...].
      index: the selection's index; arrays with an entry for each slot have one for all slots.
      sides: what keys and values share, of prompts [B, K, ...] and of a calibration [K, ...].
    """

    layer: LayerKV
    own: tuple[Array, Array] | None
    position: Array
    stats: dict[str, Array]
    index: Any
    sides: Sides

    @property
    def coded(self) -> bool:
        """Whether slots must be decoded."""
        return any(set(parts) != {"exact"} for store in self.layer.stores for parts in store.values())

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype that keys and values are decoded to."""
        return jnp.dtype((self.layer.value if self.own is None else self.own[1]).dtype)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of slots of each store, and of the step's own tokens."""
        stores = self.layer.stores
        # The arrays of one store may have other sizes than its slots; see `kvjax.cache.arrangements.blocks`.
        sizes = [self.layer.position.shape[2]]
        if len(stores) > 1:
            sizes = [jax.tree.leaves(store["value"])[0].shape[2] for store in stores]
        return (*sizes, *(() if self.own is None else (self.own[0].shape[2],)))

    def cut(self, x: Array) -> list[Array]:
        """Splits an array of all slots, [B, K, S', ...], into stores and the step's own tokens."""
        starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        return [x[:, :, start : start + size] for start, size in zip(starts, self.sizes, strict=True)]


def joined(pieces: tuple[Array, ...]) -> Array:
    """Joins pieces [B, K, S_i, ...] to one array [B, K, S', ...]."""
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, axis=2)


def prompt_pool(key: Array, value: Array, block: Block, group: Group) -> Pool:
    """Returns the pool of a prompt in one shot: its own keys and values."""
    shape = slots_of(key)
    stats = empty_stats(group.needs, group.remembers, shape)
    index: Any = group.selection.init(shape, key.shape[3], key.dtype) if group.selection.in_prompt else {}
    layer = constrain(transient(key, value, block.position, stats, index))
    return Pool(layer, None, layer.position, layer.stats, layer.index, {})


def pool_of(layer: LayerKV, inputs: "StepInputs", block: Block, group: Group, args: "LayerArgs") -> Pool:
    """Returns the pool of a layer and the tokens of a block.

    Args:
      layer: the slots.
      inputs: the tokens' keys and values.
      block: the tokens.
      group: the storage and the selection.
      args: of the layer.
    """
    key, value = inputs.key, inputs.value
    if not group.storage.new_tokens_separate:
        # Constrained before attention too: if KV heads are replicated but query heads are not, XLA would otherwise
        # write the cache in parts and gather it at every step.
        layer = constrain(append(layer, key, value, block.position, group.policy.page), by_xla=group.by_xla)
        return Pool(layer, None, layer.position, layer.stats, layer.index, {})
    layer = constrain(layer, by_xla=group.by_xla)
    own = jnp.broadcast_to(block.position[:, None], key.shape[:3])
    new = empty_stats(group.needs, group.remembers, slots_of(key))
    index = layer.index
    if group.selection.per_slot:
        entries = group.selection.entries(index, inputs.rotated_key, args.skew)
        joined_up = {name: jnp.concatenate([index[name], own], axis=2) for name, own in entries.items()}
        index = index | joined_up
    stats = {name: jnp.concatenate([leaf, new[name]], axis=2) for name, leaf in layer.stats.items()}
    position = jnp.concatenate([layer.position, own], axis=2)
    return Pool(layer, (key, value), position, stats, index, {**(args.sides or {}), **layer.sides})


def decoded(pool: Pool, group: Group, *, whole: bool = False) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Decodes the keys and values [B, K, S_i, D] of each piece; see `pieces`."""
    keys, values = pieces(pool, group, whole=whole)
    return tuple(map(as_array, keys)), tuple(map(as_array, values))


def pieces(pool: Pool, group: Group, *, whole: bool = False) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the keys and values [B, K, S_i, D] of each piece: arrays, or `Coded` vectors on the device.

    Keys are rotated as they are stored, which is not at all if ``positions="cache"``. What is in host memory and will
    be gathered is None here: moving it to the device would take the time that gathering saves.

    Args:
      pool: the slots.
      group: the storage.
      whole: whether vectors that are held shorter are decoded to all D features; attention runs on the shorter ones.
    """
    if pool.own is None:
        return (pool.layer.key,), (pool.layer.value,)

    def piece(side: str, number: int) -> Any:
        storage = group.stores[number]
        if number == 0 and storage.memories[side] == HOST and group.gathered is not None:
            return None
        found = group.arrangement.decoded(group.storage, pool.layer, number, side, pool.dtype, pool.sides)
        return found if found is not None else _piece(storage, pool.layer.stores[number], side, pool, whole)

    found = [(piece("key", number), piece("value", number)) for number in range(len(group.stores))]
    # A query sees its own block exactly: its tokens are a piece of their own until they are encoded.
    keys, values = zip(*found, pool.own, strict=True)
    return keys, values


def _piece(storage: Storage, store: held.Store, side: str, pool: Pool, whole: bool) -> Any:
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


def fetched(pool: Pool, group: Group, slots: Array, whole: tuple[Any, Any]) -> tuple[Any, Any]:
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

    def fetch(side: str, x: Any) -> Any:
        # Keys that were rotated in this step are nowhere else.
        if isinstance(x, Array):
            return gather(x, slots)
        own: held.Store = {side: {name: gather(part, slots) for name, part in store[side].items()}}
        return _piece(storage, own, side, pool, whole=False)

    return fetch("key", whole[0]), fetch("value", whole[1])


def placed(pool: Pool, keys: tuple[Any, ...], rotation: KeyRotation | None) -> tuple[Any, ...]:
    """Rotates the keys [B, K, S_i, D] of each piece to their positions; None = they are as attention takes them."""
    if rotation is None:
        return keys
    return tuple(rotation.apply(as_array(key), at) for key, at in zip(keys, pool.cut(pool.position), strict=True))


def run_after_inputs(function: Callable[..., T], pool: Pool, *arguments: Any) -> T:
    """Calls ``function(pool, *arguments)``, which decodes slots, after its arguments have been computed.

    Decoding depends on nothing that is computed in a step. XLA's scheduler for CPUs would decode every layer before the
    first one attends, and hold a decoded copy of the whole cache; it ignores optimization barriers. A branch of a
    condition is not entered before its arguments have been computed.

    Args:
      function: uses every argument; its result does not matter if no row has a token.
      pool: the slots.
      arguments: further arguments.
    """
    if not pool.coded:
        return function(pool, *arguments)

    def zeros(*operands: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *operands))

    def in_branch(*operands: Any) -> Any:
        # If no row has a token, nothing changes, whatever attention returns.
        return jax.lax.cond(jnp.any(operands[0].position >= 0), function, zeros, *operands)

    return jax.lax.platform_dependent(pool, *arguments, cpu=in_branch, default=function)


def rotated_by_rank(
    pool: Pool, keys: tuple[Any, ...], query: Array, block: Block, rope: Rope, fresh: bool
) -> tuple[Array, tuple[Array, ...]]:
    """Rotates query and keys to their ranks among the live slots of their head (StreamingLLM).

    Args:
      pool: the slots.
      keys: [B, K, S_i, D] of each piece, arrays or `Coded`, not rotated.
      query: [B, H, n, D], not rotated.
      block: the tokens of the step.
      rope: the model's rotary embedding.
      fresh: whether the slots are the block's tokens in order.
    """
    query_rank, key_rank = ranks(block.position, pool.position, in_order=fresh)
    # The query heads of a group share their KV head's slots, and so its ranks.
    query_rank = jnp.repeat(query_rank, query.shape[1] // pool.position.shape[1], axis=1)
    # Frequencies that depend on a length depend on the largest rank here.
    frequencies = rope.frequencies(longest(pool.position))
    turned = (rope.rotate(as_array(key), rank, frequencies) for key, rank in zip(keys, pool.cut(key_rank), strict=True))
    return rope.rotate(query, query_rank, frequencies), tuple(turned)
