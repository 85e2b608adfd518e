"""Formats, dtypes and damaged folders."""

import contextlib
import itertools
import json
import logging
import struct
import sys
import traceback
import types

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from kvjax.checkpoint import locate, names, readers
from kvjax.checkpoint.huggingface import load, save
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import families
from tests.checkpoint.folders import assert_same, flax_tree, folder_with, raw_config


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_shards(folder, found, suffix, write):
    """The tensors in three files and an index."""
    files = {}
    for i in range(3):
        name = f"{suffix.split('.')[0]}-{i + 1:05}-of-00003.{suffix.split('.')[1]}"
        part = dict(list(found.items())[i::3])
        write(part, folder / name)
        files |= dict.fromkeys(part, name)
    (folder / f"{suffix}.index.json").write_text(json.dumps({"weight_map": files}))


def write_flax(found, path):
    path.write_bytes(flax.serialization.to_bytes(flax_tree(found)))


def write_torch(found, path):
    torch = pytest.importorskip("torch", reason="pytorch_model.bin needs torch")
    torch.save({name: torch.from_numpy(array) for name, array in found.items()}, path)


FORMATS = {
    "safetensors": ("model.safetensors", save_file),
    "flax": ("flax_model.msgpack", write_flax),
    "torch": ("pytorch_model.bin", write_torch),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("shards", [False, True], ids=["one", "shards"])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["opt", "gpt2", "gpt_neox", "phi3", "llama"])
def test_formats(family, form, shards, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "PIECE", 7)  # tensors of several pieces
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 400)  # and of several of Flax's chunks
    _, params, found = folder_with(tmp_path, raw_config(family))
    name, write = FORMATS[form]
    if shards:
        write_shards(tmp_path, found, name, write)
    else:
        write(found, tmp_path / name)
    model = load(tmp_path)
    assert_same(model.params, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(model.params))
    assert model.tokenizer is None


