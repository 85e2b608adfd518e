"""Products of a few rows with keys or values as a cache holds them.

On CPUs kvjax's own code multiplies by the codes, or by numbers of 16 bits. Elsewhere, and where that code cannot run, a
loop decodes some slots at a time: a decoded copy of a long cache would be written to memory and read again.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from kvjax import products
from kvjax.kernels.coded import Coded
from kvjax.products import codes, native, used_slots
from kvjax.products.forms import CACHE_DTYPES
from kvjax.products.used_slots import slots_product
from kvjax.storage.base import Codec

Array = jax.Array
CPU = "cpu"
#: Slots that are decoded at a time on CPUs, where they stay in the processor's caches, and elsewhere, where each step
#: of a loop is several launches. The number does not depend on the batch, so a row's sums do not depend on other rows.
#: OPT-125M's shape, int8, batch 8, 8,192 slots, 3 layers, two cores: 76 ms by 128, 110 by 512, 197 by 2,048, 205 at
#: once, and 65 of exact slots.
CHUNKS = {CPU: 128}
CHUNK = 1024
#: Caches of up to this many chunks are decoded whole: a loop would only halve the memory, and is slower.
AT_ONCE = 2


def product(
    x: Array,
    operand: Array | Coded,
    *,
    transposed: bool = False,
    dtype: DTypeLike | None = None,
    used: Array | None = None,
) -> Array:
    """Multiplies rows by keys (transposed) or values; see `kvjax.products.product`.

    Args:
      x: [B, K, rows, m], where m is D if transposed and S otherwise.
      operand: [B, K, S, D].
      transposed: whether the result has an entry for each slot.
      dtype: of the result; None for that of x.
      used: [B, K] int32, the number of slots, the first ones of each head, whose products matter. If transposed, the
        result for others may be any finite number; otherwise x is 0 for them. None = all slots.
    """
    if not isinstance(operand, Coded):
        return products.product(x, operand, transposed=transposed, dtype=dtype, used=used)
    return _product(x, operand, used, transposed, x.dtype if dtype is None else jnp.dtype(dtype))


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def _product(x: Array, operand: Coded, used: Array | None, transposed: bool, dtype: jnp.dtype) -> Array:
    def by_chunks(x: Array, operand: Coded, used: Array | None, chunk: int = CHUNK) -> Array:
        # A number of chunks that depends on data would be one of all devices, which they would have to exchange.
        return _by_chunks(x, operand, chunk, transposed, dtype)

    def by_codes(x: Array, operand: Coded, used: Array | None) -> Array:
        vectors = operand.codec.affine(operand.parts, operand.side, operand.dim)
        assert vectors is not None
        return codes.codes_product(x, vectors, transposed=transposed, used=used).astype(dtype)

    def by_floats(x: Array, operand: Coded, used: Array | None) -> Array:
        held = operand.floats()
        assert held is not None
        every = jnp.full(held.shape[:2], held.shape[2], jnp.int32)
        return slots_product(x, held, every if used is None else used, transposed, dtype)

    slots, rows = operand.shape[2], math.prod(x.shape[2:-1])
    few = rows <= products.MAX_ROWS and products.runs_native()
    on_cpu: Callable[[Array, Coded, Array | None], Array] = functools.partial(by_chunks, chunk=CHUNKS[CPU])
    if few and refuses(operand.codec, operand.dim, operand.dtype, slots) is None:
        on_cpu = by_codes if operand.floats() is None else by_floats
    elif slots <= AT_ONCE * min(CHUNKS[CPU], CHUNK):
        return by_chunks(x, operand, used)
    return jax.lax.platform_dependent(x, operand, used, cpu=on_cpu, default=by_chunks)


@_product.defjvp
def _product_jvp(
    transposed: bool,
    dtype: jnp.dtype,
    primals: tuple[Array, Coded, Array | None],
    tangents: tuple[Array, Coded, Array | None],
) -> tuple[Array, Array]:
    # A gradient needs all decoded numbers anyway.
    result: tuple[Array, Array] = jax.jvp(
        lambda x, operand: products.product(x, operand.decode(), transposed=transposed, dtype=dtype),
        primals[:2],
        tangents[:2],
    )
    return result


def way(codec: Codec, dim: int, dtype: DTypeLike, slots: int, platform: str, grows: bool) -> str:
    """Says how `product` reads codes, for `CacheLayout.explain`.

    Args:
      codec: see `refuses`.
      dim: see `refuses`.
      dtype: see `refuses`.
      slots: S.
      platform: ``cpu``, ``gpu`` or ``tpu``.
      grows: whether rows may use a small part of the slots; see `Problem`.
    """
    own = platform == CPU and products.runs_native()
    reason = refuses(codec, dim, jnp.dtype(dtype), slots) if own else None
    if own and reason is None:
        return f"multiplied as they are{' over the slots in use' * grows}, by up to {products.MAX_ROWS} rows"
    chunk = CHUNKS.get(platform, CHUNK)
    text = f"decoded {chunk} at a time" if slots > AT_ONCE * chunk else "decoded at once"
    return text if reason is None else f"{text} ({reason})"


def refuses(codec: Codec, dim: int, dtype: DTypeLike, slots: int | None = None) -> str | None:
    """Returns why CPU code cannot read the parts of a codec without decoding them, or None.

    Args:
      codec: of single vectors.
      dim: their features.
      dtype: the model's.
      slots: S; a call is not worth its time for few floating-point numbers. None = enough.
    """
    reason, target = _reads(codec, dim, jnp.dtype(dtype))
    few = slots is not None and slots * dim < used_slots.MIN_CACHE
    if reason is None and target == native.SLOTS and few:
        reason = f"{slots} slots have fewer than {used_slots.MIN_CACHE:,} numbers"
    return reason or native.load(target)


def holds_floats(codec: Codec, dim: int, dtype: DTypeLike) -> bool:
    """Returns whether a codec holds floating-point numbers that CPU code reads; see `refuses` for the arguments."""
    return _reads(codec, dim, jnp.dtype(dtype)) == (None, native.SLOTS)


@functools.lru_cache(maxsize=1024)
def _reads(codec: Codec, dim: int, dtype: jnp.dtype) -> tuple[str | None, str]:
    """Returns why no custom call reads the parts of a codec, or None; and the name of the one that would."""
    found: list[tuple[str | None, str]] = []

    def ask(parts: dict[str, Array]) -> None:
        floats = codec.floats(parts)
        if floats is not None:
            known = floats.dtype.name in CACHE_DTYPES
            reason = None if known else f"its numbers are {floats.dtype.name}, not {', '.join(CACHE_DTYPES)}"
            found.append((reason, native.SLOTS))
            return
        vectors = codec.affine(parts, None, dim)
        reason = "it has no codes with a scale" if vectors is None else codes.refuses(vectors)
        found.append((reason, native.CODED_VECTORS))

    shapes = {
        name: jax.ShapeDtypeStruct((1, 1, 1, *own), each) for name, (own, each) in codec.parts(dim, dtype).items()
    }
    jax.eval_shape(ask, shapes)
    return found[0]


def _by_chunks(x: Array, operand: Coded, size: int, transposed: bool, dtype: jnp.dtype) -> Array:
    """Decodes and multiplies `size` slots at a time, unless there are few; sums of chunks are float32."""
    slots = operand.shape[2]
    if slots <= AT_ONCE * size:
        return products.product(x, operand.decode(), transposed=transposed, dtype=dtype)
    multiply = functools.partial(products.product, transposed=transposed, dtype=dtype if transposed else jnp.float32)

    def step(number: Array, y: Array) -> Array:
        # The last chunk begins early enough to be whole; what the one before had is left out.
        own = number * size
        start = jnp.minimum(own, slots - size)
        # [B, K, size, D]
        chunk = operand.of_slots(lambda part: jax.lax.dynamic_slice_in_dim(part, start, size, axis=2)).decode()
        if transposed:
            # [B, K, rows, S]
            return jax.lax.dynamic_update_slice_in_dim(y, multiply(x, chunk), start, axis=3)
        # [B, K, rows, size]
        weight = jax.lax.dynamic_slice_in_dim(x, start, size, axis=3)
        weight = jnp.where(start + jnp.arange(size) >= own, weight, jnp.zeros((), x.dtype))
        # [B, K, rows, D]
        return y + multiply(weight, chunk)

    # [B, K, rows, S] or [B, K, rows, D]
    y = jnp.zeros((*x.shape[:3], slots), dtype) if transposed else jnp.zeros((*x.shape[:3], operand.dim), jnp.float32)
    return jax.lax.fori_loop(0, -(-slots // size), step, y).astype(dtype)
