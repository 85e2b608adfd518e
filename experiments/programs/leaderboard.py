"""Measures the cells of a leaderboard and writes its page; see `experiments.leaderboard`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from experiments import results
from experiments.leaderboards import cells, page
from experiments.leaderboards.config import LeaderboardConfig
from experiments.programs import sweep
from experiments.runs.session import Session
from kvjax.errors import ConfigError
from kvjax.parallel import distributed
from kvjax.typing import JsonObject

SOME_FAILED = 1
JSON_FILE = "leaderboard.json"


def run(config: LeaderboardConfig, given: Sequence[str] = (), *, rerun: bool = False) -> list[JsonObject]:
    """Measures what is missing.

    Args:
      config: the leaderboard.
      given: the arguments of the command, for the commands of single cells.
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
            rows.append(cells.row(cell, found[:count], given))
            found = found[count:]
    return rows


def start(config: LeaderboardConfig, values: flags.FlagValues, argv: Sequence[str]) -> int:
    """Measures what is missing, and writes the page.

    Args:
      config: the leaderboard.
      values: of the command's flags.
      argv: the command.

    Returns:
      The exit status.
    """
    distributed.check_single("experiments.leaderboard")
    config.caches = (*config.caches, *values.add)
    folder = Path(config.output) / config.name
    results.make_folder(folder)
    if values.page:
        found = results.read_json(Path(values.page))
        if not isinstance(found, dict) or "rows" not in found:
            raise ConfigError(f"--page={values.page} is not a {JSON_FILE}.")
    else:
        # The folder of results is of this machine.
        given = [each for each in argv[1:] if not each.startswith(("--config.output=", "--rerun"))]
        rows = run(config, given, rerun=values.rerun)
        found = {"command": cells.command(given), "sizes": page.sizes(config), "rows": rows}
        results.write(folder / JSON_FILE, results.to_json(found))
    for file, content in page.files(found).items():
        results.write(folder / file, content)
    failed = [row for row in found["rows"] if row["status"] != "ok"]
    for row in failed:
        print(f"{row['status']}, {row['cache']} at {row['budget']}: {row.get('error')}", file=sys.stderr)
    print(f"{len(found['rows']) - len(failed)} of {len(found['rows'])} cells; page in {folder}/{page.PAGE}")
    return SOME_FAILED if failed else 0
