"""Times what a newcomer waits for: imports, ``--help``, first runs with nothing compiled, and runs of a second process.

Each row is measured in a separate process (`first_call`) with a separate cache folder, which has nothing that programs
of the user have kept.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from absl import flags

import kvjax
from experiments.bench import contestants
from experiments.bench.decode import interpreters, names_of_peers
from experiments.bench.first_call import Call
from experiments.peers import child_environment
from kvjax.errors import ConfigError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.typing import JsonObject

CHILD = "experiments.bench.first_call"
TINY = "kvjax-tiny"
POLICIES = ("full", "h2o", "roco", "razor_attention")
BUDGETS = (0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6)
#: Layers of the random LLaMAs: compilation should not follow depth.
DEPTHS = (6, 30)
LIBRARY = "native"  # the folder of libraries that were built, in kvjax's cache folder
BUILD = """
from kvjax.products import native
native.begin()
native.await_native()
reasons = [native.load(target) for library in native.LIBRARIES for target, _ in library.symbols]
print("; ".join(filter(None, reasons)) or "built")
"""


class Sizes(NamedTuple):
    """Attributes:
    prompt: tokens of a prompt.
    tokens: new tokens.
    scored: tokens that a sweep scores.
    batch: rows of a sweep.
    """

    prompt: int = 512
    tokens: int = 32
    scored: int = 64
    batch: int = 4


class Process(NamedTuple):
    """A process to measure.

    Attributes:
      work: what it does.
      side: who does it.
      arguments: of the interpreter.
      cache: name of the cache folder, which processes with the same name share; None = a new folder.
      python: the interpreter; None = this one.
    """

    work: str
    side: str
    arguments: tuple[str, ...]
    cache: str | None = None
    python: str | None = None


class Taken(NamedTuple):
    """Seconds that a process took; `calls` are those of its runs alone."""

    cpu: float
    wall: float
    calls: list[tuple[float, float]]


def check(values: flags.FlagValues) -> None:
    """Raises ConfigError if there is a peer that has no first use here."""
    if set(names_of_peers(values.against)) - {"transformers", "kvpress"}:
        raise ConfigError(
            "first use is measured against transformers and kvpress only; give --against=transformers,kvpress or none."
        )
    interpreters(values.python)


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Rows in seconds, the medians of `rounds` rounds in which all processes take turns."""
    sizes = Sizes(prompt=16, tokens=2, scored=2, batch=1) if values.tiny else Sizes()
    names = POLICIES if values["policies"].using_default_value else tuple(values.policies)
    with tempfile.TemporaryDirectory() as folder:
        models = {f"{depth} layers": str(Path(folder, str(depth))) for depth in ((1, 2) if values.tiny else DEPTHS)}
        for (name, path), depth in zip(models.items(), (1, 2) if values.tiny else DEPTHS, strict=True):
            print(f"saving a LLaMA of {name}", flush=True)
            kvjax.save(contestants.random_model(deep(depth), sizes.prompt + sizes.tokens), path)
        plan = processes(
            names, {TINY: TINY, **models}, names_of_peers(values.against), sizes, interpreters(values.python)
        )
        taken: dict[Process, list[Taken]] = {process: [] for process in plan}
        for number in range(values.rounds):
            with tempfile.TemporaryDirectory() as caches:
                for process in plan:
                    print(f"round {number + 1}: {process.work}, {process.side}", flush=True)
                    taken[process].append(measure(process, Path(caches)))
    return [row(process, each) for process, each in taken.items()]


def deep(layers: int) -> DecoderConfig:
    """A LLaMA as wide as SmolLM2-135M: 576 features, 9 heads, 3 KV heads."""
    return dataclasses.replace(
        contestants.shape(contestants.LLAMA), hidden_size=576, num_layers=layers, num_heads=9, num_kv_heads=3,
        head_dim=64, mlp_size=1536, embed_size=576, rope=Rope(dim=64), windows=(),
    )  # fmt: skip


