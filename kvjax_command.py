"""The console command ``kvjax``: one entry point to the programs that ``python -m`` runs too.

It is a separate module because it must start where `experiments` cannot be imported, which needs the extra
``experiments``, while the server does not; and because `kvjax` imports nothing of `experiments`. Neither jax nor a
program is imported before a command is chosen, so that ``kvjax --help`` takes no time.
"""

import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

USAGE_ERROR = 2
HELP, VERSION = {"--help", "-h", "help"}, {"--version", "-V"}
FOLDER = Path(__file__).resolve().parent  # has `experiments`, in a clone and where a wheel is installed


class Command(NamedTuple):
    """A command, and the program that it runs.

    Attributes:
      module: the program, as ``python -m`` takes it.
      about: one line for ``kvjax --help``.
      arguments: what the program is given before the user's arguments.
      requires: a flag without which the command makes no sense, with an example of its value.
    """

    module: str
    about: str
    arguments: tuple[str, ...] = ()
    requires: tuple[str, str] | None = None


COMMANDS = {
    "Experiments": {
        "demo": Command("experiments.run", "seven caches on kvjax-tiny, in a minute or two", ("--config=demo_tiny",)),
        "run": Command("experiments.run", "compare caches on one model and one text, and write a report"),
        "sweep": Command("experiments.sweep", "run every combination of the values of some fields"),
        "leaderboard": Command("experiments.leaderboard", "compare many caches, with intervals and ranks"),
        "paper": Command("experiments.paper", "measure tables and figures of H2O, RoCo and InfiniGen by name"),
        "after-prompt": Command("experiments.after_prompt", "score tokens after a prompt, and compare pair by pair"),
        "read-fraction": Command("experiments.read_fraction", "measure recall by the share of slots that are read"),
        "context-bytes": Command("experiments.context_bytes", "measure contexts as bytes, for codecs and storages"),
        "chunk-reuse": Command("experiments.chunk_reuse", "ask about facts in chunks whose caches are reused"),
        "edit-reuse": Command(
            "experiments.edit_reuse", "measure contexts whose text was edited, by the number of edits"
        ),
        "train": Command("experiments.train", "train a small decoder, and export it as a Hugging Face folder"),
        "tune": Command("experiments.tune", "fine-tune a model through a cache, and measure the gap to the full cache"),
        "train-gate": Command("experiments.train_gate", "train the gate of the policy learned, at a budget"),
        "train-merge": Command("experiments.train_merge", "train the parameters of a merge, such as lococo"),
        "train-reuse": Command(
            "experiments.train_reuse", "train KV prediction or cache augmentation, and measure both"
        ),
        "card": Command("experiments.card", "score a trained model, and write its model card"),
    },
    "Speed and memory": {
        "bench": Command("experiments.bench", "measure speed and memory, and compare with other libraries"),
        "plan": Command(
            "experiments.run",
            "compile a config for a TPU that you do not have: bytes, FLOPs, tokens/s",
            requires=("--topology", "v5e:2x4"),
        ),
        "capacity": Command("experiments.capacity", "find the largest batch that fits, and the cost of its tokens"),
        "simulate": Command("experiments.simulate", "plan serving: rows that fit, layouts, preemption, traffic"),
    },
    "Texts": {
        "serve": Command("kvjax.serve", "serve a model over HTTP with OpenAI's API"),
        "batch": Command("experiments.batch", "answer a file of requests"),
        "lm-eval": Command("kvjax.lm_eval", "run lm-evaluation-harness with kvjax's models and caches"),
        "lm-eval-tasks": Command("experiments.lm_eval_tasks", "write tasks for lm-evaluation-harness from local files"),
    },
    "Preparation": {
        "calibrate": Command("experiments.calibrate", "compute the calibration file that some storages need"),
        "skew": Command("experiments.skew", "compute the skew file for InfiniGen's selection"),
    },
}
ALL = {name: command for group in COMMANDS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the command and its arguments; else those of the process.

    Returns:
      The exit status, where the program does not end the process itself: 2 after a mistake in the command line.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in HELP:
        print(_help())
        return 0 if argv else USAGE_ERROR
    name, *rest = argv
    if name in VERSION:
        from kvjax.version import __version__

        print(f"kvjax {__version__}")
        return 0
    if name not in ALL:
        from kvjax.arguments import did_you_mean

        return _fail(f"unknown command {name!r}; {did_you_mean(name, ALL)}commands: {', '.join(ALL)}.")
    command = ALL[name]
    if reason := _not_installed(command):
        return _fail(reason)
    if command.requires and not {"--help", "-h", "--helpfull"} & set(rest):
        flag, example = command.requires
        if not any(each.lstrip("-").split("=")[0] == flag.lstrip("-") for each in rest):
            return _fail(f"kvjax {name} needs {flag}, for example {flag}={example}.")
    # As `python -m` does. Programs show the first of these as their name.
    sys.argv = [f"kvjax {name}", *command.arguments, *rest]
    runpy.run_module(command.module, run_name="__main__")
    return 0


def _not_installed(command: Command) -> str | None:
    """Returns why a command's package cannot be imported, or None if it can."""
    package = command.module.split(".")[0]
    if package != "experiments":  # it says itself which extra it needs
        return None
    try:
        found = importlib.import_module(package).__file__
    except ImportError as error:
        return f"{error}"
    if found is None or Path(found).resolve().parent != FOLDER / package:
        return f"another package of the name {package} comes first: {found}. Remove its folder from PYTHONPATH."
    return None


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return USAGE_ERROR


def _help() -> str:
    width = max(map(len, ALL)) + 2
    lines = [
        "usage: kvjax COMMAND [--FLAG=VALUE ...]",
        "",
        "Hugging Face decoders in JAX under a fixed KV-cache budget.",
    ]
    for title, group in COMMANDS.items():
        lines += ["", f"{title}:", *(f"  {name:{width}}{command.about}" for name, command in group.items())]
    lines += ["", "kvjax COMMAND --help tells what a command does, and its flags. kvjax --version prints the version."]
    if reason := _not_installed(ALL["run"]):
        lines += ["", f"Not available now, except for serve and lm-eval: {reason}."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
