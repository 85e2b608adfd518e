"""Scores the tokens after a prompt under many caches, and compares the caches pair by pair, with 95 % intervals.

    python -m experiments.after_prompt --config=random_control_tiny --config.data.text=FILE --against=window,random

Caches are those of a config of experiments.run: its policy and its baselines. The tokens after the prompt are fed one
by one (teacher forcing), and nothing is generated, so that this takes half the time of a run. --measures selects what
is measured:

  nats         the negative log-likelihood of each token. With --gap=N, tokens that recur are also scored by themselves:
               those that end a pair of tokens whose last occurrence is more than N tokens back, and after the prompt.
  facts        the tasks of --config.recall: the first data.prompt_length tokens of each question are its prompt, and
               all others are fed one by one. recall.farthest decides whether facts are told in the prompt or after it.
  recurrences  tokens that receive attention after more than --gap positions without any, and the share of them that
               the cache has evicted (kvjax.analysis.recurrences).
  errors       the relative error of the outputs of attention over what is left of a prompt
               (kvjax.analysis.output_error).

Results are written to OUTPUT/NAME/results.json after each cache, and their tables to report.md in the end. The same
command, run again, measures what is missing, or everything with --rerun; with other caches, it adds these.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

MEASURES = ("nats", "facts", "recurrences", "errors")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_list("measures", ["nats", "facts"], f"what is measured, of {', '.join(MEASURES)}", flag_values=values)
    flags.DEFINE_list(
        "against", ["window", "random"], "the policies to compare with; of several caches of such a policy, the first",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        "gap", None, "the number of tokens after which a token recurs; without it, recurring tokens are not scored by "
        "themselves", lower_bound=1, flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer("rows", 16, "number of rows, or of questions, of a batch", lower_bound=1, flag_values=values)
    flags.DEFINE_bool("rerun", False, "also measure what already has a result", flag_values=values)


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=define)
    if unknown := [name for name in values.measures if name not in MEASURES]:
        raise ConfigError(f"unknown measure {unknown[0]!r}; known measures: {', '.join(MEASURES)}.")
    if "recurrences" in values.measures and values.gap is None:
        raise ConfigError("--measures=recurrences needs --gap, the number of tokens after which a token recurs.")
    # It imports jax, which `--help` does without.
    from experiments.programs import after_prompt

    return after_prompt.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main, interrupted="run the same command again to measure what is missing.")
