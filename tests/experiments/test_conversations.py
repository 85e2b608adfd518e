"""Questions of one context in three modes: what each sees, what is reported, and what cannot be asked."""

import dataclasses

import numpy as np
import pytest

import kvjax
from experiments.tasks import conversations, registry
from experiments.tasks.base import Setting
from experiments.tasks.conversations import BYTES, HELD, MODES, RECOMPUTED, Conversation, Conversations, Mode, Turn
from kvjax import policies
from kvjax.cache.spec import as_spec
from kvjax.errors import ConfigError
from kvjax.lm_eval.runner import Runner
from tests.experiments.texts import Characters
from tests.tiny import tiny

RNG = np.random.default_rng(0)
NEW, PARTS = 4, ("first", "later")


def ids(count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in RNG.integers(1, 64, count))


def turn(**changes) -> Turn:
    return Turn(ids(5), ids(3), ("x",), NEW)._replace(**changes)


CONVERSATIONS = (
    Conversation(ids(40), (turn(), turn(), turn())),
    Conversation(ids(37), (turn(question=ids(6)), turn())),
    Conversation(ids(40), (turn(), turn(answer=ids(4)), turn())),
)


def made(**mode) -> Conversations:
    return Conversations("about", CONVERSATIONS, lambda text, turn: 0.0, Mode("task", **mode))


def answers(policy, **mode) -> list[dict]:
    found: dict[int, dict] = {}
    runner = Runner(tiny().model, as_spec(policy), rows=2, max_length=128)
    made(**mode).ask(runner, Characters(), range(3), lambda number, answer: found.update({number: answer}))
    return [found[number] for number in range(3)]


def tokens(found: list[dict]) -> list[list[list[int]]]:
    return [[turn["tokens"] for turn in each["turns"]] for each in found]


def generated(prompt: tuple[int, ...]) -> list[int]:
    result = kvjax.generate(tiny().model, [list(prompt)], policies.full(), max_new_tokens=NEW, stop=[0])
    return [int(token) for token in result.tokens[0, : result.lengths[0]] if token]


@pytest.fixture(scope="module")
def full() -> dict[str, list[dict]]:
    found = {mode: answers(policies.full(), mode=mode) for mode in MODES}
    return found | {"own": answers(policies.full(), own_answers=True)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [*MODES, "own"])
def test_each_mode_sees_its_own_text_under_a_full_cache(mode, full):
    for each, row in zip(CONVERSATIONS, tokens(full[mode]), strict=True):
        seen = each.context
        for own, new in zip(each.turns, row, strict=True):
            assert new == generated((*seen, *own.question))
            if mode in ("multi_turn", "own"):
                seen = (*seen, *own.question, *(new if mode == "own" else own.answer))


@pytest.mark.sampled(0)
def test_a_compressor_sees_the_question_of_its_prompt(full):
    """In a multi-request no question, in a multi-turn the first one."""
    compressed = {mode: answers(policies.snapkv(12, window=4), mode=mode) for mode in MODES}
    first = {mode: [row[0] for row in tokens(found)] for mode, found in compressed.items()}
    assert first["multi_turn"] == first["single"] != first["multi_request"]
    assert tokens(compressed["multi_turn"]) != tokens(compressed["single"])
    # Of a prompt 12 slots are kept, and all that follows.
    slots = {mode: [turn["slots"] for turn in found[0]["turns"]] for mode, found in compressed.items()}
    assert slots == {"multi_turn": [12, 12 + 3 + 5, 12 + 2 * 8], "multi_request": [12 + 5] * 3, "single": [12] * 3}
    again = answers(policies.snapkv(12, window=4), turns="compress")
    assert [turn["slots"] for turn in again[0]["turns"]] == [12, 12, 12]
    assert [turn["length"] for turn in again[0]["turns"]] == [45, 53, 61]
    assert answers(policies.full(), turns="compress") == full["multi_turn"], "a full cache has nothing to compress"


