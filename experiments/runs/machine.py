"""The machine: what a result was measured on, and whether a model fits it."""

import gc
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.typing import DTypeLike

from experiments.runs import identity
from kvjax import host, products
from kvjax.models.config import DecoderConfig
from kvjax.models.quantize import WeightCodes, parameter_bytes
from kvjax.parallel import distributed, sharding
from kvjax.typing import JsonObject

GB = 1e9
#: Share of the memory that weights and cache may take; the rest is for activations and everybody else.
USABLE = 0.9
MAX_MAPS = 40_000  # memory maps of a process, of which Linux allows 65,530; without any the compiler crashes


class Fit(NamedTuple):
    """The bytes that a model needs and that the machine has."""

    weights: int
    cache: int
    available: int
    where: str
    stored: int = 0

    @property
    def fits(self) -> bool:
        return self.weights + self.cache + self.stored <= USABLE * self.available

    def __str__(self) -> str:
        stored = f" and {self.stored / GB:,.1f} GB for the states of prompts" if self.stored else ""
        return (
            f"it needs {self.weights / GB:,.1f} GB for weights and {self.cache / GB:,.1f} GB for the largest cache"
            f"{stored}; {self.where} has {self.available / GB:,.1f} GB"
        )


def fit(
    config: DecoderConfig,
    dtype: DTypeLike,
    *,
    cache: int,
    stored: int = 0,
    mesh: str = "",
    codes: WeightCodes | None = None,
) -> Fit:
    """Compares a model with this machine, before anything is allocated.

    Args:
      dtype: of the weights; cache: bytes of the largest cache that will be held; stored: bytes of states that are kept
        besides; mesh: as in a config; codes: what the weights are quantised to.

    Raises:
      ConfigError: a mesh that this machine does not have.
    """
    devices = list(sharding.make_mesh(mesh).devices.flat) if mesh else jax.local_devices()[:1]
    weights = parameter_bytes(config, dtype, codes)
    # A process knows the memory of its own devices.
    here = [device for device in devices if device.process_index == distributed.number()]
    limits = [(device.memory_stats() or {}).get("bytes_limit", 0) for device in here]
    if all(limits):
        kind, least = devices[0].device_kind, int(distributed.from_all(np.int64(min(limits, default=0))).min())
        return Fit(
            weights,
            cache,
            least * len(devices),
            f"{len(devices)} {kind}s" if len(devices) > 1 else f"the {kind}",
            stored,
        )
    # All processes come to the same answer.
    every = distributed.from_all(np.int64(host_memory()))
    where = "this machine's free memory" if len(every) == 1 else f"the free memory of {len(every)} processes"
    return Fit(weights, cache, int(every.min()) * len(every), where, stored)


def host_memory() -> int:
    """Bytes of main memory that this process can still get, under the limit of its control group."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = [_number("/proc/meminfo", "MemAvailable:") * 1024 or total]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        if ceiling := _number(limit):
            free.append(max(ceiling - _number(used), 0))
    return min(total, *free)


def prompt_room() -> int:
    """Returns the bytes that `kvjax.reuse_prompts` may keep: a third of the free memory of a device or the host."""
    stats = jax.local_devices()[0].memory_stats() or {}
    free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else host_memory()
    # Half was seen to need three quarters of a host's memory, with what programs need while a prompt is computed.
    return max(1, int(free) // 3)


def forget_programs() -> None:
    """Lets compiled programs go if this process has too many memory maps: each program holds some."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


def _number(path: str, label: str = "") -> int:
    """The number after `label` in a file; 0 where there is none (no such file, or ``max``)."""
    try:
        words = Path(path).read_text().split()
        return int(words[words.index(label) + 1] if label else words[0])
    except (OSError, ValueError, IndexError):
        return 0


def environment() -> JsonObject:
    """Returns the environment of a result: versions, devices, processor, commit, sources."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "kvjax": _version("kvjax"),
        "jax": jax.__version__,
        "jaxlib": _version("jaxlib"),
        "flax": _version("flax"),
        "numpy": _version("numpy"),
        "platform": devices[0].platform,
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": distributed.count(),
        "cpu": host.cpu_name(),
        "cores": host.cores(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GB, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "products": products.explain().splitlines(),
        "commit": _git("rev-parse", "HEAD"),
        "code": identity.code(),
        "uncommitted_changes": None if (changes := _git("status", "--porcelain")) is None else bool(changes),
    }


def compilers() -> JsonObject:
    """Returns the environment of a program that is compiled and not run."""
    own = environment()
    names = ("python", "kvjax", "jax", "jaxlib", "commit", "code", "uncommitted_changes")
    return {name: own[name] for name in names} | {"libtpu": _version("libtpu")}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    """Output of a git command in the project, or None where there is no git, no clone or no commit."""
    try:
        root = Path(__file__).resolve().parents[2]
        if not (root / ".git").exists():
            # In an environment of another project, git would answer for that one.
            return None
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
