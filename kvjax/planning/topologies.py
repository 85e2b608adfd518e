"""The devices that a run is planned for, by name: this machine, a TPU topology, or GPUs of one machine."""

import re
from typing import NamedTuple

import jax

from kvjax.devices import DEVICES, Device, topology_devices
from kvjax.errors import ConfigError

#: Name -> ``device_kind`` of the GPUs of a machine, which NVLink connects.
GPUS = {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3", "h200": "NVIDIA H200"}
MAX_GPUS = 8  # of a machine


class Target(NamedTuple):
    """Devices for which a run is planned.

    Attributes:
      name: of the devices, for reports.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      size: the number of devices.
      chips: the number of chips or GPUs; a TPU7x has two devices on each.
      devices: the devices, if programs can be compiled for them.
      device: the numbers of one of them; None for those of this machine, which are measured.
    """

    name: str
    platform: str
    size: int
    chips: int
    devices: tuple[jax.Device, ...] | None
    device: Device | None


def find_target(topology: str | None) -> Target:
    """Returns the devices of a name.

    Args:
      topology: None for this machine; a TPU topology, see `kvjax.devices.parse_topology`; or the number of GPUs of a
        machine, such as ``"h100:8"``, for which no compiler is here.

    Raises:
      ConfigError: if the name is not valid.
      KvjaxError: see `kvjax.devices.topology_devices`.
    """
    if topology is None:
        devices = tuple(jax.devices())
        return Target("this machine", devices[0].platform, len(devices), len(devices), devices, None)
    if gpus := re.fullmatch(rf"({'|'.join(GPUS)})[:=_-](\d+)", topology.strip().lower()):
        kind, count = GPUS[gpus[1]], int(gpus[2])
        if not 1 <= count <= MAX_GPUS:
            raise ConfigError(f"topology {topology!r} is unknown: a machine has 1 to {MAX_GPUS} GPUs.")
        return Target(f"{count} x {kind}", "gpu", count, count, None, DEVICES[kind])
    try:
        devices = tuple(topology_devices(topology))
    except ConfigError as error:
        raise ConfigError(f"{error} GPUs of one machine are named as h100:8 ({', '.join(GPUS)}).") from None
    chips = len({tuple(getattr(each, "coords", (index,))) for index, each in enumerate(devices)})
    device = DEVICES[devices[0].device_kind]
    return Target(f"TPU {topology}", devices[0].platform, len(devices), chips, devices, device)