@pytest.mark.parametrize("stored", ["float16", "bfloat16", "float64"])
def test_stored_dtypes(stored, tmp_path):
    _, params, found = folder_with(tmp_path, raw_config("llama"))
    dtype = np.dtype(getattr(ml_dtypes, stored, None) or stored)
    save_file({name: array.astype(dtype) for name, array in found.items()}, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert_same(model.params, jax.tree.map(lambda x: x.astype(dtype).astype(np.float32), params))
    write_flax({name: array.astype(dtype) for name, array in found.items()}, tmp_path / "flax_model.msgpack")
    (tmp_path / "model.safetensors").unlink()
    assert_same(load(tmp_path).params, model.params)


def test_torch_bfloat16(tmp_path):
    torch = pytest.importorskip("torch", reason="pytorch_model.bin needs torch")
    _, params, found = folder_with(tmp_path, raw_config("llama"))
    for zipped in (True, False):
        state = {name: torch.from_numpy(array).bfloat16() for name, array in found.items()}
        torch.save(state, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        model = load(tmp_path, dtype=jnp.bfloat16)
        assert_same(model.params, params, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [jnp.float32, "bfloat16", np.float16])
def test_target_dtype(dtype, tmp_path):
    _, _, found = folder_with(tmp_path, raw_config("opt"))
    save_file(found, tmp_path / "model.safetensors")
    assert {leaf.dtype for leaf in jax.tree.leaves(load(tmp_path, dtype=dtype).params)} == {jnp.dtype(dtype)}
    default = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(load(tmp_path).params)} == {jnp.dtype(default)}


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "gpt_neox"])
def test_old_names_and_buffers(family, tmp_path):
    """A model saved without its head, by a release that saved its buffers, and with a tied head all the same."""
    config, params, found = folder_with(tmp_path, raw_config(family, tie_word_embeddings=True))
    assert config.tie_embeddings
    base = families.FAMILIES[family].names.prefix.partition(".")[0] + "."
    found = {name.removeprefix(base): array for name, array in found.items()}
    embedding = next(
        array
        for name, array in found.items()
        if name.endswith(("embed_tokens.weight", "wte.weight", "embed_in.weight"))
    )
    found["lm_head.weight"] = embedding.copy()
    found |= {
        "gpt2": {
            "h.0.attn.bias": np.ones((1, 1, 4, 4), np.uint8),
            "h.0.attn.masked_bias": np.array(-1e4, np.float32),
        },
        "gpt_neox": {"layers.1.attention.bias": np.ones((1, 1, 4, 4), np.bool_)},
        "llama": {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)},
        "opt": {},
    }[family]
    save_file(found, tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert_same(model.params, params)
    assert model.config == config


@pytest.mark.sampled(12)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("shards", [False, True], ids=["one", "shards"])
@pytest.mark.parametrize("family", [name for name in families.FAMILIES if name != "phi"])  # phi's is never tied
def test_tied_models_that_store_only_their_head(family, shards, form, tmp_path):
    """Which of the two names of a shared tensor a file has is up to the program that wrote it."""
    config, params, found = folder_with(tmp_path, raw_config(family, tie_word_embeddings=True))
    embedding, head = names.embedding_and_head(family)
    found[head] = found.pop(embedding)
    file, write = FORMATS[form]
    if shards:
        write_shards(tmp_path, found, file, write)
    else:
        write(found, tmp_path / file)
    model = load(tmp_path)
    assert model.config == config
    assert_same(model.params, params)
    if shards or form != "safetensors":
        return
    # Saved, it has the usual name.
    save(model, tmp_path / "saved")
    assert_same(load(tmp_path / "saved").params, params)
    assert embedding in header_of(tmp_path / "saved" / "model.safetensors")[0]
    del found[head]
    save_file(found, tmp_path / "model.safetensors")
    fails(tmp_path, f"1 missing: {embedding}")


def test_tied_head_that_differs_is_used(tmp_path):
    config, _, found = folder_with(tmp_path, raw_config("llama", tie_word_embeddings=True))
    found["lm_head.weight"] = found["model.embed_tokens.weight"] + 1
    save_file(found, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        model = load(tmp_path)
    assert config.tie_embeddings
    assert not model.config.tie_embeddings
    np.testing.assert_array_equal(model.params["head"]["kernel"], found["lm_head.weight"].T)


def fails(folder, *words, error=CheckpointError, **arguments):
    """Loading fails with one paragraph that says all the words, and shows no frame of any library."""
    with pytest.raises(error) as caught:
        load(folder, **arguments)
    message = str(caught.value)
    for word in words:
        assert word in message, message
    assert "\n" not in message
    shown = "".join(traceback.format_exception(caught.value))
    assert "site-packages" not in shown
    assert "During handling" not in shown
    return message


def good(folder, family="llama", **changes):
    config, params, found = folder_with(folder, raw_config(family, **changes))
    save_file(found, folder / "model.safetensors")
    return config, params, found


def test_missing_extra_and_misshapen_in_one_error(tmp_path):
    _, _, found = good(tmp_path)
    del found["model.norm.weight"], found["model.layers.1.mlp.up_proj.weight"]
    found["model.layers.0.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
    found["model.layers.0.mlp.down_proj.weight"] = np.zeros((16, 25), np.float32)
    save_file(found, tmp_path / "model.safetensors")
    fails(
        tmp_path, "2 missing: model.norm.weight, model.layers.1.mlp.up_proj.weight",
        "1 extra: model.layers.0.self_attn.q_proj.bias",
        "1 misshapen: model.layers.0.mlp.down_proj.weight is [16, 25] instead of [16, 24]",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"num_hidden_layers": 3}, ["9 missing", "model.layers.2.mlp.down_proj.weight"]),
        ({"num_hidden_layers": 1}, ["9 extra"]),
        ({"vocab_size": 41}, ["embed_tokens.weight is [40, 16] instead of [41, 16]"]),
        ({"hidden_size": 32}, ["21 misshapen", "model.layers.1.mlp.down_proj.weight"]),
        ({"num_key_value_heads": 4}, ["4 misshapen", "k_proj"]),
        ({"attention_bias": True}, ["8 missing", "q_proj.bias"]),
        ({"num_hidden_layers": 10**8}, ["num_hidden_layers must be", "at most 1000", "100000000"]),
        ({"hidden_size": 10**15}, ["hidden_size must be", "1000000000000000"]),
        ({"vocab_size": 10**15}, ["vocab_size must be", "1000000000000000"]),
        ({"num_attention_heads": 10**15}, ["num_attention_heads must be", "1000000000000000"]),
        ({"n_positions": 10**15, "model_type": "gpt2"}, ["n_positions must be", "1000000000000000"]),
        ({"model_type": "gpt2"}, ["missing", "extra"]),
    ],
)
def test_config_that_lies(lie, words, tmp_path):
    good(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | lie))
    impossible = any(isinstance(value, int) and value >= 10**8 for value in lie.values())
    fails(tmp_path, *words, error=ConfigError if impossible else CheckpointError)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(value, tmp_path):
    _, _, found = good(tmp_path)
    found["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(found, tmp_path / "model.safetensors")
    fails(tmp_path, "model.layers.1.mlp.up_proj.weight", "NaN or infinity")


def test_weights_beyond_the_target(tmp_path):
    _, _, found = good(tmp_path)
    found["model.norm.weight"][0] = 1e6
    save_file(found, tmp_path / "model.safetensors")
    load(tmp_path)
    fails(tmp_path, "model.norm.weight", "float16", dtype=jnp.float16)


def test_quantised_weights(tmp_path):
    _, _, found = good(tmp_path)
    found["model.norm.weight"] = np.ones(16, np.int8)
    save_file(found, tmp_path / "model.safetensors")
    fails(tmp_path, "model.norm.weight", "I8", "quantized")


def header_of(path):
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path, header, data):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_damaged_safetensors(tmp_path):
    good(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    header, data = header_of(path)
    for size in (0, 5, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        fails(tmp_path, "model.safetensors")
    path.write_bytes(whole[:-1])
    fails(tmp_path, "truncated", str(len(whole)), str(len(whole) - 1))
    path.write_bytes(whole + b"x")
    fails(tmp_path, "damaged")
    rewrite(path, b"{not json", data)
    fails(tmp_path, "header")
    rewrite(path, b"[1]", data)
    fails(tmp_path, "header")
    name = "model.norm.weight"
    for wrong in (
        {"dtype": "F32", "shape": [17], "data_offsets": header[name]["data_offsets"]},
        {"dtype": "F99", "shape": [16], "data_offsets": header[name]["data_offsets"]},
        {"dtype": "F32", "shape": [-16], "data_offsets": [64, 0]},
        {"dtype": "F32", "shape": "16", "data_offsets": [0, 64]},
        {"dtype": "F32"},
        None,
    ):
        rewrite(path, header | {name: wrong}, data)
        fails(tmp_path, name, "is inconsistent")
    rewrite(path, header | {name: header[name] | {"data_offsets": [10**9, 10**9 + 64]}}, data)
    fails(tmp_path, "truncated")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # Both say the first tensor's bytes; another's are of none.
        (lambda first, second: (first, first), ["overlap"]),
        (lambda first, second: (first, [second[0] - 4, second[1] - 4]), ["overlap", "ends at byte"]),
        (lambda first, second: (first, [second[0] + 4, second[1] + 4]), ["bytes", "are in no tensor"]),
        (lambda first, second: (second, first), None),  # in another order, as any writer may have them
    ],
)
def test_offsets_that_overlap_or_leave_bytes_out(change, words, tmp_path):
    _, _, found = good(tmp_path)
    path = tmp_path / "model.safetensors"
    header, data = header_of(path)
    ordered = sorted((name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    # Two neighbours of one shape, so that each entry is sound by itself.
    one, other = next(
        pair for pair in itertools.pairwise(ordered) if header[pair[0]]["shape"] == header[pair[1]]["shape"]
    )
    offsets = change(header[one]["data_offsets"], header[other]["data_offsets"])
    changed = {name: header[name] | {"data_offsets": own} for name, own in zip((one, other), offsets, strict=True)}
    rewrite(path, header | changed, data)
    if words is None:
        load(tmp_path)
        return
    fails(tmp_path, str(path), *words)
    assert {one, other} & set(fails(tmp_path, "damaged").replace(" overlap", "").replace(",", "").split())
    with pytest.raises(SafetensorError):
        safe_open(path, "numpy")
    assert found


def test_headers_that_the_library_refuses(tmp_path):
    good(tmp_path)
    path = tmp_path / "model.safetensors"
    header, data = header_of(path)
    name, entry = "model.norm.weight", header["model.norm.weight"]
    double = json.dumps(header)[:-1] + f', "{name}": {json.dumps(entry)}}}'
    gap = {key: value for key, value in header.items() if key != name}
    rewrite(path, double.encode(), data)
    fails(tmp_path, str(path), name, "twice")  # the library takes the last one, of which its own page warns
    for wrong, words in (
        (gap, ["are in no tensor"] if entry["data_offsets"][1] < len(data) else ["damaged"]),
        (header | {"__metadata__": {"format": 1}}, ["__metadata__"]),
        (header | {"__metadata__": [1]}, ["__metadata__"]),
        (header | {name: entry | {"shape": [True, 16]}}, [name, "is inconsistent"]),
        (header | {name: entry | {"shape": [10**400]}}, [name, "is inconsistent"]),
        (header | {name: entry | {"shape": [2**40] * 1000}}, [name, "is inconsistent"]),
    ):
        rewrite(path, wrong, data)
        fails(tmp_path, str(path), *words)
        with pytest.raises(SafetensorError):
            safe_open(path, "numpy")
    path.write_bytes((200_000_000).to_bytes(8, "little"))
    with path.open("r+b") as file:
        file.truncate(200_000_100)
    fails(tmp_path, "200000000 bytes")


def test_damaged_msgpack(tmp_path):
    _, _, found = folder_with(tmp_path, raw_config("opt"))
    path = tmp_path / "flax_model.msgpack"
    write_flax(found, path)
    whole = path.read_bytes()
    for size in (0, 1, 10, 60, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        fails(tmp_path, "flax_model.msgpack")
    path.write_bytes(whole + b"\x00")
    fails(tmp_path, "damaged")
    path.write_bytes(b"\xc1" * 100)
    fails(tmp_path, "damaged")
    rng = np.random.default_rng(0)
    for _ in range(50):  # whatever a flipped byte does, it is an error of ours or a model
        broken = bytearray(whole)
        broken[rng.integers(200)] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        with contextlib.suppress(CheckpointError):
            load(tmp_path)


def test_damaged_torch_file(tmp_path):
    torch = pytest.importorskip("torch", reason="pytorch_model.bin needs torch")
    _, _, found = folder_with(tmp_path, raw_config("llama"))
    path = tmp_path / "pytorch_model.bin"
    write_torch(found, path)
    path.write_bytes(path.read_bytes()[:-500])
    fails(tmp_path, "pytorch_model.bin", "damaged")
    torch.save({"model": torch.nn.Linear(2, 2)}, path)  # code: refused, not run
    fails(tmp_path, "pytorch_model.bin", "unpickle")
    torch.save([1, 2], path)
    fails(tmp_path, "dict of tensors")


def test_torch_file_without_torch(tmp_path, monkeypatch):
    folder_with(tmp_path, raw_config("llama"))
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    monkeypatch.setitem(sys.modules, "torch", None)
    fails(tmp_path, "needs torch", "safetensors")


def test_shards_and_indexes(tmp_path):
    _, _, found = folder_with(tmp_path, raw_config("llama"))
    write_shards(tmp_path, found, "model.safetensors", save_file)
    (tmp_path / "model-00002-of-00003.safetensors").rename(tmp_path / "elsewhere")
    fails(tmp_path, "lacks 1 of the 3", "model-00002-of-00003.safetensors")
    save_file({}, tmp_path / "model-00002-of-00003.safetensors")
    fails(tmp_path, "7 missing")
    save_file(found, tmp_path / "model-00002-of-00003.safetensors")
    fails(tmp_path, "twice")
    index = tmp_path / "model.safetensors.index.json"
    for text in ("{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        fails(tmp_path, "index.json")


@pytest.mark.parametrize(
    "name",
    ["../other/model.safetensors", "{other}/model.safetensors", "sub/../../other/model.safetensors", "", ".", "..",
     "linked/model.safetensors", "a\0b", "x" * 5000],
)  # fmt: skip
def test_names_that_leave_the_folder(name, tmp_path):
    folder, other = tmp_path / "model", tmp_path / "other"
    _, _, found = folder_with(folder, raw_config("llama"))
    other.mkdir()
    save_file(found, other / "model.safetensors")
    (folder / "linked").symlink_to(other)
    index = {"weight_map": dict.fromkeys(found, name.format(other=other))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    fails(folder)


def test_files_of_the_hub_cache_and_of_subfolders(tmp_path):
    """The hub's cache has links from snapshots to blobs; a folder may be a link, and users link single files."""
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "0", tmp_path / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    _, params, found = folder_with(snapshot, raw_config("llama"))
    write_shards(snapshot, found, "model.safetensors", save_file)
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / f"{number}")
        path.symlink_to(f"../../blobs/{number}")
    assert_same(load(snapshot).params, params)
    (tmp_path / "link").symlink_to(snapshot)
    assert_same(load(tmp_path / "link").params, params)
    (snapshot / "sub").mkdir()
    (snapshot / "model-00001-of-00003.safetensors").rename(snapshot / "sub" / "first.safetensors")
    (snapshot / "sub" / "first.safetensors").unlink()
    (snapshot / "sub" / "first.safetensors").symlink_to("../../../blobs/1")
    index = json.loads((snapshot / "model.safetensors.index.json").read_text())["weight_map"]
    index = {tensor: "sub/first.safetensors" if "00001-of" in file else file for tensor, file in index.items()}
    (snapshot / "model.safetensors.index.json").unlink()
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(load(snapshot).params, params)


def test_folders_that_are_none(tmp_path):
    fails(tmp_path, "no config.json", "no files")
    (tmp_path / "config.json").write_text("{")
    fails(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[]")
    fails(tmp_path, "object")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe")
    fails(tmp_path, "config.json")
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    fails(tmp_path, "mamba", "llama", str(tmp_path), error=ConfigError)
    (tmp_path / "config.json").write_text(json.dumps(raw_config("llama")))
    (tmp_path / "weights.gguf").write_text("")
    fails(tmp_path, "no weights", "model.safetensors", "weights.gguf")
    fails(tmp_path / "config.json", "is a file")
    fails(tmp_path / "absent", "no folder")
    fails("./a/b/c", "no folder")


def test_dtype_that_weights_cannot_have(tmp_path):
    good(tmp_path)
    for dtype in ("int8", "float64", "quick"):
        fails(tmp_path, "dtype", "bfloat16", error=ConfigError, dtype=dtype)


def test_hub_names(tmp_path, monkeypatch):
    """Without a network: one paragraph that says what was tried; with one, only one format is downloaded."""
    import huggingface_hub as hub

    def unreachable(*args, **kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(hub, "list_repo_files", unreachable)
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    fails("someone/some-model", "someone/some-model", "folder", "hub", "no route")
    good(tmp_path)
    asked = {}

    def download(name, **arguments):
        asked.update(arguments, name=name)
        return str(tmp_path)

    monkeypatch.setattr(hub, "list_repo_files", lambda name: ["config.json", "pytorch_model.bin", "model.safetensors"])
    monkeypatch.setattr(hub, "snapshot_download", download)
    load("someone/some-model")
    assert asked["name"] == "someone/some-model"
    assert "model.safetensors" in asked["allow_patterns"]
    assert "pytorch_model.bin" not in asked["allow_patterns"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fails("someone/some-model", "install huggingface_hub")


def test_retries_are_one_line(monkeypatch, caplog):
    """The lines that huggingface_hub logs of each try are replaced by advice; its other lines are not."""
    import huggingface_hub as hub

    logger = logging.getLogger("huggingface_hub.utils._http")
    root, lines = logging.getLogger("huggingface_hub"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    root.addHandler(handler)

    def unreachable(*args, **kwargs):
        for number in range(1, 4):
            logger.warning("'[Errno -2] Name or service not known' thrown while requesting GET https://a/b")
            logger.warning(f"Retrying in {number}s [Retry {number}/3].")
        logger.warning("another line with 100%s")
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "list_repo_files", unreachable)
    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    try:
        fails("someone/some-model", "no route")
    finally:
        root.removeHandler(handler)
    assert lines[:2] == [locate.RETRIES, "another line with 100%s"] and "HF_HUB_OFFLINE=1" in locate.RETRIES
    assert not handler.filters


@pytest.mark.parametrize("piece", [1, 3, 5, 7, 35])
def test_pieces_of_any_size_fill_a_transposed_array(piece):
    wanted = np.arange(35, dtype=np.float32).reshape(7, 5)
    array = np.zeros((5, 7), np.float32).T
    for start in range(0, 35, piece):
        readers._fill(array, start, wanted.reshape(-1)[start : start + piece])
    np.testing.assert_array_equal(array, wanted)


def test_a_model_that_comes_with_kvjax(monkeypatch, tmp_path):
    """Found by its name alone, without a network; a folder of that name in the working directory goes first."""
    monkeypatch.setattr(locate, "PRETRAINED", tmp_path / "pretrained")
    _, params, found = folder_with(tmp_path / "pretrained" / "some-model", raw_config("llama"))
    save_file(found, tmp_path / "pretrained" / "some-model" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    assert_same(load("some-model").params, params)
    assert repr(load("some-model")).startswith("Model(llama, ") and len(repr(load("some-model"))) < 240
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for wrong in ("some-modle", "someone/some-model"):
        with pytest.raises(CheckpointError, match=r"Did you mean 'some-model', which is part of kvjax\?"):
            load(wrong)
    asked = types.SimpleNamespace(list_repo_files=lambda name: pytest.fail("the hub was asked"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", asked)
    with pytest.raises(CheckpointError, match="Did you mean"):
        load("some-modle")
    assert locate.bundled("other-model") is None
    assert locate.bundled("../pretrained/some-model") is None
    (tmp_path / "some-model").mkdir()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load("some-model")


def test_adapters_are_said_and_not_applied(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    with pytest.raises(CheckpointError, match="is an adapter of someone/base, not a model: merge the two"):
        load(tmp_path)
    _, params, found = folder_with(tmp_path, raw_config("llama"))
    save_file(found, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match=r"holds an adapter \(adapter_config.json\), which is not applied"):
        assert_same(load(tmp_path).params, params)


def test_a_mesh_by_its_axes():
    assert load("kvjax-tiny", mesh="data:1").mesh.shape == {"data": 1, "model": 1}
    with pytest.raises(ConfigError, match="64 devices"):
        load("kvjax-tiny", mesh="data:64")
    with pytest.raises(ConfigError, match="rows"):
        load("kvjax-tiny", mesh="rows:1")
    with pytest.raises(ConfigError, match=r"such as .data:2,model:4.; got 3"):
        load("kvjax-tiny", mesh=3)
