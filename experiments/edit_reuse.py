"""Measures contexts whose text was edited: the perplexity of what follows, by the number of edits.

python -m experiments.edit_reuse --model=smollm2-135m-instruct --text=FILE.txt --output=results/edits.json

Each row is a passage of the text in which some spans stand for others of another length, taken from elsewhere. The
context of that passage is read by a full cache, and edits put the text's own words back. What follows in the text is
then scored: `prefill` has read the right passage, `unedited` the wrong one, and `edit` is PIE. `unrotated` moves the
slots behind an edit and leaves their keys as they are, which is what PIE corrects. `repair` recomputes a share of the
tokens behind a single edit.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from kvjax.errors import ConfigError

EDITS = "1,2,4,8,16"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("model", "kvjax-tiny", "a checkpoint folder, a hub id or a model of kvjax", flag_values=values)
    flags.DEFINE_string("text", None, "the text file", flag_values=values)
    flags.DEFINE_integer("rows", 8, "passages", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("tokens", 512, "tokens of a passage", lower_bound=32, flag_values=values)
    flags.DEFINE_integer("scored", 64, "tokens after it that are scored", lower_bound=1, flag_values=values)
    flags.DEFINE(cli.CountList(1), "edits", EDITS, "numbers of edits", flag_values=values)
    flags.DEFINE_integer("span", 8, "tokens that an edit puts in", lower_bound=2, flag_values=values)
    flags.DEFINE_float("repair", 0.15, "the share that repair recomputes", 0.0, 1.0, flag_values=values)
    flags.DEFINE_integer("seed", 0, "of the places and lengths of edits", lower_bound=0, flag_values=values)
    flags.DEFINE_string("output", None, "write the results to this JSON file", flag_values=values)


def main(argv: Sequence[str]) -> int:
    _, values = cli.parse_flags(argv, about=str(__doc__), define=define)
    if values.text is None:
        raise ConfigError("give --text=FILE.txt.")
    # It imports jax, which `--help` does without.
    from experiments.programs import edit_reuse

    return edit_reuse.start(values, argv)


if __name__ == "__main__":
    cli.main(main)
