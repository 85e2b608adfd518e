"""Forms of training text: lines of any length, and passages with questions."""

import re

import numpy as np
import pytest

from experiments.tasks import questions, words
from experiments.training import layouts
from kvjax.errors import ConfigError

TEXT = "One two three\nfour five.\n\nSix seven\n  eight nine ten eleven twelve thirteen fourteen.\n"


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.mark.parametrize("name", layouts.LAYOUTS)
def test_a_layout_moves_words_to_other_lines_only(rng, name):
    assert layouts.LAYOUTS[name](TEXT, rng).split() == TEXT.split()


def test_the_lines_of_each_layout(rng):
    made = {name: layout(TEXT * 20, rng) for name, layout in layouts.LAYOUTS.items()}
    assert made["wrapped"] == TEXT * 20
    assert "\n" not in made["flat"]
    assert made["joined"].startswith("One two three four five.\n\nSix seven eight nine ten")
    assert max(map(len, made["short"].splitlines())) < layouts.SHORT[1]
    assert len(made["short"].splitlines()) > len(made["joined"].splitlines())


@pytest.mark.parametrize("names", [(), ("wrapped", "wrapped"), ("wide",)])
def test_layouts_that_are_refused_are_told_what_there_is(names):
    with pytest.raises(ConfigError, match="must be one or more of wrapped, joined, flat, short"):
        layouts.check(names)


FACT = questions.Fact("Ann hid the {v}.", "spoon", "What did Ann hide?", words.TRAINING.nouns)


def test_statements_are_true_where_they_say_what_the_passage_says(rng):
    said = [questions._question(rng, FACT, form, 0.0) for form in rng.random(50)]
    for text in said:
        assert ("Ann hid the spoon." in text) == ("True" in text.replace("True or False", ""))
    assert 10 < sum("hid the spoon" in text for text in said) < 40


def test_the_letter_of_an_answer_stands_before_it(rng):
    texts = [questions._question(rng, FACT, form, questions.SAID_SHARE + 0.01) for form in rng.random(50)]
    letters = set()
    for text in texts:
        first, last = re.findall(r"([A-E])\) spoon", text)
        letters.add(first)
        assert first == last and text.count("spoon") == 2
    assert len(letters) >= 3


def test_passages_are_drawn_anew_and_again_by_their_seed():
    first, again, other = (questions.passages(np.random.default_rng(s), words.TRAINING, 3000) for s in (1, 1, 2))
    assert first == again != other and len(first) >= 3000
    assert len(re.findall(r"(?m)^(A|Answer|answer|Assistant): \w+", first)) >= 3
