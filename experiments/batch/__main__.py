"""The command line of `experiments.batch`."""

from collections.abc import Sequence

from absl import flags

import experiments.batch
from experiments import cli
from kvjax.errors import ConfigError


def define(values: flags.FlagValues) -> None:
    """Adds the program's own flags."""

    def text(name: str, about: str) -> None:
        flags.DEFINE_string(name, None, about, flag_values=values)

    def whole(name: str, default: int | None, about: str) -> None:
        flags.DEFINE_integer(name, default, about, 1, flag_values=values)

    def number(name: str, about: str) -> None:
        flags.DEFINE_float(name, None, about, 0.0, flag_values=values)

    text("requests", "the file of requests: a JSON object a line")
    text("output", "the file of results, which the same command continues after a kill")
    whole("rows", 32, "requests that are answered at the same time")
    whole("new_tokens", None, "new tokens of a request that does not say how many; else as the checkpoint says, or 256")
    whole("longest_prompt", None, "tokens of a prompt at the most; else those of the longest that there is")
    whole("most_new_tokens", None, "new tokens of a request at the most; else the largest number that there is")
    number("temperature", "of requests that do not say; 0 takes the most probable token")
    whole("top_k", None, "of requests that do not say")
    number("top_p", "of requests that do not say")
    number("min_p", "of requests that do not say")
    number("repetition_penalty", "of requests that do not say")


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(experiments.batch.__doc__), define=define)
    for name in ("requests", "output"):
        if values[name].value is None:
            raise ConfigError(f"give --{name}=FILE.jsonl.")
    # It imports jax, which `--help` does without.
    from experiments.programs import batch

    return batch.start(config, values)


if __name__ == "__main__":
    cli.main(main, "the same command goes on; no result is lost.")
