"""Contexts with several questions each, in the three modes of SCBench (arXiv:2412.10319).

  multi_turn     question, answer, next question, all in one context; the first question is a part of the first prompt
  multi_request  each question after a copy of the cache of the context alone
  single         each question in a separate prompt, after the context

A method that compresses prompts sees a question of `single` and the first one of `multi_turn` before it compresses, and
none of `multi_request`. A later question of `multi_turn` is asked of what was kept for the first one.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.tasks.base import SAME, Answer, Asked, Done, share
from kvjax import contexts
from kvjax.cache import KVState, Limits, layers_of, live_slots
from kvjax.checkpoint.tokenizer import Tokenizer
from kvjax.errors import ConfigError
from kvjax.generation.context import Context
from kvjax.generation.detokenize import text_after
from kvjax.generation.generate import decode
from kvjax.lm_eval.batches import batches, bucket
from kvjax.lm_eval.runner import Runner
from kvjax.parallel import distributed
from kvjax.policies.traits import compresses_prompts

MULTI_TURN, MULTI_REQUEST, SINGLE = "multi_turn", "multi_request", "single"
MODES = (MULTI_TURN, MULTI_REQUEST, SINGLE)
APPEND, COMPRESS = "append", "compress"
HELD, BYTES, RECOMPUTED = "slots held", "bytes", "tokens recomputed"  # names of scores
Ids = tuple[int, ...]
Score = Callable[[str, "Turn"], float]


class Turn(NamedTuple):
    """A question about a context.

    Attributes:
      question: its tokens; the answer begins after them.
      answer: the tokens of the right answer, which later turns see.
      references: right answers.
      new_tokens: the most tokens of an answer.
      ends: a text that ends an answer, and belongs to it; empty = only the end of the text ends one.
      about: what scores depend on besides.
    """

    question: Ids
    answer: Ids
    references: tuple[str, ...]
    new_tokens: int
    ends: str = ""
    about: Mapping[str, Any] = {}


class Conversation(NamedTuple):
    """A context and what is asked about it, in this order.

    Attributes:
      context: its tokens, with those that begin a text.
      turns: the questions.
    """

    context: Ids
    turns: tuple[Turn, ...]

    @property
    def longest(self) -> int:
        """Tokens of the context with the longest of its questions."""
        return len(self.context) + max(len(turn.question) for turn in self.turns)

    @property
    def following(self) -> int:
        """The most tokens that follow the first question in any mode."""
        answers = sum(max(len(turn.answer), turn.new_tokens) for turn in self.turns)
        return sum(len(turn.question) for turn in self.turns) + answers


@dataclasses.dataclass(frozen=True)
class Mode:
    """How questions are asked.

    Attributes:
      task: of which it is a setting, for errors.
      mode: of `MODES`.
      own_answers: whether later turns see the answers that were given, instead of the right ones.
      turns: of a prompt compressor: ``append`` keeps what it kept of the first prompt, ``compress`` compresses again at
        each later question; see `kvjax.contexts.extend`.

    Raises:
      ConfigError: an unknown mode, or a setting that the mode has no use for.
    """

    task: str
    mode: str = MULTI_TURN
    own_answers: bool = False
    turns: str = APPEND

    def __post_init__(self) -> None:
        for name, value, valid in (("mode", self.mode, MODES), ("turns", self.turns, (APPEND, COMPRESS))):
            if value not in valid:
                raise ConfigError(f"task {self.task}: {name}={value!r} is unknown; known: {', '.join(valid)}.")
        given = "own_answers=true" if self.own_answers else "" if self.turns == APPEND else f"turns={self.turns}"
        if given and self.mode != MULTI_TURN:
            raise ConfigError(
                f"task {self.task}: {given} is for mode={MULTI_TURN}; in mode={self.mode} no question sees another."
            )


@dataclasses.dataclass(frozen=True)
class Conversations(Asked):
    """Contexts with several questions each, answered greedily; a question of `Asked` is a whole context.

    Scores: ``score``, the mean over all turns, and ``turn 1``, ``turn 2``, ...; the means of `parts`, if there are any;
    and `SAME`, the share of answers that are the full cache's own. Besides, means over questions, or over contexts: the
    slots that a KV head holds when it answers, of those of the full cache (`HELD`, in percent); the `BYTES` of arrays
    of a context; and `RECOMPUTED`, the tokens of a context that go through the model again because each
    question is asked in a separate prompt.

    Attributes:
      conversations: the contexts.
      score: of one answer, from 0 to 1.
      mode: how questions are asked.
      parts: names of kinds of turns, which turns have as ``part`` of `Turn.about`.
    """

    about: str
    conversations: tuple[Conversation, ...]
    score: Score
    mode: Mode
    parts: tuple[str, ...] = ()

    @property
    def headline(self) -> tuple[str, ...]:  # type: ignore[override]
        last = self._most_turns
        return ("score", "turn 1", f"turn {last}") if last > 1 else ("score",)

    def __len__(self) -> int:
        return len(self.conversations)

    @property
    def content(self) -> str:
        asked = [
            (each.context, [(t.question, t.answer, t.new_tokens, t.ends) for t in each.turns])
            for each in self.conversations
        ]
        return repr((asked, dataclasses.replace(self.mode, task="")))

    @property
    def _most_turns(self) -> int:
        return max(len(each.turns) for each in self.conversations)

    def ask(self, runner: Runner, tokenizer: Tokenizer, wanted: Sequence[int], done: Done) -> None:
        # The largest of all contexts, wanted or not, so that a run that is resumed compiles the same sizes.
        following = bucket(max(each.following for each in self.conversations))
        for part in batches([*wanted], runner.rows, lambda number: bucket(self.conversations[number].longest)):
            asked = [self.conversations[number] for number in part]
            batch = Batch(runner, tokenizer, asked, self.mode, following)
            for number, answer in zip(part, batch.answers(), strict=True):
                done(number, answer)

    def by_turn(self, answers: Sequence[Answer]) -> list[list[float]]:
        return [
            [100 * self.score(found["text"], turn) for found, turn in zip(answer["turns"], own.turns, strict=True)]
            for answer, own in zip(answers, self.conversations, strict=True)
        ]

    def by_question(self, answers: Sequence[Answer]) -> list[float]:
        return [float(np.mean(row)) for row in self.by_turn(answers)]

    def scores(self, answers: Sequence[Answer], full: Sequence[Answer] | None) -> dict[str, float]:
        rows = self.by_turn(answers)
        found = {"score": _mean(value for row in rows for value in row)}
        for number in range(self._most_turns if self._most_turns > 1 else 0):
            found[f"turn {number + 1}"] = _mean(row[number] for row in rows if len(row) > number)
        for part in self.parts:
            own = [
                value
                for row, each in zip(rows, self.conversations, strict=True)
                for value, turn in zip(row, each.turns, strict=True)
                if turn.about["part"] == part
            ]
            found |= {part: _mean(own)} if own else {}
        every = [turn for answer in answers for turn in answer["turns"]]
        if full is not None:
            others = [turn for answer in full for turn in answer["turns"]]
            found[SAME] = share(a["text"] == b["text"] for a, b in zip(every, others, strict=True))
        found[HELD] = 100 * _mean(turn["slots"] / turn["length"] for turn in every)
        found[BYTES] = _mean(answer["bytes"] for answer in answers)
        return found | {RECOMPUTED: _mean(map(self._recomputed, self.conversations))}

    def _recomputed(self, conversation: Conversation) -> int:
        """The tokens of a context that go through the model more than once."""
        return (len(conversation.turns) - 1) * len(conversation.context) if self.mode.mode == SINGLE else 0


def _mean(values: Any) -> float:
    return float(np.mean([*values]))


class Batch:
    """Conversations that are held at once, a row each."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, asked: Sequence[Conversation], mode: Mode, following: int
    ) -> None:
        """Makes a batch.

        Args:
          runner: the model, the cache and the number of rows.
          tokenizer: of the model.
          asked: conversations, at most as many as the rows; the first one stands in for those that are missing, so that
            all batches have one size.
          mode: how questions are asked.
          following: tokens that arrays have room for after the first question.
        """
        self.runner, self.tokenizer, self.mode, self.count = runner, tokenizer, mode, len(asked)
        self.rows = [*asked, *[asked[0]] * (runner.rows - len(asked))]
        self.width = min(bucket(max(each.longest for each in asked)), runner.max_length)
        self.following = following
        self.most_turns = max(len(each.turns) for each in asked)
        eos = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        self.stop = sorted({*runner.model.eos_token_ids, *eos})

    def answers(self) -> list[Answer]:
        """Returns the answers of each conversation: ``turns``, those of its questions, and ``bytes``."""
        found: list[list[dict[str, Any]]] = [[] for _ in range(self.count)]
        held, context = 0, None
        if self.mode.mode == MULTI_REQUEST:
            alone = self._prompts([each.context for each in self.rows])
        for number in range(self.most_turns):
            questions = [self._turn(row, number).question if self._has(row, number) else () for row in self.rows]
            if self.mode.mode == MULTI_REQUEST:
                asked = self._fed(alone, questions, APPEND)
            elif context is None or self.mode.mode == SINGLE:
                pairs = zip(self.rows, questions, strict=True)
                asked = self._prompts([(*row.context, *question) for row, question in pairs])
            else:
                asked = self._fed(context, questions, self.mode.turns if _compresses(context) else APPEND)
            held = max(held, asked.layout.bytes(self.count) + asked.layout.index_bytes(self.count))
            slots, lengths = _slots(asked.state), distributed.to_host(asked.state.length)
            continues = self.mode.mode == MULTI_TURN and number + 1 < self.most_turns
            new = self._written(asked, number, keep=continues)
            for row in range(self.count):
                if self._has(self.rows[row], number):
                    text = text_after(self.tokenizer, (), new[row])
                    found[row].append({
                        "text": text, "tokens": new[row], "slots": float(slots[row]), "length": int(lengths[row]),
                    })  # fmt: skip
            if continues:
                context = self._fed(asked, self._history(number, new), APPEND, block=1)
        return [{"turns": turns, "bytes": held // self.count} for turns in found]

    @staticmethod
    def _has(row: Conversation, number: int) -> bool:
        return number < len(row.turns)

    @staticmethod
    def _turn(row: Conversation, number: int) -> Turn:
        return row.turns[min(number, len(row.turns) - 1)]

    def _prompts(self, texts: Sequence[Ids]) -> Context:
        """Returns the contexts after prompts, whose arrays have one size in all modes."""
        lengths = np.array([len(text) for text in texts], np.int32)
        # [rows, width]
        tokens = np.zeros((len(texts), self.width), np.int32)
        for row, text in zip(tokens, texts, strict=True):
            row[: len(text)] = text
        limits = Limits(
            prompt=self.width, new_tokens=self.following, shortest=min(len(each.context) for each in self.rows)
        )
        runner = self.runner
        return contexts.prefill(
            runner.model, tokens, runner.spec, lengths=lengths, room=int(lengths.max()) + self.following, limits=limits,
            prefill_block=runner.prefill_block, implementation=runner.implementation,
        )  # fmt: skip

    def _fed(self, context: Context, texts: Sequence[Ids], turns: str, block: int | None = None) -> Context:
        """Returns the contexts after further tokens, of which a row may have none."""
        block = self.runner.prefill_block if block is None and turns == APPEND else block
        return contexts.extend(
            self.runner.model, context, [[*text] for text in texts], turns=turns, block=block,
        )  # fmt: skip

    def _written(self, context: Context, number: int, *, keep: bool) -> list[list[int]]:
        """Returns the new tokens of each row, up to the end of its answer.

        Args:
          context: after the questions.
          number: of the turn.
          keep: whether `context` is needed afterwards.
        """
        turns = [self._turn(row, number) for row in self.rows]
        if keep:
            # A decode loop donates its cache.
            context = context._replace(state=jax.tree.map(lambda leaf: leaf.copy(), context.state))
        made = decode(
            self.runner.model, context, max_new_tokens=max(turn.new_tokens for turn in turns), stop=self.stop
        )  # fmt: skip
        return [
            ended(
                self.tokenizer, [int(t) for t in row[:length][: turn.new_tokens] if int(t) not in self.stop], turn.ends
            )
            for row, length, turn in zip(made.tokens, made.lengths, turns, strict=False)
        ]

    def _history(self, number: int, new: Sequence[Sequence[int]]) -> list[Ids]:
        """Returns the answers that the next turn sees; none in a row that has no next turn."""
        return [
            () if not self._has(row, number + 1) else tuple(own) if self.mode.own_answers else row.turns[number].answer
            for row, own in zip(self.rows, new, strict=False)
        ]


def ended(tokenizer: Tokenizer, tokens: list[int], ends: str) -> list[int]:
    """Returns the tokens of an answer up to the one that ends it, or all; see `Turn.ends`."""
    if not ends:
        return tokens
    counts = (n for n in range(1, len(tokens) + 1) if ends in tokenizer.decode(tokens[:n]))
    return tokens[: next(counts, len(tokens))]


def _compresses(context: Context) -> bool:
    """Returns whether a cache compresses prompts; others evict at every turn as it is, or keep everything."""
    return any(compresses_prompts(group.policy) for layer in context.layout.prompt for group in layer)


def _slots(state: KVState) -> np.ndarray:
    """Returns the mean number of slots that a KV head of each row holds, [B] float64."""
    found: list[np.ndarray] = distributed.to_host([live_slots(group) for _, group in layers_of(state)])
    # [B, heads of all layers]
    return np.concatenate([live.reshape(len(live), -1) for live in found], axis=1).mean(axis=1)
