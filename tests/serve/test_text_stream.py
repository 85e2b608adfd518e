"""Text of tokens as they come, a few at a time."""

import dataclasses

import numpy as np
import pytest

import kvjax
from kvjax.checkpoint.tokenizer import load_tokenizer
from kvjax.models import families
from kvjax.serve.text_stream import TextStream
from tests.scripted import byte_ids, ids, write_tokenizer

WORDS = "Anna put the naïve 🦊 into the box — 日本語 — and left. \n\nShe said: “No!”"


@pytest.fixture(scope="module")
def tokenizer():
    return kvjax.load("kvjax-tiny").tokenizer


@pytest.mark.parametrize("seed", range(3))
def test_pieces_are_together_the_text(tokenizer, seed):
    """Cut between any tokens, also within a character; no piece has half of one."""
    rng = np.random.default_rng(seed)
    tokens = tokenizer.encode(WORDS, bos=False)
    assert len(tokens) > 40
    stream, pieces, place = TextStream(tokenizer), [], 0
    while place < len(tokens):
        step = int(rng.integers(1, 5))
        assert stream.take(tokens[place : place + step]) is None
        pieces.append(stream.pop())
        place += step
    stream.finish()
    pieces.append(stream.pop())
    assert "".join(pieces) == stream.text == tokenizer.decode(tokens)
    assert not any("\ufffd" in piece for piece in pieces)


def test_what_is_never_whole_is_shown_in_the_end(tokenizer):
    half = tokenizer.encode("🦊", bos=False)[:2]
    stream = TextStream(tokenizer)
    assert stream.take(half) is None and stream.pop() == ""
    stream.finish()
    assert stream.pop() == tokenizer.decode(half)


@pytest.mark.parametrize(("stops", "cut"), [(["the box"], "the box"), (["zzz", " left", "and left"], "and left")])
def test_stop_texts(tokenizer, stops, cut):
    """Nothing of a stop text is shown, and the tokens up to its end are counted."""
    tokens = tokenizer.encode(WORDS, bos=False)
    stream, shown = TextStream(tokenizer, stops), ""
    for number, token in enumerate(tokens, 1):  # noqa: B007 (it is read afterwards)
        end = stream.take([token])
        shown += stream.pop()
        if end is not None:
            break
    assert end == 1 and stream.stopped and shown == stream.text == WORDS[: WORDS.index(cut)]
    assert cut in tokenizer.decode(tokens[:number]) and cut not in tokenizer.decode(tokens[: number - 1])
    # In one call it is the same, and what follows is not taken.
    again = TextStream(tokenizer, stops)
    assert again.take(tokens) == number
    again.finish()
    assert again.pop() == shown


def test_what_only_begins_a_stop_text_is_shown(tokenizer):
    stream = TextStream(tokenizer, ["into the bottle"])
    for token in tokenizer.encode(WORDS, bos=False):
        assert stream.take([token]) is None
    stream.finish()
    assert stream.text == WORDS


TOKENS = [
    *ids("▁the"),
    *byte_ids("ခဂ🦊"),
    *ids("▁end", "<|im_end|>", "▁Once", "!", "�"),
    *byte_ids("é\ufffdx"),
    *ids("▁say"),
]
TEXT = " theခဂ🦊 end Once!�é\ufffdx say"


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """LLaMA 2's form: a vocabulary that falls back to bytes."""
    folder = tmp_path_factory.mktemp("words")
    write_tokenizer(folder)
    return load_tokenizer(folder, families.read({"model_type": "llama"}))


def stand_in(text, tokens):
    """Whether the tokens of a text have all of its characters and bytes, each where it says."""
    assert "".join(each.text for each in tokens) == text
    assert b"".join(each.data for each in tokens) == text.encode()
    ends = []
    for each in tokens:
        assert text[each.offset : each.offset + len(each.text)] == each.text
        # Where the bytes before it end, but for those of a character that it goes on with.
        before = b"".join(other.data for other in tokens[: len(ends)])
        assert each.offset == len(before.decode(errors="ignore"))
        ends.append(each.offset + len(each.text))
    assert ends == sorted(ends)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 100])
