"""This machine's processor, and the compiled programs that are kept for it."""

import contextlib
import hashlib
import os
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax
from jax.experimental.compilation_cache import compilation_cache

from kvjax.arguments import check_path
from kvjax.errors import ConfigError
from kvjax.kept_files import private_folder, user_cache

VARIABLE = "KVJAX_COMPILATION_CACHE"
CACHE_BYTES = 4 * 2**30  # of compiled programs; the least recently used ones go when a folder holds more


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


def instructions() -> frozenset[str]:
    """Returns the names of this processor's instructions, as Linux has them; empty elsewhere."""
    return frozenset(_cpu_info().get("flags", "").split())


def cores() -> int:
    """Returns the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Others:
    """The load of other processes while something was timed; see `measure_load`.

    Attributes:
      share: of the time of the processors that this process may use, 0 to 1; 0 where the system does not say.
    """

    share: float = 0.0


@contextlib.contextmanager
def measure_load() -> Iterator[Others]:
    """Finds out how busy others keep this process's processors meanwhile."""
    others = Others()
    start, before = time.perf_counter(), _others_seconds()
    yield others
    if before is not None and (after := _others_seconds()) is not None:
        others.share = max(0.0, after - before) / (cores() * (time.perf_counter() - start))


def _others_seconds() -> float | None:
    """Returns the CPU seconds of others on this process's processors so far, as Linux counts them."""
    try:
        mine = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
    except (OSError, AttributeError):
        return None
    # User, nice, system, idle, waiting for input or output, interrupts, soft interrupts, taken by a host.
    busy = sum(sum(map(int, line[1:4])) + sum(map(int, line[6:9])) for line in lines if line[:1] and line[0] in mine)
    return busy / os.sysconf("SC_CLK_TCK") - time.process_time()


class _Process:
    """Whether this process has said where compiled programs are kept."""

    decided = False


def keep_programs(folder: str | Path | Literal[False] | None = None) -> bool:
    """Keeps compiled programs in a folder, so that the next process does not compile them again.

    `kvjax.load` does this for the user's cache folder, unless this function was called, ``KVJAX_COMPILATION_CACHE`` is
    ``off``, or jax's own settings (``JAX_COMPILATION_CACHE_DIR``) name a folder. At most `CACHE_BYTES` are kept.

    Args:
      folder: where they are kept; None for the user's cache; False to keep none.

    Returns:
      Whether programs are kept; they are not if the folder cannot be written.
    """
    if folder is not None and folder is not False:
        check_path("folder", folder)
    _Process.decided = True
    if folder is False:
        jax.config.update("jax_compilation_cache_dir", None)
        compilation_cache.reset_cache()
        return False
    if folder is None:  # jax runs what is there
        folder = private_folder("xla", processor())
    else:
        try:
            folder = Path(folder).expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = folder if os.access(folder, os.W_OK) else None
        except (OSError, RuntimeError):  # RuntimeError: there is no home folder
            folder = None
    if folder is not None:
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_compilation_cache_max_size", CACHE_BYTES)
        # Decoders are one large program among many small ones, which take as long together.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        # jax asks once, when the first program is compiled, which may have been before.
        compilation_cache.reset_cache()
    return folder is not None


def keep_programs_by_default() -> None:
    """Keeps compiled programs in the user's cache, where neither this process nor its environment says otherwise.

    Raises:
      ConfigError: the environment variable has an unknown value.
    """
    given = os.environ.get(VARIABLE, "on").strip().lower()
    if given not in ("on", "off"):
        raise ConfigError(
            f"{VARIABLE}={given!r} must be on or off; kvjax.keep_programs and JAX_COMPILATION_CACHE_DIR take a folder."
        )
    settings: Any = jax.config
    if not _Process.decided and given == "on" and settings.jax_compilation_cache_dir is None:
        keep_programs()


__all__ = [
    "Others",
    "cores",
    "cpu_name",
    "instructions",
    "keep_programs",
    "keep_programs_by_default",
    "measure_load",
    "processor",
    "user_cache",
]
