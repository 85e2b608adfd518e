"""Short passages with questions about them, in the forms in which question answering is written down."""

from typing import NamedTuple

import numpy as np

from experiments.tasks.words import Words

_PLACES = ("quay", "old mill", "park", "market", "tower", "river", "station", "library", "bakery", "church")
_COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown", "grey")
_VERBS = (
    ("carried", "carry"), ("lost", "lose"), ("found", "find"), ("hid", "hide"), ("bought", "buy"), ("sold", "sell"),
    ("painted", "paint"), ("washed", "wash"),
)  # fmt: skip
LETTERS = "ABCDE"
SENTENCES = (2, 7)  # of a passage, from and below
QUESTIONS = (1, 4)  # about a passage, from and below
_HEADS = ("", "", "Passage: ", "Text: ", "Read this. ", "Context: ")
#: Around a question and its answer. {q}: the question, {a}: the answer, {o}: choices, if a form shows them.
_OPEN = (
    "Question: {q}\nAnswer: {a}\n", "Q: {q}\nA: {a}\n", "{q}\n{a}\n", "{q} {a}\n", "Question: {q} Answer: {a}\n",
    "question: {q}\nanswer: {a}\n", "User: {q}\nAssistant: {a}\n",
)  # fmt: skip
_CHOSEN = ("Question: {q}\n{o}\nAnswer: {a}\n", "{q}\n{o}\nThe answer is {a}\n", "Q: {q} {o}\nA: {a}\n")
_SAID = ("{s} True or False? {a}\n", "Question: {s} True or False?\nAnswer: {a}\n", "{s} Is this right? {a}\n")
CHOICES_SHARE, SAID_SHARE = 0.25, 0.2  # of the questions


class Fact(NamedTuple):
    """A fact of a sentence, and questions about it.

    Attributes:
      text: the sentence; {v} stands for what can be wrong in it.
      answer: the right {v}.
      question: asks for it.
      alternatives: words of the kind of the answer.
    """

    text: str
    answer: str
    question: str
    alternatives: tuple[str, ...]


def passages(rng: np.random.Generator, words: Words, characters: int) -> str:
    """Returns at least `characters` characters of passages, each with its questions and answers."""
    parts: list[str] = []
    size = 0
    while size < characters:
        parts.append(passage(rng, words))
        size += len(parts[-1]) + 1
    return "\n".join(parts)


def passage(rng: np.random.Generator, words: Words) -> str:
    """Returns one passage with its questions and answers, all in one form."""
    count = int(rng.integers(*SENTENCES))
    things = [str(thing) for thing in rng.choice(words.nouns, count, replace=False)]
    facts = [_fact(rng, words, thing) for thing in things]
    text = " ".join(fact.text.format(v=fact.answer) for fact in facts)
    asked = rng.permutation(count)[: int(rng.integers(*QUESTIONS))]
    form, kind = rng.random(), rng.random()
    questions = [_question(rng, facts[index], form, kind) for index in asked]
    return f"{rng.choice(_HEADS)}{text}\n{''.join(questions)}"


def _fact(rng: np.random.Generator, words: Words, thing: str) -> Fact:
    name = str(rng.choice(words.names))
    place, colour = str(rng.choice(_PLACES)), str(rng.choice(_COLOURS))
    past, plain = _VERBS[int(rng.integers(len(_VERBS)))]
    number = str(rng.integers(2, 100))
    return (
        Fact(f"{{v}} {past} the {thing} at the {place}.", name, f"Who {past} the {thing}?", words.names),
        Fact(f"{name} {past} the {thing} at the {{v}}.", place, f"Where did {name} {plain} the {thing}?", _PLACES),
        Fact(f"The {thing} of {name} is {{v}}.", colour, f"What colour is the {thing} of {name}?", _COLOURS),
        Fact(f"{name} has {{v}} coins in the {thing}.", number, f"How many coins does {name} have in the {thing}?",
             tuple(map(str, range(2, 100)))),
        Fact(f"At the {place}, {name} {past} the {{v}}.", thing, f"What did {name} {plain} at the {place}?",
             words.nouns),
    )[int(rng.integers(5))]  # fmt: skip


def _question(rng: np.random.Generator, fact: Fact, form: float, kind: float) -> str:
    """Returns a question and its answer.

    Args:
      rng: draws wrong answers.
      fact: what is asked about.
      form: from 0 to below 1, picks one of the forms of a kind.
      kind: from 0 to below 1, picks the kind: a statement, choices, or an open question.
    """

    def picked(forms: tuple[str, ...]) -> str:
        return forms[int(form * len(forms))]

    wrong = [str(other) for other in rng.permutation(fact.alternatives)[: len(LETTERS) + 1] if other != fact.answer]
    if kind < SAID_SHARE:
        right = rng.random() < 0.5
        said = fact.text.format(v=fact.answer if right else wrong[0])
        return picked(_SAID).format(s=said, a="True" if right else "False")
    if kind < SAID_SHARE + CHOICES_SHARE:
        choices = [fact.answer, *wrong[: int(rng.integers(1, len(LETTERS)))]]
        order = rng.permutation(len(choices))
        listed = " ".join(f"{LETTERS[at]}) {choices[index]}" for at, index in enumerate(order))
        letter = LETTERS[int(np.flatnonzero(order == 0)[0])]
        return picked(_CHOSEN).format(q=fact.question, o=listed, a=f"{letter}) {fact.answer}")
    return picked(_OPEN).format(q=fact.question, a=fact.answer)
