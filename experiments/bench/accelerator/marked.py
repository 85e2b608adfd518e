"""Tests that a device runs, each file in a process of its own, as a kernel may hang or crash."""

import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.bench.accelerator import children
from kvjax.typing import JsonObject

#: A line of ``pytest -v``: the test, its outcome and the share that is done.
LINE = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b.*\[ *\d+%\]", re.MULTILINE)
BEGUN = re.compile(r"^(\S+\.py::.+?) *(?:Fatal Python error.*)?$", re.MULTILINE)
SHORT = re.compile(r"^(?:FAILED|ERROR) (\S+::.+)$", re.MULTILINE)
SKIPPED = re.compile(r"^SKIPPED \[\d+\] \S+: (.+)$", re.MULTILINE)
FRACTION = "XLA_CLIENT_MEM_FRACTION"  # of a GPU's memory that a process takes
SHOWN, WIDTH = 5, 200  # failures of a file that are shown, and characters of each


def run(
    targets: Sequence[str],
    marker: str | None,
    seconds: float,
    log: Path,
    environment: Mapping[str, str],
    folder: Path,
    *,
    concurrent: bool,
) -> list[JsonObject]:
    """Runs every file (or test of one) that pytest is given, and returns a row for each.

    Args:
      targets: files, or tests of one.
      marker: of the tests to run; None = all.
      seconds: that they may take in all.
      log: the file whose name, with a number, is that of each log.
      environment: all variables of the processes.
      folder: their working directory.
      concurrent: whether processes run at the same time, as those that share a GPU can; they share its memory.
    """
    command = [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "no:cacheprovider"]
    command += ("-m", marker) if marker else ()
    commands = [[*command, target] for target in targets]
    jobs = [(command, log.with_suffix(f".{number}.txt")) for number, command in enumerate(commands)]
    if concurrent:
        share = float(environment[FRACTION]) / len(targets)
        ended = children.run_all(jobs, seconds, dict(environment) | {FRACTION: f"{share:.3f}"}, folder)
    else:
        ended, until = [], time.monotonic() + seconds
        for number, job in enumerate(jobs):
            limit = (until - time.monotonic()) / (len(jobs) - number)
            ended += children.run_all([job], limit, environment, folder)
    return [
        {"tests": target, **counts(own.read_text(errors="replace"), status), "seconds": took}
        for target, (_, own), (status, took) in zip(targets, jobs, ended, strict=True)
    ]


def counts(text: str, status: int | None) -> JsonObject:
    """Reads what pytest wrote, also if it did not come to an end.

    Args:
      text: of ``pytest -v -ra``.
      status: its exit status; None if its time was up.
    """
    ended = LINE.findall(text)
    outcomes = [outcome for _, outcome in ended]
    row: dict[str, Any] = {
        "passed": outcomes.count("PASSED") + outcomes.count("XFAIL"),
        "failed": outcomes.count("FAILED") + outcomes.count("ERROR") + outcomes.count("XPASS"),
        "skipped": outcomes.count("SKIPPED"),
    }
    notes = [each[:WIDTH] for each in SHORT.findall(text)[:SHOWN]]
    notes += [f"skipped: {reason[:WIDTH]}" for reason in dict.fromkeys(SKIPPED.findall(text))]
    if status not in (0, 1):  # 1: some failed
        begun = [each for each in BEGUN.findall(text) if not LINE.match(each)]
        where = f", in {begun[-1]}" if begun else ""
        why = "stopped, as its time was up" if status is None else f"ended with status {status}"
        last = "" if ended or begun else f": {' '.join(text.split())[-WIDTH:]}"
        notes.append(f"{why}{where}{last}")
    return row | {"stopped": status is None, "notes": "; ".join(notes) or None}
