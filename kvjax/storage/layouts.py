"""Layouts: how the slots of a store are arranged.

A storage asks its layout what goes with it; `kvjax.cache.arrangements` has the arrays of each layout, and what a step
does with them. A new layout inherits from `Layout`.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvjax.arguments import count_argument
from kvjax.errors import StorageError
from kvjax.numerics.statistics import COUNT, MASS, Statistic
from kvjax.storage.block_codec import BlockCodec
from kvjax.storage.codec import Codec

if TYPE_CHECKING:
    from kvjax.storage.base import Storage

ANY = "any"  # the frame in which keys are held as they are
slots = "slots"  # names the layout in which each vector is held by itself, `SingleSlots`
LOWER, UPPER = "lower", "upper"  # the layers of a pair


class Layout:
    """Base class of layouts, which are frozen dataclasses.

    Attributes:
      of_blocks: whether the codecs of keys or values may be of blocks.
      of_pairs: whether the codecs are of two layers.
      uniform: whether all slots have arrays of the same form, but for exact ones.
      needs: the statistics by which tokens are encoded.
      block_size: the number of tokens that are encoded together; None = each vector is encoded by itself.
    """

    of_blocks: bool = False
    of_pairs: bool = False
    uniform: bool = False
    needs: frozenset[Statistic] = frozenset()

    @property
    def block_size(self) -> int | None:
        return None

    @property
    def nested(self) -> tuple["Storage", ...]:
        """The storages that are part of the layout."""
        return ()

    def check(self, storage: "Storage") -> None:
        """Checks the `Storage` whose layout this is.

        Raises:
          StorageError: its codecs, residual, frame, sinks or memory do not go with the layout.
        """
        if storage.on_host or storage.sinks:
            raise StorageError(
                f"storage {storage.name}: memory={storage.memory!r} and sinks={storage.sinks} are not valid with "
                f"layout={storage.layout!r}; use 'device' and 0."
            )

    def with_nested(self, change: Callable[["Storage"], "Storage"]) -> "Layout":
        """Returns the layout with a change of the storages that are part of it."""
        return self

    def one_by_one(self, storage: "Storage") -> "Storage | None":
        """Returns a storage of single slots that holds the same once all is encoded; None = there is none."""
        return None

    def codes_nothing(self, storage: "Storage", tokens: int) -> bool:
        """Returns whether all of a row's `tokens` tokens stay exact."""
        return False


@dataclasses.dataclass(frozen=True)
class SingleSlots(Layout):
    """The layout in which each vector is held by itself; ``layout="slots"`` in a storage."""

    uniform = True

    def check(self, storage: "Storage") -> None:
        pass

    def codes_nothing(self, storage: "Storage", tokens: int) -> bool:
        return bool(storage.kept_exact >= tokens)


@dataclasses.dataclass(frozen=True)
class Blocks(Layout):
    """The layout in which blocks of consecutive tokens are encoded together.

    Tokens are counted in order of position. When a row has seen t tokens, the first ⌊t / size⌋ blocks are encoded, and
    the t mod size newest tokens are exact. A key or value whose codec is of one vector is encoded by its age instead;
    see `Storage.residual`.

    Attributes:
      size: the number of tokens of a block.

    Raises:
      StorageError: a size below 1.
    """

    size: int
    of_blocks = True

    def __post_init__(self) -> None:
        size = count_argument("blocks: size", self.size, minimum=1, error=StorageError)
        object.__setattr__(self, "size", size)

    @property
    def block_size(self) -> int:
        return self.size

    def check(self, storage: "Storage") -> None:
        super().check(storage)
        of_blocks = [codec for codec in storage.codecs.values() if isinstance(codec, BlockCodec)]
        if not of_blocks:
            raise StorageError(f"storage {storage.name}: layout={self!r} needs a BlockCodec; use layout='slots'.")
        if len(of_blocks) == 2 and storage.residual:
            raise StorageError(
                f"storage {storage.name}: residual={storage.residual} is for single vectors, and keys and values are "
                "both in blocks; use residual=0."
            )
        for codec in of_blocks:
            codec.check(self.size)

    def one_by_one(self, storage: "Storage") -> "Storage | None":
        key, value = (
            codec.single if isinstance(codec, BlockCodec) else codec for codec in storage.codecs.values()
        )  # fmt: skip
        if key is None or value is None:
            return None
        return dataclasses.replace(storage, key=key, value=value, layout=slots, residual=self.size)

    def codes_nothing(self, storage: "Storage", tokens: int) -> bool:
        late = {True: self.size > tokens, False: storage.residual >= tokens}
        return all(late[isinstance(codec, BlockCodec)] for codec in storage.codecs.values())


