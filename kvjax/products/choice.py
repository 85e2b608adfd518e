"""Which form a product uses: a fixed rule, or the fastest form on this machine, timed once and kept.

Timings are kept in the user's cache folder, by processor, number of cores, jax version and the forms' code, unless
other work disturbed them: delete the folder `products` there to time again.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp

from kvjax import host, kept_files
from kvjax.errors import ConfigError
from kvjax.products import forms, native, scenes
from kvjax.products.forms import FORMS, Shaped

Array = jax.Array
AUTO, FIXED = "auto", "fixed"
SETTINGS = (AUTO, FIXED, *FORMS)
VARIABLE = "KVJAX_PRODUCTS"
KEY = re.compile(r"\w+ (batch of )?\[(in, out|out, in)\], [0-9]{1,4} rows", re.ASCII)  # see `Entry.key`
MAX_SPEED = 1e15  # bytes per second
MAX_ROWS = 64  # with more, a product is limited by arithmetic, at which XLA is good
# Numbers of elements. Smaller matrices may stay in a processor's cache, where all forms are fast, and a timing takes a
# second. A projection, or a layer's keys, are one of many that are as large; a table is the only one.
MIN_OF_MANY, MIN_TABLE = 1 << 19, 1 << 21
ROUNDS, NOISE = 9, 0.03  # a form must be faster than the ones before it by this share
# A timing was disturbed by other work if its median round takes this many times the fastest, or if others used this
# share of the processors: a steady load makes all rounds alike.
DISTURBED, MAX_OTHERS = 1.5, 0.1


@dataclasses.dataclass(frozen=True)
class Entry:
    """The timing of one kind of product.

    Attributes:
      dtype: of the matrices.
      layout: ``[in, out]`` or ``[out, in]``, with ``batch of`` before it for a batch of matrices.
      rows: the number of rows.
      speeds: form -> bytes of matrices per second.
    """

    dtype: str
    layout: str
    rows: int
    speeds: dict[str, float]

    @property
    def form(self) -> str:
        """The chosen form: the one without a timing, `fixed_form`, unless another is faster by more than noise."""
        best = fixed_form(self.rows, self.layout == "[in, out]", "split" in self.speeds)
        for name, speed in self.speeds.items():
            if speed > (1 + NOISE) * self.speeds[best]:
                best = name
        return best

    @property
    def key(self) -> str:
        """The name of the timing in the file."""
        return f"{self.dtype} {self.layout}, {self.rows} rows"

    @classmethod
    def of(cls, key: str, speeds: dict[str, float]) -> Self:
        """Returns the timing of a name in the file."""
        kind, rows = key.removesuffix(" rows").rsplit(", ", 1)
        dtype, layout = kind.split(" ", 1)
        return cls(dtype, layout, int(rows), speeds)


def fixed_form(rows: int, weights: bool, can_split: bool) -> str:
    """Returns the form that is used without a timing.

    Args:
      rows: the number of rows.
      weights: whether there is one matrix, [in, out].
      can_split: whether the form ``split`` can be used.
    """
    return "split" if rows == 1 and weights and can_split else "dot"


Timings = dict[str, dict[str, float]]  # key of an `Entry` -> its speeds


class _Process:
    """The choices of this process; a program that is traced once keeps its forms."""

    setting: str | None = None
    given: ClassVar[Timings] = {}
    used: ClassVar[Timings] = {}


def use(setting: str) -> None:
    """Sets how this process chooses the form of a product, and forgets the programs that were traced.

    Args:
      setting: ``auto`` for the fastest form here, ``fixed`` for a form that does not depend on the machine, or the name
        of a form in `FORMS`, which is used wherever it can be.

    Raises:
      ConfigError: if the setting is unknown, or names a form that is not available here.
    """
    check(setting)
    _Process.setting = setting
    jax.clear_caches()


def timings() -> Timings:
    """Returns the timings by which this process has chosen forms so far; see `use_timings`."""
    return dict(_Process.used)


def use_timings(given: Timings) -> None:
    """Chooses forms as another process did, where products must be rounded as there, and forgets traced programs.

    Args:
      given: from `timings`. What it does not have is timed as ever.
    """
    _Process.given = dict(given)
    chosen.cache_clear()
    jax.clear_caches()


def check(setting: str) -> None:
    """Raises ConfigError if a setting is not valid; see `use`."""
    if setting not in SETTINGS:
        raise ConfigError(f"unknown form of products {setting!r}; give one of {', '.join(SETTINGS)}.")
    if setting == "native":
        native.await_native()
    if setting == "native" and (reason := FORMS["native"].refuses(jax.ShapeDtypeStruct((1, 1), jnp.float32), False)):
        raise ConfigError(f"the native form of products is not available: {reason}.")


def setting() -> str:
    """Returns the setting of this process: of `use`, of ``KVJAX_PRODUCTS``, or ``auto``."""
    if _Process.setting is None:
        given = os.environ.get(VARIABLE, AUTO)
        check(given)
        _Process.setting = given
    return _Process.setting


def form_for(x: Shaped, kernel: Shaped, transposed: bool) -> str:
    """Returns the name of the form for operands, on the current mesh; see `kvjax.products.product`."""
    batched = kernel.ndim > 2
    rows = x.shape[-2] if batched else math.prod(x.shape[:-1])
    weights = not (transposed or batched)
    fixed = fixed_form(rows, weights, weights and _can("split", kernel, False))
    if not 0 < rows <= MAX_ROWS or on_mesh() or setting() == FIXED:
        return fixed
    if setting() != AUTO:
        return setting() if _can(setting(), kernel, transposed) else fixed
    minimum = MIN_TABLE if transposed and not batched else MIN_OF_MANY
    if kernel.size < minimum or kernel.dtype != x.dtype or jax.default_backend() != "cpu":
        return fixed
    if native.load() == native.BUILDING:
        return fixed
    found = chosen(kernel.dtype.name, batched, transposed, 1 << (rows - 1).bit_length()).form
    return found if _can(found, kernel, transposed) else fixed


def runs_native() -> bool:
    """Whether products with codes use kvjax's own code, where it can be built: no other form reads codes."""
    return setting() in (AUTO, "native") and not on_mesh() and jax.default_backend() == "cpu"


