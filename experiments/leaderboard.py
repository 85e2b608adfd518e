"""Compares many caches at several budgets on the same texts and tasks, and writes one page with intervals and ranks.

    python -m experiments.leaderboard --config=leaderboard_smollm2 --config.texts=ONE.txt,OTHER.txt

Results are JSON files in OUTPUT/NAME-sweep/, a file for each cache, budget and text; called again, it runs what is
missing or failed, and everything with --rerun. Several workers may be given the same command: each result is computed
by one of them. The page, leaderboard.md, its plots and leaderboard.json are written to OUTPUT/NAME/; the JSON file has
the scores of every row and of every question, and each cell's command.

--add=mine.py:loudest adds a policy of your own. --page writes the page of a leaderboard.json again, and runs nothing.
"""

from collections.abc import Sequence

from absl import flags

from experiments import cli
from experiments.leaderboards.config import LeaderboardConfig


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("add", [], "a cache of your own, as in mine.py:loudest", flag_values=values)
    flags.DEFINE_string("page", None, "write the page of this leaderboard.json, and run nothing", flag_values=values)
    flags.DEFINE_bool("rerun", False, "run what there is a result of too", flag_values=values)


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=str(__doc__), define=define, cls=LeaderboardConfig)
    # It imports jax, which `--help` does without.
    from experiments.programs import leaderboard

    return leaderboard.start(config, values, argv)


if __name__ == "__main__":
    cli.main(main)
