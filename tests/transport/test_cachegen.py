"""CacheGen's codes are those of the worked cases, to the bit, and a message is the context but for what they round."""

import json
import zlib

import jax
import numpy as np
import pytest

from kvjax import contexts, policies, selection, storage, transport
from kvjax.cache import CacheSpec
from kvjax.cache.layer_stack import arranged_state
from kvjax.errors import CheckpointError, ConfigError, InputError
from kvjax.transport import cachegen, entropy, messages, varint, vectors
from kvjax.transport.entropy import Symbols
from kvjax.transport.inflate import inflate
from kvjax.transport.tables import split
from tests.tiny import random_tokens, tiny

SPECS = {
    "full": CacheSpec(policies.full()),
    "statistics": CacheSpec(policies.h2o(12)),
    "heads of different lengths": CacheSpec(policies.adakv(policies.snapkv(12, window=4))),
    "groups of heads": CacheSpec(policies.split_heads([[1, 0], [0, 1]], policies.full(), policies.window(8))),
    "an index": CacheSpec(policies.full(), selection=selection.quest(page=4, budget=12)),
    "row memory": CacheSpec(policies.rkv(8)),
    "in host memory": CacheSpec(policies.full(), storage.dense(memory="host")),
}


def cases(shared_data, kind):
    arrays = np.load(shared_data / "examples" / "reuse_cases.npz")
    for number, case in enumerate(json.loads(bytes(arrays["cases"]))):
        if case["kind"] == kind:
            yield (
                case["arguments"],
                case["expect"],
                {name.removeprefix(f"{number}_"): arrays[name] for name in arrays if name.startswith(f"{number}_")},
            )


def bits(codes, limit, delta, chunk, tables=None):
    """The ideal bits of anchors and of the other vectors, by the given tables or those of each chunk."""
    found = np.zeros(2)
    for start in range(0, len(codes), chunk):
        for place, symbols in enumerate(split(codes[start : start + chunk], limit, delta, chunk)):
            if len(symbols.codes):
                table = entropy.count(symbols) if tables is None else tables[place]
                found[place] += entropy.ideal_bits(symbols, table)
    return found


def test_worked_vectors(shared_data):
    count = 0
    for arguments, expect, own in cases(shared_data, "cachegen"):
        limit, options = arguments["limit"], {name: arguments[name] for name in ("delta", "chunk")}
        codes, ranges = made = cachegen.encode_vectors(own["in_x"], limit, **options)
        np.testing.assert_array_equal(codes, own["codes"])
        np.testing.assert_array_equal(ranges, own["ranges"])
        np.testing.assert_array_equal(cachegen.decode_vectors(made, limit, **options), own["decoded"])
        np.testing.assert_allclose(bits(codes, limit, **options), expect["chunk_bits"], rtol=1e-9)
        if "in_calibration" in own:
            calibration = cachegen.encode_vectors(own["in_calibration"], limit, **options).codes
            tables = [entropy.count(each) for each in split(calibration, limit, **options)]
            np.testing.assert_array_equal(tables[1], own["table"])
            np.testing.assert_allclose(bits(codes, limit, **options, tables=tables), expect["model_bits"], rtol=1e-9)
        count += 1
    assert count == 5


def test_worked_caches_and_limits(shared_data):
    count = 0
    for arguments, expect, own in cases(shared_data, "cachegen_context"):
        limits = cachegen.limits(len(own["in_x"]), arguments["level"])
        options = {name: arguments[name] for name in ("delta", "chunk")}
        assert [*map(list, limits)] == [expect["key_limits"], expect["value_limits"]]
        for layer, both in enumerate(own["in_x"]):
            for side, x in enumerate(both):
                made = cachegen.encode_vectors(x, limits[side][layer], **options)
                np.testing.assert_array_equal(made.codes, own["codes"][layer, side])
                decoded = cachegen.decode_vectors(made, limits[side][layer], **options)
                np.testing.assert_array_equal(decoded, own["decoded"][layer, side])
                found = bits(made.codes[0], limits[side][layer], **options)
                np.testing.assert_allclose(found, own["chunk_bits"][layer, side], rtol=1e-6)
        count += 1
    for arguments, expect, _ in cases(shared_data, "cachegen_limits"):
        assert [*map(list, cachegen.limits(**arguments))] == [expect["key_limits"], expect["value_limits"]]
        count += 1
    assert count == 5


