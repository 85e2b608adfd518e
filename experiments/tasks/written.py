"""Questions that are answered in words: how they are asked, and what is reported of every such task."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.tasks import ngrams
from experiments.tasks.base import SAME, Answer, Asked, Done, share
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.generation.detokenize import marked_text
from kvjax.lm_eval.runner import Runner

FULL = " to full"  # ends the names of scores against what the full cache wrote
UNTIL = "first differs after"  # the mean number of tokens before the first that is not the full cache's


class Item(NamedTuple):
    """A question that is answered in words.

    Attributes:
      context: what is read, and compressed.
      question: what is asked after it; empty if the context ends with it.
      references: right answers, or what an answer should be like.
      new_tokens: the most tokens of an answer.
      about: what scores depend on besides.
    """

    context: str
    question: str
    references: tuple[str, ...]
    new_tokens: int
    about: Mapping[str, Any]


Scorer = Callable[[Sequence[Item], Sequence[Answer]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Written(Asked):
    """Questions that are answered in words, greedily.

    Besides the scores of `scorer`: ``tokens``, the mean length of the answers; ``ended``, the share of answers that end
    before they have all the tokens that they may have; and `SAME`, the share of texts that are the full cache's own. If
    `compared`, also the n-gram scores of all texts against the full cache's, `UNTIL`, and how much answers repeat
    themselves (`ngrams.diversity`).

    Attributes:
      items: the questions.
      scorer: scores the answers.
      stop: texts that end an answer.
      aware: whether a question is known when its context is compressed. Otherwise a context is processed once for all
        of its questions.
      compared: see above.
    """

    about: str
    items: tuple[Item, ...]
    scorer: Scorer
    headline: tuple[str, ...]
    stop: tuple[str, ...] = ()
    aware: bool = False
    compared: bool = False

    def __len__(self) -> int:
        return len(self.items)

    @property
    def content(self) -> str:
        return repr(([item[:4] for item in self.items], self.stop, self.aware))

    def ask(self, runner: Runner, tokenizer: Tokenizer, wanted: Sequence[int], done: Done) -> None:
        stop = sorted({*runner.model.eos_token_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])})

        def finish(number: int, prompt: Sequence[int], ids: np.ndarray) -> None:
            text, whole = marked_text(tokenizer, prompt, ids), self.items[number].new_tokens
            over = len(ids) < whole or int(ids[-1]) in stop or text.find(self.stop) >= 0
            tokens = [int(token) for token in ids if int(token) not in stop]
            done(number, {"text": text.before(self.stop).visible, "tokens": tokens, "ended": over})

        def finished(numbers: Sequence[int], prompts: Sequence[Sequence[int]], index: int, ids: np.ndarray) -> None:
            finish(numbers[index], prompts[index], ids)

        def finished_of(
            groups: Sequence[Sequence[int]], questions: Sequence[Sequence[Sequence[int]]], index: int, place: int,
            ids: np.ndarray,
        ) -> None:  # fmt: skip
            finish(groups[index][place], questions[index][place], ids)

        options: dict[str, Any] = {"stop": stop, "ended": self.stop}
        for new_tokens in sorted({self.items[number].new_tokens for number in wanted}):
            own = [number for number in wanted if self.items[number].new_tokens == new_tokens]
            alone = [n for n in own if self.aware or not self.items[n].question]
            room = runner.max_length - new_tokens
            prompts = [middle(tokenizer.encode(self.items[n].context + self.items[n].question), room) for n in alone]
            runner.texts(
                prompts, new_tokens=new_tokens, **options,
                done=functools.partial(finished, alone, prompts),
            )  # fmt: skip
            shared: dict[str, list[int]] = {}
            for number in own:
                if self.items[number].question and not self.aware:
                    shared.setdefault(self.items[number].context, []).append(number)
            groups = list(shared.values())
            questions = [[tokenizer.encode(self.items[n].question, bos=False) for n in group] for group in groups]
            contexts = [
                middle(tokenizer.encode(context), room - max(map(len, asked)))
                for context, asked in zip(shared, questions, strict=True)
            ]
            runner.answers(
                contexts, questions, new_tokens=new_tokens, **options,
                done=functools.partial(finished_of, groups, questions),
            )  # fmt: skip

    def scores(self, answers: Sequence[Answer], full: Sequence[Answer] | None) -> dict[str, float]:
        found = self.scorer(self.items, answers)
        if full is not None:
            found[SAME] = share(a["text"] == b["text"] for a, b in zip(answers, full, strict=True))
            if self.compared:
                compared = text_scores(answers, [each["text"] for each in full])
                found |= {f"{name}{FULL}": score for name, score in compared.items()}
                pairs = zip(answers, full, strict=True)
                found[UNTIL] = float(np.mean([_same_until(a["tokens"], b["tokens"]) for a, b in pairs]))
        if self.compared:
            found |= ngrams.diversity([each["tokens"] for each in answers])
        found["tokens"] = float(np.mean([len(each["tokens"]) for each in answers]))
        return found | {"ended": share(each["ended"] for each in answers)}

    def by_question(self, answers: Sequence[Answer]) -> list[float]:
        # Scores of texts as a whole, such as BLEU, are those of a text of one answer here.
        return [self.scorer((item,), (each,))[self.headline[0]] for item, each in zip(self.items, answers, strict=True)]


def text_scores(answers: Sequence[Answer], references: Sequence[str]) -> dict[str, float]:
    """N-gram scores of answers, METEOR among them if WordNet is here."""
    return ngrams.text_scores([each["text"] for each in answers], references, meteor=ngrams.has_wordnet())


def middle(ids: Sequence[int], room: int) -> Sequence[int]:
    """Tokens without those in the middle that there is no room for, as LongBench cuts its prompts."""
    if len(ids) <= room or room < 2:
        return ids
    first = room // 2
    return [*ids[:first], *ids[len(ids) - (room - first) :]]


def _same_until(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The number of tokens before the first that differs, or before the end of either."""
    return next(
        (n for n, (a, b) in enumerate(zip(tokens, others, strict=False)) if a != b), min(len(tokens), len(others))
    )
