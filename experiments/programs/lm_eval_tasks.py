"""Writes tasks of lm-evaluation-harness; see `experiments.lm_eval_tasks`."""

import json
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from absl import flags

import kvjax
from experiments import results
from experiments.config import RecallConfig
from experiments.tasks import multiple_choice, score
from experiments.tasks.multiple_choice import Question
from experiments.tasks.story import story
from experiments.tasks.words import HELD_OUT
from kvjax.typing import JsonObject

PREFIX, RECALL = "kvjax_", ("passkey", "multi_key", "associative")
CHARACTERS = 3_000  # of a text that is scored by itself
STORIES = 8  # texts where none are given
#: How lm_eval joins the values of documents.
AGGREGATIONS = {
    "word_perplexity": "weighted_perplexity", "byte_perplexity": "weighted_perplexity",
    "bits_per_byte": "bits_per_byte",
    "acc": "mean", "acc_norm": "mean", "exact_match": "mean",
}  # fmt: skip


def write_choices(folder: Path, task: str, questions: Sequence[Question], examples: Sequence[Question] = ()) -> None:
    """Writes a multiple-choice task.

    Args:
      folder: which exists.
      task: its name, without `PREFIX`.
      questions: at least one. If contexts differ, each choice is a context and its continuation.
      examples: that stand before each question.
    """
    several = len(questions[0].contexts) > 1
    rows, shots = (
        [
            {"contexts": list(each.contexts), "continuation": each.choices[0], "label": each.label}
            if several
            else {"context": each.contexts[0], "choices": list(each.choices), "label": each.label}
            for each in own
        ]
        for own in (questions, examples)
    )
    fields = (
        {"doc_to_text": "label", "doc_to_choice": "contexts", "doc_to_target": "continuation"}
        if several
        else {"doc_to_text": "context", "doc_to_choice": "choices", "doc_to_target": "label"}
    )
    metrics = ["acc"] if several else ["acc", "acc_norm"]
    _write(folder, task, rows, {"output_type": "multiple_choice", **fields}, metrics, shots)


def write_texts(folder: Path, task: str, texts: Iterable[str]) -> None:
    """Writes a task of perplexity; each text is scored by itself."""
    settings = {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "text"}
    _write(folder, task, [{"text": text} for text in texts], settings, list(AGGREGATIONS)[:3])


def write_answers(folder: Path, task: str, asked: Iterable[tuple[str, str]], *, new_tokens: int) -> None:
    """Writes a task of generation, scored by exact match: contexts and answers. An answer ends with its sentence."""
    settings = {
        "output_type": "generate_until", "doc_to_text": "context", "doc_to_target": "answer",
        "generation_kwargs": {"until": ["\n", "."], "do_sample": False, "max_gen_toks": new_tokens},
        "filter_list": [
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
    }  # fmt: skip
    rows = [{"context": context, "answer": answer} for context, answer in asked]
    _write(folder, task, rows, settings, ["exact_match"])


def _write(
    folder: Path,
    task: str,
    rows: list[JsonObject],
    settings: JsonObject,
    metrics: list[str],
    shots: Sequence[JsonObject] = (),
) -> None:
    files = {}
    for split, own in (("test", rows), ("examples", shots)):
        if own:
            data = (folder / f"{PREFIX}{task}{'' if split == 'test' else '_examples'}.jsonl").resolve()
            data.write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")
            files[split] = str(data)
    few = {"num_fewshot": len(shots), "fewshot_split": "examples", "fewshot_config": {"sampler": "first_n"}}
    config = {
        "task": PREFIX + task, "dataset_path": "json", "dataset_kwargs": {"data_files": files},
        "test_split": "test", **settings, "target_delimiter": " ", **(few if shots else {}),
        "metric_list": [
            {"metric": each, "aggregation": AGGREGATIONS[each], "higher_is_better": AGGREGATIONS[each] == "mean"}
            for each in metrics
        ],
        "metadata": {"version": 1.0},
    }  # fmt: skip
    # JSON is YAML.
    (folder / f"{PREFIX}{task}.yaml").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def recall_prompts(task: str, *, prompts: int, length: int) -> list[tuple[str, str]]:
    """Contexts of `length` tokens of kvjax-tiny, and their answers."""
    model = kvjax.load("kvjax-tiny")
    assert model.tokenizer is not None
    config = RecallConfig(tasks=(task,), prompts=prompts, length=length, nearest=length // 2, farthest=3 * length // 4)
    made = score.make_prompts(config, model, seed=0)[task]
    return [(model.tokenizer.decode(each.tokens), each.text.strip().rstrip(string.punctuation)) for each in made]


def pieces(files: Sequence[Path]) -> list[str]:
    """Files in pieces of `CHARACTERS` characters; generated stories if there are none."""
    if not files:
        return [story(np.random.default_rng(seed), HELD_OUT, CHARACTERS) for seed in range(STORIES)]
    texts = [file.read_text(encoding="utf-8") for file in files]
    return [text[start : start + CHARACTERS] for text in texts for start in range(0, len(text), CHARACTERS)]


def start(values: flags.FlagValues) -> int:
    """Writes the tasks that a command line asks for.

    Returns:
      The exit status.
    """
    folder = Path(values.output)
    results.make_folder(folder)
    if values.data:
        for task in multiple_choice.TASKS:
            examples, questions = multiple_choice.with_examples(task, Path(values.data), values.shots)
            write_choices(folder, task, questions, examples)
    for task in RECALL:
        write_answers(folder, task, recall_prompts(task, prompts=values.prompts, length=values.length), new_tokens=16)
    write_texts(folder, "texts", pieces([Path(file) for file in values.texts]))
    print(f"wrote {', '.join(sorted(file.stem for file in folder.glob('*.yaml')))} to {folder}")
    return 0
