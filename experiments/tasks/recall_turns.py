"""Recall tasks with several questions about one context: facts all over a story, one of them asked for at each turn."""

import dataclasses
import itertools

import numpy as np

from experiments.tasks import recall
from experiments.tasks.base import Asked, Setting
from experiments.tasks.conversations import APPEND, MULTI_TURN, Conversation, Conversations, Mode, Turn
from experiments.tasks.prompts import NoRoom
from experiments.tasks.recall import Episode
from experiments.tasks.score import SPARE_TOKENS
from experiments.tasks.spec import TaskSpec, at_least_one
from experiments.tasks.story import Encode, filler
from experiments.tasks.words import HELD_OUT, Words
from kvjax.errors import ConfigError

#: Whether one episode of a kind has several facts; otherwise there is an episode for each question.
KINDS = {"passkey": False, "multi_key": True, "associative": True, "copy": False}


@dataclasses.dataclass(frozen=True)
class RecallTurns(TaskSpec):
    """Facts of one kind at random places of a story, and a question about some of them, one after the other.

    The order of the questions is drawn as well, so that the facts of all turns lie as far back in the context.

    Attributes:
      kind: of `KINDS`; see `experiments.tasks.recall`.
      mode: ``multi_turn``, ``multi_request`` or ``single``; see `experiments.tasks.conversations`.
      questions: about each context.
      length: tokens of a context.
      count: contexts.
      nearest: the tokens of a context after its last fact, at least.
      difficulty: see `experiments.tasks.recall`; None = the default of the kind, and enough for the questions.
      own_answers: see `Mode`.
      turns: see `Mode`.
    """

    kind: str
    mode: str = MULTI_TURN
    questions: int = 4
    length: int = 400
    count: int = 32
    nearest: int = 64
    difficulty: int | None = None
    own_answers: bool = False
    turns: str = APPEND

    def __post_init__(self) -> None:
        name = f"recall_{self.kind}"
        at_least_one(name, questions=self.questions, length=self.length, count=self.count)
        if not 0 <= self.nearest < self.length:
            raise ConfigError(f"task {name}: nearest={self.nearest} should be from 0 to below length={self.length}.")
        if self.difficulty is not None and self.difficulty < (least := self._least):
            raise ConfigError(f"task {name}: difficulty={self.difficulty} should be at least {least}.")
        if self.kind == "passkey" and self.questions > (most := len(HELD_OUT.things)):
            raise ConfigError(f"task {name}: questions={self.questions} should be at most {most}, one for each number.")
        self._asked_as()

    @property
    def _least(self) -> int:
        """The least difficulty; one episode of several facts has one for each question."""
        return max(recall.EASIEST[self.kind], self.questions if KINDS[self.kind] else 0)

    def _asked_as(self) -> Mode:
        return Mode(f"recall_{self.kind}", self.mode, self.own_answers, self.turns)

    def make(self, setting: Setting) -> Asked:
        rng = np.random.default_rng(setting.seed)
        count = self.count if setting.questions is None else min(self.count, setting.questions)
        made = tuple(self._conversation(rng, setting) for _ in range(count))
        whole = max(len(each.context) + each.following for each in made)
        if whole > setting.max_length:
            raise ConfigError(
                f"task recall_{self.kind}: a context of {self.length} tokens and {self.questions} questions take "
                f"{whole}, more than the model's {setting.max_length}; lower length or questions."
            )
        about = f"{count} contexts of {self.length} tokens with {self.questions} questions each, {self.mode}"
        return Conversations(about, made, exact, self._asked_as())

    def _conversation(self, rng: np.random.Generator, setting: Setting) -> Conversation:
        def encode(text: str) -> list[int]:
            return setting.tokenizer.encode(text, bos=False)

        episode = self._episode(rng, HELD_OUT)
        order = rng.permutation(len(episode.questions))[: self.questions]
        facts = [encode(f" {fact}") for fact in rng.permutation(episode.facts)]
        begins = setting.tokenizer.encode("")
        free = self.length - self.nearest - len(begins) - sum(map(len, facts))
        if free < 0:
            raise NoRoom(
                f"task recall_{self.kind}: {len(facts)} facts take {sum(map(len, facts))} tokens, which do not fit in "
                f"a context of {self.length} before its last {self.nearest}; raise length."
            )
        cuts = [0, *np.sort(rng.integers(0, free + 1, len(facts))).tolist(), free]
        sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
        sizes[-1] += self.nearest
        story = filler(encode, HELD_OUT)
        parts = [begins]
        for size, fact in zip(sizes, [*facts, []], strict=True):
            parts += [story(rng, size).tolist(), fact]
        turns = tuple(self._turn(episode.questions[index], encode) for index in order)
        return Conversation(tuple(itertools.chain(*parts)), turns)

    def _turn(self, question: recall.Question, encode: Encode) -> Turn:
        answer = tuple(encode(question.answer))
        asked = tuple(encode(f" {question.text}"))
        return Turn(asked, answer, (question.answer,), len(answer) + SPARE_TOKENS, question.answer[-1])

    def _episode(self, rng: np.random.Generator, words: Words) -> Episode:
        """Returns facts, and at least as many questions as are asked."""
        least = self._least
        difficulty = max(recall.DIFFICULTY[self.kind], least) if self.difficulty is None else self.difficulty
        task = recall.TASKS[self.kind]
        if KINDS[self.kind]:
            return task(rng, words, difficulty)
        # Numbers of different things, so that a question tells which is meant.
        things = [words.things[index] for index in rng.permutation(len(words.things))]
        named = [dataclasses.replace(words, things=(things[n % len(things)],)) for n in range(self.questions)]
        made = [task(rng, own, difficulty) for own in named]
        return Episode(
            tuple(fact for each in made for fact in each.facts), tuple(q for each in made for q in each.questions)
        )


def exact(text: str, turn: Turn) -> float:
    """Whether a text begins with the right answer, to the character that ends it."""
    return float(text.lstrip().startswith(turn.references[0].lstrip()))
