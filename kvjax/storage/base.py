"""Storages: the form in which slots hold keys and values; `kvjax.storage.codec` has that of one vector.

Codecs and storages are frozen dataclasses: equal by value, hashable and picklable, and `repr` evaluates to an equal
object.
"""

import dataclasses
from typing import Any

from jax.typing import DTypeLike

from kvjax.arguments import check_hashable, checked_call, choice_argument, count_argument
from kvjax.errors import StorageError
from kvjax.numerics.statistics import Statistic
from kvjax.parallel.host_memory import DEVICE, HOST, MEMORIES
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.codec import Codec, CodecFunctions, Exact, entry_of, round_trip, straight_through
from kvjax.storage.layouts import ANY, Layout, SingleSlots, slots
from kvjax.storage.side import Parts, Shapes, Side

Memory = str | tuple[str, str]  # ``device``, ``host``, or a pair of these for keys and for values

ROTATED, UNROTATED = "rotated", "unrotated"
FRAMES = (ANY, ROTATED, UNROTATED)

factory = checked_call(StorageError)  # decorates the factories of storages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Storage:
    """Describes how the slots of a cache hold keys and values.

    Attributes:
      key: the codec of keys, or of their blocks.
      value: the codec of values, or of their blocks.
      layout: ``slots`` holds each vector by itself; see `Blocks`, `Tiers`, `Segments` and `Pairs`.
      residual: the number of newest positions that stay exact. Of `Blocks` those of keys or values that are encoded
        one by one.
      frame: ``any`` holds keys rotated by RoPE or not, as the policy's `positions` determine; ``rotated`` holds them
        rotated; ``unrotated`` holds them as they are before, and rotates them to their positions in each step.
      sinks: the number of first positions that stay exact, until they are evicted.
      memory: where slots are held: ``device``, ``host``, or a pair of these for keys and for values. Exact positions of
        the residual, and all that is not a key or a value, are always on the device.
      name: shown in reports; ignored by comparisons.

    Raises:
      StorageError: a field that is not valid.
    """

    key: Codec | BlockCodec
    value: Codec | BlockCodec
    layout: str | Layout = slots
    residual: int = 0
    frame: str = ANY
    memory: Memory = DEVICE
    name: str = dataclasses.field(default="custom", compare=False)
    sinks: int = 0

    def __post_init__(self) -> None:
        if self.layout != slots and not isinstance(self.layout, Layout):
            raise StorageError(
                f"storage {self.name}: layout={self.layout!r} is not valid; use 'slots', blocks(n), tiers(high) or "
                "pairs()."
            )
        layout = self.resolved_layout
        kinds = (Codec, BlockCodec) if layout.of_blocks else Codec
        if not isinstance(self.key, kinds) or not isinstance(self.value, kinds):
            raise StorageError(
                f"storage {self.name}: key={self.key!r} and value={self.value!r} must be codecs, such as "
                "kvjax.storage.Integer(4) or kvjax.storage.Exact(); of blocks only with layout=blocks(n)."
            )
        for field in ("key", "value"):
            _check_codec(f"storage {self.name}: {field}", getattr(self, field))
        choice_argument(f"storage {self.name}: frame", self.frame, FRAMES, error=StorageError)
        object.__setattr__(self, "memory", _memory(self.name, self.memory))
        for field in ("residual", "sinks"):
            count = count_argument(f"storage {self.name}: {field}", getattr(self, field), error=StorageError)
            object.__setattr__(self, field, count)
        for side, codec, map_back in (("key", self.key, "query"), ("value", self.value, "output")):
            if codec.dims is not None and getattr(codec.dims, map_back) is None:
                raise StorageError(f"storage {self.name}: {codec.dims!r} has no `{map_back}`, which {side}s need.")
        changed = next((codec for codec in (self.key, self.value) if codec.dims is not None), None)
        if changed is not None and self.frame != ROTATED:
            raise StorageError(
                f"storage {self.name}: attention runs on vectors as {changed!r} holds them, so that keys must be "
                f"rotated already; use frame='{ROTATED}', not {self.frame!r}."
            )
        if self.on_host and (changed is not None or self.frame == UNROTATED):
            raise StorageError(
                f"storage {self.name}: memory={self.memory!r} needs vectors that are read as stored; keys that are "
                "rotated in each step, and shorter vectors, must be on the device: leave out memory."
            )
        of_pairs = [codec for codec in (self.key, self.value) if isinstance(codec, Codec) and codec.of_pairs]
        if len(of_pairs) != (2 if layout.of_pairs else 0):
            raise StorageError(
                f"storage {self.name}: key={self.key!r} and value={self.value!r} with layout={self.layout!r}: codecs "
                "of two layers, such as kvjax.storage.Merged(), and layout=pairs() go together."
            )
        layout.check(self)

    @property
    def resolved_layout(self) -> Layout:
        """The layout; `SingleSlots` where it is given by its name."""
        return self.layout if isinstance(self.layout, Layout) else SingleSlots()

    @property
    def needs(self) -> frozenset[Statistic]:
        """The statistics by which the storage chooses how tokens are held."""
        return self.resolved_layout.needs

    @property
    def codecs(self) -> dict[str, Codec | BlockCodec]:
        """The codec of keys and that of values."""
        return {"key": self.key, "value": self.value}

    @property
    def exact(self) -> bool:
        """Whether keys and values are held in the model's dtype."""
        return isinstance(self.key, Exact) and isinstance(self.value, Exact)

    @property
    def memories(self) -> dict[str, str]:
        """The memory of keys and that of values: ``device`` or ``host``."""
        key, value = (self.memory, self.memory) if isinstance(self.memory, str) else self.memory
        return {"key": key, "value": value}

    @property
    def on_host(self) -> bool:
        """Whether keys or values are in host memory."""
        return HOST in self.memories.values()

    @property
    def new_tokens_separate(self) -> bool:
        """Whether a step's own tokens are separate from the slots until the step ends.

        They are appended to the slots before the step attends only if these are exact and on the device.
        """
        return self.on_host or not self.exact

    def bound(self, kv_heads: int) -> "Storage":
        """Returns the storage for a layer of `kv_heads` KV heads.

        Raises:
          StorageError: a codec does not take so many heads.
        """
        key, value = (codec.bound(kv_heads) for codec in self.codecs.values())
        return self if (key, value) == (self.key, self.value) else dataclasses.replace(self, key=key, value=value)

    def of_layer(self, layer: int, layers: int | None = None) -> "Storage":
        """Returns the storage of one layer; see `Codec.of_layer`."""
        return self._each("of_layer", layer, layers)

    def of_head(self, head: int, kv_heads: int | None = None) -> "Storage":
        """Returns the storage of one KV head of a layer; see `Codec.of_head`."""
        return self._each("of_head", head, kv_heads)

    def _each(self, method: str, *arguments: Any) -> "Storage":
        """Calls a method of every codec, those of a high tier too."""
        key, value = (getattr(codec, method)(*arguments) for codec in self.codecs.values())
        layout = self.layout
        if isinstance(layout, Layout):
            layout = layout.with_nested(lambda storage: getattr(storage, method)(*arguments))
        if (key, value, layout) == (self.key, self.value, self.layout):
            return self
        return dataclasses.replace(self, key=key, value=value, layout=layout)

    def by_age(self) -> "Storage | None":
        """Returns the storage of blocks whose tokens are encoded one by one instead, when they are as old as a block.

        None if tokens of a block are encoded together, or if there are no blocks.
        """
        found: Storage | None = self.resolved_layout.one_by_one(self)
        return found

    @property
    def of_prompt(self) -> bool:
        """Whether the blocks of a prompt are held in another form than later ones."""
        return any(isinstance(codec, BlockCodec) and codec.prompt is not None for codec in self.codecs.values())

    @property
    def joint_heads(self) -> int:
        """The number of KV heads whose vectors are held together."""
        return max(int(codec.joint_heads) for codec in self.codecs.values())

    @property
    def kept_exact(self) -> int:
        """The number of positions that stay exact: the newest of the residual, and the first ones."""
        return self.residual + self.sinks

    @property
    def divided(self) -> bool:
        """Whether a token is in one store while it is exact and in another once it is encoded."""
        return self.layout == slots and self.new_tokens_separate and self.kept_exact > 0

    @property
    def sides(self) -> dict[str, Side]:
        """The sides of keys and values: what vectors share, where they have one."""
        return {
            name: codec.side for name, codec in (("key", self.key), ("value", self.value)) if codec.side is not None
        }

    def sides_of(self, when: str) -> dict[str, Side]:
        """Returns those of `sides` that are made at one time, ``prompt`` or ``calibration``."""
        return {name: side for name, side in self.sides.items() if side.when == when}

    @property
    def shortened(self) -> bool:
        """Whether keys or values are held as shorter vectors, over which attention runs."""
        return self.key.dims is not None or self.value.dims is not None

    @property
    def label(self) -> str:
        """The name, and which of keys and values are in host memory."""
        held = [f"{side}s" for side, memory in self.memories.items() if memory == HOST]
        if not held or "memory=" in self.name:  # a name from the command line says it already
            return self.name
        return f"{self.name} on host" if len(held) == 2 else f"{self.name}, {held[0]} on host"

    def on_device(self) -> "Storage":
        """Returns the storage with everything in the device's memory, which changes no result."""
        if self.exact:
            return dataclasses.replace(self, memory=DEVICE, residual=0, sinks=0)
        return dataclasses.replace(self, memory=DEVICE)

    def bytes_per_slot(self, dim: int, dtype: DTypeLike, memory: str | None = None) -> int:
        """Returns the number of bytes of a key and a value of `dim` numbers each.

        Args:
          dim: features of a head.
          dtype: the model's.
          memory: ``device`` or ``host``, to count only what is held there; None = all.

        Of a block this is the share of one token.
        """
        return sum(self.bytes_of(side, dim, dtype) for side, own in self.memories.items() if memory in (None, own))

    def bytes_of(self, side: str, dim: int, dtype: DTypeLike) -> int:
        """Returns the bytes of a ``key`` or a ``value``; of one in a block its share, rounded up."""
        codec = self.codecs[side]
        if isinstance(codec, BlockCodec):
            size = self.resolved_layout.block_size
            assert size is not None
            return -(-codec.bytes(size, dim, dtype) // size)
        return codec.bytes(dim, dtype)

    def codes_nothing(self, tokens: int) -> bool:
        """Returns whether all of a row's `tokens` tokens stay exact."""
        return self.resolved_layout.codes_nothing(self, tokens)


def _check_codec(what: str, codec: Codec | BlockCodec) -> None:
    """Checks what a codec is, without calling its functions.

    Raises:
      StorageError: a function is missing, or it cannot be hashed. The message begins with `what`.
    """
    for name in ("parts", "encode", "decode"):
        if not callable(given := getattr(codec, name, None)):
            raise StorageError(
                f"{what}: {name}={given!r} must be a function of {type(codec).__name__}; see kvjax.storage.Codec."
            )
    check_hashable(what, codec, error=StorageError)


def _memory(name: str, given: object) -> Memory:
    """Returns a checked memory, one word if keys and values are in the same."""
    pair = (given, given) if isinstance(given, str) else tuple(given) if isinstance(given, list | tuple) else ()
    if len(pair) != 2 or any(each not in MEMORIES for each in pair):
        raise StorageError(
            f"storage {name}: memory={given!r} is not valid; use 'device', 'host', or a pair of these for keys and for "
            "values, such as ('device', 'host')."
        )
    return pair[0] if pair[0] == pair[1] else pair


__all__ = [
    "ANY", "FRAMES", "ROTATED", "UNROTATED", "Codec", "CodecFunctions", "Exact", "Memory", "Parts", "Shapes", "Side",
    "Storage", "entry_of", "factory", "round_trip", "straight_through",
]  # fmt: skip
