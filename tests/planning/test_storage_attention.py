"""Attention in a storage drive: pages are counted as they are, and expected as drawn slots touch them."""

import itertools

import numpy as np
import pytest

from kvjax.errors import InputError
from kvjax.planning.served_model import ServedModel
from kvjax.planning.storage_attention import storage_bytes, storage_seconds

MODEL = ServedModel(params=1, layers=3, heads=8, kv_heads=2, dim=16)  # 32 bytes of a vector


def test_bytes():
    found = storage_bytes(MODEL, 1000, channels=4, slots=100, page=256)
    assert (found.stored, found.cache, found.link) == (3 * 2 * 1000 * 32, 2 * 2 * 1000 * 32, 2 * 8 * 16 * 2)
    # A channel has 2,000 bytes, and a page 8 vectors: 8 pages for each of 4 channels of 2 heads, 125 of each side.
    assert (found.channel_pages, found.all_pages, found.most_slot_pages) == (64, 500, 400)
    assert 64 * 256 < found.read < found.most_read == 256 * 464
    # Where all slots are chosen, expectation, bound and the whole cache are the same.
    whole = storage_bytes(MODEL, 1000, channels=4, slots=5000, page=256)
    assert whole.slot_pages == whole.most_slot_pages == whole.all_pages == 500
    one = storage_bytes(MODEL, 1000, channels=4, slots=1, page=256)
    assert one.slot_pages == pytest.approx(4) and one.most_slot_pages == 4
    # Vectors that are longer than a page take all of theirs.
    long = storage_bytes(MODEL, 1000, channels=16, slots=10, page=20)
    assert (long.slot_pages, long.most_slot_pages, long.all_pages) == (80, 80, 8000)


@pytest.mark.parametrize(("tokens", "chosen", "page"), [(7, 3, 96), (8, 2, 128), (5, 4, 64), (6, 5, 128)])
def test_expected_pages_are_the_mean_over_all_choices(tokens, chosen, page):
    each = page // 32
    counts = [len({at // each for at in slots}) for slots in itertools.combinations(range(tokens), chosen)]
    found = storage_bytes(MODEL, tokens, channels=1, slots=chosen, page=page)
    assert found.slot_pages == pytest.approx(4 * np.mean(counts), rel=1e-12)
    assert found.most_slot_pages == 4 * max(counts)


def test_seconds():
    found = storage_bytes(MODEL, 1000, channels=4, slots=100, page=256)
    times = storage_seconds(MODEL, found, flash_rate=1e6, link_rate=1e5, rows=5, page=256)
    link = found.link / 1e5
    assert times.sparse == pytest.approx(15 * (found.read / 1e6 + link))
    assert times.most_sparse == pytest.approx(15 * (464 * 256 / 1e6 + link))
    assert times.dense == pytest.approx(15 * (500 * 256 / 1e6 + link))
    assert times.device == pytest.approx(15 * (500 * 256 / 1e6 + found.cache / 1e5))
    assert times.sparse < times.most_sparse < times.dense < times.device


@pytest.mark.parametrize(
    ("change", "match"), [({"channels": 17}, "features"), ({"slots": 0}, "slots"), ({"page": 0}, "page")]
)
def test_what_is_refused(change, match):
    with pytest.raises(InputError, match=match):
        storage_bytes(MODEL, 10, **{"channels": 2, "slots": 3, **change})
    found = storage_bytes(MODEL, 10, channels=2, slots=3)
    with pytest.raises(InputError, match="flash_rate"):
        storage_seconds(MODEL, found, flash_rate=0, link_rate=1.0)
