"""Tokens to text one at a time, against what tokenizers decode all tokens to."""

import codecs
import dataclasses
import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

import kvjax
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.generation.detokenize import Detokenizer, marked_text, text_after
from kvjax.models import families
from tests.conftest import ROOT
from tests.scripted import BYTES, LLAMA2, byte_ids, ids, write_tokenizer

FORMS = {
    "llama2": LLAMA2,
    "gemma": decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    "metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}
WORDS = {
    "wordpiece": (decoders.WordPiece(), ["do", "##ing", "n't", ".", "'", "it", "##s"]),
    "suffix": (decoders.BPEDecoder(), ["hello</w>", "he", "llo</w>", "!</w>"]),
    "spaces": (None, ["hello", "world", "!"]),
}
TEXTS = (
    "Anna put the naïve 🦊 into the box — 日本語 — and left. \n\nShe said: “No!”", "ခခဂဃ🦊🦊 နေကောင်းလား  x",
    "  two spaces", "def f():\n    return 1\n", "\ufffd real \ufffd\ufffd", "🦊" * 20, " ", "x\ty\r\n",
)  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A function that loads a small tokenizer by the name of its form."""

    def load(name):
        folder = tmp_path_factory.mktemp(name)
        if name == "kvjax-tiny":
            return kvjax.load(name).tokenizer
        if name in FORMS:
            write_tokenizer(folder, decoder=FORMS[name])
            return load_tokenizer(folder, families.read({"model_type": "llama"}))
        decoder, words = WORDS[name]
        vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *words])}
        backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        if decoder is not None:
            backend.decoder = decoder
        backend.add_special_tokens(["<unk>", "<s>", "</s>"])
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
        return load_tokenizer(folder, families.read({"model_type": "llama"}))

    loaded = {}
    return lambda name: loaded.setdefault(name, None) or loaded.update({name: load(name)}) or loaded[name]


@pytest.mark.parametrize("name", [*FORMS, *WORDS, "kvjax-tiny"])
def test_the_text_is_that_of_all_tokens_less_that_of_the_prompt(made, name):
    """Random tokens, special ones among them, cut anywhere. Bytes are cut in the tests below."""
    tokenizer, rng = made(name), np.random.default_rng(0)
    usual = [
        i for i in range(tokenizer.size) if tokenizer.token(i) not in BYTES and "\ufffd" not in tokenizer.decode([i])
    ]
    for _ in range(300):
        tokens = rng.choice(usual, rng.integers(1, 9)).tolist()
        cut = int(rng.integers(0, len(tokens) + 1))
        whole, before = tokenizer.decode(tokens), tokenizer.decode(tokens[:cut])
        assert whole.startswith(before)
        assert text_after(tokenizer, tokens[:cut], tokens[cut:]) == whole[len(before) :], tokens
        # Padding and ids beyond the tokenizer have no text.
        assert text_after(tokenizer, [*tokens[:cut], -1], [*tokens[cut:], -1, 10**6]) == whole[len(before) :]


@pytest.mark.parametrize("name", [*FORMS, "kvjax-tiny"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_prompt_and_what_follows_are_the_text_wherever_it_is_cut(made, name, text):
    """Also within a character, whose text comes with its last byte; U+FFFD of a text is a character like others."""
    tokenizer = made(name)
    tokens = tokenizer.encode(text, bos=False)
    whole = tokenizer.decode(tokens)
    assert whole.strip() == text.strip() and text_after(tokenizer, (), tokens) == whole
    shown = ""
    detokenizer = Detokenizer(tokenizer)
    for cut, token in enumerate(tokens):
        assert shown + text_after(tokenizer, tokens[:cut], tokens[cut:]) == whole
        if not detokenizer.incomplete:
            before = tokenizer.decode(tokens[:cut])
            assert text_after(tokenizer, tokens[:cut], tokens[cut:]) == whole[len(before) :]
        shown += detokenizer.add(token).text
        assert whole.startswith(shown)
    assert not detokenizer.incomplete and detokenizer.finish() == ""


@pytest.mark.parametrize("character", ["é", "ခ", "🦊"])
def test_runs_of_bytes_of_any_length(made, character):
    tokenizer = made("llama2")
    for count in (1, 2, 3, 4, 5, 8, 9, 50):
        run = byte_ids(character * count)
        assert text_after(tokenizer, (), run) == character * count
        assert text_after(tokenizer, ids("x"), [*run, *ids("▁end")]) == character * count + " end"
        # The last character is not whole: those before it stay, and each of its bytes is replaced.
        left = len(character.encode()) - 1
        assert text_after(tokenizer, ids("x"), run[:-1]) == character * (count - 1) + "\ufffd" * left
        assert text_after(tokenizer, ids("x"), [*run[:-1], *ids("▁end")]).endswith("\ufffd" * left + " end")


def test_bytes_that_are_no_character(made):
    """As SentencePiece decodes them: each byte of what is no character is replaced, and no other."""
    tokenizer, rng = made("llama2"), np.random.default_rng(1)
    for _ in range(200):
        data = bytes(rng.choice([0x41, 0x80, 0xBF, 0xC3, 0xE2, 0xED, 0xEF, 0xBD, 0xF0, 0x9F, 0xFF], 6).tolist())
        expected, place = "", 0
        while place < len(data):
            sizes = [n for n in (1, 2, 3, 4) if codecs.decode(data[place : place + n], errors="ignore")]
            whole = sizes and len(data[place : place + sizes[0]].decode(errors="ignore").encode()) == sizes[0]
            expected += data[place : place + sizes[0]].decode() if whole else "\ufffd"
            place += sizes[0] if whole else 1
        tokens = ids("x", *(f"<0x{byte:02X}>" for byte in data), "▁end")
        assert text_after(tokenizer, tokens[:1], tokens[1:]) == expected + " end"


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ("E1 80", "81", "ခ"),  # begins in the prompt
        ("E1 80", "▁end", " end"),  # the prompt's text has the replacement of its bytes
        ("E1", "80 E1 80 81", "\ufffdခ"),
        ("E1 80 81 E1", "80 81", "ခ"),
        ("EF BF", "BD", "\ufffd"),
        ("EF", "BF", "\ufffd"),
    ],
)
def test_the_prompt_ends_within_a_character(made, before, after, text):
    tokenizer = made("llama2")

    def tokens(names):
        return ids(*(name if name.startswith("▁") else f"<0x{name}>" for name in names.split()))

    assert text_after(tokenizer, [1, *tokens(before)], tokens(after)) == text


def test_a_space_before_the_first_word(made):
    """Only at the beginning of a text is it left out."""
    tokenizer = made("llama2")
    for prompt, text in (((), "the end"), ((1,), "the end"), ((2, 1), "the end"), ((*ids("x"), 3), " the end")):
        assert text_after(tokenizer, prompt, [*ids("▁the"), 3, *ids("▁end")]) == text
    assert text_after(tokenizer, (), ids("▁", "▁the")) == tokenizer.decode(ids("▁", "▁the")) == " the"
    assert text_after(tokenizer, ids("▁"), ids("▁the")) == " the"
    assert text_after(tokenizer, (), ids("<0x20>", "▁the")) == tokenizer.decode(ids("<0x20>", "▁the"))


def test_special_tokens_are_written_out_for_stop_texts(made):
    marked = marked_text(made("llama2"), ids("x"), ids("▁the", "<|im_end|>", "▁end", "!"))
    assert marked.text == " the<|im_end|> end!" and marked.visible == " the end!"
    assert marked.before(["end!", "e<|im"]).visible == " th"
    assert marked.before(["<|im_end|> "]).visible == " the"
    assert marked.before(["never"]) == marked.before([]) == marked
    assert marked.after_last("<|im_end|>").stripped().visible == "end!"


@pytest.mark.parametrize("name", ["llama2", "kvjax-tiny"])
def test_tokens_are_decoded_a_fixed_number_of_times(made, name):
    tokenizer, given = made(name), []
    counted = dataclasses.replace(tokenizer, _decode=lambda ids: given.append(len(ids)) or tokenizer._decode(ids))
    text = "ခဂ🦊" * 1500 + "x the end ! " * 2000
    tokens = tokenizer.encode(text, bos=False)[:20_000]
    assert len(tokens) == 20_000
    got = text_after(counted, (), tokens)
    assert sum(given) <= 4 * len(tokens) and max(given) <= 2
    assert text.startswith(got.rstrip("\ufffd")) and len(got) > 5000


@pytest.mark.parametrize("name", ["kvjax-tiny", "llama2", "sentencepiece"])
def test_texts_are_those_of_transformers(name, made, tmp_path, request):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    if name == "kvjax-tiny":
        folder = ROOT / "kvjax/pretrained/kvjax-tiny"
    elif name == "llama2":
        folder = tmp_path
        write_tokenizer(folder)
    else:
        folder = request.getfixturevalue("shared_data") / "data/models/stories260K-hf"
        if not folder.is_dir():
            pytest.skip("no stories260K-hf in the shared data folder")
    own = load_tokenizer(folder, families.read({"model_type": "llama", "vocab_size": 2048}))
    if name == "sentencepiece":
        peer = transformers.LlamaTokenizer.from_pretrained(folder)
    else:
        peer = transformers.AutoTokenizer.from_pretrained(folder)
    rng = np.random.default_rng(2)
    for _ in range(60):
        tokens = [token for text in rng.choice(TEXTS, 3) for token in own.encode(str(text), bos=False)]
        special = [token for token in (own.bos_id, own.eos_id) if token is not None]
        cut = int(rng.integers(0, len(tokens)))
        whole = peer.decode([*tokens[:cut], *special, *tokens[cut:]], skip_special_tokens=True)
        before = peer.decode(tokens[:cut], skip_special_tokens=True)
        if not Detokenizer(own, tokens[:cut]).incomplete and whole.startswith(before):
            assert text_after(own, tokens[:cut], [*special, *tokens[cut:]]) == whole[len(before) :]
