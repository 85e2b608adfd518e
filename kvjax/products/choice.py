"""Which form a product uses: a fixed rule, or the fastest form on this machine, timed once and kept.

Timings are kept in the user's cache folder, by processor, number of cores and jax version: delete the folder `products`
there to time again.
"""

import concurrent.futures
import dataclasses
import functools
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from kvjax import host
from kvjax.errors import ConfigError
from kvjax.products.forms import FORMS

Array = jax.Array
AUTO, FIXED = "auto", "fixed"
SETTINGS = (AUTO, FIXED, *FORMS)
VARIABLE = "KVJAX_PRODUCTS"
MAX_ROWS = 64  # with more, a product is limited by arithmetic, at which XLA is good
MIN_WEIGHTS = 1 << 18  # smaller kernels stay in a cache: the fixed form serves
# The matrices that are timed: those of an MLP, in several copies, so that no cache holds them.
SHAPE, COPIES = (768, 3072), 8
ROUNDS, NOISE = 5, 0.05  # a form must be faster than the ones before it by this share


@dataclasses.dataclass(frozen=True)
class Entry:
    """The timing of one kind of product.

    Attributes:
      dtype: of the weights.
      transposed: whether kernels are [out, in].
      rows: the number of rows.
      speeds: form -> bytes of weights per second.
    """

    dtype: str
    transposed: bool
    rows: int
    speeds: dict[str, float]

    @property
    def form(self) -> str:
        """The chosen form."""
        best = "dot"
        for name, speed in self.speeds.items():
            if speed > (1 + NOISE) * self.speeds[best]:
                best = name
        return best


class _Process:
    """What this process has decided; a program that is traced once keeps its forms."""

    setting: str | None = None


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


def check(setting: str) -> None:
    """Raises ConfigError if a setting is not valid; see `use`."""
    if setting not in SETTINGS:
        raise ConfigError(f"unknown form of products {setting!r}; give one of {', '.join(SETTINGS)}.")
    if setting == "native" and (reason := FORMS["native"].refuses(jax.ShapeDtypeStruct(SHAPE, jnp.float32), False)):
        raise ConfigError(f"the form native of products is not available: {reason}.")


def setting() -> str:
    """Returns the setting of this process: of `use`, of ``KVJAX_PRODUCTS``, or ``auto``."""
    if _Process.setting is None:
        given = os.environ.get(VARIABLE, AUTO)
        check(given)
        _Process.setting = given
    return _Process.setting


def form_for(x: Array, kernel: Array, transposed: bool) -> str:
    """Returns the name of the form for operands, on the current mesh; see `kvjax.products.product`."""
    rows = math.prod(x.shape[:-1])
    fixed = "split" if rows == 1 and not transposed and FORMS["split"].refuses(kernel, False) is None else "dot"
    mesh = jax.sharding.get_abstract_mesh()
    # The compiler cannot divide a custom call over devices.
    if rows > MAX_ROWS or not (mesh.empty or mesh.size == 1) or setting() == FIXED:
        return fixed
    if setting() != AUTO:
        return setting() if FORMS[setting()].refuses(kernel, transposed) is None else fixed
    if kernel.size < MIN_WEIGHTS or kernel.dtype != x.dtype or jax.default_backend() != "cpu":
        return fixed
    found = chosen(kernel.dtype.name, transposed, 1 << (rows - 1).bit_length()).form
    return found if FORMS[found].refuses(kernel, transposed) is None else fixed


@functools.cache
def chosen(dtype: str, transposed: bool, rows: int) -> Entry:
    """Returns the timing of one kind of product on this machine; it is measured if none is kept.

    Args:
      dtype: of weights and rows.
      transposed: whether kernels are [out, in].
      rows: the number of rows, a power of 2.
    """
    path = _path()
    key = f"{dtype} {'[out, in]' if transposed else '[in, out]'} {rows}"
    kept = _read(path)
    if key not in kept:
        # A thread of its own has no trace to which the timed programs would be added, and no mesh.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            measured = thread.submit(_measure, dtype, transposed, rows).result()
        kept = _read(path) | {key: measured}
        _write(path, kept)
    return Entry(dtype, transposed, rows, {name: kept[key][name] for name in FORMS if name in kept[key]})


def explain() -> str:
    """Describes the forms in use: the setting, and every timing that this process has needed."""
    lines = [f"products: {setting()}"]
    kept = _read(_path()) if setting() == AUTO else {}
    for key, speeds in sorted(kept.items()):
        dtype, layout, rows = key.split(" ", 1)[0], key[key.index("[") : key.index("]") + 1], key.rsplit(" ", 1)[1]
        entry = Entry(dtype, layout == "[out, in]", int(rows), speeds)
        each = ", ".join(f"{name} {speed / 1e9:.1f}" for name, speed in speeds.items())
        lines.append(f"  {dtype} {layout}, {rows} rows: {entry.form} ({each} GB/s)")
    return "\n".join(lines)


def _measure(dtype: str, transposed: bool, rows: int) -> dict[str, float]:
    """Returns bytes of weights per second of every form that can be used, timed in turns."""
    shapes = (SHAPE, SHAPE[::-1])
    keys = jax.random.split(jax.random.key(0), 2 * COPIES)
    # [in, out] or [out, in], of which each odd one maps back
    kernels = [jax.random.normal(key, shapes[(i + transposed) % 2], dtype) for i, key in enumerate(keys)]
    # [rows, in]
    x = jnp.ones((rows, SHAPE[0]), dtype)
    calls: dict[str, Callable[[], Any]] = {}
    for name, form in FORMS.items():
        if form.refuses(kernels[0], transposed) is None:
            calls[name] = functools.partial(jax.jit(functools.partial(_chain, form.run, transposed)), x, kernels)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:  # the first call compiles
                times[name].append(time.perf_counter() - start)
    read = sum(kernel.nbytes for kernel in kernels)
    return {name: read / statistics.median(each) for name, each in times.items()}


def _chain(run: Callable[[Array, Array, bool], Array], transposed: bool, x: Array, kernels: list[Array]) -> Array:
    for kernel in kernels:
        # [rows, out], without growth
        x = run(x, kernel, transposed) * jnp.asarray(1e-2, x.dtype)
    return x


def _path() -> Path:
    return host.user_cache() / "products" / f"{host.processor()}-{host.cores()}-jax-{jax.__version__}.json"


def _read(path: Path) -> dict[str, dict[str, float]]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _write(path: Path, kept: dict[str, dict[str, float]]) -> None:
    """Keeps timings; without a folder that can be written, the next process measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(kept, file, indent=1)
        Path(file.name).replace(path)
    except OSError:
        pass