def test_an_answer_ends_where_it_says():
    """So that own answers are no longer in the history than what is scored."""
    words = [*map(ord, "7. It")]
    assert conversations.ended(Characters(), words, ".") == words[:2]
    assert conversations.ended(Characters(), words, "!") == conversations.ended(Characters(), words, "") == words


def test_scores_by_turn():
    own = dataclasses.replace(
        made(mode="single"), score=lambda text, turn: float(text == "yes"), parts=PARTS,
        conversations=tuple(
            each._replace(turns=tuple(own._replace(about={"part": PARTS[n > 0]}) for n, own in enumerate(each.turns)))
            for each in CONVERSATIONS
        ),
    )  # fmt: skip
    texts = (("yes", "no", "yes"), ("yes", "yes"), ("no", "no", "yes"))
    found = [
        {"bytes": 100, "turns": [{"text": text, "tokens": [], "slots": 8.0, "length": 32} for text in row]}
        for row in texts
    ]
    assert own.by_turn(found) == [[100, 0, 100], [100, 100], [0, 0, 100]]
    assert own.by_question(found) == pytest.approx([200 / 3, 100, 100 / 3])
    scores = own.scores(found, found)
    assert scores.pop("as full") == 100
    assert scores == pytest.approx({
        "score": 62.5, "turn 1": 200 / 3, "turn 2": 100 / 3, "turn 3": 100, "first": 200 / 3, "later": 60, HELD: 25,
        BYTES: 100, RECOMPUTED: (2 * 40 + 37 + 2 * 40) / 3,
    })  # fmt: skip
    assert own.headline == ("score", "turn 1", "turn 3")
    assert own.scores(found, None).keys() == scores.keys()
    assert dataclasses.replace(own, mode=Mode("task")).scores(found, None)[RECOMPUTED] == 0


def setting(questions: int | None = None, max_length: int = 10_000) -> Setting:
    return Setting(None, questions, 0, Characters(), max_length)


@pytest.mark.parametrize("kind", ["passkey", "multi_key", "associative", "copy"])
def test_recall_contexts_hold_an_answer_to_each_question(kind):
    task = f"recall_{kind}(length=900, count=3, nearest=100)"
    asked = registry.build(task).make(setting())
    assert asked.conversations == registry.build(task).make(setting()).conversations
    assert len(asked) == 3 == len({each.context for each in asked.conversations})
    places = set()
    for each in asked.conversations:
        assert len(each.context) == 900 and each.context[0] == 0
        text = Characters().decode(each.context)
        assert len({turn.question for turn in each.turns}) == len(each.turns) == 4
        for own in each.turns:
            (answer,) = own.references
            assert tuple(map(ord, answer)) == own.answer and answer.endswith(own.ends)
            # The question ends as the fact goes on before the answer.
            fact = (Characters().decode(own.question).split()[-1] + answer).lower()
            assert text.lower().count(fact) == 1
            places.add(end := text.lower().index(fact) + len(fact))
            assert end <= 899 - 100
            assert asked.score(answer + " It", own) == 1 and asked.score(answer[:-1], own) == 0
    assert max(places) - min(places) > 400, "facts are spread over the context"


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("recall_passkey(mode=many)", "mode='many' is unknown; known: multi_turn, multi_request, single"),
        ("recall_passkey(turns=drop)", "turns='drop' is unknown"),
        ("recall_copy(mode=single, own_answers=true)", "own_answers=true is for mode=multi_turn"),
        ("recall_copy(mode=multi_request, turns=compress)", "turns=compress is for mode=multi_turn"),
        ("recall_passkey(questions=7)", "at most 6"),
        ("recall_multi_key(difficulty=3)", "at least 4"),
        ("recall_copy(difficulty=0)", "at least 1"),
        ("recall_copy(nearest=500)", "below length=400"),
        ("recall_copy(count=0)", "count=0 should be at least 1"),
        ("recall_copy(length=200)", "do not fit in a context of 200 before its last 64"),
        ("recall_copy(length=2000, count=1)", "more than the model's 2000"),
    ],
)  # fmt: skip
def test_recall_that_cannot_be_asked(task, message):
    with pytest.raises(ConfigError, match=message):
        registry.build(task).make(setting(max_length=2000))
