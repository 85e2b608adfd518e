"""A headless Chromium that opens pages, runs scripts in them and takes pictures.

It is driven over a pair of pipes, by the DevTools protocol: one JSON object in each direction, ended by a zero byte.
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-pipe",
)  # fmt: skip
#: Becomes Chromium, which reads commands from file 3 and writes answers to file 4.
CONNECT = """
import os, sys
reads, writes, *command = sys.argv[1:]
os.dup2(int(reads), 3)
os.dup2(int(writes), 4)
os.execv(command[0], command)
"""
TIMEOUT = 60.0  # seconds for an answer
ABOVE = 10  # the lowest number of a pipe's file: 3 and 4 stay free for Chromium's
HEIGHT = 900  # pixels


class BrowserError(Exception):
    """Chromium ended, gave no answer, or refused a command."""


class Browser:
    """A Chromium with one page open; a context manager.

    Args:
      width: of the page, in pixels.
    """

    def __init__(self, width: int = 1280) -> None:
        if PROGRAM is None:
            raise BrowserError("Chromium is not installed.")
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._commands = _pipe()
        self._answers, writes = _pipe()

        command = [sys.executable, "-c", CONNECT, str(reads), str(writes), PROGRAM, *FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=(reads, writes),
        )  # fmt: skip
        for end in (reads, writes):
            os.close(end)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.resize(width)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends Chromium."""
        os.close(self._commands)
        os.close(self._answers)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command; returns its result.

        Raises:
          BrowserError: Chromium refused the command, or gives no answer.
        """
        number = next(self._numbers)
        command = {"id": number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        answer = self._await(lambda message: message.get("id") == number, method)
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, page: Path, scripts: bool = True) -> None:
        """Opens a file, and waits until it is loaded with its images.

        Args:
          page: the file.
          scripts: whether the page's own scripts run, which takes longer than all else.
        """
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._await(lambda message: message.get("method") == "Page.loadEventFired", str(page))

    def resize(self, width: int) -> None:
        """Gives the page a width in pixels; below 768 it is a phone's."""
        size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 768}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """Evaluates JavaScript in the page; returns its value, of a promise when it is kept.

        Raises:
          BrowserError: the script raised an exception.
        """
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            details = found["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return found["result"].get("value")

    def picture(self, whole: bool = True) -> bytes:
        """Returns a PNG of the page, or of what fits into the window."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")["data"])

    def _await(self, wanted: Any, what: str) -> dict[str, Any]:
        """Returns the first message that is wanted."""
        end = time.monotonic() + TIMEOUT
        while True:
            first, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer = rest
                message: dict[str, Any] = json.loads(first)
                if wanted(message):
                    return message
                continue
            if not select.select([self._answers], [], [], max(0.0, end - time.monotonic()))[0]:
                raise BrowserError(f"no answer within {TIMEOUT:g} seconds to {what}")
            read = os.read(self._answers, 1 << 16)
            if not read:
                raise BrowserError(f"Chromium ended with status {self._process.wait(10)} at {what}")
            self._buffer += read


def _pipe() -> tuple[int, int]:
    """Returns the ends of a pipe, for reading and for writing, with numbers from `ABOVE` on."""
    ends = os.pipe()
    moved = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, ABOVE) for end in ends]
    for end in ends:
        os.close(end)
    return moved[0], moved[1]
