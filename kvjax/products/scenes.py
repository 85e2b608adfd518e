"""Small programs in which the forms of a product are timed: a form beside the operations that surround it in a decoder.

Alone, each form reads about as fast as memory allows. In a decoder XLA runs products that do not depend on each other
at the same time, and joins others with the operations around them, which it cannot do with a custom call: keys read at
the same speed by two forms alone took 2 ms more in a step of 27 with one of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kvjax.products.forms import dot

Array = jax.Array
Run = Callable[..., Array]
# Shapes of OPT-125M: width, width of the MLP, rows of a table. And 96 heads with 512 keys and values of 64.
WIDTH, INNER, ROWS_OF_TABLE = 768, 3072, 32768
HEADS = (96, 512, 64)
# Some 200 MB each, so that no processor's cache holds them.
LAYERS, TABLES, CACHES = 6, 2, 8


def scene(dtype: str, batched: bool, transposed: bool, rows: int) -> tuple[Array, list[Array], Callable[..., Array]]:
    """Returns a program with products of one kind.

    Args:
      dtype: of everything.
      batched: whether there is a batch of matrices: keys or values of heads, in attention.
      transposed: whether matrices are [out, in]: keys, or a table of embeddings; else the weights of layers.
      rows: the number of rows, of each head if `batched`.

    Returns:
      The rows; the matrices that products of this kind read; and (form's run, rows, matrices) -> an array.
    """
    if batched:
        caches = [_filled(HEADS, i, dtype) for i in range(2 * CACHES)]
        # [heads, rows, 64]
        x = jnp.ones((HEADS[0], rows, HEADS[2]), dtype)
        return x, caches, _keys if transposed else _values
    # [rows, width]
    x = jnp.ones((rows, WIDTH), dtype)
    if transposed:
        return x, [_filled((ROWS_OF_TABLE, WIDTH), i, dtype) for i in range(TABLES)], _tables
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, INNER), (INNER, WIDTH)]
    return x, [_filled(shape, i, dtype) for i, shape in enumerate(shapes * LAYERS)], _layers


def _filled(shape: tuple[int, ...], i: int, dtype: str) -> Array:
    # To draw random numbers would take longer than the timing.
    return jnp.full(shape, 1e-3 / (i + 2), dtype)


def _layers(run: Run, x: Array, weights: list[Array]) -> Array:
    for i in range(0, len(weights), 6):
        query, key, value, out, up, down = weights[i : i + 6]
        # [rows, width]
        heads = sum(run(x, each, False, x.dtype) for each in (query, key, value))
        x += run(heads, out, False, x.dtype)
        x += run(jax.nn.relu(run(x, up, False, x.dtype)), down, False, x.dtype)
    return x


def _tables(run: Run, x: Array, tables: list[Array]) -> Array:
    for table in tables:
        # [rows, rows of the table]
        scores = run(x, table, True, x.dtype)
        x += scores.max(axis=-1, keepdims=True)
    return x


def _attention(score: Run, mix: Run, x: Array, caches: list[Array]) -> Array:
    for i in range(0, len(caches), 2):
        # [heads, rows, slots]
        shares = jax.nn.softmax(score(x, caches[i], True, x.dtype), axis=-1)
        x = mix(shares, caches[i + 1], False, x.dtype)
    return x


def _keys(run: Run, x: Array, caches: list[Array]) -> Array:
    return _attention(run, dot, x, caches)


def _values(run: Run, x: Array, caches: list[Array]) -> Array:
    return _attention(dot, run, x, caches)
