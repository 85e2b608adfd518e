"""Losses of several caches on held-out windows, and their table."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments import results
from experiments.reports import tables
from kvjax.models.model import Model
from kvjax.policies import Policy


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


def write(folder: Path, name: str, found: Mapping[str, Sequence[float]], about: Sequence[str], command: str) -> str:
    """Writes results.json and report.md, and returns the table.

    Args:
      folder: of the run.
      name: of the run.
      found: nats per token of each window, by cache; ``full`` is the full cache.
      about: lines above the table.
      command: the command line; "" = none.
    """
    means = {each: float(np.mean(values)) for each, values in found.items()}
    rows = [
        {"policy": each, "nats per token": f"{x:.4f}", "perplexity": f"{math.exp(x):.3f}",
         "nats above full": f"{x - means['full']:.4f}"}
        for each, x in means.items()
    ]  # fmt: skip
    results.write(folder / "results.json", results.to_json({"name": name, "nats": means, "nats_by_window": found}))
    shown = tables.markdown(name, [*about, *([f"`{command}`"] if command else [])], rows)
    results.write(folder / "report.md", shown)
    return tables.table(rows)