@pytest.mark.parametrize("by", [entropy.ANS, entropy.ZLIB])
def test_streams_are_lossless_and_as_short_as_their_tables_allow(by):
    if by == entropy.ANS:
        pytest.importorskip("constriction", reason="needs kvjax[transport]")
    rng, streams = np.random.default_rng(0), []
    for count, channels, limit in ((1350, 24, 7), (150, 24, 127), (0, 3, 5), (1, 2, 15)):
        codes = np.clip(np.rint(rng.normal(size=(count, channels)) * limit / 3), -limit, limit).astype(np.int8)
        symbols = Symbols(codes, limit)
        streams.append((symbols, entropy.count(symbols)))
    data = entropy.compress(streams, by)
    found = entropy.decompress(data, [(len(each.codes), each.limit, table) for each, table in streams], by)
    for codes, (symbols, _) in zip(found, streams, strict=True):
        np.testing.assert_array_equal(codes, symbols.codes)
    if by == entropy.ANS:
        assert 8 * len(data) <= 1.01 * sum(entropy.ideal_bits(*each) for each in streams) + 8 * 64


def test_positions_of_any_size_are_lossless():
    rng = np.random.default_rng(0)
    arrays = [np.array([[-1, 0, 2**31 - 1, -(2**31), 5]]), rng.integers(-(2**31), 2**31, (3, 4)), np.zeros((2, 0))]
    arrays = [each.astype(np.int32) for each in arrays]
    data = b"".join(map(varint.encode, arrays))
    for one, two in zip(varint.decode(data, [each.shape for each in arrays]), arrays, strict=True):
        np.testing.assert_array_equal(one, two)
    assert len(varint.encode(np.arange(10_000))) == 10_000
    with pytest.raises(CheckpointError, match="positions"):
        varint.decode(data[:-1], [each.shape for each in arrays])


def context_of(name, layers=2):
    rows = [random_tokens(1, length, seed=length)[0] for length in (50, 31)]
    return contexts.prefill(tiny(layers=layers).model, rows, SPECS[name])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("options", [{}, {"level": 1, "delta": False, "chunk": 7}], ids=["differences", "chunks of 7"])
