"""N-gram scores of generated texts: ROUGE, BLEU and METEOR against references, and how much a text repeats itself.

All scores but `longest repeat` go from 0 to 100, as papers print them. They come from rouge_score, sacrebleu and nltk,
which `pip install 'kvjax[tasks]'` brings.

Tokens are scored as texts are, a token id for a word. With the full cache's greedy tokens as references this is RoCo's
protocol (arXiv:2402.06262): 100 means that a policy says what the full cache says.
"""

import functools
import importlib
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import numpy as np

from kvjax.errors import ConfigError, InputError
from kvjax.typing import Foreign

ROUGE = {"ROUGE-1": "rouge1", "ROUGE-2": "rouge2", "ROUGE-L": "rougeL"}  # by rouge_score's names
BLEU, METEOR = "BLEU-4", "METEOR"
Tokens = Sequence[int] | np.ndarray


def text_scores(hypotheses: Sequence[str], references: Sequence[str], *, meteor: bool = False) -> dict[str, float]:
    """ROUGE-1, ROUGE-2, ROUGE-L and BLEU-4 of texts against one reference each, and METEOR if asked for.

    ROUGE and METEOR are means over texts, BLEU is of all texts together. ROUGE is the F measure, without stemming, of
    rouge_score's words; BLEU and METEOR are of words as sacrebleu's tokenizer 13a splits them. METEOR is nltk's.

    Raises:
      InputError: no texts, or another number of references.
      ConfigError: a library is not installed, or METEOR is asked for and WordNet is not there.
    """
    _check(hypotheses, references)
    scores = _rouge(hypotheses, references, tokenizer=None)
    scores[BLEU] = _bleu(hypotheses, references, "13a")
    if meteor:
        scores[METEOR] = _meteor(hypotheses, references)
    return scores


def token_scores(hypotheses: Sequence[Tokens], references: Sequence[Tokens]) -> dict[str, float]:
    """ROUGE-1, ROUGE-2, ROUGE-L and BLEU-4 of rows of token ids against one reference each.

    Args:
      hypotheses: rows, or [rows, new] int32; negative ids, which stand after the end of a row, are left out.
      references: likewise.

    Raises:
      InputError, ConfigError: as `text_scores`.
    """
    _check(hypotheses, references)
    texts, others = ([_joined(row) for row in rows] for rows in (hypotheses, references))
    return _rouge(texts, others, tokenizer=_Split()) | {BLEU: _bleu(texts, others, "none")}


def diversity(rows: Sequence[Tokens]) -> dict[str, float]:
    """Means over rows: the share of a row's n-grams that are distinct, for n of 1 and 2, and its longest repeat.

    The longest repeat is the largest n such that an n-gram of the row occurs in it twice (it may overlap itself). A row
    without n-grams has a share of 100. The share is Li et al.'s distinct-n (arXiv:1510.03055), row by row.

    Args:
      rows: token ids as in `token_scores`.

    Raises:
      InputError: no rows.
    """
    if not len(rows):
        raise InputError("no rows were given; give at least one.")
    kept = [_ids(row) for row in rows]
    shares = {f"distinct-{n}": float(np.mean([_distinct(row, n) for row in kept])) for n in (1, 2)}
    return shares | {"longest repeat": float(np.mean([_longest_repeat(row) for row in kept]))}


def wordnet() -> Foreign:
    """nltk's reader of WordNet, without which there is no METEOR.

    Raises:
      ConfigError: nltk or WordNet is not there.
    """
    reader = library("nltk.corpus.reader").WordNetCorpusReader
    loader = library("nltk.corpus.util").LazyCorpusLoader("wordnet", reader, None)
    try:
        with warnings.catch_warnings():  # of languages other than English
            warnings.simplefilter("ignore")
            loader.ensure_loaded()
    except LookupError:
        raise ConfigError(
            "METEOR needs nltk's WordNet for synonyms; download it with `python -m nltk.downloader "
            "wordnet`, or set NLTK_DATA to a folder that contains corpora/wordnet.zip of nltk_data."
        ) from None
    return loader


def check() -> None:
    """Checks that the libraries are here, before anything is generated.

    Raises:
      ConfigError: one is not installed.
    """
    text_scores(["a"], ["a"])


@functools.cache
def has_wordnet() -> bool:
    """Whether METEOR can be computed."""
    try:
        wordnet()
    except ConfigError:
        return False
    return True


def library(name: str) -> ModuleType:
    """A module of the extra `tasks`.

    Raises:
      ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        raise ConfigError(f"{name.split('.')[0]} is not installed; `pip install 'kvjax[tasks]'` installs it.") from None


def _check(hypotheses: Sequence[object], references: Sequence[Any]) -> None:
    if len(hypotheses) != len(references) or not len(references):
        raise InputError(f"{len(hypotheses)} texts and {len(references)} references were given; give one for each.")


def _ids(row: Tokens) -> list[int]:
    return [int(token) for token in row if token >= 0]


def _joined(row: Tokens) -> str:
    return " ".join(map(str, _ids(row)))


class _Split:
    """A tokenizer for rouge_score: what spaces separate."""

    def tokenize(self, text: str) -> list[str]:
        return text.split()


def _rouge(hypotheses: Sequence[str], references: Sequence[str], tokenizer: _Split | None) -> dict[str, float]:
    scorer = library("rouge_score.rouge_scorer").RougeScorer(list(ROUGE.values()), tokenizer=tokenizer)
    scores = [scorer.score(target, text) for text, target in zip(hypotheses, references, strict=True)]
    return {name: 100 * float(np.mean([score[kind].fmeasure for score in scores])) for name, kind in ROUGE.items()}


def _bleu(hypotheses: Sequence[str], references: Sequence[str], tokenize: str) -> float:
    bleu = library("sacrebleu.metrics").BLEU(tokenize=tokenize, force=True)
    return float(bleu.corpus_score(list(hypotheses), [list(references)]).score)


def _meteor(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    score = functools.partial(library("nltk.translate.meteor_score").single_meteor_score, wordnet=wordnet())
    split = library("sacrebleu.tokenizers.tokenizer_13a").Tokenizer13a()
    pairs = zip(hypotheses, references, strict=True)
    return 100 * float(np.mean([score(split(target).split(), split(text).split()) for text, target in pairs]))


def _grams(row: Sequence[int], n: int) -> list[tuple[int, ...]]:
    return [tuple(row[start : start + n]) for start in range(len(row) - n + 1)]


def _distinct(row: Sequence[int], n: int) -> float:
    grams = _grams(row, n)
    return 100 * len(set(grams)) / len(grams) if grams else 100.0


def _longest_repeat(row: Sequence[int]) -> int:
    # If an n-gram occurs twice, so does each shorter one within it: the boundary is found by bisection.
    low, high = 0, max(len(row) - 1, 0)
    while low < high:
        middle = (low + high + 1) // 2
        grams = _grams(row, middle)
        low, high = (middle, high) if len(set(grams)) < len(grams) else (low, middle - 1)
    return low
