"""Measures recall and perplexity by the share of slots that a step reads, for selections and for eviction policies.

python -m experiments.read_fraction --output=results/reading.json --plot=results/reading.png
python -m experiments.read_fraction --input=results/reading.json --plot=results/reading.png

Prompts of 984 tokens contain a fact 700 to 900 tokens before their end. Layers 0 and 1 read everything. The share is
that of the layers with a selection, measured while the answers are generated, and includes the new token. For a policy
it is the share of the prompt that the policy keeps. Perplexity is that of a generated story, or of --text, after a
prompt of 256 tokens, in chunks of 256 tokens. The prompts of a batch are run through the model once for all caches that
read them whole. `quest_pages` reads pages of --page tokens. `quest_in_prompt` also reads as many tokens of a prompt
before each block of queries, in chosen pages, and `quest_a_shape` the oldest and the newest of them.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

SHARES = ("0.005", "0.01", "0.02", "0.05", "0.1", "0.2")
#: What can be measured; `experiments.programs.read_fraction.METHODS` builds them.
METHODS = (
    "infinigen",
    "infinigen_skewed",
    "infinigen_half",
    "infinigen_recent",
    "optimal",
    "quest",
    "quest_pages",
    "quest_in_prompt",
    "quest_a_shape",
    "tokenselect",
    "shadowkv",
    "h2o",
    "snapkv",
    "window",
)
#: Those that need long prompts, and whose prompts are not shared with other caches.
IN_PROMPTS = ("quest_pages", "quest_in_prompt", "quest_a_shape")


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", "kvjax-tiny", "a checkpoint folder, a hub id or a model of kvjax", flag_values=values)
    flags.DEFINE_integer("prompts", 128, "number of prompts of each recall task", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("length", 984, "number of tokens of a prompt", lower_bound=64, flag_values=values)
    flags.DEFINE_integer("rows", 8, "number of rows of the text", lower_bound=1, flag_values=values)
    flags.DEFINE_string("text", None, "text file to score; default: a generated story", flag_values=values)
    flags.DEFINE_integer("text_prompt", 256, "tokens of a row that are its prompt", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("scored", 768, "tokens of a row after its prompt, at most", lower_bound=1, flag_values=values)
    about = "tokens of a page of `quest_pages`, `quest_in_prompt` and `quest_a_shape`"
    flags.DEFINE_integer("page", 16, about, lower_bound=1, upper_bound=64, flag_values=values)
    about = "queries of a block that reads pages of a prompt, for `quest_in_prompt` and `quest_a_shape`"
    flags.DEFINE_integer("query_block", 64, about, lower_bound=1, flag_values=values)
    flags.DEFINE_integer("batch", 16, "number of prompts or rows per batch", lower_bound=1, flag_values=values)
    flags.DEFINE_string("skew", None, "a file of `experiments.skew`, for infinigen_skewed", flag_values=values)
    flags.DEFINE_list("shares", list(SHARES), "comma-separated shares of the prompt, in (0, 1]", flag_values=values)
    without = [name for name in METHODS if name not in ("infinigen_skewed", *IN_PROMPTS)]
    flags.DEFINE_list("methods", without, f"comma-separated, of {', '.join(METHODS)}", flag_values=values)
    flags.DEFINE_string("input", None, "only plot the results in this file", flag_values=values)
    flags.DEFINE_string("output", None, "also write the results to this JSON file after each batch", flag_values=values)
    flags.DEFINE_string("plot", None, "also write a plot of the results to this PNG file", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    try:
        shares = [float(share) for share in values.shares]
    except ValueError as error:
        raise ConfigError(f"--shares={','.join(values.shares)}: {error}.") from None
    if unknown := [name for name in values.methods if name not in METHODS]:
        raise ConfigError(f"unknown method {unknown[0]!r}; known methods: {', '.join(METHODS)}.")
    if not all(0 < share <= 1 for share in shares):
        raise ConfigError(f"--shares={','.join(values.shares)} must be fractions in (0, 1], such as 0.02.")
    # It imports jax, which `--help` does without.
    from experiments.programs import read_fraction

    return read_fraction.start(values, shares, argv)


if __name__ == "__main__":
    cli.main(main)
