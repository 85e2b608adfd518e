"""Tokenizers of every kind of file, on the real ones and on small ones made here."""

import json
import shutil

import numpy as np
import pytest

from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import CheckpointError, InputError
from kvjax.models import families

TEXT = "The quick brown fox, it's 42 naïve jumps —  and\n\ntwo  spaces. 日本"


def config(family, **changes):
    return families.read({"model_type": family, **changes})


@pytest.fixture(scope="module")
def real(shared_data):
    folder = shared_data / "data/tokenizers"
    if not folder.is_dir():
        pytest.skip("no tokenizers in the shared data folder")
    return folder


def copy(folder, *files):
    for file in files:
        shutil.copy(file, folder)
    return folder


def test_gpt2(real):
    tokenizer = load_tokenizer(real / "gpt2", config("gpt2"))
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert tokenizer.encode(" Hello<|endoftext|>") == [18435, 50256]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size, tokenizer.size) == (50256, 50256, 50257, 50257)


def test_opt(real, tmp_path):
    """GPT-2's pieces and merges with OPT's own ids, after </s>."""
    folder = copy(tmp_path, real / "opt/vocab.json", real / "gpt2/merges.txt")
    tokenizer = load_tokenizer(folder, config("opt"))
    assert tokenizer.encode("Hello world") == [2, 31414, 232]
    assert tokenizer.encode("Hello world", bos=False) == [31414, 232]
    assert tokenizer.encode("</s><pad>") == [2, 2, 1]
    assert tokenizer.encode("") == [2]
    assert tokenizer.decode([2, 31414, 232, -1, -1]) == "Hello world"
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.bos_id, tokenizer.eos_id) == (2, 2)
    assert (tokenizer.size, tokenizer.vocab_size) == (50265, 50272)
    assert tokenizer.decode([50270]) == ""  # only fills up the table
    assert (tokenizer.token(2), tokenizer.token(50270)) == ("</s>", "")


def test_gpt_neox(real):
    tokenizer = load_tokenizer(real / "gpt-neox", config("gpt_neox"))
    assert tokenizer.encode("Hello world") == [12092, 1533]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert not tokenizer.adds_bos


def test_llama_sentencepiece(real):
    tokenizer = load_tokenizer(real / "llama2", config("llama"))
    assert tokenizer.encode("Hello world") == [1, 15043, 3186]
    assert tokenizer.encode("Hello world", bos=False) == [15043, 3186]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.size) == (1, 2, 32000)
    assert (tokenizer.token(1), tokenizer.token(32000)) == ("<s>", "")
    assert tokenizer.encode("<s>Hello</s>", bos=False) == [1, 15043, 2]


def test_tokens_beyond_the_model(real, tmp_path):
    """Only a text that holds one is refused: the Pythia tokenizer has tokens beyond a smaller table."""
    tokenizer = load_tokenizer(real / "gpt-neox", config("gpt_neox", vocab_size=50_270))
    assert tokenizer.encode("Hello world") == [12092, 1533]
    with pytest.raises(InputError, match=r"token 5027\d.*50269"):
        tokenizer.encode("a" + " " * 6 + "b")
    with pytest.raises(InputError, match="text"):
        tokenizer.encode(b"bytes")
    for wrong in (60_000, -2):
        with pytest.raises(InputError, match=str(wrong)):
            tokenizer.decode([wrong])


