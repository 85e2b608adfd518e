"""N-gram scores: of texts, of token ids, and how much a row repeats itself."""

import math
import sys

import numpy as np
import pytest

from experiments.tasks import ngrams
from kvjax.errors import ConfigError, InputError

#: A WordNet of one verb with two lemmas, in the form of its release 3.0.
WORDNET = {
    "lexnames": "00\tverb.social\t2\n",
    "index.verb": "heed v 1 0 1 0 00000000\nobey v 1 0 1 0 00000000\n",
    "data.verb": "00000000 00 v 02 obey 0 heed 0 000 00 | do as told\n",
}
EMPTY = (
    *("cntlist.rev", "index.sense", "index.adj", "index.adv", "index.noun", "data.adj", "data.adv", "data.noun"),
    *("adj.exc", "adv.exc", "noun.exc", "verb.exc"),
)


@pytest.fixture
def libraries():
    for name in ("rouge_score", "sacrebleu", "nltk"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'kvjax[tasks]'")


@pytest.fixture
def nltk_data(tmp_path, monkeypatch, libraries):
    monkeypatch.setattr("nltk.data.path", [str(tmp_path)])
    folder = tmp_path / "corpora" / "wordnet"
    folder.mkdir(parents=True)
    return folder


def test_scores_of_texts_by_hand(libraries):
    """Words are lower-cased; ROUGE drops punctuation, of which BLEU makes words."""
    found = ngrams.text_scores(["The cat sat on a mat", "x"], ["the cat lay on a mat.", "x"])
    # Of 6 words 5 are equal, of 5 pairs 3, and the longest common subsequence has 5; the second text is its reference.
    expected = {"ROUGE-1": 5 / 6, "ROUGE-2": 3 / 5, "ROUGE-L": 5 / 6}
    second = {"ROUGE-1": 1, "ROUGE-2": 0, "ROUGE-L": 1}  # one word has no pair
    for name, share in expected.items():
        assert found[name] == pytest.approx(100 * (share + second[name]) / 2)
    assert set(found) == {*expected, "BLEU-4"}
    same = ngrams.text_scores(["a b c d e"], ["a b c d e"])
    assert all(score == pytest.approx(100) for score in same.values())


def test_bleu_of_all_rows_together(libraries):
    """n-gram matches of all rows over all their n-grams, times the brevity penalty; ids after the end do not count."""
    rows = np.array([[1, 2, 3, 4, 5, 6, -1, -1], [7, 7, 8, 9, 9, 1, 2, 3]])
    references = [[1, 2, 3, 4, 5, 7, 8, 9], [7, 7, 8, 9, 1, 2, 3, 4]]
    matches, totals = (5 + 7, 4 + 6, 3 + 4, 2 + 2), (14, 12, 10, 8)
    precision = math.prod(m / t for m, t in zip(matches, totals, strict=True)) ** 0.25
    found = ngrams.token_scores(rows, references)
    assert found["BLEU-4"] == pytest.approx(100 * precision * math.exp(1 - 16 / 14))
    first, second = 2 * 5 / (6 + 8), 2 * 7 / (8 + 8)
    assert found["ROUGE-1"] == pytest.approx(50 * (first + second))
    assert found["ROUGE-2"] == pytest.approx(50 * (2 * 4 / (5 + 7) + 2 * 6 / (7 + 7)))


def test_meteor_counts_stems_and_synonyms(nltk_data):
    for name in EMPTY:
        (nltk_data / name).touch()
    for name, text in WORDNET.items():
        (nltk_data / name).write_text(text)
    found = ngrams.text_scores(["they obey the commands"], ["they heed the command"], meteor=True)
    # All four words match, in one chunk: only the penalty of a chunk in four is left.
    assert found["METEOR"] == pytest.approx(100 * (1 - 0.5 * (1 / 4) ** 3))


def test_meteor_without_wordnet(nltk_data):
    nltk_data.rmdir()
    with pytest.raises(ConfigError, match="METEOR needs nltk's WordNet"):
        ngrams.text_scores(["a"], ["a"], meteor=True)


def test_what_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge_score.rouge_scorer", None)
    with pytest.raises(ConfigError, match=r"rouge_score is not installed; `pip install 'kvjax\[tasks\]'`"):
        ngrams.token_scores([[1]], [[1]])


def test_as_many_references_as_texts():
    with pytest.raises(InputError, match="1 texts and 2 references"):
        ngrams.text_scores(["a"], ["a", "b"])
    with pytest.raises(InputError, match="at least one"):
        ngrams.diversity([])


@pytest.mark.parametrize(
    ("row", "distinct", "longest"),
    [
        ([1, 2, 3, 4], (100, 100), 0),
        ([1, 2, 1, 2, 1, -1], (40, 50), 3),
        ([5, 5, 5, 5], (25, 100 / 3), 3),
        ([1], (100, 100), 0),
        ([-1], (100, 100), 0),
    ],
)
def test_diversity(row, distinct, longest):
    found = ngrams.diversity([row])
    assert (found["distinct-1"], found["distinct-2"]) == pytest.approx(distinct)
    assert found["longest repeat"] == longest
