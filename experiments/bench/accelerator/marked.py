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
SHOWN, WIDTH = 5, 200  # failures of a file that are shown, and characters of each


def run(
    targets: Sequence[str], marker: str | None, seconds: float, log: Path, environment: Mapping[str, str], folder: Path
) -> list[JsonObject]:
    """A row for every file (or test of one) that pytest is given; they share the time that is left."""
    rows, until = [], time.monotonic() + seconds
    for number, target in enumerate(targets):
        command = [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "no:cacheprovider", target]
        share = (until - time.monotonic()) / (len(targets) - number)
        own, began = log.with_suffix(f".{number}.txt"), time.monotonic()
        status = children.run([*command, *(("-m", marker) if marker else ())], share, own, environment, folder)
        row = {"tests": target, **counts(own.read_text(errors="replace"), status)}
        rows.append(row | {"seconds": time.monotonic() - began})
    return rows


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