def processes(
    policies: Sequence[str],
    models: dict[str, str],
    against: Sequence[str],
    sizes: Sizes,
    pythons: Mapping[str, str] = MappingProxyType({}),
) -> list[Process]:
    """The processes, in order: the first one builds the library, of which all others have a copy.

    Args:
      policies: of kvjax-tiny.
      models: a folder, or a name that `kvjax.load` knows, by the name that rows have.
      against: peers.
      sizes: of prompts and texts.
      pythons: the interpreters of peers that have their own.
    """

    def calling(work: str, call: Call, cache: str | None = None) -> Process:
        side = call.policy if call.side == "kvjax" else call.side
        return Process(work, side, ("-m", CHILD, json.dumps(call._asdict())), cache, pythons.get(side))

    plan = [
        Process("build the library", "kvjax", ("-c", BUILD), LIBRARY),
        Process("import", "jax", ("-c", "import jax")),
        Process("import", "kvjax", ("-c", "import kvjax")),
        Process("import, every name", "kvjax", ("-c", "from kvjax import *")),
        Process("--help", "experiments.run", ("-m", "experiments.run", "--help")),
    ]
    for name, model in models.items():
        call = Call("kvjax", model, prompt=sizes.prompt, tokens=sizes.tokens)
        for policy in policies if name == TINY else ("h2o",):
            plan.append(calling(f"{name}, first generate", call._replace(policy=policy), f"{name} {policy}"))
        for policy in policies if name == TINY else ("h2o",):
            plan.append(calling(f"{name}, second process", call._replace(policy=policy), f"{name} {policy}"))
        # Peers know a name of kvjax's as the folder that it is.
        folder = str(Path(kvjax.__file__).parent / "pretrained" / model) if name == TINY else model
        plan += [calling(f"{name}, second process", call._replace(side=peer, model=folder)) for peer in against]
    sweep = Call(
        "kvjax", TINY, budgets=BUDGETS, batch=sizes.batch, prompt=sizes.prompt, tokens=sizes.scored, scores=True,
        again=True,
    )  # fmt: skip
    work = f"{TINY}, {len(BUDGETS)} budgets scored"
    return [*plan, calling(work, sweep), calling(f"{work}, padded", sweep._replace(padded=True))]


def measure(process: Process, caches: Path) -> Taken:
    """Runs a process to its end.

    Args:
      process: what to run.
      caches: the folder of this round's cache folders.

    Raises:
      ConfigError: it ended with an error.
    """
    home = Path(tempfile.mkdtemp(dir=caches)) if process.cache is None else caches / process.cache
    built = caches / LIBRARY / "kvjax" / LIBRARY
    if process.cache != LIBRARY and built.is_dir() and not (home / "kvjax").exists():
        # Only the user may read what is run.
        (home / "kvjax").mkdir(mode=0o700, parents=True)
        shutil.copytree(built, home / "kvjax" / LIBRARY)
    environment = child_environment() | {"XDG_CACHE_HOME": str(home)}
    for name in ("JAX_COMPILATION_CACHE_DIR", "KVJAX_COMPILATION_CACHE"):
        environment.pop(name, None)
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(
        [process.python or sys.executable, *process.arguments], env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    wall, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise ConfigError(
            f"{process.work}, {process.side}: it exited with status {done.returncode}: {done.stderr[-800:]}"
        )
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    last = done.stdout.splitlines()[-1:] if CHILD in process.arguments else []
    return Taken(cpu, wall, [tuple(each) for line in last for each in json.loads(line)])


def row(process: Process, taken: Sequence[Taken]) -> JsonObject:
    """A row of the table; of a process that ran twice, the CPU seconds of the first time beyond the second."""

    def median(numbers: Sequence[float]) -> float | None:
        return float(np.median(numbers)) if numbers else None

    firsts = [each.calls[0] for each in taken if each.calls]
    twice: list[Any] = [each.calls for each in taken if len(each.calls) > 1]
    return {
        "work": process.work,
        "side": process.side,
        "cpu s": median([cpu for cpu, _ in firsts]),
        "wall s": median([wall for _, wall in firsts]),
        "of it compiling": median([first[0] - second[0] for first, second in twice]),
        "process cpu s": median([each.cpu for each in taken]),
        "process wall s": median([each.wall for each in taken]),
    }
