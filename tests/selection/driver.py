"""Runs a selection over ragged texts without a model: prompts, then one token a step, on slots overwritten in place."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.selection import SelectView

HEADS = {"mha": (4, 1), "gqa": (2, 2), "mqa": (1, 4)}  # KV heads, query heads of each
DIM = 8
SCALE = 0.25  # a power of two: texts of whole numbers have exact ties in the reference too
LENGTHS, PROMPTS = (37, 30, 24), (16, 9, 1)
NEAR = 1e-5  # choices nearer than this demand another seed


class Texts(NamedTuple):
    """B rows of T tokens, of which a row has `lengths`, the first `prompts` at once."""

    query: np.ndarray  # [B, K, G, T, D]
    key: np.ndarray  # [B, K, T, D]
    value: np.ndarray  # [B, K, T, D]
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]

    def row(self, row: int) -> Texts:
        arrays = (leaf[row : row + 1] for leaf in self[:3])
        return Texts(*arrays, self.lengths[row : row + 1], self.prompts[row : row + 1])

    def head(self, row: int, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 query [T, G, D], key and value [T, D] of one KV head's real tokens."""
        length = self.lengths[row]
        query = self.query[row, head, :, :length].swapaxes(0, 1)
        return tuple(
            x.astype(np.float64) for x in (query, self.key[row, head, :length], self.value[row, head, :length])
        )


class Run(NamedTuple):
    output: np.ndarray  # [B, K, G, T, D]
    read: np.ndarray  # [B, K, T, T] bool, which tokens each query read
    chosen: np.ndarray  # [B, K, T, T] bool


def texts(heads: str, seed: int = 0, *, whole: bool = False, vocabulary: int | None = None) -> Texts:
    """Random texts; with a vocabulary, of so many different tokens of small whole numbers, so that ties are exact."""
    kv_heads, group = HEADS[heads]
    rng = np.random.default_rng(seed)
    rows, width = len(LENGTHS), max(LENGTHS)
    shapes = (rows, kv_heads, group, width, DIM), (rows, kv_heads, width, DIM), (rows, kv_heads, width, DIM)
    query, key, value = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    if vocabulary is not None:
        words = rng.integers(-2, 3, (vocabulary, DIM)).astype(np.float32)
        key = words[rng.integers(0, vocabulary, shapes[1][:3])]
        query = rng.integers(-2, 3, shapes[0]).astype(np.float32)
    return Texts(1.5 * query if vocabulary is None else query, key, value, LENGTHS, LENGTHS if whole else PROMPTS)


def run(selection, texts: Texts, *, budget=None, capacity=None, window=None, block=None, kept=None, apart=False) -> Run:
    """The selection over texts.

    `kept` [B][K] are the positions of the prompt that a compressor leaves. `apart`: the selection sees a token behind
    the slots in its own step, as where slots are held in a code.

    A dense prompt is put into its slots without attention: its queries' part of the result is as the caller has it.
    """
    rows, kv_heads, group, width, dim = texts.query.shape
    prompts, lengths = np.array(texts.prompts), np.array(texts.lengths)
    budget = np.asarray([1] * rows if budget is None else budget, np.int32)
    found = Run(
        np.zeros((rows, kv_heads, group, width, dim), np.float32),
        np.zeros((rows, kv_heads, width, width), bool),
        np.zeros((rows, kv_heads, width, width), bool),
    )
    about = {"selection": selection, "window": window, "apart": apart}
    shape = (rows, kv_heads, capacity or width)
    if selection.in_prompt:
        position = np.full(shape, -1, np.int32)
        empty = np.zeros((*shape, dim), np.float32)
        index = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), _index_shapes(selection, shape))
        layer = Layer(position, empty, empty, index)
        block = block or max(PROMPTS)
        for start in range(0, max(prompts), block):
            at = np.arange(start, start + block, dtype=np.int32)
            tokens = tuple(x[..., np.minimum(at, width - 1), :] for x in texts[:3])
            at = np.where(at < prompts[:, None], at, -1)
            layer, out = _block(layer, *tokens, at, prompts, budget, **about)
            _record(found, start, at, layer.position, *out)
    else:
        layer = _held(texts, shape, [[range(n)] * kv_heads for n in prompts] if kept is None else kept)
        layer = layer._replace(index=built(selection, layer.position, layer.key))
    # [steps, B]: each row decodes from the end of its own prompt
    at = np.arange(width - min(PROMPTS), dtype=np.int32)[:, None] + prompts
    at = np.where(at < lengths, at, -1).astype(np.int32)

    def tokens(x: np.ndarray) -> np.ndarray:
        """[B, ..., T, D] -> [steps, B, ..., 1, D] of the positions `at`."""
        return np.stack([[x[row, ..., each[row], :] for row in range(rows)] for each in at])[..., None, :]

    steps = _steps(layer, *(tokens(x) for x in texts[:3]), at[:, :, None], prompts, budget, **about)
    for number, out in enumerate(zip(*(np.asarray(x) for x in steps), strict=True)):
        for row in np.flatnonzero(at[number] >= 0):
            own = slice(row, row + 1)
            _record(Run(*(x[own] for x in found)), at[number, row], at[number, own, None], *(x[own] for x in out))
    return found


def _held(texts: Texts, shape, kept) -> Layer:
    """The slots of the positions `kept` [B][K], oldest first."""
    layer = Layer(np.full(shape, -1, np.int32), *(np.zeros((*shape, DIM), np.float32) for _ in range(2)), {})
    for row, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            own = np.sort(np.asarray(positions, np.int32))
            layer.position[row, head, : len(own)] = own
            layer.key[row, head, : len(own)] = texts.key[row, head, own]
            layer.value[row, head, : len(own)] = texts.value[row, head, own]
    return layer


