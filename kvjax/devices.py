"""What planning needs to know of a device: its memory, how fast it reads it and how fast it multiplies.

Accelerators are looked up; anything else, such as the local CPU, is measured. TPU topologies are named, not present:
the libtpu wheel compiles for them on any machine.
"""

import dataclasses
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.errors import ConfigError, KvjaxError

GIB = 2.0**30


@dataclasses.dataclass(frozen=True)
class Device:
    """One device as jax counts them.

    Attributes:
      kind: jax's ``device_kind``.
      memory: bytes that a program may use; None = unknown.
      bandwidth: bytes/s between the device and its memory; None = unknown.
      flops: dense bfloat16 FLOP/s (of a measured device: float32); None = unknown.
      source: where the numbers are from.
    """

    kind: str
    memory: float | None
    bandwidth: float | None
    flops: float | None
    source: str


def _tpu(kind: str, usable: float, bandwidth: float, flops: float, page: str, cores: int = 1) -> Device:
    """A row of the table: GiB usable by one device, and GB/s and TFLOP/s of a chip of `cores` devices."""
    source = f"cloud.google.com/tpu/docs/{page}; usable memory as the TPU compiler reports it"
    return Device(kind, usable * GIB, bandwidth * 1e9 / cores, flops * 1e12 / cores, source)


def _nvidia(kind: str, memory: float, bandwidth: float, flops: float) -> Device:
    """A row of the table: GB, GB/s and dense bfloat16 TFLOP/s."""
    return Device(kind, memory * 1e9, bandwidth * 1e9, flops * 1e12, "NVIDIA's data sheet of the product")


#: Peak numbers by ``device_kind``. A TPU's usable memory is below its nominal size (v4 32 GiB, v5e 16 GB, v5p 95 GB,
#: v6e 32 GB, TPU7x 192 GiB a chip): it is the limit at which libtpu 0.0.42's compiler says RESOURCE_EXHAUSTED.
DEVICES: dict[str, Device] = {
    device.kind: device
    for device in (
        _tpu("TPU v4", 30.75, 1200, 275, "v4"),
        _tpu("TPU v5 lite", 15.75, 819, 197, "v5e"),
        _tpu("TPU v5", 95.73, 2765, 459, "v5p"),
        _tpu("TPU v6 lite", 31.24, 1638, 918, "v6e"),
        _tpu("TPU7x", 94.74, 7380, 2307, "tpu7x", cores=2),
        _nvidia("NVIDIA A100-SXM4-40GB", 40, 1555, 312),
        _nvidia("NVIDIA A100-SXM4-80GB", 80, 2039, 312),
        _nvidia("NVIDIA H100 80GB HBM3", 80, 3350, 989),
        _nvidia("NVIDIA H100 PCIe", 80, 2000, 756),
        _nvidia("NVIDIA H200", 141, 4800, 989),
    )
}

#: Topology family -> (dimensions of its torus, most chips of one pod).
TOPOLOGIES: dict[str, tuple[int, int]] = {
    "v4": (3, 4096),
    "v5e": (2, 256),
    "v5p": (3, 8960),
    "v6e": (2, 256),
    "tpu7x": (3, 9216),
}


def local_device(devices: Sequence[Any]) -> Device:
    """What one of these local devices has; CPU devices of one process share the machine evenly."""
    first = devices[0]
    limit = (first.memory_stats() or {}).get("bytes_limit") if first.platform != "cpu" else None
    if first.device_kind in DEVICES:
        known = DEVICES[first.device_kind]
        # What jax's allocator was given, if that is less.
        return dataclasses.replace(known, memory=min(known.memory or math.inf, limit or math.inf))
    share = len(devices) if first.platform == "cpu" else 1
    memory = host_memory() if first.platform == "cpu" else limit
    bandwidth, flops = measure(first)
    source = "measured here: a float32 matrix-vector and a matrix product"
    if share > 1:
        source += f", shared by {share} devices"
    return Device(first.device_kind, memory and memory / share, bandwidth / share, flops / share, source)


