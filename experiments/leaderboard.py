"""Compares many caches at several budgets on the same texts and tasks, and writes one page with intervals and ranks.

    python -m experiments.leaderboard --config=leaderboard_smollm2 --config.texts=ONE.txt,OTHER.txt

Results are JSON files in OUTPUT/NAME-sweep/, one for each cache, budget and text. The same command, run again, measures
what is missing or failed, or everything with --rerun. Several workers may run the same command: each result is computed
by one of them. The page leaderboard.md, its plots and leaderboard.json are written to OUTPUT/NAME/; the JSON file has
the scores of every row and question, and the command of each cell. Tasks with several questions about one context have
an additional page, turns.md, as has a long generation (--config.generated=512), generation.md.

--add=mine.py:loudest adds a policy of your own. --kvpress=answers.json adds a column: whether kvpress answers the same,
by the file that `python -m experiments.bench answers --output=answers.json` has written. --peaks adds the memory at the
peak, for which programs of a few layers are compiled under each cache. --page=FILE only writes the page of an existing
leaderboard.json, and --page=ONE.json,OTHER.json one page of several, of the same model, texts and tasks; with --peaks
or --kvpress, it also writes a leaderboard.json with these columns beside the page.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from experiments.leaderboards.config import LeaderboardConfig


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("add", [], "a policy of your own, such as mine.py:loudest", flag_values=values)
    flags.DEFINE_list("page", [], "only write the page of these leaderboard.json files", flag_values=values)
    flags.DEFINE_string("kvpress", None, "a file of `bench answers`, for a column of the page", flag_values=values)
    flags.DEFINE_bool("peaks", False, "also plan the memory that each cell needs at its peak", flag_values=values)
    flags.DEFINE_bool("rerun", False, "also run what already has a result", flag_values=values)


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=define, cls=LeaderboardConfig)
    # It imports jax, which `--help` does without.
    from experiments.programs import leaderboard

    return leaderboard.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main)
