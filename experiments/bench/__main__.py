"""The command line of the benchmarks; `experiments.programs.bench` runs them."""

import faulthandler
import signal
from collections.abc import Sequence

from absl import flags

import experiments.bench
from experiments import cli, peers
from experiments.bench.names import ACCELERATOR, GROUPS, KINDS, LLAMA, MINUTES
from experiments.tasks import multiple_choice
from kvjax.typing import IMPLEMENTATIONS


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
    text("shape", None, f"decoder: {LLAMA} or one of kvjax.models.shapes; else opt-125m, where the peers have it")
    flags.DEFINE_float("budget", 0.2, "fraction of the context", 0.0, 1.0, flag_values=values)
    whole("batch", None, "rows")
    several("weights", "none", "for `decode`: the first policy with weights quantised to int8, int4, int2 as well")
    several("context", None, "prompt tokens; several, with commas between them, for `memory` and `selections`")
    whole("slots", 512, "budget of every policy, for `policies`, `storages` and `stream`", 64)
    whole("tokens", 128, "new tokens of kvjax a round; a slow peer generates fewer", 2)
    whole("rounds", 5, "rounds, A B B A")
    flags.DEFINE_enum("implementation", "auto", IMPLEMENTATIONS, "of kvjax's attention", flag_values=values)
    flags.DEFINE_bool("compile", False, "try torch.compile on transformers' static cache too", flag_values=values)
    text("text", None, "a file to score, for `stream` and `lm_eval`")
    text("model", None, "folder, GGUF file or name: for `lm_eval`, else kvjax-tiny; for `gguf`, else SmolLM2")
    several("grid", "12x103x64,12x512x64,96x2048x64", "BATCH*HEADSxSLOTSxHEAD_DIM, for `kernels`")
    several("kinds", ",".join(KINDS), "attention with statistics `none` or `mass`, and `step`, for `kernels`")
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
    whole("documents", 100, "questions of each task, and pieces of the text, for `lm_eval`")
    whole("requests", 2000, "requests of mixed lengths, for `serve`")
    several("servers", "", "NAME=http://HOST:PORT of servers that run the same model, for `serve`")
    about = "run Pallas kernels interpreted on this machine: their times mean nothing"
    flags.DEFINE_enum("interpret", "no", ["no", "tpu", "gpu"], about, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "of weights and caches", flag_values=values)
    text("output", None, f"also write the figures as JSON to this file; for `{ACCELERATOR}`, the folder of its results")
    about = f"that `{ACCELERATOR}` may take; what has not been measured then is left to another call"
    flags.DEFINE_float("minutes", MINUTES, about, 0.0, flag_values=values)
    flags.DEFINE_bool("tiny", False, "measure arrays of a few kilobytes, to see that a task runs", flag_values=values)
    text("plot", None, "also draw the figures, as a PNG, to this file")


def main(argv: Sequence[str]) -> int:
    about = str(experiments.bench.__doc__)
    given, values = cli.parse_flags(argv, about=about, define=define, positional=1, groups=GROUPS)
    # It imports jax, which `--help` does without.
    from experiments.programs import bench

    return bench.start(given[0] if given else "decode", values, argv)


if __name__ == "__main__":
    # A process that is ended because its time is up says where it was.
    faulthandler.register(signal.SIGTERM, all_threads=False, chain=True)
    cli.main(main)
