"""The link between a device and its host: bytes a second to and from pinned memory, measured."""

import functools
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags
from jax.sharding import SingleDeviceSharding

from experiments.bench.contestants import CALLS, in_turns, timed
from experiments.bench.device import published
from kvjax.devices import GIGA
from kvjax.errors import KvjaxError
from kvjax.parallel.host_memory import DEVICE, PINNED
from kvjax.typing import JsonObject

SIZES: tuple[int, ...] = (
    1 << 20,
    1 << 28,
)  # bytes of an array: one that shows what a transfer takes at least, and one that is large


def run(values: flags.FlagValues) -> list[JsonObject]:
    """GB a second, a row for every size and direction.

    Raises:
      KvjaxError: a device without pinned host memory.
    """
    device = jax.devices()[0]
    kinds = {memory.kind for memory in device.addressable_memories()}
    if PINNED not in kinds:
        raise KvjaxError(f"{device.device_kind} has no memory of the kind {PINNED}: it has {', '.join(sorted(kinds))}.")
    sides: dict[tuple[int, str], Iterator[float]] = {}
    for size in SIZES:
        for source, target in ((PINNED, DEVICE), (DEVICE, PINNED)):
            sides[size, f"{source} to {target}"] = _moving(device, size, source, target)
    times = in_turns(sides, values.rounds)
    known = published()
    return [
        {
            "MB": size / 1e6,
            "direction": direction,
            "us": 1e6 * float(np.median(each)),
            "GB/s": size / float(np.median(each)) / GIGA,
            "PCI Express GB/s": known and known.link and known.link / GIGA,
        }
        for (size, direction), each in times.items()
    ]


def link_bandwidth(rounds: int) -> float:
    """Returns the bytes/s from pinned host memory to the device, of a large array.

    Args:
      rounds: how many times it is moved; the median counts.
    """
    moving = _moving(jax.devices()[0], SIZES[-1], PINNED, DEVICE)
    return SIZES[-1] / float(np.median([next(moving) for _ in range(rounds + 1)][1:]))


def _moving(device: jax.Device, size: int, source: str, target: str) -> Iterator[float]:
    """Seconds of moving an array of random numbers, several of them in a row."""
    # [size / 4]
    array = jax.random.normal(jax.random.key(0), (size // 4,))
    array = jax.device_put(array, SingleDeviceSharding(device, memory_kind=source))
    place = SingleDeviceSharding(device, memory_kind=target)
    return timed(functools.partial(jax.device_put, array, place), CALLS)
