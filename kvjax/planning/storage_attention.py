"""Bytes and seconds of attention that a storage drive computes where the cache lies (InstInfer, arXiv:2409.04992).

The drive holds keys twice: channel by channel, from which a query reads its r largest channels, and token by token,
from which it reads the k slots of highest approximate score, as values are. Flash is read in whole pages. All figures
are planned.
"""

import math
from typing import NamedTuple

from kvjax.arguments import check_type, number_argument
from kvjax.errors import InputError
from kvjax.inputs import check_count
from kvjax.planning.served_model import ServedModel

FLASH_PAGE = 4096  # bytes


class StorageBytes(NamedTuple):
    """The bytes of a decoding step, for a layer and a row; pages are those of flash.

    Attributes:
      stored: of the cache: keys twice, and values.
      channel_pages: of the runs of the chosen channels, each of which begins with a page.
      slot_pages: of the keys and values of the chosen slots, the expected number if these are drawn at random.
      most_slot_pages: the largest number that they can touch.
      all_pages: of all keys and values, token by token, which attention to the whole cache reads.
      read: bytes of `channel_pages` and `slot_pages`.
      most_read: bytes of `channel_pages` and `most_slot_pages`.
      link: between the drive and the device: queries out, outputs back.
      cache: of keys and values without copies, which go over the link if the device attends.
    """

    stored: int
    channel_pages: int
    slot_pages: float
    most_slot_pages: int
    all_pages: int
    read: float
    most_read: int
    link: int
    cache: int


class StorageSeconds(NamedTuple):
    """The seconds of attention of a decoding step, in all layers and rows.

    Attributes:
      sparse: of attention in the drive to the chosen slots: pages and link.
      most_sparse: the same, if the slots touch as many pages as they can.
      dense: of attention in the drive to all slots.
      device: of attention on the device, to which the whole cache moves.
    """

    sparse: float
    most_sparse: float
    dense: float
    device: float


def storage_bytes(
    model: ServedModel, tokens: int, *, channels: int, slots: int, page: int = FLASH_PAGE
) -> StorageBytes:
    """Returns the bytes of attention in a drive to `slots` slots that `channels` channels of the keys rank.

    KV heads choose channels and slots each by itself. No vector crosses the end of a page, unless it is longer than
    one. Means of values and unwritten tokens are in the drive's own memory, and not counted; nor are the key and the
    value of a new token, which go to the drive either way.

    Args:
      model: the model.
      tokens: of the text, n.
      channels: r, at most the features of a head.
      slots: k; those beyond n do not count.
      page: bytes of a page of flash.

    Raises:
      InputError: a number out of range.
    """
    check_type("model", model, ServedModel, "a ServedModel, such as ServedModel.of(model.config)")
    for name, value in (("tokens", tokens), ("channels", channels), ("slots", slots), ("page", page)):
        check_count(name, value)
    if channels > model.dim:
        raise InputError(f"channels={channels} exceeds the {model.dim} features of a head.")
    heads, vector = model.kv_heads, model.dim * model.width
    side = heads * tokens * vector
    channel_pages = heads * channels * math.ceil(tokens * model.width / page)
    chosen = min(slots, tokens)
    slot_pages = 2 * heads * _expected_pages(tokens, chosen, vector, page)
    most_slot_pages = 2 * heads * _most_pages(tokens, chosen, vector, page)
    return StorageBytes(
        stored=3 * side, channel_pages=channel_pages, slot_pages=slot_pages, most_slot_pages=most_slot_pages,
        all_pages=2 * heads * _most_pages(tokens, tokens, vector, page), read=page * (channel_pages + slot_pages),
        most_read=page * (channel_pages + most_slot_pages), link=2 * model.heads * model.dim * model.width,
        cache=2 * side,
    )  # fmt: skip


def storage_seconds(
    model: ServedModel, found: StorageBytes, *, flash_rate: float, link_rate: float, rows: int = 1,
    page: int = FLASH_PAGE,
) -> StorageSeconds:  # fmt: skip
    """Returns the seconds that reading and moving take, one after the other; computing in the drive takes none.

    Args:
      model: the model.
      found: the bytes of a layer and a row.
      flash_rate: bytes/s of all flash channels of the drive together.
      link_rate: bytes/s between the drive and the device.
      rows: of the batch.
      page: as in `storage_bytes`.

    Raises:
      InputError: a number out of range.
    """
    check_count("rows", rows)
    for name, value in (("flash_rate", flash_rate), ("link_rate", link_rate)):
        number_argument(name, value, minimum=1.0, maximum=math.inf, error=InputError)
    times, link = rows * model.layers, found.link / link_rate
    whole = found.all_pages * page / flash_rate
    return StorageSeconds(
        sparse=times * (found.read / flash_rate + link), most_sparse=times * (found.most_read / flash_rate + link),
        dense=times * (whole + link), device=times * (whole + found.cache / link_rate),
    )  # fmt: skip


def _most_pages(tokens: int, chosen: int, vector: int, page: int) -> int:
    """Returns the largest number of pages that some of the vectors of a head touch: one each, or all pages."""
    if vector > page:
        return chosen * math.ceil(vector / page)
    return min(chosen, math.ceil(tokens / (page // vector)))


def _expected_pages(tokens: int, chosen: int, vector: int, page: int) -> float:
    """Returns the expected number of pages that vectors of a head touch, which are drawn without replacement."""
    if vector > page:
        return float(_most_pages(tokens, chosen, vector, page))
    each = page // vector
    whole, rest = divmod(tokens, each)
    return whole * _touched(tokens, chosen, each) + (_touched(tokens, chosen, rest) if rest else 0.0)


def _touched(tokens: int, chosen: int, inside: int) -> float:
    """Returns the chance that at least one of the chosen tokens is among those `inside` a page."""
    if chosen > tokens - inside:
        return 1.0
    # C(n - inside, chosen) / C(n, chosen), factor by factor
    return 1.0 - math.prod((tokens - chosen - at) / (tokens - at) for at in range(inside))
