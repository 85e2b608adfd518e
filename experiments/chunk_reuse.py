"""Measures caches of chunks that are reused in another order: answers, and distances from a whole prefill.

python -m experiments.chunk_reuse --model=smollm2-135m-instruct --text=FILE.txt --output=results/chunks.json
python -m experiments.chunk_reuse --input=results/chunks.json --plot=results/chunks.png

A request has six chunks of a text in which facts are hidden, and a question about one of them. Half of the facts are in
one chunk (`whole`); of the others, a chunk has the beginning, and the next one the end (`divided`), which a cache of
the chunk alone cannot know. Each method answers all requests: `prefill` computes everything; `reused` nothing; `blend`,
`random` and `first` recompute a share of the tokens, by the deviation of values, at random, and at the beginning of
each chunk; `asked` is `blend` with a part of the share (--by_question) for tokens that the question attends to;
`gradual` is `blend` with a share that falls from layer to layer, from 1.5 times the share to half of it, for shares of
at most 2/3; `both` compares keys and values; `linked` gives half of the share to the first tokens of each chunk, and
half to deviation; `craft` chooses among the caches of chunks in another order, and repairs them; `parallel` reads all
chunks at the same positions. Without --methods, `gradual`, `both` and `linked` are left out.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

SHARES = ("0.05", "0.15", "0.3")
METHODS = ("prefill", "reused", "blend", "asked", "random", "first", "craft", "parallel")
VARIANTS = ("gradual", "both", "linked")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", "kvjax-tiny", "a checkpoint folder, a hub id or a model of kvjax", flag_values=values)
    flags.DEFINE_string("text", None, "the text file that facts are hidden in", flag_values=values)
    flags.DEFINE_integer("requests", 40, "number of requests, half of either kind", lower_bound=2, flag_values=values)
    flags.DEFINE_integer("chunks", 6, "chunks of a request, an even number", lower_bound=2, flag_values=values)
    flags.DEFINE_integer("tokens", 96, "tokens of a chunk", lower_bound=48, flag_values=values)
    flags.DEFINE_string("prefix", "Here are some notes.\n", "the text before the chunks", flag_values=values)
    flags.DEFINE_list(
        "methods", list(METHODS), f"comma-separated, of {', '.join(METHODS + VARIANTS)}", flag_values=values
    )
    flags.DEFINE_list("shares", list(SHARES), "shares of tokens that are recomputed, in (0, 1)", flag_values=values)
    about = "the part of the share that asked gives to tokens that the question attends to, from 0 to 1"
    flags.DEFINE_float("by_question", 0.25, about, lower_bound=0, upper_bound=1, flag_values=values)
    flags.DEFINE_list("alphas", ["1"], "factors of the share that craft recomputes", flag_values=values)
    target = (
        "choose the smallest factor of craft at which answers are this share of the whole prefill's, and at which 1 "
        "less the distance of values is this large"
    )
    flags.DEFINE_float("target", 0.95, target, lower_bound=0, upper_bound=1, flag_values=values)
    flags.DEFINE_string("alpha_plot", None, "write the plot of craft's factors to this PNG file", flag_values=values)
    flags.DEFINE_integer("distances", 4, "requests whose distances are measured", lower_bound=0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of names, codes and orders", lower_bound=0, flag_values=values)
    flags.DEFINE_string("input", None, "only plot the results in this file", flag_values=values)
    flags.DEFINE_string("output", None, "write the results to this JSON file", flag_values=values)
    flags.DEFINE_string("plot", None, "write the plot to this PNG file", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if values.input is None and values.text is None:
        raise ConfigError("give --text=FILE.txt, or --input=FILE.json to plot.")
    if unknown := set(values.methods) - {*METHODS, *VARIANTS}:
        valid = ", ".join(METHODS + VARIANTS)
        raise ConfigError(f"unknown methods {', '.join(sorted(unknown))}; valid are {valid}.")
    if values.alpha_plot and not values.input and not {"prefill", "craft"} <= {*values.methods}:
        raise ConfigError("--alpha_plot needs answers of prefill and craft among --methods.")
    # It imports jax, which `--help` does without.
    from experiments.programs import chunk_reuse

    return chunk_reuse.start(values, argv)


if __name__ == "__main__":
    cli.main(main)
