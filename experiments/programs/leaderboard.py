"""Measures the cells of a leaderboard and writes its page; see `experiments.leaderboard`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from absl import flags

import kvjax
from experiments import results
from experiments.leaderboards import cells, generation, page, peaks, turns
from experiments.leaderboards.cells import Cell
from experiments.leaderboards.config import LeaderboardConfig
from experiments.programs import sweep
from experiments.runs import machine
from experiments.runs.session import Session
from experiments.sweeps.sharing import MISSING
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
    session, listed = Session(resume=not rerun), cells.cells(config)
    rows: dict[str, list[JsonObject]] = {}
    # Other workers may have what was left to them by the time that the rest is done.
    for again in (False, True):
        for cache, own in listed.items():
            if again and all(row["status"] != MISSING for row in rows[cache]):
                continue
            # All budgets of a cache in one call, so that they share programs; those of a long generation are numbers of
            # slots, and the others fractions.
            combinations = [each for cell in own for each in cells.experiments(config, cell)]
            found: dict[Cell, list[JsonObject]] = {cell: [] for cell in own}
            for long in (False, True):
                part = [each for each in combinations if (generation.GENERATED in each[0]) is long]
                if part:
                    _, made = sweep.run_all(part[0][1], part, rerun=rerun and not again, session=session)
                    for (swept, _), result in zip(part, made, strict=True):
                        found[Cell(cache, swept["budget"])].append(result)
            rows[cache] = [cells.row(cell, found[cell], given) for cell in own]
    return [row for cache in listed for row in rows[cache]]


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
    peer = None
    if values.kvpress:
        peer = results.read_json(Path(values.kvpress))
        if not isinstance(peer, dict) or not {"answers", "model"} <= peer.keys():
            raise ConfigError(f"--kvpress={values.kvpress} is not a file of `python -m experiments.bench answers`.")
    if values.page:
        parts = [results.read_json(Path(each)) for each in values.page]
        for each, part in zip(values.page, parts, strict=True):
            if not isinstance(part, dict) or not {"command", "rows", "sizes"} <= part.keys():
                raise ConfigError(f"--page={each} is not a {JSON_FILE}.")
        found = page.merged(parts)
    else:
        # The folder of results is of this machine.
        left_out = ("--config.output=", "--rerun", "--kvpress=", "--peaks")
        given = [each for each in argv[1:] if not each.startswith(left_out)]
        # Cells are of the same texts under other caches.
        with kvjax.reuse_prompts(machine.prompt_room()):
            rows = run(config, given, rerun=values.rerun)
        found = {"command": cells.command(given), "sizes": page.sizes(config), "rows": rows}
        results.write(folder / JSON_FILE, results.to_json(found))
    if values.peaks:
        found = found | {"rows": peaks.with_peaks(found["rows"], config, found["sizes"])}
    if peer is not None:
        found = found | {"rows": page.with_peer(found["rows"], peer, found["sizes"]["model"])}
    if values.peaks or peer is not None:
        results.write(folder / JSON_FILE, results.to_json(found))
    for file, content in (page.files(found) | turns.files(found) | generation.files(found)).items():
        results.write(folder / file, content)
    failed = [row for row in found["rows"] if row["status"] not in ("ok", MISSING)]
    for row in failed:
        print(f"failed, {row['cache']} at {row['budget']}: {row['error']}", file=sys.stderr)
    done = sum(row["status"] == "ok" for row in found["rows"])
    print(f"{done} of {len(found['rows'])} cells; page in {folder}/{page.PAGE}")
    if any(row["status"] == MISSING for row in found["rows"]):
        print("Other workers run the rest; the last one writes the complete page, as does this command, run later.")
    return SOME_FAILED if failed else 0
