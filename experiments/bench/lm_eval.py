"""lm-evaluation-harness: the seconds of its evaluation with kvjax, and with its own ``--model hf``, in turns.

The peer has a process of its own: in one process, the threads of torch and of XLA were seen to slow each other down.
"""

import contextlib
import functools
import importlib.util
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

import kvjax
from experiments.bench.contestants import in_turns, ratio
from experiments.programs import lm_eval_tasks
from experiments.tasks import multiple_choice
from kvjax.checkpoint import locate
from kvjax.errors import ConfigError
from kvjax.typing import Foreign, JsonObject

KVJAX, PEER = "kvjax", "hf"
MODEL = "kvjax-tiny"
ROWS = 16
TEXTS = "texts"  # the task of perplexity
EXACT = "float64"  # the dtype in which the peer's softmax is computed once more where its printed digits differ
#: lm_eval's names of the results that are compared, and ours.
METRICS = {"acc": "accuracy", "acc_norm": "accuracy by length", "word_perplexity": "word perplexity"}
#: What the solved questions before each question are: the first ones of a training file, the same before all of them;
#: or drawn anew for each question, which is what lm_eval does unless a task says otherwise.
FIRST, DRAWN = "first", "drawn"


def run(values: flags.FlagValues) -> list[JsonObject]:
    """A row for each task, number of shots and policy.

    Raises:
      ConfigError: no folder of tasks, packages that are missing, unknown examples, or a text that cannot be read.
    """
    if not values.data:
        raise ConfigError("bench lm_eval needs --data=FOLDER, with a subfolder for each multiple-choice task.")
    if unknown := [kind for kind in values.examples if kind not in (FIRST, DRAWN)]:
        raise ConfigError(f"--examples={unknown[0]}: unknown; valid: {FIRST}, {DRAWN}.")
    compared = values.against != ["none"]
    if compared:
        _check_peer()
    questions = {task: multiple_choice.read(task, Path(values.data)) for task in values.questions}
    pieces = _pieces(values)
    # The numbers of a peer without a network, and no fork of a process that runs JAX.
    os.environ |= {"HF_HUB_OFFLINE": "1", "DISABLE_MULTIPROC": "1"}
    models = {name: made(values, name) for name in dict.fromkeys(("full", *values.policies))}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        if compared:
            weights = _weights_of_peer(values, models["full"], Path(folder) / "model")
            models[PEER] = stack.enter_context(peer(weights, values.dtype, values.batch or ROWS))
        rows: list[dict[str, Any]] = []
        for task, every in questions.items():
            # The same questions in all rows: those that are no examples.
            asked = every[max(values.shots) :][: values.documents]
            for shots in values.shots:
                for kind in values.examples if shots else ("none",):
                    examples: list[multiple_choice.Question] = []
                    if kind == FIRST:
                        examples = multiple_choice.with_examples(task, Path(values.data), shots)[0]
                    where = Path(folder) / kind
                    where.mkdir(exist_ok=True)
                    lm_eval_tasks.write_choices(where, task, asked, examples)
                    found = one_task(values, models, str(where), task, shots, len(asked))
                    rows += [{"task": task, "examples": kind} | row for row in found]
        if pieces:
            lm_eval_tasks.write_texts(Path(folder), TEXTS, pieces)
            found = one_task(values, models, folder, TEXTS, 0, len(pieces))
            rows += [{"task": TEXTS, "examples": "none"} | row for row in found]
    return rows


def _pieces(values: flags.FlagValues) -> list[str]:
    """Returns pieces of --text, as many as there are questions of a task; none without a text."""
    if not values.text:
        return []
    file = Path(values.text)
    if not file.is_file():
        raise ConfigError(f"--text={file}: there is no such file.")
    return lm_eval_tasks.pieces([file])[: values.documents]


def _weights_of_peer(values: flags.FlagValues, own: Foreign, saved: Path) -> JsonObject:
    """Returns the arguments by which the peer loads the same weights: the GGUF file, or a folder that is written."""
    found = locate.local(values.model or MODEL)
    if found is not None and found.is_file():
        return {"pretrained": str(found.parent), "gguf_file": found.name}
    kvjax.save(own.runner.model, saved)
    return {"pretrained": str(saved)}


