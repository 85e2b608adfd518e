"""Settings of tokenizers of other types: a KvjaxError that names the file and the key, or a tokenizer that works."""

import json
import shutil

import pytest

from kvjax.checkpoint.huggingface import load
from kvjax.checkpoint.locate import PRETRAINED
from kvjax.checkpoint.readers import read_json
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import ConfigError, KvjaxError
from kvjax.models import families
from tests.models.test_odd_configs import ODD

TINY = PRETRAINED / "kvjax-tiny"
KEYS = (
    "bos_token", "eos_token", "pad_token", "unk_token", "add_bos_token", "add_eos_token", "add_prefix_space",
    "additional_special_tokens", "extra_special_tokens",
)  # fmt: skip


LISTS = ("additional_special_tokens", "extra_special_tokens")


@pytest.fixture
def folder(tmp_path):
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("key", KEYS)
def test_odd_values(key, file, folder):
    config, messages = families.read(read_json(folder / "config.json")), []
    for value in (*ODD, {"content": 5}, {"content": None}, [{"name": 1}], ["a", "b"]):
        (folder / file).write_text(json.dumps({key: value}))
        try:
            tokenizer = load_tokenizer(folder, config)
        except KvjaxError as error:
            messages.append(str(error))
            continue
        assert value is None or isinstance(value, str | bool) or (key in LISTS and isinstance(value, list | dict))
        assert tokenizer.decode(tokenizer.encode("One two.")).strip() == "One two."
    assert messages and all(file in each and key in each and len(each) < 1000 for each in messages)


def test_loading_says_which_folder(folder):
    shutil.copy(TINY / "model.safetensors", folder)
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": "yes"}')
    with pytest.raises(ConfigError, match=rf"{folder}/tokenizer_config\.json: add_bos_token must be true, false or"):
        load(folder)
