"""The command line of `experiments.batch`."""

from collections.abc import Sequence

from absl import flags

import experiments.batch
from experiments import cli
from kvjax.errors import ConfigError
from kvjax.units import parse_size


class Size(flags.ArgumentParser):
    """Reads a number of bytes; see `kvjax.units.parse_size`."""

    syntactic_help = "a number of bytes, such as 4GB"

    def parse(self, argument: str) -> int:
        try:
            return parse_size(argument)
        except ValueError:
            raise ValueError(f"must be a number of bytes, such as 4GB; got {argument}") from None

    def flag_type(self) -> str:
        return "bytes"


def define(values: flags.FlagValues) -> None:
    """Adds the program's own flags."""

    def text(name: str, about: str) -> None:
        flags.DEFINE_string(name, None, about, flag_values=values)

    def whole(name: str, default: int | None, about: str) -> None:
        flags.DEFINE_integer(name, default, about, 1, flag_values=values)

    def number(name: str, about: str) -> None:
        flags.DEFINE_float(name, None, about, 0.0, flag_values=values)

    text("requests", "the file of requests: one JSON object per line")
    text("output", "the file of results; if it is incomplete, the same command continues it")
    whole("rows", 32, "number of requests that are answered at the same time, at most")
    about = (
        "limit the number of rows to those whose keys and values fit in this memory, such as 2GB; what a group holds "
        "once (--shared_slots) counts once"
    )
    flags.DEFINE(Size(), "cache_bytes", None, about, flag_values=values)
    about = "bytes for the states of prompts, such as 4GB, which others that begin alike continue; 0 = none are kept"
    flags.DEFINE(Size(), "prefix_cache", "1GB", about, flag_values=values)
    flags.DEFINE_bool(
        "shared_slots",
        False,
        "hold the slots of a group's common prefix once, and read them once for all rows; only with a full cache",
        flag_values=values,
    )
    text(
        "contexts",
        "a folder for contexts that requests keep (keep_context), and those of later runs continue (context)",
    )
    text("codec", "form of these contexts: cachegen:LEVEL, or a file of Tables or a Transform; default: as they are")
    whole("new_tokens", None, "default max_new_tokens of a request; if not given, that of the checkpoint, or 256")
    where = "in the file, or as in the first run of --contexts"
    whole("longest_prompt", None, f"largest number of tokens of a prompt; default: that of the longest {where}")
    whole("most_new_tokens", None, f"most tokens that follow a prompt; default: the largest max_new_tokens {where}")
    number("temperature", "default temperature of a request; 0 takes the most probable token")
    whole("top_k", None, "default top_k of a request")
    number("top_p", "default top_p of a request")
    number("min_p", "default min_p of a request")
    number("repetition_penalty", "default repetition_penalty of a request")


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(experiments.batch.__doc__), define=define)
    for name in ("requests", "output"):
        if values[name].value is None:
            raise ConfigError(f"give --{name}=FILE.jsonl.")
    # It imports jax, which `--help` does without.
    from experiments.programs import batch

    return batch.start(config, values)


if __name__ == "__main__":
    cli.main(main, "run the same command again to continue; no result is lost.")
