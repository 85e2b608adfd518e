"""lm-evaluation-harness: the seconds of its evaluation with kvjax, and with its own ``--model hf``, in turns.

The peer has a process of its own: in one process, the threads of torch and of XLA were seen to slow each other down.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import in_turns, ratio
from experiments.programs import lm_eval_tasks
from experiments.tasks import multiple_choice
from kvjax.errors import ConfigError
from kvjax.typing import Foreign, JsonObject

KVJAX, PEER = "kvjax", "hf"
MODEL = "kvjax-tiny"
ROWS = 16
#: What the solved questions before each question are: the first ones of a training file, the same before all of them;
#: or drawn anew for each question, which is what lm_eval does unless a task says otherwise.
FIRST, DRAWN = "first", "drawn"


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each task, number of shots and policy.

    Raises:
      ConfigError: no folder of tasks, packages that are missing, or unknown examples.
    """
    if not values.data:
        raise ConfigError("bench lm_eval needs --data=FOLDER, which holds a folder for each multiple-choice task.")
    if unknown := [kind for kind in values.examples if kind not in (FIRST, DRAWN)]:
        raise ConfigError(f"--examples={unknown[0]}: unknown; valid: {FIRST}, {DRAWN}.")
    compared = values.against != ["none"]
    if compared:
        _check_peer()
    questions = {task: multiple_choice.read(task, Path(values.data)) for task in values.questions}
    # The numbers of a peer without a network, and no fork of a process that runs JAX.
    os.environ |= {"HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
    models = {name: made(values, name) for name in dict.fromkeys(("full", *values.policies))}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if compared:
            kvjax.save(models["full"].runner.model, Path(folder) / "model")
            models[PEER] = stack.enter_context(peer(str(Path(folder) / "model"), values.batch or ROWS))
        rows: list[dict[str, Any]] = []
        for task, every in questions.items():
            # The same questions in all rows: those that are no examples.
            asked = every[max(map(int, values.shots)) :][: values.documents]
            for shots in map(int, values.shots):
                for kind in values.examples if shots else ("none",):
                    examples: list[multiple_choice.Question] = []
                    if kind == FIRST:
                        examples = multiple_choice.with_examples(task, Path(values.data), shots)[0]
                    where = Path(folder) / kind
                    where.mkdir(exist_ok=True)
                    lm_eval_tasks.write_choices(where, task, asked, examples)
                    found = one_task(values, models, str(where), task, shots, compared)
                    rows += [{"task": task, "examples": kind} | row for row in found]
    return rows


def one_task(
    values: flags.FlagValues, models: JsonObject, folder: str, task: str, shots: int, compared: bool
) -> list[JsonObject]:
    """A row for each policy: seconds of the whole evaluation, and of the model's part of it."""
    accuracy: dict[str, float] = {}
    spent: dict[str, list[float]] = {name: [] for name in models}
    sides = {
        name: evaluating(model, folder, f"{lm_eval_tasks.PREFIX}{task}", shots, spent[name], accuracy, name)
        for name, model in models.items()
    }
    times = in_turns(sides, values.rounds)
    rows = []
    for name, each in times.items():
        if name == PEER:
            continue
        row = {
            "documents": values.documents, "shots": shots, "batch": values.batch or ROWS, "side": name,
            "seconds": float(np.median(each)), "first call": spent[name][0],
            "in the model": float(np.median(spent[name][1:])), "accuracy": accuracy[name],
        }  # fmt: skip
        if compared:
            row |= {
                "hf seconds": float(np.median(times[PEER])), "hf in the model": float(np.median(spent[PEER][1:])),
                "hf accuracy": accuracy[PEER], "times as fast": ratio(times[PEER], each),
                "in the model, times as fast": ratio(spent[PEER][1:], spent[name][1:]),
            }  # fmt: skip
        rows.append(row)
    return rows


def evaluating(
    model: object, folder: str, task: str, shots: int, spent: list[float], accuracy: dict[str, float], name: str
) -> Iterator[float]:
    """Seconds of each evaluation; those of the model's part are added to `spent`."""
    while True:
        if isinstance(model, Connection):
            model.send((folder, task, shots))
            whole, own, accuracy[name] = model.recv()
        else:
            whole, own, accuracy[name] = evaluate(model, folder, task, shots)
        spent.append(own)
        yield whole


def evaluate(model: Foreign, folder: str, task: str, shots: int) -> tuple[float, float, float]:
    """The seconds of one evaluation, those of the model's part, and the accuracy."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    plain, spent = type(model)._loglikelihood_tokens, [0.0]

    def measured(*arguments: Any, **options: Any) -> Foreign:
        start = time.perf_counter()
        answers = plain(model, *arguments, **options)
        spent[0] += time.perf_counter() - start
        return answers

    model._loglikelihood_tokens = measured
    tasks = TaskManager(include_path=folder, include_defaults=False)
    start = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model, tasks=[task], num_fewshot=shots, task_manager=tasks, bootstrap_iters=0, log_samples=False
    )
    return time.perf_counter() - start, spent[0], found["results"][task]["acc,none"]


def made(values: flags.FlagValues, policy: str) -> Foreign:
    """kvjax-tiny in lm_eval."""
    try:
        from kvjax.lm_eval import KVJaxLM
    except ImportError as error:
        raise ConfigError(str(error)) from None
    budget = None if policy == "full" else values.budget
    return KVJaxLM(MODEL, policy=policy, budget=budget, dtype=values.dtype, batch_size=values.batch or ROWS)


def _check_peer() -> None:
    """Raises ConfigError if lm_eval's own model cannot run, before anything is measured."""
    if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("torch") is None:
        raise ConfigError("--model hf needs kvjax[bench-lm-eval]; install it, or give --against=none.")


@contextlib.contextmanager
def peer(folder: str, rows: int) -> Iterator[Connection]:
    """The same weights in lm_eval's own model, in a process of its own that evaluates on request."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, folder, rows), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def serve(requests: Connection, folder: str, rows: int) -> None:
    """Evaluates until the other end is closed."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(pretrained=folder, dtype="auto", device="cpu", batch_size=rows)
    with contextlib.suppress(EOFError):
        while True:
            requests.send(evaluate(model, *requests.recv()))
