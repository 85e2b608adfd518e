"""This machine's processor and the user's folder for caches."""

import hashlib
import os
import platform
from pathlib import Path


def cpu_name() -> str:
    """Returns the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def processor() -> str:
    """Returns a short identifier of this kind of processor, its instructions included.

    Machine code that is kept need not run on another kind, nor be as fast there.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        about = [
            line for line in lines if line.startswith(("model name", "cpu family", "model\t", "flags", "Features"))
        ]
    except OSError:
        about = []
    return hashlib.sha256("".join(dict.fromkeys(about) or cpu_name()).encode()).hexdigest()[:8]


def cores() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_cache() -> Path:
    """Returns the folder for kvjax's files in the user's cache, as the XDG base directory specification says."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored.
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "kvjax"