def one_task(
    values: flags.FlagValues, models: JsonObject, folder: str, task: str, shots: int, documents: int
) -> list[JsonObject]:
    """A row for each policy: results, seconds of the whole evaluation, and of the model's part of it."""
    metrics: dict[str, dict[str, float]] = {}
    spent: dict[str, list[float]] = {name: [] for name in models}
    sides = {
        name: evaluating(model, folder, f"{lm_eval_tasks.PREFIX}{task}", shots, spent[name], metrics, name)
        for name, model in models.items()
    }
    times = in_turns(sides, values.rounds)
    rows = []
    for name, each in times.items():
        if name == PEER:
            continue
        row = {
            "documents": documents, "shots": shots, "batch": values.batch or ROWS, "side": name,
            "seconds": float(np.median(each)), "first call": spent[name][0],
            "in the model": float(np.median(spent[name][1:])), **metrics[name],
        }  # fmt: skip
        if PEER in models:
            theirs = metrics[PEER]
            row |= {
                "hf seconds": float(np.median(times[PEER])), "hf in the model": float(np.median(spent[PEER][1:])),
                **{f"hf {metric}": value for metric, value in theirs.items()},
                "digits of hf": digits(metrics[name]) == digits(theirs),
                "times as fast": ratio(times[PEER], each),
                "in the model, times as fast": ratio(spent[PEER][1:], spent[name][1:]),
            }  # fmt: skip
            if name == "full" and not row["digits of hf"]:
                # In float32, a sum over a vocabulary of 49,152 was seen to be off by 1.6e-5 nats a token.
                models[PEER].send((folder, f"{lm_eval_tasks.PREFIX}{task}", shots, EXACT))
                exact = models[PEER].recv()[2]
                row |= {f"hf {metric}, softmax in {EXACT}": value for metric, value in exact.items()}
        rows.append(row)
    return rows


def digits(metrics: Mapping[str, float]) -> dict[str, str]:
    """Results as lm_eval prints them."""
    return {name: f"{value:.4f}" for name, value in metrics.items()}


def evaluating(
    model: object,
    folder: str,
    task: str,
    shots: int,
    spent: list[float],
    metrics: dict[str, dict[str, float]],
    name: str,
) -> Iterator[float]:
    """Seconds of each evaluation; those of the model's part are added to `spent`."""
    while True:
        if isinstance(model, Connection):
            model.send((folder, task, shots))
            whole, own, metrics[name] = model.recv()
        else:
            whole, own, metrics[name] = evaluate(model, folder, task, shots)
        spent.append(own)
        yield whole


def evaluate(
    model: Foreign, folder: str, task: str, shots: int, softmax: str | None = None
) -> tuple[float, float, dict[str, float]]:
    """The seconds of one evaluation, those of the model's part, and the metrics that lm_eval prints.

    Args:
      model: a model of lm_eval.
      folder: the folder of the tasks.
      task: the name of a task.
      shots: the number of solved questions before each question.
      softmax: the dtype of the softmax of ``--model hf``; None for that of its logits.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if hasattr(model, "softmax_dtype"):
        from lm_eval.models.utils_hf import get_dtype

        model.softmax_dtype = None if softmax is None else get_dtype(softmax)

    spent = [0.0]
    timed = [name for name in ("_loglikelihood_tokens", "loglikelihood_rolling") if name in vars(type(model))]
    for name in timed:
        setattr(model, name, functools.partial(_timed, getattr(type(model), name), model, spent))
    tasks = TaskManager(include_path=folder, include_defaults=False)
    start = time.perf_counter()
    found = lm_eval.simple_evaluate(
        model=model, tasks=[task], num_fewshot=shots, task_manager=tasks, bootstrap_iters=0, log_samples=False
    )
    seconds = time.perf_counter() - start
    # acc,none is the name of an accuracy of answers that no filter changed.
    named = {key.partition(",")[0]: value for key, value in found["results"][task].items()}
    metrics = {METRICS[key]: float(value) for key, value in named.items() if key in METRICS}
    return seconds, spent[0], metrics


def _timed(
    call: Callable[..., Foreign], model: Foreign, spent: list[float], *arguments: Any, **options: Any
) -> Foreign:
    """Calls a method of a model, and adds its seconds; those of a call within another one count once."""
    start, before = time.perf_counter(), spent[0]
    answers = call(model, *arguments, **options)
    spent[0] = before + time.perf_counter() - start
    return answers


def made(values: flags.FlagValues, policy: str) -> Foreign:
    """The model in lm_eval under a policy."""
    try:
        from kvjax.lm_eval import KVJaxLM
    except ImportError as error:
        raise ConfigError(str(error)) from None
    budget = None if policy == "full" else values.budget
    return KVJaxLM(
        values.model or MODEL, policy=policy, budget=budget, dtype=values.dtype, batch_size=values.batch or ROWS
    )


def _check_peer() -> None:
    """Raises ConfigError if lm_eval's own model cannot run, before anything is measured."""
    if importlib.util.find_spec("accelerate") is None or importlib.util.find_spec("torch") is None:
        raise ConfigError("--model hf needs kvjax[bench-lm-eval]; install it, or give --against=none.")


@contextlib.contextmanager
def peer(weights: JsonObject, dtype: str, rows: int) -> Iterator[Connection]:
    """Starts a process in which lm_eval's own model with the same weights evaluates on request.

    Args:
      weights: the arguments of lm_eval's model that name the weights.
      dtype: the dtype of weights and activations.
      rows: the number of rows of a batch.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, weights, dtype, rows), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        process.join()


def serve(requests: Connection, weights: JsonObject, dtype: str, rows: int) -> None:
    """Evaluates until the other end is closed."""
    from lm_eval.models.huggingface import HFLM

    model = HFLM(**weights, dtype=dtype, device="cpu", batch_size=rows)
    with contextlib.suppress(EOFError):
        while True:
            requests.send(evaluate(model, *requests.recv()))