class Layer(NamedTuple):
    position: jax.Array
    key: jax.Array
    value: jax.Array
    index: dict[str, jax.Array]


def _index_shapes(selection, shape):
    return jax.eval_shape(lambda: selection.init(shape, DIM, jnp.float32))


@functools.partial(jax.jit, static_argnums=0)
def built(selection, position, key):
    """The index of slots [B, K, S] that are held when a prompt ends."""
    return selection.build(selection.init(position.shape, key.shape[-1], key.dtype), position, key)


@functools.partial(jax.jit, static_argnames=("selection", "window", "apart"))
def _steps(layer: Layer, query, key, value, at, prompt, budget, *, selection, window, apart):
    """Single tokens; leading axis: steps."""

    def body(layer, inputs):
        layer, out = _step(layer, *inputs, prompt, budget, selection, window, apart)
        return layer, (layer.position, *out)

    return jax.lax.scan(body, layer, (query, key, value, at))[1]


@functools.partial(jax.jit, static_argnames=("selection", "window", "apart"))
def _block(layer: Layer, query, key, value, at, prompt, budget, *, selection, window, apart):
    return _step(layer, query, key, value, at, prompt, budget, selection, window, apart)


def _step(layer: Layer, query, key, value, at, prompt, budget, selection, window, apart):
    """Appends n tokens, chooses, attends, settles: the layer, and (output, read, chosen)."""
    n, size = at.shape[1], layer.position.shape[2]
    # [B, K, n]: the first n empty slots, which follow each other
    first = jnp.argmax(layer.position < 0, axis=2)[..., None].astype(jnp.int32)
    target = jnp.where(at[:, None] >= 0, first + jnp.arange(n, dtype=jnp.int32), size)
    write = jax.vmap(jax.vmap(lambda old, slot, new: old.at[slot].set(new, mode="drop")))
    position = write(layer.position, target, jnp.broadcast_to(at[:, None], target.shape))
    layer = layer._replace(
        position=position, key=write(layer.key, target, key), value=write(layer.value, target, value)
    )
    newest = jnp.max(at, axis=1)
    view = SelectView(
        position=position, key=layer.key, newest=newest, budget=budget, prompt=prompt, slot=target[:, :, -1],
        scale=SCALE, layer=0, window=window, first=None if n == 1 else at[:, 0],
    )  # fmt: skip
    index = selection.write(layer.index, key, target[:, :, 0], newest >= 0) if n == 1 else layer.index
    seen = _apart(view, at, key) if apart else view
    chosen = selection.chosen(index, query[:, :, :, 0], seen)
    read = chosen | selection.always(index, seen)
    if apart:
        chosen, read = chosen[:, :, :size], read[:, :, :size] | (view.new & read[:, :, size:])
    # [B, K, n, S]
    mask = read[:, :, None] & (position[:, :, None] <= at[:, None, :, None])
    logits = SCALE * jnp.einsum("bkgnd,bksd->bkgns", query, layer.key)
    weights = jnp.where(mask[:, :, None], jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    output = jnp.einsum("bkgns,bksd->bkgnd", weights, layer.value)
    index = selection.settle(index, {"mass": jnp.sum(jnp.mean(weights, axis=2), axis=2)}, view)
    return layer._replace(index=index), (output, mask, jnp.broadcast_to(chosen[:, :, None], mask.shape))


def _apart(view: SelectView, at, key) -> SelectView:
    """The view with the new token behind the slots."""
    own = jnp.broadcast_to(at[:, None], (*view.slot.shape, 1))
    position = jnp.concatenate([jnp.where(view.new, -1, view.position), own], axis=2)
    hidden = jnp.where(view.new[..., None], 9.0, view.key)
    return view._replace(position=position, key=jnp.concatenate([hidden, key], axis=2))


def _record(found: Run, start, at, position, output, read, chosen) -> None:
    """Puts what a block's queries did where the positions are the indices."""
    position, output, read, chosen = (np.asarray(x) for x in (position, output, read, chosen))
    for row, positions in enumerate(np.asarray(at)):
        real = int((positions >= 0).sum())
        queries = slice(start, start + real)
        found.output[row, :, :, queries] = output[row, :, :, :real]
        for head in range(position.shape[1]):
            slots = np.flatnonzero(position[row, head] >= 0)
            where = position[row, head, slots]
            found.read[row, head, queries, where] = read[row, head, :real][:, slots].T
            found.chosen[row, head, queries, where] = chosen[row, head, :real][:, slots].T


def assert_same(found: Run, texts: Texts, reference, *, start: tuple[int, ...] | None = None) -> None:
    """Equal sets, and outputs to rounding, of queries from position `start` on (None: the end of each prompt).

    `reference(row, query, key, value)` gives a row's and a head's.
    """
    for row, length in enumerate(texts.lengths):
        queries = slice((start or texts.prompts)[row], length)
        for head in range(texts.key.shape[1]):
            expected = reference(row, *texts.head(row, head))
            about = f"row {row} head {head}"
            assert expected.gap > NEAR, f"{about}: a choice is too near ({expected.gap:.1e}); another seed"
            np.testing.assert_array_equal(found.read[row, head, queries, :length], expected.read[queries], about)
            np.testing.assert_array_equal(found.chosen[row, head, queries, :length], expected.chosen[queries], about)
            output = found.output[row, head, :, queries].swapaxes(0, 1)
            np.testing.assert_allclose(output, expected.output[queries], atol=2e-5, err_msg=about)
