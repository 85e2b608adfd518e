"""Training windows: every one of its size, every answer recallable from it, the same for the same step."""

import dataclasses
import itertools

import numpy as np
import pytest

from experiments.tasks.words import TRAINING
from experiments.training.mixture import Kind, Mixture

BOS = 256


def encode(texts):
    return [list(text.encode()) for text in texts]


@pytest.fixture(scope="module")
def mixture():
    ends = np.zeros(300, bool)
    ends[ord(".")] = True
    text = np.frombuffer(b"It was a fine day. " * 2000, np.uint8).astype(np.int32)
    other = np.frombuffer(b"No rain fell. " * 500, np.uint8).astype(np.int32)
    return Mixture([text, other], encode, ends, TRAINING, BOS, recall_fraction=0.5, task_shares=(1, 1, 2, 1, 1), seed=3)


def runs(kind, wanted):
    """Start and end of every stretch of a kind."""
    at = 0
    for value, group in itertools.groupby(kind.tolist()):
        length = len(list(group))
        if value == wanted:
            yield at, at + length
        at += length


def test_a_batch_depends_on_seed_and_step_alone(mixture):
    tokens, kind = mixture.batch(5, 3, 400)
    assert tokens.shape == kind.shape == (3, 401)
    assert (tokens.dtype, kind.dtype) == (np.int32, np.int8)
    mixture.batch(6, 2, 100, invented_fraction=1.0)
    again = mixture.batch(5, 3, 400)
    assert np.array_equal(tokens, again[0])
    assert np.array_equal(kind, again[1])
    assert not np.array_equal(tokens, mixture.batch(6, 3, 400)[0])
    assert not np.array_equal(tokens, mixture.batch(5, 3, 400, invented_fraction=0.5)[0])


@pytest.mark.parametrize("invented", [0.0, 1.0])
def test_every_answer_stands_before_its_question(mixture, invented):
    answers = 0
    for step in range(20):
        for tokens, kind in zip(*mixture.batch(step, 2, 1500, invented_fraction=invented), strict=True):
            assert tokens[0] == BOS
            assert kind[0] == Kind.GIVEN
            for start, end in runs(kind, Kind.ANSWER):
                answer = bytes(tokens[start:end].astype(np.uint8)).decode()
                before = bytes(tokens[1:start].astype(np.uint8)).decode()
                assert answer[0] == " "
                # The value, without what closes it: a chain of variables tells it in another sentence.
                assert answer[1:-1] in before
                answers += 1
    assert answers > 100


def test_text_goes_on_where_a_piece_was_put_in(mixture):
    tokens, kind = mixture.window(np.random.default_rng(0), 1501)
    text = bytes(tokens[kind == Kind.TEXT].astype(np.uint8)).decode()
    assert text in "It was a fine day. " * 2000 or text in "No rain fell. " * 500
    assert 0.3 < np.mean(kind == Kind.TEXT) < 0.9
    # Pieces are put in where a sentence ends.
    for start, _ in runs(kind, Kind.GIVEN):
        if start and kind[start - 1] == Kind.TEXT:
            assert tokens[start - 1] == ord(".")


def test_repeats_can_be_predicted_by_looking_back(mixture):
    tokens, kind = mixture.batch(0, 8, 60, repeat_fraction=0.5)
    assert [bool((row == Kind.REPEAT).any()) for row in kind] == [False] * 4 + [True] * 4
    for row, of in zip(tokens[4:], kind[4:], strict=True):
        first = int(np.argmax(of == Kind.REPEAT))
        assert (of[first:] == Kind.REPEAT).all()
        assert (row[first:] == row[1 : 1 + len(row) - first]).all()


@pytest.mark.parametrize("fraction", [0.0, 0.7, 1.0])
def test_any_share_of_recall_fits(mixture, fraction):
    tokens, kind = dataclasses.replace(mixture, recall_fraction=fraction).batch(1, 8, 300)
    assert tokens.shape == (8, 301)
    assert (kind == Kind.ANSWER).any() == (fraction > 0)


def test_a_window_too_short_for_any_task_is_text(mixture):
    _, kind = mixture.batch(0, 4, 8)
    assert set(np.unique(kind)) <= {Kind.GIVEN, Kind.TEXT}
