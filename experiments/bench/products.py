"""Products with weights and with caches, by every form of `kvjax.products` and by libraries of other projects."""

import functools
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.bench.contestants import in_turns, ratio, reading
from kvjax.devices import measure
from kvjax.products import FORMS
from kvjax.typing import JsonObject, PyTree

ROWS = (1, 8, 32)
#: Matrices of each layout: the two of an MLP of OPT-125M's, and keys and values of 96 heads. Each second one maps back.
SHAPES = {"weights": (768, 3072), "96 heads": (96, 64, 512)}
COPIES = 8  # 151 or 201 MB: no cache holds them
CALLS = 3  # of a round
SMALL = {"weights": (64, 128), "96 heads": (2, 8, 16)}  # of --shape=tiny


def run(values: flags.FlagValues) -> list[JsonObject]:
    """GB of matrices a second, of what memory allows; and GFLOP/s, of what the largest product that XLA does allows."""
    _, flops = measure(jax.devices()[0])
    rows = []
    for count in (values.batch,) if values.batch else ROWS:
        for name, shape in (SMALL if values.shape == "tiny" else SHAPES).items():
            for transposed in (False, True):
                rows += _one_setting(values, count, name, shape, transposed, flops)
    return rows


def _one_setting(
    values: flags.FlagValues, rows: int, name: str, shape: tuple[int, ...], transposed: bool, flops: float
) -> list[JsonObject]:
    *batch, inputs, outputs = shape
    keys = jax.random.split(jax.random.key(0), 2 * COPIES)
    pairs = ((*batch, inputs, outputs), (*batch, outputs, inputs))
    # [*batch, in, out] or [*batch, out, in]
    kernels = [jax.random.normal(key, pairs[(i + transposed) % 2], values.dtype) / inputs for i, key in enumerate(keys)]
    # [*batch, rows, in]
    x = jnp.ones((*batch, rows, inputs), values.dtype)
    sides: dict[str, Iterator[float]] = {"limit": reading()}
    for form, each in FORMS.items():
        if each.refuses(kernels[0], transposed) is None:
            form_of = functools.partial(each.run, transposed=transposed, dtype=x.dtype)
            chain = jax.jit(functools.partial(_chain, form_of))
            sides[form] = _settled(functools.partial(chain, x, kernels))
    if values.dtype == "float32" and "none" not in values.against:
        sides |= {library: _settled(call) for library, call in _libraries(x, kernels, transposed).items()}
    times = in_turns(sides, values.rounds)
    a_byte = np.array(times.pop("limit"))
    moved = sum(kernel.nbytes for kernel in kernels)
    work = 2 * rows * sum(kernel.size for kernel in kernels)

    def row(side: str, seconds: Sequence[float] | np.ndarray) -> JsonObject:
        middle = float(np.median(seconds))
        return {
            "rows": rows,
            "matrices": f"{name}, {'[out, in]' if transposed else '[in, out]'}",
            "side": side,
            "GB/s": moved / middle / 1e9,
            "% of memory": 100 * ratio(moved * a_byte, seconds),
            "GFLOP/s": work / middle / 1e9,
            "% of arithmetic": 100 * work / middle / flops,
        }

    return [row(side, each) for side, each in times.items()]


def _settled(call: Callable[[], object]) -> Iterator[float]:
    """Seconds of a call, the mean of three after one that is not timed: threads of other libraries wait for their next
    work in a loop, for up to 20 ms, and slow down whoever comes after them."""
    while True:
        jax.block_until_ready(call())
        start = time.perf_counter()
        for _ in range(CALLS):
            jax.block_until_ready(call())
        yield (time.perf_counter() - start) / CALLS


def _chain(run: Callable[[PyTree, PyTree], PyTree], x: object, kernels: list[PyTree]) -> PyTree:
    """Products one after the other, so that none can be left out or done beside another."""
    for kernel in kernels:
        x = run(x, kernel)
    return x


def _libraries(x: jax.Array, kernels: list[jax.Array], transposed: bool) -> dict[str, Callable[[], object]]:
    """The same products by NumPy's BLAS, and by torch where it is installed, on the same arrays."""

    def multiply(x: PyTree, kernel: Any) -> Any:
        return x @ (kernel.swapaxes(-1, -2) if transposed else kernel)

    arrays = [np.asarray(kernel) for kernel in kernels]
    calls: dict[str, Callable[[], object]] = {"numpy": lambda: _chain(multiply, np.asarray(x), arrays)}
    if importlib.util.find_spec("torch"):
        import torch

        tensors = [torch.from_numpy(np.array(array)) for array in arrays]
        first = torch.from_numpy(np.array(x))

        def by_torch() -> None:
            with torch.inference_mode():
                _chain(multiply, first, tensors)

        calls["torch"] = by_torch
    return calls