def on_mesh() -> bool:
    """Whether programs are for several devices, over which the compiler cannot divide a custom call."""
    mesh = jax.sharding.get_abstract_mesh()
    return not (mesh.empty or mesh.size == 1)


def _can(form: str, kernel: Shaped, transposed: bool) -> bool:
    return FORMS[form].refuses(kernel, transposed) is None


@functools.cache
def chosen(dtype: str, batched: bool, transposed: bool, rows: int) -> Entry:
    """Returns the timing of one kind of product on this machine; it is measured if none is kept.

    Args:
      dtype: of matrices and rows.
      batched: whether there is a batch of matrices.
      transposed: whether matrices are [out, in].
      rows: the number of rows, a power of 2.
    """
    layout = ("batch of " if batched else "") + ("[out, in]" if transposed else "[in, out]")
    path, entry = _path(), Entry(dtype, layout, rows, {})
    kept = _read(path) | _Process.given
    if entry.key not in kept:
        # A thread of its own has no trace to which the timed programs would be added, and no mesh.
        with ThreadPoolExecutor(1) as thread:
            measured, quiet = thread.submit(_measure, dtype, batched, transposed, rows).result()
        kept = _read(path) | {entry.key: measured}
        if quiet:  # else the next process times again
            _write(path, kept)
    speeds = _Process.used[entry.key] = kept[entry.key]
    return dataclasses.replace(entry, speeds={name: speeds[name] for name in FORMS if name in speeds})


def explain() -> str:
    """Describes the forms in use: the setting, and the timings that are kept for this machine."""
    lines = [f"products: {setting()}"]
    kept = _read(_path()) if setting() == AUTO else {}
    for key, speeds in sorted(kept.items()):
        each = ", ".join(f"{name} {speed / 1e9:.1f}" for name, speed in speeds.items())
        lines.append(f"  {key}: {Entry.of(key, speeds).form} ({each} GB/s)")
    return "\n".join(lines)


def _measure(dtype: str, batched: bool, transposed: bool, rows: int) -> tuple[dict[str, float], bool]:
    """Times every form that can be used, in turns.

    Returns:
      Bytes of matrices per second, and whether the machine was quiet. The first form's are those of its fastest round,
      the others' follow by the median ratio of a round: the speed of memory may change from one round to the next.
    """
    x, kernels, program = scenes.scene(dtype, batched, transposed, rows)
    calls: dict[str, Callable[[], Any]] = {}
    for name, form in FORMS.items():
        if all(form.refuses(kernel, transposed) is None for kernel in kernels):
            calls[name] = functools.partial(jax.jit(functools.partial(program, form.run)), x, kernels)
    for call in calls.values():
        jax.block_until_ready(call())  # compiles
    times: dict[str, list[float]] = {name: [] for name in calls}
    with host.measure_load() as others:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                start = time.perf_counter()
                jax.block_until_ready(call())
                times[name].append(time.perf_counter() - start)
    read = sum(kernel.nbytes for kernel in kernels)
    alike = all(statistics.median(each) < DISTURBED * min(each) for each in times.values())
    first = next(iter(times.values()))
    ratios = {name: statistics.median(a / b for a, b in zip(first, each, strict=True)) for name, each in times.items()}
    return {name: ratio * read / min(first) for name, ratio in ratios.items()}, alike and others.share < MAX_OTHERS


def _path() -> Path | None:
    """Returns the file of timings, or None where nothing can be kept."""
    folder = kept_files.private_folder("products")
    library = "-prebuilt" if native.uses_prebuilt() else ""
    return folder and folder / f"{host.processor()}-{host.cores()}-jax-{jax.__version__}-{_code()}{library}.json"


@functools.cache
def _code() -> str:
    """Returns a digest of what is timed: the forms, and the programs around them."""
    files = (*native.SOURCES, *native.HEADERS, Path(forms.__file__), Path(scenes.__file__))
    return hashlib.sha256("\n".join(file.read_text() for file in files).encode()).hexdigest()[:8]


def _read(path: Path | None) -> Timings:
    """Returns the timings of a file, without those that are not valid, which are then taken again."""
    try:
        found = json.loads((path and kept_files.read(path)) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return {key: each for key, each in found.items() if _is_valid(key, each)} if isinstance(found, dict) else {}


def _is_valid(key: str, speeds: object) -> bool:
    """Whether this is a timing that `chosen` may have kept."""
    if not KEY.fullmatch(key) or not isinstance(speeds, dict) or "dot" not in speeds:
        return False
    numbers = [each for each in speeds.values() if isinstance(each, int | float) and not isinstance(each, bool)]
    return len(numbers) == len(speeds) and all(0 < each < MAX_SPEED for each in numbers)


def _write(path: Path | None, kept: Timings) -> None:
    """Keeps timings; without a folder that can be written, the next process measures again."""
    if path is not None:
        with contextlib.suppress(OSError):
            kept_files.write(path, json.dumps(kept, indent=1).encode())