@dataclasses.dataclass(frozen=True)
class Tiers(Layout):
    """The layout in which slots that a policy evicts are encoded into a second tier instead of being dropped.

    The policy's live slots are the high tier, which its budget counts. What it evicts stays in the low tier for ever,
    in the storage's own codecs. Queries attend to both tiers; low slots have no statistics.

    Attributes:
      high: the `Storage` of the high tier, of single slots on the device.
      low_capacity: the number of slots of the low tier, whose oldest entry is lost when it is full; None = there is
        room for all that is evicted.

    Raises:
      StorageError: a capacity below 1.
    """

    high: Any
    low_capacity: int | None = None

    def __post_init__(self) -> None:
        if self.low_capacity is not None:
            low = count_argument("tiers: low_capacity", self.low_capacity, minimum=1, error=StorageError)
            object.__setattr__(self, "low_capacity", low)

    def check(self, storage: "Storage") -> None:
        super().check(storage)
        high = self.high
        single = isinstance(high, type(storage)) and high.layout == slots
        if not single or high.kept_exact or high.on_host or high.sides or high.frame != ANY:
            raise StorageError(
                f"storage {storage.name}: high={high!r} must be a storage of single slots on the device, without "
                "residual and sides; use one such as kvjax.storage.int8()."
            )
        if storage.exact or storage.shortened:
            raise StorageError(
                f"storage {storage.name}: key={storage.key!r} and value={storage.value!r} must be codecs of whole "
                "vectors, other than Exact, for the low tier; use one such as kvjax.storage.Integer(2)."
            )
        if storage.residual or storage.frame != ANY:
            raise StorageError(
                f"storage {storage.name}: residual={storage.residual} and frame={storage.frame!r} are not valid with "
                "tiers; the policy says what stays exact. Leave them out."
            )

    @property
    def nested(self) -> tuple["Storage", ...]:
        return (self.high,)

    def with_nested(self, change: Callable[["Storage"], "Storage"]) -> "Tiers":
        return dataclasses.replace(self, high=change(self.high))


@dataclasses.dataclass(frozen=True)
class Segments(Layout):
    """The layout in which tokens are encoded when a segment ends, in two tiers by the attention that they were paid.

    The prompt is a segment, and so is every `window` tokens that follow. When a segment ends, the ⌈ratio·n⌉ of its n
    tokens with the largest mean attention go to the high tier, for ever, and the others to the low one, which has the
    storage's own codecs. Until then tokens are exact. Keys of a segment's tier are a block.

    Attributes:
      high: the `Storage` whose codecs hold the high tier; None in that storage itself.
      ratio: the share of a segment that goes to the high tier.
      window: the number of tokens of a segment after the prompt.
    """

    high: Any
    ratio: float
    window: int
    of_blocks = True
    needs = frozenset({MASS, COUNT})

    @property
    def block_size(self) -> int:
        return self.window

    def check(self, storage: "Storage") -> None:
        super().check(storage)
        tiers = [storage, *([] if self.high is None else [self.high])]
        for each in tiers:
            in_blocks = isinstance(each, type(storage)) and isinstance(each.key, BlockCodec)
            if not (in_blocks and isinstance(each.value, Codec)):
                raise StorageError(
                    f"storage {storage.name}: a tier of segments stores keys in blocks and values individually; got "
                    f"{each!r}."
                )
        if any(each.residual or each.frame != ANY or each.shortened for each in tiers):
            raise StorageError(
                f"storage {storage.name}: residual, frame and shorter vectors are not valid with segments; leave them "
                "out."
            )

    @property
    def nested(self) -> tuple["Storage", ...]:
        return () if self.high is None else (self.high,)

    def with_nested(self, change: Callable[["Storage"], "Storage"]) -> "Segments":
        return self if self.high is None else dataclasses.replace(self, high=change(self.high))


@dataclasses.dataclass(frozen=True)
class Pairs(Layout):
    """The layout in which two neighbouring layers hold their prompts together.

    Layers from `start` on are taken in pairs, each with the next one. A last one without a partner, and all before
    `start`, hold their tokens exactly, and so does every layer those that follow the prompt.

    Attributes:
      start: the first layer of the first pair; None = half of the model's layers, rounded down.

    Raises:
      StorageError: a start below 0.
    """

    start: int | None = None
    of_pairs = True

    def __post_init__(self) -> None:
        if self.start is not None:
            object.__setattr__(self, "start", count_argument("pairs: start", self.start, error=StorageError))

    def check(self, storage: "Storage") -> None:
        super().check(storage)
        if storage.residual or storage.frame != ANY:
            raise StorageError(
                f"storage {storage.name}: residual={storage.residual} and frame={storage.frame!r} are not valid with "
                "pairs of layers, in which all tokens after the prompt stay exact; leave them out."
            )

    def half(self, layer: int, layers: int) -> str | None:
        """Returns whether a layer is the ``lower`` or the ``upper`` one of a pair, or None if it is in none.

        Args:
          layer: its number.
          layers: the number of layers of the model.

        Raises:
          StorageError: the model has no layer `start`.
        """
        start = layers // 2 if self.start is None else self.start
        if start >= layers:
            raise StorageError(f"pairs: start={start} is not a layer of this model; give one from 0 to {layers - 1}.")
        if layer < start or layer >= layers - (layers - start) % 2:
            return None
        return UPPER if (layer - start) % 2 else LOWER
