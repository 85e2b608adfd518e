"""Devices for planning: memory size, memory bandwidth and peak FLOP/s, and TPU topologies by name.

Accelerators are looked up in a table; other devices, such as the local CPU, are measured. A TPU topology need not be
present: the libtpu wheel compiles for it on any machine.
"""

import dataclasses
import math
import numbers
import os
import re
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kvjax.environment import prepare_libtpu
from kvjax.errors import ConfigError, InputError, KvjaxError, shown

GIB = 2.0**30
GIGA, TERA = 1e9, 1e12
# Bytes/s of 16 lanes of PCI Express in one direction, after line coding. Google publishes no speed of the link between
# a TPU and its host; that of the third generation is assumed.
PCIE_3, PCIE_4, PCIE_5 = 15.75e9, 31.5e9, 63e9
CGROUP_LIMIT = "/sys/fs/cgroup/memory.max"  # memory limit of the process's control group (cgroup v2, Linux)
MATRIX_SIZE = 8192  # rows and columns of a float32 matrix of 256 MiB, which is larger than any CPU cache
SQUARE_SIZE = 1024  # rows and columns of a float32 matrix of 4 MiB, which fits into a CPU cache
#: The numbers of a `Device`, as messages call them.
NUMBERS = {
    "memory": "memory",
    "bandwidth": "bandwidth of the memory",
    "flops": "FLOP/s",
    "link": "link to the host",
    "interconnect": "links to other devices",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """One JAX device.

    Attributes:
      kind: JAX's ``device_kind``.
      memory: bytes that a program can use; None if unknown.
      bandwidth: bytes/s between the device and its memory; None if unknown.
      flops: peak FLOP/s for dense bfloat16 products, or for float32 if the device was measured; None if unknown.
      source: where the numbers come from.
      link: bytes/s from host memory to the device; None if there is no link or its speed is unknown.
      interconnect: bytes/s from a device to the others in one direction, over all of its links; None if unknown.

    Raises:
      InputError: a number that is not above 0.
    """

    kind: str
    memory: float | None
    bandwidth: float | None
    flops: float | None
    source: str
    link: float | None = None
    interconnect: float | None = None

    def __post_init__(self) -> None:
        for name in NUMBERS:
            value = getattr(self, name)
            real = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (real and value > 0):
                raise InputError(f"{name} of a device must be a number above 0, or None; got {shown(value)}.")


def known_numbers(device: object, *names: str) -> tuple[float, ...]:
    """Returns numbers of a device, all of which must be known.

    Args:
      device: the device.
      *names: of the numbers, attributes of `Device`.

    Raises:
      InputError: it is no `Device`, or one of the numbers is not known.
    """
    if not isinstance(device, Device):
        raise InputError(
            "device must be a kvjax.devices.Device, such as kvjax.devices.DEVICES['NVIDIA H200'] or "
            f"kvjax.devices.local_device(jax.devices()[:1]); got {shown(device)}."
        )
    found = [getattr(device, name) for name in names]
    if missing := [NUMBERS[name] for name, value in zip(names, found, strict=True) if value is None]:
        raise InputError(
            f"plans need to know of {device.kind}: {', '.join(missing)}; give a kvjax.devices.Device with it."
        )
    return tuple(found)


def _tpu(
    kind: str, usable: float, bandwidth: float, flops: float, interconnect: float | None, page: str, cores: int = 1
) -> Device:
    """Returns one entry of `DEVICES` for a TPU.

    Args:
      kind: JAX's ``device_kind``.
      usable: memory that a program can use on one device, in GiB.
      bandwidth: memory bandwidth of a chip, in GB/s.
      flops: peak bfloat16 rate of a chip, in TFLOP/s.
      interconnect: bandwidth of a chip's links to other chips, both directions together, in GB/s; None if unknown.
      page: the page of Google's documentation that the numbers come from.
      cores: the number of devices per chip.
    """
    source = f"cloud.google.com/tpu/docs/{page}; usable memory as the TPU compiler reports it; host link assumed"
    return Device(
        kind, usable * GIB, bandwidth * GIGA / cores, flops * TERA / cores, source, PCIE_3 / cores,
        interconnect and interconnect * GIGA / 2 / cores,
    )  # fmt: skip


def _nvidia(
    kind: str, memory: float, bandwidth: float, flops: float, link: float, nvlink: float | None = None
) -> Device:
    """Returns one entry of `DEVICES` for a GPU.

    Args:
      kind: JAX's ``device_kind``.
      memory: in GB.
      bandwidth: memory bandwidth, in GB/s.
      flops: peak rate of dense bfloat16 products, in TFLOP/s.
      link: of the PCI Express generation of the product, in bytes/s.
      nvlink: bandwidth of NVLink, both directions together, in GB/s; None without it.
    """
    source = "NVIDIA's data sheet of the product"
    others = nvlink and nvlink * GIGA / 2
    return Device(kind, memory * GIGA, bandwidth * GIGA, flops * TERA, source, link, others)


#: Peak numbers by ``device_kind``. The usable memory of a TPU is smaller than its nominal size (v4 32 GiB, v5e 16 GB,
#: v5p 95 GB, v6e 32 GB, TPU7x 192 GiB per chip): it is the size above which the compiler of libtpu 0.0.42 reports
#: RESOURCE_EXHAUSTED.
DEVICES: dict[str, Device] = {
    device.kind: device
    for device in (
        _tpu("TPU v4", 30.75, 1200, 275, None, "v4"),
        _tpu("TPU v5 lite", 15.75, 819, 197, 400, "v5e"),
        _tpu("TPU v5", 95.73, 2765, 459, 1200, "v5p"),
        _tpu("TPU v6 lite", 31.24, 1638, 918, 800, "v6e"),
        _tpu("TPU7x", 94.74, 7380, 2307, None, "tpu7x", cores=2),
        _nvidia("NVIDIA A100-SXM4-40GB", 40, 1555, 312, PCIE_4, 600),
        _nvidia("NVIDIA A100-SXM4-80GB", 80, 2039, 312, PCIE_4, 600),
        _nvidia("NVIDIA H100 80GB HBM3", 80, 3350, 989, PCIE_5, 900),
        _nvidia("NVIDIA H100 PCIe", 80, 2000, 756, PCIE_5),
        _nvidia("NVIDIA H200", 141, 4800, 989, PCIE_5, 900),
    )
}

#: Topology family -> (number of torus dimensions, maximum number of chips in a pod).
TOPOLOGIES: dict[str, tuple[int, int]] = {
    "v4": (3, 4096),
    "v5e": (2, 256),
    "v5p": (3, 8960),
    "v6e": (2, 256),
    "tpu7x": (3, 9216),
}


def local_device(devices: Sequence[jax.Device]) -> Device:
    """Returns the numbers of one local device.

    CPU devices of one process each get an equal share of the machine.

    Args:
      devices: the devices of a run, all of one kind.

    Raises:
      InputError: there is no device.
    """
    if not devices:
        raise InputError("devices is empty; give those of a run, such as jax.devices().")
    first = devices[0]
    limit = (first.memory_stats() or {}).get("bytes_limit") if first.platform != "cpu" else None
    if first.device_kind in DEVICES:
        known = DEVICES[first.device_kind]
        # JAX's allocator may have reserved less than the whole memory.
        return dataclasses.replace(known, memory=min(known.memory or math.inf, limit or math.inf))
    share = len(devices) if first.platform == "cpu" else 1
    memory = host_memory() if first.platform == "cpu" else limit
    bandwidth, flops = measure(first)
    source = "measured here: a float32 matrix-vector and a matrix product"
    if share > 1:
        source += f", shared by {share} devices"
    return Device(first.device_kind, memory and memory / share, bandwidth / share, flops / share, source)


def host_memory() -> float | None:
    """Returns the bytes of memory that this process can use, or None if unknown.

    This is the smaller of the machine's memory and the limit of the process's control group.
    """
    try:
        total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None
    try:
        with open(CGROUP_LIMIT) as file:
            total = min(total, float(file.read()))  # a ValueError if the file holds "max", for no limit
    except (OSError, ValueError):
        pass
    return total


def measure(device: jax.Device) -> tuple[float, float]:
    """Measures the memory bandwidth and the float32 matrix product rate of a device, in about a second.

    Args:
      device: the device.

    Returns:
      The bandwidth in bytes/s, from a product of a vector with a matrix that exceeds every cache, and the rate in
      FLOP/s, from a product of matrices that fit into a cache.
    """
    with jax.default_device(device):
        # [MATRIX_SIZE, MATRIX_SIZE] and [1, MATRIX_SIZE]
        matrix, row = jnp.ones((MATRIX_SIZE, MATRIX_SIZE)), jnp.ones((1, MATRIX_SIZE))
        # [SQUARE_SIZE, SQUARE_SIZE]
        square = jnp.ones((SQUARE_SIZE, SQUARE_SIZE))
        # As in the decoder: [n, in] x [in, out].
        product = jax.jit(lambda x, kernel: x @ kernel)
        bandwidth = matrix.nbytes / _best_seconds(lambda: product(row, matrix))
        # A product of two N × N matrices takes N³ multiplications and N³ additions.
        return bandwidth, 2 * SQUARE_SIZE**3 / _best_seconds(lambda: product(square, square))


def _best_seconds(run: Callable[[], jax.Array], repeats: int = 5) -> float:
    """Returns the shortest wall time of `repeats` calls, after a call that compiles."""
    run().block_until_ready()
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        run().block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


def parse_topology(name: str) -> tuple[str, tuple[int, ...]]:
    """Parses the name of a TPU topology.

    Args:
      name: FAMILY:AxB or FAMILY:AxBxC, such as ``"v5e:2x4"``.

    Returns:
      The family, and the number of chips along three axes, such as ``("v5e", (2, 4, 1))``.

    Raises:
      ConfigError: if the name is malformed or the topology does not exist. The compiler itself would abort the process
        for some names and accept other ones silently.
    """
    valid = f"a topology is FAMILY:AxB or FAMILY:AxBxC of chips, as in v5e:2x4; families: {', '.join(TOPOLOGIES)}."
    match = re.fullmatch(r"([a-z0-9]+)[:=_-](\d{1,5}(?:x\d{1,5}){1,2})", name.strip().lower())
    if match is None or match[1] not in TOPOLOGIES:
        raise ConfigError(f"topology {name!r} is unknown; {valid}")
    sizes = tuple(int(size) for size in match[2].split("x"))
    sizes += (1,) * (3 - len(sizes))
    axes, maximum = TOPOLOGIES[match[1]]
    # The compiler hangs for some shapes that do not exist, such as v5e:3x9.
    flat = sizes[2] == 1 and all(size & (size - 1) == 0 for size in sizes)
    if min(sizes) < 1 or math.prod(sizes) > maximum or (axes == 2 and not flat):
        shape = "two axes, each a power of two," if axes == 2 else "two or three axes"
        raise ConfigError(
            f"topology {name!r} cannot be built: {match[1]} has {shape} and 1 to {maximum} chips; {valid}"
        )
    return match[1], sizes


def topology_devices(name: str) -> list[jax.Device]:
    """Returns the devices of a TPU topology. Programs can be compiled for them, but not run.

    Args:
      name: see `parse_topology`.

    Raises:
      ConfigError: if the name is not valid.
      KvjaxError: if the libtpu wheel is not installed, or rejects the topology.
    """
    family, sizes = parse_topology(name)
    prepare_libtpu()
    from jax.experimental import topologies

    # A host has 2 x 2 chips, or fewer if the topology is narrower.
    bounds = (2 - sizes[0] % 2, 2 - sizes[1] % 2, 1)
    options: dict[str, tuple[int, ...] | str] = {} if bounds == (2, 2, 1) else {"chips_per_host_bounds": bounds}
    if family == "v4":
        options["chip_config_name"] = "megacore"  # one device per chip, as JAX has on a real v4
    layout = "x".join(str(size) for size in (sizes if TOPOLOGIES[family][0] == 3 else sizes[:2]))
    try:
        return list(topologies.get_topology_desc(f"{family}:{layout}", "tpu", **options).devices)
    except RuntimeError as error:
        if "not installed" in str(error) or "libtpu" in str(error).lower():
            raise KvjaxError(
                f"compiling for {name} needs Google's TPU compiler, the libtpu wheel, which is not installed (no TPU "
                "is needed): pip install 'kvjax[tpu]'. Without it, leave the topology out to plan for this machine."
            ) from None
        raise KvjaxError(f"the TPU compiler rejects topology {name!r}: {str(error).splitlines()[0]}") from None
