"""The scores of SCBench's tasks, from 0 to 1, as its compute_scores.py defines them (microsoft/MInference, scbench/).

Where an answer of the released files is one text, the released code takes each of its characters for a right answer of
its own in `scbench_many_shot` and `scbench_qa_chn`. Here it is one right answer.
"""

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from experiments.tasks import matching, ngrams
from experiments.tasks.conversations import Turn
from kvjax.typing import Foreign

LEAST_SIMILAR = 0.8  # BLEU from which a function counts as found
_LETTERS = "ABCD"
_PREFIXES = ("answer is:", "answer:", "answer is", "option is")  # before a letter, the first that occurs counts
_NUMBER = re.compile(r"\d+\.\d+|\d+")
_BLOCK = re.compile(r"^```\w*[ \t]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
#: Of Chinese: the blocks of punctuation and of full-width forms, and marks of Latin texts.
_MARKS = re.compile("[\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\uff3b-\uff40\uff5b-\uff65\u2010-\u2027\ufe4f]")


def holds(text: str, turn: Turn) -> float:
    """Whether a text holds a right answer, in the same case."""
    return float(any(each in text for each in turn.references))


def holds_all(text: str, turn: Turn) -> float:
    """The share of right answers that a text holds, in whatever case."""
    return matching.contains_all(text, turn.references, {})


def holds_any(text: str, turn: Turn) -> float:
    """Whether a text holds a right answer, in whatever case."""
    return matching.contains_any(text, turn.references, {})


def number(text: str, turn: Turn) -> float:
    """Whether the first number of a text is the right one; its whole part, if that is a whole number."""
    found = _NUMBER.search(text)
    right = turn.references[0]
    if found is None:
        return 0.0
    return float(float(found[0]) == float(right) if "." in right else int(float(found[0])) == int(right))


def digits(text: str, turn: Turn) -> float:
    """Whether the first digits of a text are those of the right answer."""
    found = re.search(r"\d+", text)
    return float(found is not None and found[0] == turn.references[0])


def characters_f1(text: str, turn: Turn) -> float:
    """The best F1 of the characters of a text, without case, punctuation and spaces; for Chinese."""
    return max(_f1(_characters(text), _characters(each)) for each in turn.references)


def rouge_l_sum(text: str, turn: Turn) -> float:
    """The best ROUGE-L F measure of a summary whose lines are sentences, by rouge_score without stemming."""
    return max(_rouge().score(each, text)["rougeLsum"].fmeasure for each in turn.references)


def choice(text: str, turn: Turn) -> float:
    """Whether a text gives the right option, by its letter or its text.

    A text that begins with one of the letters gives that one. Otherwise, what follows ``answer is`` or the like counts,
    and without that the first letter that stands alone. ``references`` are the text of the option and its letter.
    """
    text = text.strip()
    if text[:1] and text[0] in _LETTERS:
        return float(text[0] in turn.references)
    if text in turn.references:
        return 1.0
    plain = re.sub(" +", " ", re.sub(r"""[\n"'.,?!{}]""", " ", text))
    for prefix in _PREFIXES:
        if (at := plain.find(prefix)) >= 0:
            return float(plain[at + len(prefix) + 1 :].startswith(tuple(turn.references)))
    alone = next((word for word in plain.split() if len(word) == 1 and word in _LETTERS), None)
    return float(alone in turn.references)


def function(text: str, turn: Turn) -> float:
    """Whether the code of a text is more like the right function than like any other that is asked for.

    The code is that of the first block between ``` marks, or the whole text. It is compared by BLEU of what spaces
    separate, which has to be at least `LEAST_SIMILAR`. ``functions`` of `Turn.about` are those that are asked for in
    this repository, by name, and ``name`` is that of the right one. The released code keeps only the first function of
    a block, by a parser of each language.
    """
    functions: Mapping[str, str] = turn.about["functions"]
    block = _BLOCK.search(text.strip())
    code = text.strip() if block is None else block[1]
    similar = {name: _bleu(code, own) for name, own in functions.items()}
    best = max(similar, key=lambda name: similar[name])
    return float(best == turn.about["name"] and similar[best] >= LEAST_SIMILAR)


def check() -> None:
    """Checks that the libraries are here, before anything is generated.

    Raises:
      ConfigError: one is not installed.
    """
    _rouge()
    ngrams.library("nltk.translate.bleu_score")


@functools.cache
def _rouge() -> Foreign:
    return ngrams.library("rouge_score.rouge_scorer").RougeScorer(["rougeLsum"])


def _bleu(text: str, reference: str) -> float:
    module = ngrams.library("nltk.translate.bleu_score")
    smooth = module.SmoothingFunction().method4
    return float(module.sentence_bleu([reference.split()], text.split(), smoothing_function=smooth))


def _characters(text: str) -> list[str]:
    plain = _MARKS.sub("", text.lower())
    return [each for each in plain if each not in string.punctuation and not each.isspace()]


def _f1(characters: Sequence[str], others: Sequence[str]) -> float:
    common = sum((Counter(characters) & Counter(others)).values())
    return 2 * common / (len(characters) + len(others)) if common else 0.0


#: By the names of tasks; those of several kinds of questions have the scores of these kinds.
SCORES: Mapping[str, Callable[[str, Turn], float]] = {
    "scbench_kv": holds, "scbench_prefix_suffix": holds, "scbench_vt": holds_all, "scbench_repoqa": function,
    "scbench_qa_eng": holds_any, "scbench_qa_chn": characters_f1, "scbench_choice_eng": choice,
    "scbench_many_shot": holds_any, "scbench_summary": rouge_l_sum, "scbench_mf": number, "scbench_passkey": digits,
}  # fmt: skip
