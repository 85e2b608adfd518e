"""Runs one benchmark: a table, JSON and a plot; see `experiments.bench`."""

import contextlib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tabulate import tabulate

import kvjax.products
from experiments import peers, results
from experiments.bench import (
    accelerator,
    acceptance,
    answers,
    contestants,
    decode,
    device,
    equality,
    every_policy,
    figures,
    first_use,
    forms,
    gguf,
    kernels,
    link,
    lm_eval,
    memory,
    prefill,
    prefixes,
    products,
    selections,
    serve,
    shared,
    speculate,
    storages,
    stream,
    swap,
    transfers,
)
from experiments.bench.names import ACCELERATOR
from experiments.runs import machine
from kvjax.errors import ConfigError
from kvjax.typing import JsonObject

TASKS = {
    "decode": decode.run,
    "policies": every_policy.run,
    "storages": storages.run,
    "selections": selections.run,
    "link": link.run,
    "products": products.run,
    "forms": forms.run,
    "stream": stream.run,
    "prefill": prefill.run,
    "memory": memory.run,
    "kernels": kernels.run,
    "device": device.run,
    "transfers": transfers.run,
    "swap": swap.run,
    "first_use": first_use.run,
    "gguf": gguf.run,
    "lm_eval": lm_eval.run,
    "serve": serve.run,
    "prefixes": prefixes.run,
    "shared": shared.run,
    "speculate": speculate.run,
    "equality": equality.run,
    "acceptance": acceptance.run,
    "answers": answers.run,
}
#: Tasks that measure peers, and what checks their flags before it is asked whether the peers are installed.
AGAINST = {
    "decode": decode.check,
    "prefill": prefill.check,
    "memory": memory.check,
    "first_use": first_use.check,
    "gguf": gguf.check,
    "answers": answers.check,
}
#: Peers of tasks that do not measure the default of --against.
DEFAULT_PEERS = {"gguf": gguf.PEER, "answers": answers.PEER}


def start(task: str, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Runs a task, or the accelerator's parts.

    Returns:
      The exit status.
    """
    if task not in (*TASKS, ACCELERATOR):
        raise ConfigError(f"unknown benchmark {task!r}; known benchmarks: {', '.join((*TASKS, ACCELERATOR))}.")
    if task == ACCELERATOR:
        return accelerator.run(values)
    if values.tiny:
        shrink()
    for flag in ("output", "plot"):
        if path := values[flag].value:
            results.make_file(path, flag)
    pythons = decode.interpreters(values.python)
    if task in AGAINST:
        if task in DEFAULT_PEERS and not values["against"].present:
            values["against"].value = [DEFAULT_PEERS[task]]
        AGAINST[task](values)
        peers.check_installed(decode.names_of_peers(values.against), pythons)
    environment = machine.environment() | {"peers": peers.versions(pythons)}
    environment["reads_gb_per_second"] = 1e-9 / next(contestants.reading())
    print(describe(environment))
    # float32 means float32 on every side: left alone, accelerators multiply it in fewer bits.
    with jax.default_matmul_precision("highest" if values.dtype == "float32" else None), interpreting(values.interpret):
        rows = TASKS[task](values)
    environment["products"] = kvjax.products.explain().splitlines()  # with what was timed meanwhile
    print(tabulate(rows, headers="keys", floatfmt=",.2f", intfmt=",", tablefmt="github"))
    print("\n".join(environment["products"]))
    if values.output:
        result: dict[str, Any] = {"environment": environment, "command": _command(argv), task: rows}
        if task == "answers":
            result["model"] = values.model or answers.MODEL
        results.write(Path(values.output), results.to_json(result))
    if values.plot:
        Path(values.plot).write_bytes(figures.draw(task, rows))
    return 0


def _command(argv: Sequence[str]) -> str:
    """Returns the arguments that another machine would be given: all but the files to write."""
    kept = [each for each in argv[1:] if not each.lstrip("-").startswith(("output=", "plot="))]
    # Interpreters are of this machine.
    return shlex.join(re.sub(r"^(--?python=[^=]*=).*", r"\1PYTHON", each) for each in kept)


def shrink() -> None:
    """Arrays and products of nothing but a test: what a machine does at most is not measured."""
    contestants.READ_BYTES, device.SQUARE["cpu"], transfers.SIZES = 1 << 16, 64, (1 << 12, 1 << 16)


def interpreting(machine: str) -> contextlib.AbstractContextManager[Any]:
    """Where Pallas kernels run: ``no``, on the device that they are written for; else interpreted on this machine."""
    if machine == "no":
        return contextlib.nullcontext()
    # Pallas takes long to import.
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jax.experimental.pallas import tpu as pltpu

    if machine == "tpu":
        return pltpu.force_tpu_interpret_mode()
    gpu: Any = plgpu  # older versions have no interpreter
    if not hasattr(gpu, "InterpretGPUParams"):
        raise ConfigError(f"--interpret=gpu needs jax 0.11 or newer; this is jax {jax.__version__}.")
    return gpu.force_gpu_interpret_mode(gpu.InterpretGPUParams())


def describe(environment: JsonObject) -> str:
    """One line: what this ran on."""
    platform, kind = environment["platform"], environment["device"]
    where = f"{environment['cpu']}, {environment['cores']} cores, {environment['memory_gb']} GB"
    speed = f"reads {environment['reads_gb_per_second']:.1f} GB/s"
    if platform != "cpu":
        where = f"{environment['devices']} {kind}; {where}"
    installed = ", ".join(f"{name} {version}" for name, version in environment["peers"].items() if version)
    return f"measured on {platform}: {where}, {speed}; jax {environment['jax']}" + (
        f", {installed}" if installed else ""
    )
