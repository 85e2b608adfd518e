"""Text of tokens as they come, a few at a time."""

import numpy as np
import pytest

import kvjax
from kvjax.serve.text import TextStream

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
