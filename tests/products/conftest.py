"""The native library at each vector width that this machine has."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvjax.products import native

#: Vector width -> what /proc/cpuinfo calls the instructions of the next larger width, and the flag that forbids these.
NARROWER = {"avx2": ("avx512f", "-mno-avx512f"), "sse2": ("avx", "-mno-avx")}
#: Compiles in two thirds of the time of -O3. At -O1 GCC fuses no products and sums by itself, so that code that lets it
#: would pass these tests.
LEVEL = "-O2"
NAMES = ("TARGET", "SLOTS", "ATTEND", "CODED_VECTORS", "CODED_WEIGHTS")
WIDTHS = ["widest", *NARROWER]


def load(width: str) -> dict[str, str]:
    """Builds and registers the library at a width; returns the names of its custom calls, by those in `native`."""
    info = Path("/proc/cpuinfo")
    feature, flag = NARROWER[width]
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        pytest.skip("vector widths are those of x86-64 on Linux")
    if feature not in info.read_text().split():
        pytest.skip(f"this processor has no {feature}: {width} is the widest, or is not there")
    flags = (*native.FLAGS, LEVEL, flag)
    with ThreadPoolExecutor() as threads:
        reasons = list(threads.map(lambda each: native.register(each, flags, f"_{width}"), native.LIBRARIES))
    assert not any(reasons), reasons
    return {name: f"{getattr(native, name)}_{width}" for name in NAMES}


LOADED: dict[str, dict[str, str]] = {}


@pytest.fixture(params=WIDTHS)
def width(request, monkeypatch):
    """Products are those of one vector width."""
    for name in NAMES:
        if reason := native.load(getattr(native, name)):
            pytest.skip(reason)
    if request.param != "widest":
        if request.param not in LOADED:
            LOADED[request.param] = load(request.param)
        for name, target in LOADED[request.param].items():
            monkeypatch.setattr(native, name, target)
    return request.param
