"""Describes an accelerator in a process of its own: the one that starts the parts must not hold its memory.

python -m experiments.bench.accelerator.probe FILE
"""

import sys
from pathlib import Path

import jax

from experiments import results
from experiments.runs import machine


def main() -> None:
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    known = {
        "platform_version": str(getattr(device.client, "platform_version", "")),
        "device_memory_gb": round(stats.get("bytes_limit", 0) / 1e9, 1) or None,
    }
    results.write(Path(sys.argv[1]), results.to_json(machine.environment() | known))


if __name__ == "__main__":
    main()
