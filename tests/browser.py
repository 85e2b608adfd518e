"""Pages in a headless Chromium, where there is one."""

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="opens pages in Chromium, which is not installed")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr",
)  # fmt: skip


class Opened(NamedTuple):
    """A page after its scripts have run.

    Attributes:
      dom: as HTML.
      messages: lines that the browser's console shows: errors, and what scripts print.
    """

    dom: str
    messages: list[str]

    def inside(self, role: str) -> str:
        """Returns the HTML inside of a part of the viewer."""
        return re.search(rf'<(\w+)[^>]*data-role="{role}"[^>]*>(.*?)</\1>', self.dom, re.S)[2]


@functools.cache
def opened(path: Path, fragment: str = "") -> Opened:
    """Opens a file with the part of an address after ``#``."""
    with tempfile.TemporaryDirectory() as profile:
        command = [PROGRAM, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", f"{path.as_uri()}#{fragment}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return Opened(done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line])
