"""What the fields of a `kvjax.storage.Storage` with a layout must be."""

from typing import Any

from kvjax.arguments import check_hashable
from kvjax.errors import StorageError
from kvjax.storage.codec import Codec
from kvjax.storage.layouts import BlockCodec, Blocks, Segments, Tiers, slots

ANY = "any"  # the frame in which keys are held as they are


def check_codec(what: str, codec: Codec | BlockCodec) -> None:
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


def check_layout(storage: Any) -> None:
    """Checks a `Storage` whose layout is not of single slots.

    Raises:
      StorageError: its codecs, residual, frame, sinks or memory do not go with the layout.
    """
    if storage.on_host or storage.sinks:
        raise StorageError(
            f"storage {storage.name}: memory={storage.memory!r} and sinks={storage.sinks} are not valid with "
            f"layout={storage.layout!r}; use 'device' and 0."
        )
    if isinstance(storage.layout, Blocks):
        _check_blocks(storage, storage.layout)
    elif isinstance(storage.layout, Tiers):
        _check_tiers(storage, storage.layout.high)
    elif isinstance(storage.layout, Segments):
        _check_segments(storage, storage.layout)
    elif storage.residual or storage.frame != ANY:
        raise StorageError(
            f"storage {storage.name}: residual={storage.residual} and frame={storage.frame!r} are not valid with pairs "
            "of layers, in which all that follows a prompt stays exact; leave them out."
        )


def _check_segments(storage: Any, layout: Segments) -> None:
    tiers = [storage, *([] if layout.high is None else [layout.high])]
    for each in tiers:
        if not (isinstance(each, type(storage)) and isinstance(each.key, BlockCodec) and isinstance(each.value, Codec)):
            raise StorageError(
                f"storage {storage.name}: a tier of segments holds keys in blocks and values by themselves; got "
                f"{each!r}."
            )
    if any(each.residual or each.frame != ANY or each.shortened for each in tiers):
        raise StorageError(
            f"storage {storage.name}: residual, frame and shorter vectors are not valid with segments; leave them out."
        )


def _check_tiers(storage: Any, high: Any) -> None:
    single = isinstance(high, type(storage)) and high.layout == slots
    if not single or high.kept_exact or high.on_host or high.sides or high.frame != ANY:
        raise StorageError(
            f"storage {storage.name}: high={high!r} must be a storage of single slots on the device, without residual "
            "and sides; use one such as kvjax.storage.int8()."
        )
    if storage.exact or storage.shortened:
        raise StorageError(
            f"storage {storage.name}: key={storage.key!r} and value={storage.value!r} must be codecs of whole vectors, "
            "other than Exact, for the low tier; use one such as kvjax.storage.Integer(2)."
        )
    if storage.residual or storage.frame != ANY:
        raise StorageError(
            f"storage {storage.name}: residual={storage.residual} and frame={storage.frame!r} are not valid with "
            "tiers; the policy says what stays exact. Leave them out."
        )


def _check_blocks(storage: Any, layout: Blocks) -> None:
    of_blocks = [codec for codec in storage.codecs.values() if isinstance(codec, BlockCodec)]
    if not of_blocks:
        raise StorageError(f"storage {storage.name}: layout={layout!r} needs a BlockCodec; use layout='slots'.")
    if len(of_blocks) == 2 and storage.residual:
        raise StorageError(
            f"storage {storage.name}: residual={storage.residual} is for single vectors, and keys and values are both "
            "in blocks; use residual=0."
        )
    for codec in of_blocks:
        codec.check(layout.size)
