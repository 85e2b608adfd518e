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

    def counts(name: str, default: str | None, about: str, least: int = 1) -> None:
        flags.DEFINE(cli.CountList(least), name, default, about, flag_values=values)

    several("against", "transformers", f"comma-separated peers ({', '.join(peers.PEERS)}), or none")
    several("python", "", "comma-separated PEER=INTERPRETER, for peers that are installed in other environments")
    several("policies", "h2o", "comma-separated policies of kvjax; the others are compared with the first")
    text("shape", None, f"decoder: {LLAMA} or one of kvjax.models.shapes; default opt-125m if all peers support it")
    flags.DEFINE_float("budget", 0.2, "budget as a fraction of the context", 0.0, 1.0, flag_values=values)
    whole("batch", None, "number of rows; default: that of each benchmark")
    several("weights", "none", "for `decode`: also run the first policy with weights quantized to int8, int4 or int2")
    counts(
        "context",
        None,
        "number of prompt tokens, a list for `memory` and `selections`; default: that of each benchmark",
    )
    whole("slots", 512, "budget of every policy or draft, for `policies`, `storages`, `stream` and `speculate`", 64)
    whole("tokens", 128, "new tokens of kvjax per round; a slow peer generates fewer", 2)
    whole("rounds", 5, "number of rounds, in the order A B B A")
    about = "implementation of kvjax's attention"
    flags.DEFINE_enum("implementation", "auto", IMPLEMENTATIONS, about, flag_values=values)
    flags.DEFINE_bool("compile", False, "also try torch.compile with transformers' static cache", flag_values=values)
    text("text", None, "a file to score, for `stream` and `lm_eval`, or to prompt with, for `speculate`")
    text(
        "model",
        None,
        "folder, GGUF file or name, for `lm_eval`, `shared`, `speculate`, `answers` (default kvjax-tiny), `gguf` "
        "(SmolLM2), `prefill`",
    )
    several("grid", "12x103x64,12x512x64,96x2048x64", "shapes as BATCH*HEADSxSLOTSxHEAD_DIM, for `kernels`")
    several("kinds", ",".join(KINDS), "for `kernels`: attention with statistics `none` or `mass`, and a whole `step`")
    about = (
        "a cache to measure, for `selections`, `storages` and `answers`; default all. For `prefill`, a selection of a "
        'full cache; for `gguf`, a policy with a storage, such as "h2o + fp16"'
    )
    flags.DEFINE_multi_string("caches", [], about, flag_values=values)
    flags.DEFINE_bool(
        "fill",
        False,
        "fill caches with random numbers instead of prompts, for `decode`, `storages` and `gguf`",
        flag_values=values,
    )
    text("data", None, "folder with the multiple-choice tasks, for `lm_eval`")
    several("questions", "copa,piqa,mathqa", f"tasks for `lm_eval`, of {', '.join(multiple_choice.TASKS)}")
    counts("shots", "0", "number of examples before each question, for `lm_eval`", 0)
    several("examples", "first", "how examples are chosen, for `lm_eval`: first (of a file), drawn (for each question)")
    whole("documents", 100, "number of questions per task, and of pieces of the text, for `lm_eval` and `answers`")
    whole("requests", 2000, "number of requests, for `serve` and `prefixes`")
    about = "for `speculate`: what drafts, a selection, seen(POLICY) or own(POLICY); default several of these"
    flags.DEFINE_multi_string("drafts", [], about, flag_values=values)
    counts("gammas", "4", "for `speculate`: numbers of drafts of a round")
    about = "for `speculate`: also compute α by kvjax.analysis.acceptance, which reads each prompt twice more"
    flags.DEFINE_bool("acceptance", False, about, flag_values=values)
    about = "for `speculate`: where the model's cache is; slots that draft are on the device"
    flags.DEFINE_enum("memory", "device", ["device", "host"], about, flag_values=values)
    flags.DEFINE_float("temperature", 0.0, "for `speculate`: of samples; 0 = greedy", 0.0, flag_values=values)
    flags.DEFINE_float("top_p", 0.9, "for `speculate`: of samples", 0.0, 1.0, flag_values=values)
    several("servers", "", "NAME=http://HOST:PORT of servers that run the same model, for `serve`")
    about = "interpret Pallas kernels on this machine; their times are not meaningful"
    flags.DEFINE_enum("interpret", "no", ["no", "tpu", "gpu"], about, flag_values=values)
    flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "dtype of weights and caches", flag_values=values)
    text("output", None, f"also write the results as JSON to this file; for `{ACCELERATOR}`, the folder of its results")
    about = f"time limit of `{ACCELERATOR}` in minutes; a later run measures what is missing"
    flags.DEFINE_float("minutes", MINUTES, about, 0.0, flag_values=values)
    flags.DEFINE_bool("tiny", False, "use arrays of a few kilobytes, to check that a task runs", flag_values=values)
    text("plot", None, "also write a plot of the results to this PNG file")


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
