"""Compares many caches at several budgets on the same texts and tasks, and writes one page with intervals and ranks.

    python -m experiments.leaderboard --config=leaderboard_smollm2 --config.texts=ONE.txt,OTHER.txt

Results are JSON files in OUTPUT/NAME-sweep/, a file for each cache, budget and text; called again, it runs what is
missing or failed, and everything with --rerun. Several workers may be given the same command: each result is computed
by one of them. The page, leaderboard.md, its plots and leaderboard.json are written to OUTPUT/NAME/; the JSON file has
the scores of every row and of every question, and each cell's command.

--add=mine.py:loudest adds a policy of your own. --page writes the page of a leaderboard.json again, and runs nothing.
"""

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import cli, results, sweep
from experiments.leaderboards import cells, page
from experiments.leaderboards.config import LeaderboardConfig
from experiments.runs import machine
from experiments.runs.session import Session
from kvjax.errors import ConfigError
from kvjax.parallel import distributed
from kvjax.typing import JsonObject

SOME_FAILED = 1
JSON_FILE = "leaderboard.json"


def define(values: flags.FlagValues) -> None:
    flags.DEFINE_multi_string("add", [], "a cache of your own, as in mine.py:loudest", flag_values=values)
    flags.DEFINE_string("page", None, "write the page of this leaderboard.json, and run nothing", flag_values=values)
    flags.DEFINE_bool("rerun", False, "run what there is a result of too", flag_values=values)


def run(config: LeaderboardConfig, name: str, *, rerun: bool = False) -> list[JsonObject]:
    """Measures what is missing.

    Args:
      config: the leaderboard.
      name: of the config, for commands.
      rerun: whether what there is a result of is measured too.

    Returns:
      The rows of the page, see `experiments.leaderboards.cells.row`.
    """
    session, rows = Session(resume=not rerun), []
    for own in cells.cells(config).values():
        combinations, counts = [], []
        for cell in own:
            made = list(cells.experiments(config, cell))
            combinations += made
            counts.append(len(made))
        # All budgets of a cache in one call, so that they share programs.
        _, found = sweep.run_all(combinations[0][1], combinations, rerun=rerun, session=session)
        for cell, count in zip(own, counts, strict=True):
            rows.append(cells.row(cell, found[:count], name))
            found = found[count:]
    return rows


def main(argv: Sequence[str]) -> int:
    config, values = cli.parse(argv, about=__doc__, define=define, cls=LeaderboardConfig)
    distributed.check_single("experiments.leaderboard")
    config.caches = (*config.caches, *values.add)
    folder = Path(config.output) / config.name
    results.make_folder(folder)
    if values.page:
        found = results.read_json(Path(values.page))
        if not isinstance(found, dict) or "rows" not in found:
            raise ConfigError(f"--page={values.page} is not a {JSON_FILE}.")
    else:
        name = next(argument.split("=", 1)[1] for argument in argv if argument.startswith("--config="))
        rows = run(config, name, rerun=values.rerun)
        found = {
            "command": shlex.join(["python", "-m", "experiments.leaderboard", *argv[1:]]),
            "environment": machine.environment(), "sizes": page.sizes(config), "rows": rows,
        }  # fmt: skip
        results.write(folder / JSON_FILE, results.to_json(found))
    for file, content in page.files(found).items():
        results.write(folder / file, content)
    failed = [row for row in found["rows"] if row["status"] != "ok"]
    for row in failed:
        print(f"{row['status']}, {row['cache']} at {row['budget']}: {row.get('error')}", file=sys.stderr)
    print(f"{len(found['rows']) - len(failed)} of {len(found['rows'])} cells; page in {folder}/{page.PAGE}")
    return SOME_FAILED if failed else 0


if __name__ == "__main__":
    cli.main(main)