def host_memory() -> float | None:
    """Bytes of memory that this process may have: the machine's, or its control group's if that is less."""
    try:
        total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            total = min(total, float(file.read()))  # "max" is no number
    except (OSError, ValueError):
        pass
    return total


def measure(device: Any) -> tuple[float, float]:
    """Bytes/s of reading a matrix too large for any cache, and FLOP/s of a product that fits; a second or so."""
    with jax.default_device(device):
        matrix, row = jnp.ones((8192, 8192)), jnp.ones((1, 8192))
        square = jnp.ones((1024, 1024))
        # The decoder's own product: [n, in] x [in, out].
        product = jax.jit(lambda x, kernel: x @ kernel)
        reading = matrix.nbytes / _best_seconds(lambda: product(row, matrix))
        return reading, 2 * 1024**3 / _best_seconds(lambda: product(square, square))


def _best_seconds(run: Callable[[], jax.Array], repeats: int = 5) -> float:
    run().block_until_ready()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


def parse_topology(name: str) -> tuple[str, tuple[int, ...]]:
    """``"v5e:2x4"`` -> ("v5e", (2, 4, 1)): family and chips along three axes.

    Raises:
      ConfigError: here, because the compiler kills the process over some bad names and silently takes others.
    """
    valid = f"a topology is FAMILY:AxB or FAMILY:AxBxC of chips, as in v5e:2x4; families: {', '.join(TOPOLOGIES)}."
    match = re.fullmatch(r"([a-z0-9]+)[:=_-](\d{1,5}(?:x\d{1,5}){1,2})", name.strip().lower())
    if match is None or match[1] not in TOPOLOGIES:
        raise ConfigError(f"topology {name!r} is unknown; {valid}")
    sizes = tuple(int(size) for size in match[2].split("x"))
    sizes += (1,) * (3 - len(sizes))
    axes, most = TOPOLOGIES[match[1]]
    # The compiler does not come back from some shapes that no machine has, such as v5e:3x9.
    flat = sizes[2] == 1 and all(size & (size - 1) == 0 for size in sizes)
    if min(sizes) < 1 or math.prod(sizes) > most or (axes == 2 and not flat):
        shape = "two axes, each a power of two," if axes == 2 else "two or three axes"
        raise ConfigError(f"topology {name!r} cannot be built: {match[1]} has {shape} and 1 to {most} chips; {valid}")
    return match[1], sizes


def topology_devices(name: str) -> list[Any]:
    """Devices of a named TPU topology that need not exist: programs can be compiled for them and not run.

    Raises:
      ConfigError: a bad name. KvjaxError: the libtpu wheel is not installed, or refuses the topology.
    """
    family, sizes = parse_topology(name)
    prepare_libtpu()
    from jax.experimental import topologies

    # A host holds 2 x 2 chips unless the topology is narrower than that.
    bounds = (2 - sizes[0] % 2, 2 - sizes[1] % 2, 1)
    options: dict[str, Any] = {} if bounds == (2, 2, 1) else {"chips_per_host_bounds": bounds}
    if family == "v4":
        options["chip_config_name"] = "megacore"  # one device a chip, as jax runs on a real v4
    layout = "x".join(str(size) for size in (sizes if TOPOLOGIES[family][0] == 3 else sizes[:2]))
    try:
        return list(topologies.get_topology_desc(f"{family}:{layout}", "tpu", **options).devices)
    except RuntimeError as error:
        if "not installed" in str(error) or "libtpu" in str(error).lower():
            raise KvjaxError(
                f"compiling for {name} needs Google's TPU compiler, the libtpu wheel, which is not installed (no TPU "
                "is needed): pip install 'kvjax[tpu]'. Without it, leave the topology out to plan for this machine."
            ) from None
        raise KvjaxError(f"the TPU compiler refuses topology {name!r}: {str(error).splitlines()[0]}") from None


def prepare_libtpu() -> None:
    """Settings that libtpu reads once, when it is loaded; what the user has set stays."""
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # else one process a machine, though none uses a chip
    os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    if os.environ.get("TPU_SKIP_MDS_QUERY"):  # jax sets it where there is no chip: nothing to ask the cloud about
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
