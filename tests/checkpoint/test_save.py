"""Saved folders: whole or absent, sharded when large, and equal to what was saved."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from safetensors import safe_open

from kvjax.checkpoint import names, writer
from kvjax.checkpoint.huggingface import load, save
from kvjax.errors import CheckpointError
from kvjax.models import families
from kvjax.models.model import Model
from tests.checkpoint.folders import assert_same, random_params, raw_config

TOKENIZER = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).to_str().encode()
TALK = [{"role": "user", "content": "x"}]


def small(family="llama", dtype=jnp.float32) -> Model:
    config = families.read(raw_config(family))
    return Model(config, jax.tree.map(lambda x: jnp.asarray(x, dtype), random_params(config)))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("family", families.FAMILIES)
def test_round_trip(family, tmp_path):
    model = small(family)
    save(model, tmp_path / "new" / "folder")
    again = load(tmp_path / "new" / "folder")
    assert again.config == model.config
    assert_same(again.params, model.params)
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["folder"]


def test_dtypes_survive_and_the_file_is_sound(tmp_path):
    model = small(dtype=jnp.bfloat16)
    norm = model.params["final_norm"]
    norm["scale"] = norm["scale"].astype(jnp.float32)  # mixed dtypes stay aligned
    save(model, tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == "bfloat16"
    with safe_open(tmp_path / "model/model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {tensor.name for tensor in names.tensors(model.config)}
    assert_same(load(tmp_path / "model").params, jax.tree.map(lambda x: x.astype(jnp.float32), model.params))


def test_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_BYTES", 5000)
    model = small()
    save(model, tmp_path / "model")
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    assert_same(load(tmp_path / "model").params, model.params)


def test_replaces_a_checkpoint_and_nothing_else(tmp_path):
    folder = tmp_path / "model"
    save(small(), folder)
    (folder / "pytorch_model.bin").write_text("old")
    other = small("opt")
    save(other, folder)
    assert not (folder / "pytorch_model.bin").exists()
    assert load(folder).config == other.config
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"thesis\.tex"):
        save(other, folder)
    assert (folder / "thesis.tex").exists()
    assert load(folder).config == other.config
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        save(other, tmp_path / "file")


def test_templates_are_saved_and_replaced(tmp_path):
    """Also a folder of them, where nothing else may be."""
    files = {"tokenizer.json": TOKENIZER, "chat_template.jinja": b"D", "additional_chat_templates/tool_use.jinja": b"T"}
    given, folder = tmp_path / "given", tmp_path / "model"
    save(small(), given)
    for name, content in files.items():
        (given / name).parent.mkdir(exist_ok=True)
        (given / name).write_bytes(content)
    for _ in range(2):  # the second replaces the first
        save(load(given), folder)
        tokenizer = load(folder).tokenizer
        assert tokenizer.files == files
        assert [tokenizer.apply_chat_template(TALK, template=name) for name in (None, "tool_use")] == ["D", "T"]
    (folder / "additional_chat_templates/thesis.tex").write_text("years of work")
    with pytest.raises(CheckpointError, match="additional_chat_templates"):
        save(small(), folder)
    assert (folder / "additional_chat_templates/thesis.tex").exists()


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("stage", ["_write_safetensors", "_replace"])
def test_interrupted_save_leaves_what_was_there(stage, existing, tmp_path, monkeypatch):
    folder = tmp_path / "model"
    old = small()
    if existing:
        save(old, folder)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(writer, stage, interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(small("opt"), folder)
    assert [path.name for path in tmp_path.iterdir()] == (["model"] if existing else [])
    if existing:
        assert load(folder).config == old.config


def test_parameters_that_are_not_the_configs(tmp_path):
    model = small()
    wrong = {**model.params, "final_norm": {"scale": np.zeros(3, np.float32)}}
    with pytest.raises(CheckpointError, match=r"final_norm/scale.*\[3\].*\[16\]"):
        save(dataclasses.replace(model, params=wrong), tmp_path / "model")
    with pytest.raises(CheckpointError, match="embed/tokens is absent"):
        save(dataclasses.replace(model, params={}), tmp_path / "model")
    integers = {**model.params, "final_norm": {"scale": np.zeros(16, np.int8)}}
    with pytest.raises(CheckpointError, match="int8"):
        save(dataclasses.replace(model, params=integers), tmp_path / "model")
    assert not any(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(small(), tmp_path / "file" / "model")
