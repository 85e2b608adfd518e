"""Products with the slots of a cache that are in use, by kvjax's own code for CPUs; see native.cc and attend.cc.

A row of a batch often uses a part of the slots that are allocated for it. The others are not read.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from kvjax.products import native
from kvjax.products.choice import MAX_ROWS, runs_native
from kvjax.products.forms import CACHE_DTYPES, Shaped, dot

Array = jax.Array
#: Numbers of each cache that `slots_product` pays for, whatever the number of caches, on which nothing may depend.
MIN_CACHE = 1 << 12


def reads_used_slots(x: Shaped, cache: Shaped) -> bool:
    """Whether `slots_product` runs, and is worth it.

    Args:
      x: [*batch, rows, D or S].
      cache: [*batch, S, D].
    """
    *_, slots, dim = cache.shape
    few = 0 < x.shape[-2] <= MAX_ROWS and slots * dim >= MIN_CACHE
    return few and cache.dtype.name in CACHE_DTYPES and runs_native() and native.load(native.SLOTS) is None


@functools.partial(jax.custom_jvp, nondiff_argnums=(3, 4))
def slots_product(x: Array, cache: Array, used: Array, transposed: bool, dtype: DTypeLike) -> Array:
    """Multiplies rows by the first slots of each of a batch of caches. Sums are float32.

    The result is the same, bit for bit, for any number of slots, of caches and of threads.

    Args:
      x: [*batch, rows, D] if transposed, else [*batch, rows, S].
      cache: [*batch, S, D].
      used: [*batch] int32, the number of slots that are multiplied; x is taken as 0 for the others.
      transposed: whether the result has an entry for each slot, 0 for one that is not used.
      dtype: of the result.

    Returns:
      [*batch, rows, S] if transposed, else [*batch, rows, D].
    """
    *batch, slots, dim = cache.shape
    result = jax.ShapeDtypeStruct((*batch, x.shape[-2], slots if transposed else dim), jnp.float32)
    call = jax.ffi.ffi_call(native.SLOTS, result, vmap_method="sequential")
    # [*batch, rows, S or D]
    return call(x.astype(jnp.float32), cache, used, transposed=transposed).astype(dtype)


@slots_product.defjvp
def _slots_jvp(
    transposed: bool, dtype: DTypeLike, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[Array, Array]:
    (x, cache, used), (dx, dcache, _) = primals, tangents
    # [*batch, 1, S]
    live = (jnp.arange(cache.shape[-2], dtype=jnp.int32) < used[..., None])[..., None, :]

    def masked(rows: Array) -> Array:
        return jnp.where(live, rows, jnp.zeros((), rows.dtype))

    if transposed:
        tangent = masked(dot(dx, cache, True, dtype) + dot(x, dcache, True, dtype))
    else:
        tangent = dot(masked(dx), cache, False, dtype) + dot(masked(x), dcache, False, dtype)
    return slots_product(x, cache, used, transposed, dtype), tangent


@functools.partial(jax.custom_jvp, nondiff_argnums=(5,))
def attend_slots(query: Array, key: Array, value: Array, seen: Array, used: Array, scale: float) -> tuple[Array, Array]:
    """Attends to the first slots of each of a batch of caches, in float32.

    The result is the same, bit for bit, for any number of slots, of queries, of caches and of threads.

    Args:
      query: [*batch, G * n, D], the n queries of each of G heads, those of a head together.
      key: [*batch, S, D].
      value: [*batch, S, D], of the dtype of keys.
      seen: [*batch, n, S] bool, whether each query sees each slot.
      used: [*batch] int32, the number of slots up to the last one that a query sees.
      scale: factor of the logits.

    Returns:
      The output [*batch, G * n, D] and the log-sum-exps [*batch, G * n], float32; 0 and -inf where no slot is seen.
    """
    results = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (query.shape, query.shape[:-1]))
    call = jax.ffi.ffi_call(native.ATTEND, results, vmap_method="sequential")
    # [*batch, G * n, D] and [*batch, G * n]
    output, lse = call(query.astype(jnp.float32), key, value, seen, used, scale=np.float32(scale))
    return output, lse


@attend_slots.defjvp
def _attend_jvp(
    scale: float, primals: tuple[Array, ...], tangents: tuple[Array, ...]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    query, key, value, seen, _ = primals
    # [*batch, G * n, S]
    mask = jnp.tile(seen, (1,) * (seen.ndim - 2) + (query.shape[-2] // seen.shape[-2], 1))

    def plain(query: Array, key: Array, value: Array) -> tuple[Array, Array]:
        # [*batch, G * n, S]
        logits = jnp.where(
            mask, scale * dot(query, key.astype(query.dtype), True, jnp.float32), jnp.finfo(jnp.float32).min
        )
        # [*batch, G * n, 1]
        top = jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
        # [*batch, G * n, S]
        weight = jnp.where(mask, jnp.exp(logits - top), 0.0)
        # [*batch, G * n, 1]
        total = jnp.sum(weight, axis=-1, keepdims=True)
        known = jnp.where(total > 0, total, 1.0)
        lse = jnp.where(total > 0, top + jnp.log(known), -jnp.inf)
        return dot(weight / known, value.astype(jnp.float32), False, jnp.float32), lse[..., 0]

    result: tuple[tuple[Array, Array], tuple[Array, Array]] = jax.jvp(plain, (query, key, value), tangents[:3])
    return result
