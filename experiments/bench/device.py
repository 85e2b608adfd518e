"""The highest speed of the device: memory that is read and copied, large products; measured and published."""

import time
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from experiments.bench import contestants
from experiments.bench.contestants import CALLS, in_turns, reading, timed
from kvjax.devices import DEVICES, GIGA, TERA, Device
from kvjax.models.config import DecoderConfig
from kvjax.models.parameters import parameter_shapes
from kvjax.products.quantized import MATRIX
from kvjax.typing import JsonObject

SQUARE = {"cpu": 1024}  # rows and columns of the product that is measured, by platform
LARGE = 8192  # elsewhere: 1.1e12 operations on arrays of 128 MiB in bfloat16


def run(values: flags.FlagValues) -> list[JsonObject]:
    """Bytes or FLOPs a second, a row for each kind of work; what is published is of the device's maker."""
    known = published()
    count = contestants.READ_BYTES // 8
    times = in_turns(
        {
            "memory, read": reading(),
            "memory, copied": copying(count),
            f"product, {values.dtype}": multiplying(values.dtype),
        },
        values.rounds,
    )
    read, copied, product = times
    by_source = known.source if known else None
    bandwidth = known.bandwidth if known else None
    # The published rate is that of products of bfloat16.
    flops = known.flops if known and values.dtype == "bfloat16" else None

    def row(
        name: str, seconds: Sequence[float] | np.ndarray, unit: str, scale: float, most: float | None
    ) -> JsonObject:
        rate = 1 / float(np.median(seconds)) / scale
        return {
            "work": name,
            "measured": rate,
            "unit": unit,
            "published": most and most / scale,
            "% of published": most and 100 * rate * scale / most,
            "source": by_source if most else None,
        }

    moved = np.array(times[copied]) / (CALLS * 8 * count)
    return [
        row(read, times[read], "GB/s", GIGA, bandwidth),
        row(copied, moved, "GB/s", GIGA, bandwidth),
        row(product, times[product], "TFLOP/s", TERA, flops),
    ]


def published() -> Device | None:
    """The numbers of the device that programs run on, from `kvjax.devices.DEVICES`; None if it is not there."""
    return DEVICES.get(jax.devices()[0].device_kind)


def copying(count: int) -> Iterator[float]:
    """Seconds of `CALLS` times reading and writing `count` float32, in place: a new array would be paid for by page."""
    copy, array = jax.jit(lambda x: -x, donate_argnums=0), jnp.ones((count,))
    while True:
        start = time.perf_counter()
        for _ in range(CALLS):
            array = copy(array)
        jax.block_until_ready(array)
        yield time.perf_counter() - start


def multiplying(dtype: str) -> Iterator[float]:
    """Seconds an operation of a large product of two square matrices; a multiply-add is two operations."""
    size = SQUARE.get(jax.default_backend(), LARGE)
    # [size, size]
    left, right = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    product = jax.jit(lambda x, y: x @ y)
    for seconds in timed(lambda: product(left, right), CALLS):
        yield seconds / (2 * size**3)


def prompt_flops(config: DecoderConfig, batch: int, context: int) -> int:
    """Floating-point operations of a prompt's matrix products: what a model FLOPs utilisation counts.

    Every token goes through the matrices of all layers (of experts, those that it chooses), the last one of each row
    through the output head, and a query attends to itself and the tokens before it, within its window. A multiply-add
    is two operations. What a policy computes besides is not counted.
    """
    layers = [node for name, node in parameter_shapes(config).items() if name.startswith("layer_")]
    weights = sum(leaf.size for leaf in jax.tree.leaves(layers) if leaf.ndim == MATRIX)
    experts = sum(leaf.size for leaf in jax.tree.leaves(layers) if leaf.ndim > MATRIX)
    weights += experts * config.experts_per_token // max(config.num_experts, 1)
    # [T], then its sum for each layer
    seen = np.arange(1, context + 1)
    attended = sum(int(np.minimum(seen, window or context).sum()) for window in config.windows)
    row = context * weights + config.vocab_size * config.embed_size + 2 * config.num_heads * config.head_dim * attended
    return 2 * batch * row
