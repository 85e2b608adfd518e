"""Recall tasks: every question has its answer among the facts, nothing held out is in training, scoring is exact."""

import itertools
import re

import numpy as np
import pytest

from experiments import config as configs
from experiments.config import RecallConfig
from experiments.tasks import prompts, recall, score, story, wording, words
from experiments.tasks.words import HELD_OUT, TRAINING
from kvjax.cache import Limits
from kvjax.errors import ConfigError
from kvjax.models.model import Model
from kvjax.policies import window

SPLITS = {"training": TRAINING, "held out": HELD_OUT}


def encode(text: str) -> list[int]:
    return list(text.encode())


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", recall.TASKS)
@pytest.mark.parametrize("difficulty", [1, 2, 5])
def test_an_answer_stands_in_the_fact_that_is_asked_for(task, split, difficulty):
    for seed in range(60):
        episode = recall.TASKS[task](np.random.default_rng(seed), SPLITS[split], difficulty)
        assert episode == recall.TASKS[task](np.random.default_rng(seed), SPLITS[split], difficulty)
        for question in episode.questions:
            assert question.answer.startswith(" ")
            assert not question.text.endswith(" ")
            # In a text, facts and questions follow a space.
            fact = f" {episode.facts[question.fact]}"
            if task == "variable":
                assert follow(episode.facts, question.text) == question.answer
            else:
                assert question.answer in fact
                others = [f" {other}" for other in episode.facts if f" {other}" != fact]
                assert not any(question.answer in other for other in others)


@pytest.mark.parametrize("task", recall.TASKS)
def test_wordings_that_are_made_up_have_their_answers_too_and_none_of_the_held_out_words(task):
    wordings = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        made_up = wording.invent(rng, TRAINING)
        wordings.add(made_up.templates[task])
        words_of = set(" ".join(itertools.chain(*made_up.templates[task])).split())
        assert not words_of & (wording.RESERVED - set(wording.OPENINGS))
        assert not any(" > {v}" in part for part in made_up.templates[task][0])
        episode = recall.TASKS[task](rng, made_up, 3)
        for question in episode.questions:
            assert question.answer.startswith(" ")
            assert not question.text.endswith(" ")
            if task != "variable":
                assert question.answer in f" {episode.facts[question.fact]}"
    assert len(wordings) > 55


def follow(facts, question):
    """Solves a chain of variables: every name on its left side, what it holds on its right."""
    value = {}
    for fact in facts:
        number = re.search(r"\b\d\d\b", fact)
        if number:
            names = [word for word in re.findall(r"[a-z]+", fact) if word in TRAINING.nouns + HELD_OUT.nouns]
            value[names[0]] = number[0]
        else:
            named = [word for word in re.findall(r"[a-z]+", fact) if word in TRAINING.nouns + HELD_OUT.nouns]
            left, right = reversed(named) if fact.startswith("Put") else named
            value[left] = value[right]
    names = [word for word in re.findall(r"[a-z]+", question) if word in value]
    return f" {value[names[-1]]}."


def test_difficulty_counts_what_the_task_says():
    def episode(task, difficulty):
        return recall.TASKS[task](np.random.default_rng(3), TRAINING, difficulty)

    assert len(re.findall(r"\d", episode("passkey", 7).questions[0].answer)) == 7
    assert len(episode("multi_key", 6).facts) == len(episode("multi_key", 6).questions) == 6
    assert len(episode("associative", 9).facts) == 9
    assert len(episode("copy", 8).questions[0].answer.split()) == 8
    assert len(episode("variable", 4).facts) == 4 + 2
    with pytest.raises(ConfigError, match=r"needs 200 different words, but there are \d+"):
        recall.associative(np.random.default_rng(0), HELD_OUT, 100)


def test_nothing_that_is_held_out_is_in_training():
    held_out = set(HELD_OUT.nouns) | set(HELD_OUT.names)
    assert not held_out & (set(TRAINING.nouns) | set(TRAINING.names))
    assert not set(HELD_OUT.things) & set(TRAINING.things)
    for task, templates in HELD_OUT.templates.items():
        assert not {t[0] for t in templates} & {t[0] for t in TRAINING.templates[task]}
    text = "the walnut and the swan " * 3 + "a horse " * 2 + "Emma"
    assert words.common_words([text], 10) == ("the", "and", "horse")


