"""Tokenizers of every kind of file, on the real ones and on small ones made here."""

import base64
import io
import json
import shutil

import numpy as np
import pytest

from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.errors import CheckpointError, InputError, KvjaxError
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
    with pytest.raises(InputError, match="string"):
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
    with pytest.raises(InputError, match=r"takes a sequence of strings; use encode\(\)"):
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


@pytest.fixture(scope="module")
def pieces():
    """A SentencePiece model of the form of LLaMA 2's: BPE with bytes, no normalisation."""
    import sentencepiece

    made, text = io.BytesIO(), ["Once upon a time there was a little cat.", "Hello world, the dog ran to the cat."]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 20), model_writer=made, vocab_size=320, hard_vocab_limit=False, minloglevel=2,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", control_symbols=["<ctl>"],
        user_defined_symbols=["<u>"],
    )  # fmt: skip
    return made.getvalue()


def words(folder):
    """A tokenizer.json of letters, of which some special tokens are added tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    letters = ["<unk>", "<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyzHO<>|_./"]
    vocab = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["<s>"])
    backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    return len(vocab)


def token(content, **flags):
    usual = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word"), False) | {"special": True}
    return {"content": content} | usual | flags


def added(start, **flags):
    """added_tokens_decoder of a chat model, of which one token is not special."""
    names = {0: "<unk>", 1: "<s>", 2: "</s>", start: "<|im_end|>", start + 1: "<|im_start|>"}
    return {str(i): token(text, **flags) for i, text in names.items()} | {str(start + 2): token("<x>", special=False)}


ADDED = {"<|im_start|>": 1, "<|im_end|>": 0, "<x>": 2}
#: What the files beside the vocabulary say: of tokenizer_config.json, special_tokens_map.json, added_tokens.json.
SPREAD = {
    "nothing": ({}, None, None),
    "added_tokens.json": ({"eos_token": "<|im_end|>"}, None, ADDED),
    "added_tokens.json and a map": ({}, {"eos_token": token("<|im_end|>"), "pad_token": "<x>"}, ADDED),
    "a map before the settings": ({"eos_token": "</s>"}, {"eos_token": "<|im_end|>"}, ADDED),
    "a map after added_tokens_decoder": ({"added_tokens_decoder": added}, {"eos_token": "<|im_end|>"}, ADDED),
    "added_tokens_decoder": ({"added_tokens_decoder": added, "eos_token": "<|im_end|>"}, None, None),
    "added_tokens_decoder with other flags": ({"added_tokens_decoder": lambda n: added(n, lstrip=True)}, None, None),
    "stripped at the right": ({"added_tokens_decoder": lambda n: added(n, rstrip=True)}, None, None),
    "single words": ({"added_tokens_decoder": lambda n: added(n, single_word=True)}, None, None),
    "named only": ({"bos_token": {"__type": "AddedToken"} | token("<b>"), "eos_token": "<|im_end|>"}, None, None),
    "additional": ({"additional_special_tokens": ["<x>", {"__type": "AddedToken"} | token("<y>")]}, None, None),
    "none beside those of the model": ({"additional_special_tokens": []}, None, None),
    "additional of the map": ({}, {"additional_special_tokens": ["<x>"]}, {"<x>": 0}),
    "extra with names": ({"extra_special_tokens": {"image_token": "<x>"}, "other_token": "<y>"}, None, None),
    "legacy": ({"legacy": True, "added_tokens_decoder": added}, None, None),
    "not legacy": ({"legacy": False, "added_tokens_decoder": added}, None, None),
    "no space before a text": ({"add_prefix_space": False, "added_tokens_decoder": added}, None, None),
    "bos": ({"add_bos_token": True, "add_eos_token": False, "bos_token": "<s>"}, None, None),
    "another bos": ({"add_bos_token": True, "bos_token": "<x>"}, None, ADDED),
    "no bos": ({"add_bos_token": False, "bos_token": "<s>"}, None, None),
}
CHATS = [
    "<|im_start|>user\nOnce upon a time<|im_end|>\n", "Hello  world", " Hello", "a <x> b", "a<x>b<y> <x>c", "", "日本é",
    "<s>the cat</s> ran<ctl>.", "<u>the<u> cat", "<unk>the", "<|im_end|>", "the <|im_start|>", "<b>the<b>",
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SPREAD)
@pytest.mark.parametrize("kind", ["tokenizer.model", "tokenizer.json", "vocab.json"])
def test_facts_of_several_files_are_those_of_transformers(kind, name, pieces, request, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    family, classes = "llama", "LlamaTokenizer"
    if kind == "tokenizer.model":
        (tmp_path / kind).write_bytes(pieces)
        start = 320
    elif kind == "tokenizer.json":
        start, classes = words(tmp_path), "PreTrainedTokenizerFast"
    else:
        gpt2 = request.getfixturevalue("real") / "gpt2"
        copy(tmp_path, gpt2 / "vocab.json", gpt2 / "merges.txt")
        start, family, classes = 50257, "gpt2", "GPT2Tokenizer"
    settings, mapped, numbers = SPREAD[name]
    settings = {key: value(start) if callable(value) else value for key, value in settings.items()}
    if kind == "vocab.json":
        for number in ("0", "1", "2"):
            settings.get("added_tokens_decoder", {}).pop(number, None)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": classes, "unk_token": "<unk>"} | settings)
    )
    if mapped is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(mapped))
    if numbers is not None:
        (tmp_path / "added_tokens.json").write_text(json.dumps({text: start + i for text, i in numbers.items()}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    (tmp_path / "saved").mkdir()
    own = load_tokenizer(tmp_path, config(family, vocab_size=60_000))
    own.save(tmp_path / "saved")
    for tokenizer in (own, load_tokenizer(tmp_path / "saved", config(family, vocab_size=60_000))):
        # transformers splits the pieces that a model's users defined if tokens are listed.
        for text in (text for text in CHATS if "<u>" not in text or "additional_special_tokens" not in settings):
            expected = peer(text, add_special_tokens=False).input_ids
            assert tokenizer.encode(text, bos=False) == expected, text
            assert tokenizer.encode(text) == peer(text).input_ids, text
            assert tokenizer.decode(expected) == peer.decode(expected, skip_special_tokens=True), text
        assert tokenizer.special_tokens == peer.special_tokens_map
        assert tokenizer.size == len(peer)
        assert [tokenizer.token(i) for i in range(start, tokenizer.size)] == peer.convert_ids_to_tokens(
            range(start, len(peer))
        )
        if peer.eos_token_id is not None:
            assert tokenizer.eos_id == peer.eos_token_id
        if peer.bos_token_id is not None and kind != "tokenizer.json":  # the post-processor's
            assert tokenizer.bos_id == peer.bos_token_id


def test_a_sentencepiece_model_alone_is_used_as_sentencepiece_does(pieces, tmp_path):
    """Without a class, whether a space and BOS come first is as the model and its family have it."""
    import sentencepiece

    (tmp_path / "tokenizer.model").write_bytes(pieces)
    tokenizer, whole = (
        load_tokenizer(tmp_path, config("llama")),
        sentencepiece.SentencePieceProcessor(model_proto=pieces),
    )
    for text in ("Hello  world", " the cat ", "日本é", ""):
        assert tokenizer.encode(text) == [1, *whole.encode(text)]
        assert tokenizer.decode(whole.encode(text)) == whole.decode(whole.encode(text))
    assert tokenizer.encode("<s>the<ctl>cat</s>", bos=False) == [
        1, *whole.encode("the"), whole.piece_to_id("<ctl>"), *whole.encode("cat"), 2
    ]  # fmt: skip


def test_an_id_of_the_model_may_have_another_text(pieces, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(pieces)
    number = load_tokenizer(tmp_path, config("llama")).encode("<ctl>", bos=False)[0]
    settings = {"added_tokens_decoder": {str(number): token("<|turn|>")}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = load_tokenizer(tmp_path, config("llama"))
    assert tokenizer.encode("<|turn|>", bos=False) == [number] and tokenizer.token(number) == "<|turn|>"


def test_an_added_token_with_another_id_is_said(pieces, tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(pieces)
    (tmp_path / "added_tokens.json").write_text('{"<|turn|>": 500}')
    with pytest.warns(UserWarning, match=r"'<\|turn\|>' have other ids"):
        tokenizer = load_tokenizer(tmp_path, config("llama"))
    assert tokenizer.encode("<|turn|>", bos=False) == [320]


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("tokenizer.model", b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256)), "tiktoken"),
        ("tokenizer.model", b"IQ== 0\r\nIg== 1\r\n", "tiktoken"),
        ("tiktoken.model", b"IQ== 0\n", "tiktoken"),
        ("tekken.json", b"{}", "tekken"),
    ],
)
def test_vocabularies_of_other_tokenizers_are_named(name, content, kind, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.warns(UserWarning, match=f"{name} is a vocabulary in the form of.*{kind}.*without a tokenizer"):
        assert load_tokenizer(tmp_path, config("llama")) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"x": {"content": "a"}}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"5": 7}}'),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}'),
        ("tokenizer_config.json", b"[]"),
        ("special_tokens_map.json", b'{"additional_special_tokens": 5}'),
        ("special_tokens_map.json", b"\xff"),
        ("added_tokens.json", b"[1]"),
        ("added_tokens.json", b'{"a": "b"}'),
        ("added_tokens.json", b"{"),
    ],
)
def test_damaged_files_beside_the_vocabulary(name, content, tmp_path):
    tiny(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(KvjaxError):
        load_tokenizer(tmp_path, config("llama"))


@pytest.mark.sampled(1)
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