def test_settings_say_whether_bos_comes_first(real, tmp_path):
    folder = copy(tmp_path, *(real / "llama2").glob("*.model"))
    for said in (True, False):
        (folder / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": said}))
        assert load_tokenizer(folder, config("llama")).encode("Hello") == ([1] if said else []) + [15043]
    (folder / "tokenizer_config.json").write_text("{}")
    assert not load_tokenizer(folder, config("qwen2")).adds_bos


def tiny(path, post_processor=None):
    """A tokenizer.json of three words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel({"<s>": 0, "a": 1, "b": 2, "<unk>": 3, "<e>": 4}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(["<s>", "<e>"])
    if post_processor:
        backend.post_processor = post_processor
    backend.enable_truncation(2)  # as some published files have it
    backend.save(str(path / "tokenizer.json"))


def test_post_processor_says_whether_bos_comes_first(tmp_path):
    from tokenizers.processors import TemplateProcessing

    tiny(tmp_path, TemplateProcessing(single="<s> $A <e>", special_tokens=[("<s>", 0), ("<e>", 4)]))
    tokenizer = load_tokenizer(tmp_path, config("qwen2"))
    assert tokenizer.encode("a b a") == [0, 1, 2, 1]
    assert tokenizer.bos_id == 0
    tiny(tmp_path, TemplateProcessing(single="$A <e>", special_tokens=[("<e>", 4)]))
    assert load_tokenizer(tmp_path, config("llama")).encode("a b a") == [1, 2, 1]
    tiny(tmp_path)
    settings = {"bos_token": {"content": "<e>"}, "eos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path, config("llama"))
    assert tokenizer.encode("a b a") == [4, 1, 2, 1]
    assert tokenizer.eos_id == 0


def test_batches_are_padded_at_the_end(tmp_path):
    tiny(tmp_path)
    tokenizer = load_tokenizer(tmp_path, config("qwen2"))
    batch = tokenizer.encode_batch(["a b a", "", "b"])
    assert batch.tokens.tolist() == [[1, 2, 1], [-1, -1, -1], [2, -1, -1]] and batch.tokens.dtype == np.int32
    assert batch.lengths.tolist() == [3, 0, 1]
    assert tokenizer.decode_batch(batch.tokens) == ["a b a", "", "b"]
    with pytest.raises(InputError, match=r"takes texts, but got one; use encode\(\)"):
        tokenizer.encode_batch("a b")


def test_saved_files_are_the_same(real, tmp_path):
    folder = copy(tmp_path, real / "opt/vocab.json", real / "gpt2/merges.txt")
    tokenizer = load_tokenizer(folder, config("opt"))
    (tmp_path / "to").mkdir()
    tokenizer.save(tmp_path / "to")
    assert load_tokenizer(tmp_path / "to", config("opt")).encode(TEXT) == tokenizer.encode(TEXT)


def test_folders_without_a_tokenizer(tmp_path):
    assert load_tokenizer(tmp_path, config("llama")) is None
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    assert load_tokenizer(tmp_path, config("gpt2")) is None
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    assert load_tokenizer(tmp_path, config("gpt2")).encode("a") == [0]
    with pytest.warns(UserWarning, match=r"tokenizer\.json"):
        assert load_tokenizer(tmp_path, config("qwen2")) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"{"),
        ("tokenizer.json", b'{"version": "1.0"}'),
        ("tokenizer.model", b"no model"),
        ("vocab.json", b"["),
        ("merges.txt", b"\xff\xff a b c\n"),
        ("tokenizer_config.json", b"{"),
    ],
)
def test_damaged_files(name, content, tmp_path):
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path, config("gpt2"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["gpt2", "gpt-neox", "opt"])
def test_same_ids_as_transformers(kind, real, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    if kind == "opt":
        copy(tmp_path, real / "opt/vocab.json", real / "gpt2/merges.txt")
        reference = transformers.GPT2Tokenizer.from_pretrained(
            tmp_path, bos_token="</s>", eos_token="</s>", unk_token="</s>", pad_token="<pad>"
        )
    elif kind == "gpt2":
        reference = transformers.GPT2Tokenizer.from_pretrained(real / "gpt2")
    else:
        reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(real / "gpt-neox/tokenizer.json"))
    folder = tmp_path if kind == "opt" else real / kind
    tokenizer = load_tokenizer(folder, config(kind.replace("-", "_")))
    text = TEXT + " <|endoftext|> end"
    if kind == "opt":
        text = TEXT + " </s> end"
    assert tokenizer.encode(text, bos=False) == reference(text, add_special_tokens=False)["input_ids"]