def test_a_prompt_has_its_length_and_its_distance():
    fill = story.filler(encode, HELD_OUT)
    for task, difficulty in recall.DIFFICULTY.items():
        made = prompts.make(
            np.random.default_rng(5), task=task, difficulty=difficulty, length=1500, distance=900, words=HELD_OUT,
            encode=encode, filler=fill, bos=[1],
        )  # fmt: skip
        assert made.tokens.shape == (1500,)
        assert made.tokens[0] == 1
        text, answer = bytes(made.tokens[1:].astype(np.uint8)).decode(), bytes(made.answer.astype(np.uint8)).decode()
        assert not text.endswith(" ")
        if task != "variable":
            # The fact ends where the distance says: after the answer, and what else closes it.
            end = text.index(answer) + len(answer)
            rest = text[end : 1500 - 1 - 900]
            assert len(rest) < 40
            assert answer not in text[1500 - 1 - 900 :]


def test_facts_without_room_are_refused():
    def make(task):
        fill = story.filler(encode, HELD_OUT)
        return prompts.make(
            np.random.default_rng(0), task=task, difficulty=4, length=100, distance=90, words=HELD_OUT, encode=encode,
            filler=fill, bos=[],
        )  # fmt: skip

    with pytest.raises(prompts.NoRoom, match="of 100 tokens with this fact 90 tokens before its end"):
        make("multi_key")


class Bytes:
    """A tokenizer whose tokens are bytes."""

    bos_id, adds_bos = 0, True

    def encode(self, text, bos=True):
        return encode(text)

    def decode(self, ids):
        return bytes(int(i) for i in ids).decode()


def test_only_the_whole_answer_counts(monkeypatch):
    model = Model(config=None, params=None, tokenizer=Bytes())
    config = RecallConfig(tasks=("passkey", "associative"), prompts=4, length=1200, nearest=700, farthest=900)
    asked = score.make_prompts(config, model, seed=0)
    assert {task: len(made) for task, made in asked.items()} == {"passkey": 4, "associative": 4}
    assert [prompt.answer.tolist() for prompt in score.make_prompts(config, model, seed=0)["passkey"]] == [
        prompt.answer.tolist() for prompt in asked["passkey"]
    ]

    longest = max(made.answer.size for task in asked.values() for made in task)

    def generate(model, tokens, policy, *, max_new_tokens, limits):
        assert limits == Limits(1200, longest + score.SPARE_TOKENS, shortest=1200)
        answers = {made.tokens.tobytes(): made.answer for made in [*asked["passkey"], *asked["associative"]]}
        rows = np.full((len(tokens), max_new_tokens), 7, np.int32)
        assert len(tokens) <= score.ROWS
        for i, (row, prompt) in enumerate(zip(rows, tokens, strict=True)):
            answer = answers[prompt.tobytes()]
            row[: answer.size] = answer
            if i == 1:
                row[answer.size - 1] += 1  # the number is right, but does not end
            if i == 2:
                row[:] = [*row[1:], 7]  # a tokenizer may leave out the space: the text is the same
        return type("Generation", (), {"tokens": rows})

    monkeypatch.setattr(score.kvjax, "generate", generate)
    assert score.exact_matches(model, asked, window(budget=8)) == {"passkey": 0.75, "associative": 0.75}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RecallConfig(tasks=("pass",)), "recall.tasks='pass' is unknown; known tasks: passkey"),
        (RecallConfig(tasks=("copy",), nearest=800, farthest=700), "must ascend"),
        (
            RecallConfig(tasks=("variable", "passkey"), difficulty=0),
            "difficulty=0 is too low for passkey; give at least 1",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        score.make_prompts(config, Model(config=None, params=None, tokenizer=Bytes()), seed=0)


def test_a_model_without_a_tokenizer_is_refused():
    with pytest.raises(ConfigError, match="need a tokenizer, and the model has none"):
        score.make_prompts(RecallConfig(tasks=("copy",)), Model(config=None, params=None), seed=0)
    assert score.make_prompts(configs.ExperimentConfig().recall, Model(config=None, params=None), seed=0) == {}