def test_tokens_stand_in_the_text(words, step):
    """Those of a piece are the ones whose characters have been shown by then."""
    stream, tokens, shown = TextStream(words, ["never"], prompt=ids("x")), [], ""
    for place in range(0, len(TOKENS), step):
        assert stream.take(TOKENS[place : place + step]) is None
        shown += stream.pop()
        tokens += stream.pop_tokens()
        assert shown.startswith("".join(each.text for each in tokens)) and TEXT.startswith(shown)
    stream.finish()
    shown, tokens = shown + stream.pop(), tokens + stream.pop_tokens()
    assert shown == stream.text == TEXT and len(tokens) == len(TOKENS)
    stand_in(TEXT, tokens)
    # Each byte of a character is its own token's.
    assert [list(each.data) for each in tokens[1:4]] == [[0xE1], [0x80], [0x81]]
    assert [each.text for each in tokens[1:4]] == ["", "", "ခ"] and tokens[12].text == tokens[12].data.decode() == ""


@pytest.mark.parametrize(
    ("stops", "text", "number"),
    [
        (["<|im_end|>"], " theခဂ🦊 end", 13),
        (["nd<|im_end|> On"], " theခဂ🦊 e", 14),
        (["d<|im_end|> Onc", "<|im_end|> Once!"], " theခဂ🦊 en", 14),
        (["ဂ"], " theခ", 7),
        (["eခဂ🦊 e"], " th", 12),
        (["\ufffd"], " theခဂ🦊 end Once!", 16),
        (["�é\ufffd"], " theခဂ🦊 end Once!", 21),
        (["<|im_end|> end", "never"], TEXT, None),
        (["end Once"], TEXT, None),  # a special token is between them
    ],
)
@pytest.mark.parametrize("step", [1, 3, 100])
def test_stop_texts_with_special_tokens_and_bytes(words, stops, text, number, step):
    stream, tokens, taken = TextStream(words, stops, prompt=ids("x")), [], None
    for place in range(0, len(TOKENS), step):
        end = stream.take(TOKENS[place : place + step])
        tokens += stream.pop_tokens()
        if end is not None:
            taken = place + end
            break
    stream.finish()
    tokens += stream.pop_tokens()
    assert (stream.text, taken, stream.stopped) == (text, number, number is not None)
    assert len(tokens) == (number or len(TOKENS))
    stand_in(text, tokens)


def test_tokens_of_what_is_never_whole(words):
    """The text has a replacement for each byte, the tokens have the bytes."""
    stream = TextStream(words, prompt=ids("x"))
    assert stream.take([*ids("▁the"), *byte_ids("🦊")[:3]]) is None
    assert [each.text for each in stream.pop_tokens()] == [" the"]
    stream.finish()
    tokens = stream.pop_tokens()
    assert stream.text == " the\ufffd\ufffd\ufffd" and "".join(each.text for each in tokens) == "\ufffd" * 3
    assert b"".join(each.data for each in tokens) == "🦊".encode()[:3]


def test_bytes_of_a_character_that_the_prompt_begins(words):
    stream = TextStream(words, prompt=[*ids("x"), *byte_ids("🦊")[:2]])
    assert stream.take([*byte_ids("🦊")[2:], *ids("!")]) is None
    stream.finish()
    tokens = stream.pop_tokens()
    assert stream.text == "🦊!" and len(tokens) == 3
    stand_in("🦊!", tokens)


def test_a_stream_decodes_each_token_a_fixed_number_of_times(words):
    given = []
    counted = dataclasses.replace(words, _decode=lambda ids: given.append(len(ids)) or words._decode(ids))
    tokens = (TOKENS * 1000)[:20_000]
    stream = TextStream(counted, ["never there", "<|im_end|><|im_end|>"], prompt=ids("x"))
    size = 0
    for place in range(0, len(tokens), 4):
        assert stream.take(tokens[place : place + 4]) is None
        size += len(stream.pop())
    assert sum(given) <= 4 * len(tokens) and size > 10_000
