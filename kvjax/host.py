"""This machine's processor and the user's folder for caches."""

import hashlib
import os
import platform
from pathlib import Path


def _cpu_info() -> dict[str, str]:
    """Returns what Linux says of the first processor; empty on other systems."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def cpu_name() -> str:
    """Returns the name of the processor, with the numbers that tell generations of the same name apart."""
    info = _cpu_info()
    if "model name" not in info:
        return platform.processor() or platform.machine()
    about = [f"{key} {info[key]}" for key in ("cpu family", "model") if key in info]
    about += ["AVX-512"] * ("avx512f" in info.get("flags", "").split())
    return f"{info['model name']} ({', '.join(about)})" if about else info["model name"]


def processor() -> str:
    """Returns a short identifier of this kind of processor, its instructions included.

    Machine code that is kept need not run on another kind, nor be as fast there.
    """
    info = _cpu_info()
    kind = (
        "".join(info.get(key, "") for key in ("model name", "cpu family", "model", "flags", "Features")) or cpu_name()
    )
    return hashlib.sha256(kind.encode()).hexdigest()[:8]


def cores() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def user_cache() -> Path:
    """Returns the folder for kvjax's files in the user's cache, as the XDG base directory specification says."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored.
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "kvjax"
