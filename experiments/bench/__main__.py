"""The command line of the benchmarks: flags, one task, a table, JSON and a plot."""

import contextlib
import faulthandler
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from absl import flags
from tabulate import tabulate

import experiments.bench
import kvjax.products
from experiments import cli, peers, results
from experiments.bench import (
    accelerator,
    contestants,
    decode,
    device,
    every_policy,
    figures,
    first_use,
    forms,
    kernels,
    link,
    lm_eval,
    memory,
    prefill,
    products,
    selections,
    serve,
    storages,
    stream,
    transfers,
)
from experiments.runs import machine
from experiments.tasks import multiple_choice
from kvjax.attention import IMPLEMENTATIONS
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
    "first_use": first_use.run,
    "lm_eval": lm_eval.run,
    "serve": serve.run,
}
#: Tasks that measure peers, and what checks their flags before it is asked whether the peers are installed.
AGAINST = {
    "decode": decode.check,
    "prefill": prefill.check,
    "memory": memory.check,
    "first_use": first_use.check,
}
ACCELERATOR = "accelerator"  # runs others of these, in processes of their own


def define(values: flags.FlagValues) -> None:
    def text(name: str, default: str | None, about: str) -> None:
        flags.DEFINE_string(name, default, about, flag_values=values)

    def whole(name: str, default: int | None, about: str, least: int = 1) -> None:
        flags.DEFINE_integer(name, default, about, least, flag_values=values)

    def several(name: str, default: str | None, about: str) -> None:
        flags.DEFINE_list(name, default, about, flag_values=values)

    several("against", "transformers", f"peers ({', '.join(peers.PEERS)}), with commas between them; or none")
    several("python", "", "PEER=INTERPRETER: peers that are in an environment of their own, with commas between them")
    several("policies", "h2o", "policies of kvjax, with commas between them; the first is what others are compared to")
    text(
        "shape", None, f"decoder: {decode.LLAMA} or one of kvjax.models.shapes; else opt-125m, where the peers have it"
    )
    flags.DEFINE_float("budget", 0.2, "fraction of the context", 0.0, 1.0, flag_values=values)
    whole("batch", None, "rows")
    several("weights", "none", "for `decode`: the first policy with weights quantised to int8, int4, int2 as well")
    several("context", None, "prompt tokens; several, with commas between them, for `memory` and `selections`")
    whole("slots", 512, "budget of every policy, for `policies`, `storages` and `stream`", 64)
    whole("tokens", 128, "new tokens of kvjax a round; a slow peer generates fewer", 2)
    whole("rounds", 5, "rounds, A B B A")
    flags.DEFINE_enum("implementation", "auto", IMPLEMENTATIONS, "of kvjax's attention", flag_values=values)
    flags.DEFINE_bool("compile", False, "try torch.compile on transformers' static cache too", flag_values=values)
    text("text", None, "a file to score, for `stream`")
    several("grid", "12x103x64,12x512x64,96x2048x64", "BATCH*HEADSxSLOTSxHEAD_DIM, for `kernels`")
    several("kinds", ",".join(kernels.KINDS), "attention with statistics `none` or `mass`, and `step`, for `kernels`")
    about = "a cache of `selections` or `storages`; may be given several times, and is else every one"
    flags.DEFINE_multi_string("caches", [], about, flag_values=values)
    flags.DEFINE_bool(
        "fill",
        False,
        "fill caches with random numbers instead of prompts, for `decode` and `storages`",
        flag_values=values,
    )
    text("data", None, "folder of the multiple-choice tasks, for `lm_eval`")
    several("questions", "copa,piqa,mathqa", f"of {', '.join(multiple_choice.TASKS)}, for `lm_eval`")
    several("shots", "0", "questions with their answers before each question, for `lm_eval`")
    several("examples", "first", "which ones: the first of a file, or drawn for each question; for `lm_eval`")
    whole("documents", 100, "questions of each task, for `lm_eval`")
    whole("requests", 2000, "requests of mixed lengths, for `serve`")
    several("servers", "", "NAME=http://HOST:PORT of servers that run the same model, for `serve`")
    about = "run Pallas kernels interpreted on this machine: their times mean nothing"
    flags.DEFINE_enum("interpret", "no", ["no", "tpu", "gpu"], about, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of weights and caches", flag_values=values)
    text("output", None, f"also write the figures as JSON to this file; for `{ACCELERATOR}`, the folder of its results")
    about = f"that `{ACCELERATOR}` may take; what has not been measured then is left to another call"
    flags.DEFINE_float("minutes", accelerator.MINUTES, about, 0.0, flag_values=values)
    flags.DEFINE_bool("tiny", False, "measure arrays of a few kilobytes, to see that a task runs", flag_values=values)
    text("plot", None, "also draw the figures, as a PNG, to this file")


def _command(argv: Sequence[str]) -> str:
    """Returns the arguments that another machine would be given: all but the files to write."""
    return shlex.join(each for each in argv[1:] if not each.lstrip("-").startswith(("output=", "plot=")))


def main(argv: Sequence[str]) -> int:
    given, values = cli.parse_flags(argv, about=str(experiments.bench.__doc__), define=define, positional=1)
    task = given[0] if given else "decode"
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
        results.write(Path(values.output), results.to_json(result))
    if values.plot:
        Path(values.plot).write_bytes(figures.draw(task, rows))
    return 0


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


if __name__ == "__main__":
    # A process that is ended because its time is up says where it was.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    cli.main(main)
