"""The six multiple-choice tasks, read from small files of the forms that are published."""

import json

import pytest

from experiments.tasks import multiple_choice
from experiments.tasks.multiple_choice import Question
from kvjax.errors import ConfigError

COPA = """<copa-corpus><item id="1" asks-for="cause" most-plausible-alternative="2">
<p>The cup fell.</p><a1>It rained.</a1><a2>The cat jumped.</a2></item></copa-corpus>"""
BLANK = (
    "Please choose: sentence: The cat met a dog and _ ran.\n\nOption1: the cat Option2: the dog Answer format: option1"
)
FILES = {
    "copa/copa-test.xml": COPA,
    "openbookqa/test.tsv": "ID\tQuestion Stem\tChoices\tComplete Question\tAnswer Key\n"
    "7\tIce is\t(A) cold (B) hot (C) dry (D) loud\tx\tA\n",
    "piqa/dev.jsonl": json.dumps({"goal": "Open a jar", "sol1": "Turn it.", "sol2": "Eat it."}),
    "piqa/dev-labels.lst": "0\n",
    "winogrande/dev_llm_adapters.json": json.dumps([{"instruction": BLANK, "answer": "option2"}]),
    "rte/val.jsonl": json.dumps({"premise": "It rains.", "hypothesis": "It is wet.", "label": "not_entailment"}),
    "mathqa/test_llm_adapters.json": json.dumps(
        [
            {"instruction": "1 + 1 ? The options: A ) 1 , B ) 2 , 0 , C ) 3 , D ) 4 , E ) 5", "answer": "B"},
            {"instruction": "1 + 2 ? The options: ['A ) 1', 'B ) 2', 'C ) 3', 'D ) 4', 'E ) 5']", "answer": "C"},
        ]
    ),
}
EXPECTED = {
    "copa": [Question(("The cup fell because",), ("it rained.", "the cat jumped."), 1)],
    "openbookqa": [Question(("Ice is",), ("cold", "hot", "dry", "loud"), 0)],
    "piqa": [Question(("Question: Open a jar\nAnswer:",), ("Turn it.", "Eat it."), 0)],
    "winogrande": [Question(("The cat met a dog and the cat", "The cat met a dog and the dog"), ("ran.",), 1)],
    "rte": [Question(("It rains.\nQuestion: It is wet. True or False?\nAnswer:",), ("True", "False"), 1)],
    "mathqa": [
        Question(("Question: 1 + 1 ?\nAnswer:",), ("1", "2 , 0", "3", "4", "5"), 1),
        Question(("Question: 1 + 2 ?\nAnswer:",), ("1", "2", "3", "4", "5"), 2),
    ],
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("task", multiple_choice.TASKS)
def test_questions(task, small):
    assert multiple_choice.read(task, small) == EXPECTED[task]


@pytest.mark.parametrize("task", multiple_choice.TASKS)
def test_every_published_question_has_choices_and_a_label(task, shared_data):
    folder = shared_data / "data/tasks"
    if not folder.is_dir():
        pytest.skip("no tasks in the shared data folder")
    counts = {"openbookqa": 4, "mathqa": 5}
    for each in multiple_choice.read(task, folder):
        several = max(len(each.contexts), len(each.choices))
        assert several == counts.get(task, 2) and 0 <= each.label < several
        assert all(each.contexts) and all(each.choices)


def test_what_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="there is no file"):
        multiple_choice.read("rte", tmp_path)
    with pytest.raises(ConfigError, match="known tasks: copa"):
        multiple_choice.read("boolq", tmp_path)
