"""Losses of several caches on held-out windows, and their table."""

import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import results
from experiments.reports import tables
from experiments.tuning.training_run import TrainingRun
from kvjax.models.model import Model
from kvjax.policies import Policy
from kvjax.typing import JsonObject


def nats(
    model: Model,
    policy: Policy,
    tokens: np.ndarray,
    *,
    prompt_length: int,
    prefill_block: int | None,
    calibration: kvjax.Calibration | None = None,
) -> list[float]:
    """Returns the mean negative log-likelihood per token after each prompt, in nats.

    Args:
      model: from `kvjax.load`.
      policy: what the cache keeps.
      tokens: [windows, T] int32.
      prompt_length: the number of tokens of a window that are its prompt.
      prefill_block: the number of tokens of a block of the prompt; None = one block.
      calibration: of the policy, if it needs one.
    """
    exact = "highest" if model.dtype == jnp.float32 else None
    with jax.default_matmul_precision(exact):
        found = kvjax.log_likelihood(
            model, tokens, policy, prompt_length=prompt_length, prefill_block=prefill_block, calibration=calibration
        )
    return [float(x) for x in -np.asarray(found.logprobs)[:, prompt_length - 1 :].mean(axis=1, dtype=np.float64)]


def means(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns the mean over the windows of each cache."""
    return {name: float(np.mean(values)) for name, values in found.items()}


def write(
    run: TrainingRun, found: Mapping[str, Sequence[float]], trained: str, budget: int | float, environment: JsonObject
) -> str:
    """Writes results.json and report.md, and returns the table.

    Args:
      run: the run.
      found: nats per token of each window, by cache; ``full`` is the full cache.
      trained: what was trained, and the number of its parameters.
      budget: the budget of the caches.
      environment: from `TrainingRun.begin`.
    """
    config, average = run.config, means(found)
    rows = [
        {"policy": each, "nats per token": f"{x:.4f}", "perplexity": f"{math.exp(x):.3f}",
         "nats above full": f"{x - average['full']:.4f}"}
        for each, x in average.items()
    ]  # fmt: skip
    content = {"name": config.name, "nats": average, "nats_by_window": found}
    results.write(run.folder / "results.json", results.to_json(content))
    about = [
        run.description,
        f"{trained}, {config.steps} steps of {config.rows} windows of {run.size} tokens; {len(run.held_out)} "
        f"held-out windows of {config.windows.prompt_length} prompt tokens and {config.evaluation.new_tokens} scored "
        f"ones, under a budget of {budget}.",
        f"On {environment['device']} ({environment['cpu']}); jax {environment['jax']}.",
    ]
    shown = tables.markdown(config.name, [*about, *([f"`{run.command}`"] if run.command else [])], rows)
    results.write(run.folder / "report.md", shown)
    return tables.table(rows)