def test_a_message_is_the_context_but_for_what_codes_round(name, options):
    context = context_of(name)
    model, data = context.made.model, transport.encode(context, **options)
    found = transport.decode(data, model)
    limits = cachegen.limits(2, options.get("level", 2))
    read, other = vectors.read(context), vectors.read(found)
    for layer, (groups, decoded) in enumerate(zip(read.layers, other.layers, strict=True)):
        for group, own in zip(groups, decoded, strict=True):
            for heads, rights in zip(group.rows, own.rows, strict=True):
                for head, right in zip(heads, rights, strict=True):
                    np.testing.assert_array_equal(head.slots, right.slots)
                    for side in range(2):
                        kwargs = {"delta": options.get("delta", True), "chunk": options.get("chunk", cachegen.CHUNK)}
                        coded = cachegen.encode_vectors(head.sides[side], limits[side][layer], **kwargs)
                        expected = cachegen.decode_vectors(coded, limits[side][layer], **kwargs)
                        np.testing.assert_array_equal(right.sides[side], expected)
                        error = np.abs(right.sides[side] - head.sides[side])
                        assert error.max(initial=0) <= 1.01 * coded.ranges.max(initial=0) / (2 * limits[side][layer])
    # All else is equal to the bit, and where it was.
    for one, two in zip(*(jax.tree.leaves(vectors.without_slots(each.state)) for each in (read, other)), strict=True):
        np.testing.assert_array_equal(one, two)
    for one, two in zip(*(jax.tree.leaves(each.state) for each in (context, found)), strict=True):
        assert one.sharding.memory_kind == two.sharding.memory_kind and one.dtype == two.dtype
    np.testing.assert_array_equal(found.logits, context.logits)
    np.testing.assert_array_equal(found.tokens, context.tokens)
    assert found.boundaries == context.boundaries and found.layout.decode == context.layout.decode
    report = transport.report(data)
    assert report.total == len(data) and report.original == 4 * report.numbers > 0
    if entropy.coder() == entropy.ANS:
        streams = 2 * 2 * -(-50 // options.get("chunk", 50))
        assert 8 * report.codes <= 1.01 * report.ideal_bits + 8 * 64 * streams
    if name == "full":
        decoded = contexts.decode(model, contexts.extend(model, found, [[5, 6], [7]]), max_new_tokens=3)
        assert decoded.tokens.shape == (2, 3)


def test_tables_of_the_model_are_not_sent(tmp_path):
    context = context_of("full")
    model = context.made.model
    tables = transport.make_tables([context, context_of("statistics")])
    tables.save(tmp_path / "tables.npz")
    loaded = transport.Tables.load(tmp_path / "tables.npz")
    assert loaded.digest == tables.digest
    data = transport.encode(context, tables=tables)
    assert transport.report(data).tables == 0 < transport.report(transport.encode(context)).tables
    one, two = transport.decode(data, model, tables=loaded), transport.decode(transport.encode(context), model)
    for a, b in zip(*(jax.tree.leaves(arranged_state(each.state, ())) for each in (one, two)), strict=True):
        np.testing.assert_array_equal(a, b)
    others = transport.make_tables([context])
    for given in ({}, {"tables": others}):
        with pytest.raises(CheckpointError, match="other tables"):
            transport.decode(data, model, **given)
    with pytest.raises(InputError, match=r"the tables are of level=2, delta=True"):
        transport.encode(context, level=1, tables=tables)
    with pytest.raises(CheckpointError, match="has no tables"):
        transport.Tables.load(tmp_path / "nothing.npz")


def test_without_the_entropy_coder_codes_are_compressed_by_zlib(monkeypatch):
    context = context_of("full", layers=1)
    model, data = context.made.model, transport.encode(context)
    installed = entropy.coder()
    monkeypatch.setattr(entropy, "coder", lambda: entropy.ZLIB)
    other = transport.encode(context)
    one = transport.decode(other, model)
    if installed == entropy.ANS:
        with pytest.raises(ConfigError, match=r"kvjax\[transport\]"):
            transport.decode(data, model)
    monkeypatch.undo()
    two = transport.decode(data, model)
    for a, b in zip(*(jax.tree.leaves(each.state) for each in (one, two)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_whatever_is_damaged_or_cut_off_is_noticed():
    context = context_of("statistics", layers=1)
    model, data = context.made.model, transport.encode(context, chunk=5)
    for place in np.random.default_rng(0).integers(0, len(data), 60):
        spoiled = bytearray(data)
        spoiled[place] ^= 16
        with pytest.raises(CheckpointError, match=r"damaged|no message|cut off"):
            transport.decode(bytes(spoiled), model)
    for length in (0, 10, 30, len(data) // 2, len(data) - 1):
        with pytest.raises(CheckpointError, match=r"cut off|no message"):
            transport.decode(data[:length], model)
    with pytest.raises(CheckpointError, match="another model"):
        transport.decode(data, tiny(layers=1, seed=5).model)
    with pytest.raises(CheckpointError, match="another policy"):
        transport.decode(data, model, policies.h2o(13))
    with pytest.raises(InputError, match="data must be bytes"):
        transport.decode("text", model)


def test_a_part_does_not_become_larger_than_it_must_be():
    """Parts that inflate without end are refused, whatever their checksums."""
    context = context_of("full", layers=1)
    model, data = context.made.model, transport.encode(context)
    assert transport.decode(data, model, max_bytes=1 << 20).num_rows == 2
    with pytest.raises(CheckpointError, match="more than max_bytes="):
        transport.decode(data, model, max_bytes=1000)
    bomb = zlib.compress(bytes(1 << 24), 9)
    assert len(bomb) < 20_000
    for limit in (0, 1000, (1 << 24) - 1):
        with pytest.raises(CheckpointError, match="the size of a part"):
            inflate(bomb, limit)
    assert len(inflate(bomb, 1 << 24)) == 1 << 24
    for damaged in (bomb[:-1], bomb + b"more", b"nothing"):
        with pytest.raises(CheckpointError, match="damaged"):
            inflate(damaged, 1 << 24)
    about, parts, _ = messages._opened(data)
    header = json.dumps(about | {"parts": [len(bomb), len(parts[1])]}).encode()
    checksum = zlib.crc32(header + bomb + parts[1])
    place = len(messages.MAGIC) + messages.HEADER.size + messages.HEADER.unpack_from(data, len(messages.MAGIC))[0]
    rest = data[place + sum(map(len, parts)) :]
    forged = messages.MAGIC + messages.HEADER.pack(len(header), checksum) + header + bomb + parts[1] + rest
    with pytest.raises(CheckpointError, match="the size of a part"):
        transport.decode(forged, model)


def test_what_cannot_be_coded_is_refused():
    model, text = tiny(layers=1).model, random_tokens(1, 20, seed=1)
    with pytest.raises(InputError, match="coded by storage int8"):
        transport.encode(contexts.prefill(model, text, policies.full(), storage=storage.int8()))
    context = contexts.prefill(model, text, policies.full())
    for options, message in (
        ({"level": 4}, "level must be 1, 2 or 3"), ({"chunk": 0}, "chunk must be"), ({"delta": 1}, "delta must be"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            transport.encode(context, **options)
    with pytest.raises(InputError, match="at least one context"):
        transport.make_tables([])
    with pytest.raises(InputError, match="at most 65504"):
        cachegen.encode_vectors(np.full((1, 2), 7e4), 7)
    with pytest.raises(InputError, match="delta=False"):
        cachegen.encode_vectors(np.array([[6e4], [-6e4]]), 7)
    with pytest.raises(InputError, match="finite"):
        cachegen.encode_vectors(np.array([[np.nan]]), 7)
