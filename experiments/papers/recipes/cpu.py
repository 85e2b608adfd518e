"""CPU: decoding steps of `experiments.bench decode`, interleaved, in a process of its own."""

import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import results
from experiments.papers.parts import Lab, Part, Result
from experiments.papers.settings import ROOT, Settings
from kvjax.errors import KvjaxError
from kvjax.typing import Json, JsonObject


def bench(lab: Lab, task: str, options: Mapping[str, Json], *flags: str) -> list[JsonObject]:
    """Runs a task of `experiments.bench` in a process of its own, and returns its rows.

    Raises:
      KvjaxError: it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{task}.json"
        command = [sys.executable, "-m", "experiments.bench", task, *flags, f"--output={file}"]
        command += [f"--{name}={given}" for name, given in options.items()]
        environment = dict(os.environ)
        if lab.settings.scale.trial:
            # Neither the memory's speed nor that of each form of products is measured.
            command.append("--tiny")
            environment["KVJAX_PRODUCTS"] = "fixed"
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        made = results.read_json(file)
    if done.returncode or made is None:
        raise KvjaxError(f"{' '.join(command[1:])} failed: {done.stderr.strip()[-2000:]}")
    rows: list[dict[str, Any]] = made[task]
    return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Part):
    """Times decoding steps of policies in turns, on a model of random weights whose caches are filled.

    The result has ``side`` [n] names, ``milliseconds`` [n] float64, the median of a step, and ``slots`` [n].

    Attributes:
      policies: the first is what others are compared with.
      shape: of `kvjax.models.shapes`.
      batch: rows.
      context: tokens of the prompt.
      tokens: of a round.
      rounds: of which the median counts.
    """

    policies: tuple[str, ...]
    shape: str
    batch: int
    context: int
    tokens: int
    rounds: int

    def measure(self, lab: Lab) -> Result:
        options = {
            "against": "none", "policies": ",".join(self.policies), "shape": self.shape, "batch": self.batch,
            "context": self.context, "tokens": self.tokens, "rounds": self.rounds,
        }  # fmt: skip
        rows = [row for row in bench(lab, "decode", options, "--fill") if row["side"] in self.policies]
        return {
            "side": np.array([row["side"] for row in rows]),
            "milliseconds": np.array([row["ms/step"] for row in rows], np.float64),
            "slots": np.array([row["slots"] for row in rows], np.int32),
        }


def decode(settings: Settings, batch: int, context: int, *, policies: tuple[str, ...] = ("h2o", "full")) -> Decode:
    """A part at OPT-125M's shape; in a trial at that of a model of four layers and a quarter of the context."""
    if settings.scale.trial:
        return Decode(policies=policies, shape="tiny", batch=batch, context=context // 4, tokens=16, rounds=2)
    return Decode(policies=policies, shape="opt-125m", batch=batch, context=context, tokens=64, rounds=5)


def milliseconds(result: Result, side: str) -> float:
    """The median of a step of one policy."""
    return float(result["milliseconds"][list(result["side"]).index(side)])
