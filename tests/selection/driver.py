"""Runs a selection over ragged texts without a model: prompts, then one token a step, on slots overwritten in place."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.numerics.rope import Rope
from kvjax.selection import Held, SelectView
from tests.reference.selection import Layer as ReferenceLayer
from tests.reference.step import rotate

HEADS = {"mha": (4, 1), "gqa": (2, 2), "mqa": (1, 4)}  # KV heads, query heads of each
DIM = 8
SCALE = 0.25  # a power of two: texts of whole numbers have exact ties in the reference too
LENGTHS, PROMPTS = (37, 30, 24), (16, 9, 1)
THETA = 50.0  # base of RoPE's frequencies: keys are those of `Texts` after they were rotated
ROPE = Rope(dim=DIM, theta=THETA)
NEAR = 1e-5  # choices nearer than this demand another seed


class Texts(NamedTuple):
    """B rows of T tokens, of which a row has `lengths`, the first `prompts` at once."""

    query: np.ndarray  # [B, K, G, T, D]
    key: np.ndarray  # [B, K, T, D]
    value: np.ndarray  # [B, K, T, D]
    guess: np.ndarray  # [B, K, G, T, D] what a selection that looks ahead takes for the query
    lengths: tuple[int, ...]
    prompts: tuple[int, ...]
    skew: np.ndarray | None = None  # [K, D, D]

    def row(self, row: int) -> Texts:
        arrays = (leaf[row : row + 1] for leaf in self[:4])
        return Texts(*arrays, self.lengths[row : row + 1], self.prompts[row : row + 1], self.skew)

    def head(self, row: int, head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float64 query [T, G, D], key and value [T, D] of one KV head's real tokens."""
        layer = self.layer(row)
        return layer.query[:, head], layer.key[:, head], layer.value[:, head]

    def layer(self, row: int) -> ReferenceLayer:
        """float64 numbers of a row's real tokens."""
        query, key, value, guess = (
            np.moveaxis(leaf[row][..., : self.lengths[row], :], -2, 0).astype(np.float64) for leaf in self[:4]
        )
        plain = rotate(key, -np.arange(len(key)), THETA)
        return ReferenceLayer(query, key, value, guess, plain)


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
        guess = rng.integers(-2, 3, shapes[0]).astype(np.float32)
    else:
        query = 1.5 * query
        guess = query + rng.normal(size=shapes[0]).astype(np.float32)
    return Texts(query, key, value, guess, LENGTHS, LENGTHS if whole else PROMPTS)


def orthogonal(kv_heads: int, seed: int = 0) -> np.ndarray:
    """[K, D, D] random orthogonal matrices."""
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(kv_heads, DIM, DIM)))[0].astype(np.float32)


def run(selection, texts: Texts, *, budget=None, capacity=None, window=None, block=None, kept=None, apart=False) -> Run:
    """The selection over texts.

    `kept` [B][K] are the positions of the prompt that a compressor leaves. `apart`: the selection sees a token behind
    the slots in its own step, as where slots are held in a code.

    A dense prompt is put into its slots without attention: its queries' part of the result is as the caller has it.
    """
    rows, kv_heads, group, width, dim = texts.query.shape
    prompts, lengths = np.array(texts.prompts), np.array(texts.lengths)
    selection = selection.bound(group, width - min(PROMPTS))
    budget = np.asarray([1] * rows if budget is None else budget, np.int32)
    found = Run(
        np.zeros((rows, kv_heads, group, width, dim), np.float32),
        np.zeros((rows, kv_heads, width, width), bool),
        np.zeros((rows, kv_heads, width, width), bool),
    )
    about = {"selection": selection, "window": window, "apart": apart, "skew": texts.skew}
    shape = (rows, kv_heads, capacity or width)
    if selection.in_prompt:
        position = np.full(shape, -1, np.int32)
        empty = np.zeros((*shape, dim), np.float32)
        index = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), _index_shapes(selection, shape))
        layer = Slots(position, empty, empty, index)
        block = block or max(PROMPTS)
        for start in range(0, max(prompts), block):
            at = np.arange(start, start + block, dtype=np.int32)
            tokens = tuple(x[..., np.minimum(at, width - 1), :] for x in texts[:4])
            at = np.where(at < prompts[:, None], at, -1)
            layer, out = _block(layer, *tokens, at, prompts, budget, **about)
            _record(found, start, at, layer.position, *out)
    else:
        layer = _held(texts, shape, [[range(n)] * kv_heads for n in prompts] if kept is None else kept)
        sums = watched(selection, texts, block) if selection.watches else {}
        index = built(selection, layer.position, layer.key, prompts, sums, texts.skew, layer.value)
        layer = layer._replace(index=index)
    # [steps, B]: each row decodes from the end of its own prompt
    at = np.arange(width - min(PROMPTS), dtype=np.int32)[:, None] + prompts
    at = np.where(at < lengths, at, -1).astype(np.int32)

    def tokens(x: np.ndarray) -> np.ndarray:
        """[B, ..., T, D] -> [steps, B, ..., 1, D] of the positions `at`."""
        return np.stack([[x[row, ..., each[row], :] for row in range(rows)] for each in at])[..., None, :]

    steps = _steps(layer, *(tokens(x) for x in texts[:4]), at[:, :, None], prompts, budget, **about)
    for number, out in enumerate(zip(*(np.asarray(x) for x in steps), strict=True)):
        for row in np.flatnonzero(at[number] >= 0):
            own = slice(row, row + 1)
            _record(Run(*(x[own] for x in found)), at[number, row], at[number, own, None], *(x[own] for x in out))
    return found


def watched(selection, texts: Texts, block=None) -> dict[str, np.ndarray]:
    """The sums of the prompts, at once or in blocks; padding is rubbish."""
    prompts, widest = np.array(texts.prompts), max(texts.prompts)
    sums = selection.start(texts.key.shape[:2], DIM)
    if not selection.rotated:
        texts = plain_texts(texts)
    for start in range(0, widest, block or widest):
        at = np.arange(start, min(start + (block or widest), widest))
        real = at < prompts[:, None]
        query = np.where(real[:, None, None, :, None], texts.query[..., at, :], 77.0).astype(np.float32)
        key = np.where(real[:, None, :, None], texts.key[..., at, :], 77.0).astype(np.float32)
        sums = selection.watch(sums, query, key, real, texts.skew)
    return sums


def plain_texts(texts: Texts) -> Texts:
    """With queries and keys as they were before they were rotated."""
    at = -np.arange(texts.key.shape[2])
    query, key = (np.moveaxis(rotate(np.moveaxis(x, -2, 0), at, THETA), 0, -2) for x in (texts.query, texts.key))
    return texts._replace(query=query.astype(np.float32), key=key.astype(np.float32))


def _held(texts: Texts, shape, kept) -> Slots:
    """The slots of the positions `kept` [B][K], oldest first."""
    layer = Slots(np.full(shape, -1, np.int32), *(np.zeros((*shape, DIM), np.float32) for _ in range(2)), {})
    for row, heads in enumerate(kept):
        for head, positions in enumerate(heads):
            own = np.sort(np.asarray(positions, np.int32))
            layer.position[row, head, : len(own)] = own
            layer.key[row, head, : len(own)] = texts.key[row, head, own]
            layer.value[row, head, : len(own)] = texts.value[row, head, own]
    return layer


class Slots(NamedTuple):
    position: jax.Array
    key: jax.Array
    value: jax.Array
    index: dict[str, jax.Array]


def _index_shapes(selection, shape):
    return jax.eval_shape(lambda: selection.init(shape, DIM, jnp.float32))


@functools.partial(jax.jit, static_argnums=0)
def built(selection, position, key, prompt=None, sums=None, skew=None, value=None):
    """The index of slots [B, K, S] that are held when a prompt ends."""
    prompt = jnp.max(position, axis=(1, 2)) + 1 if prompt is None else prompt
    frequencies = ROPE.frequencies(prompt)
    held = Held(position, key, prompt, skew, lambda x: ROPE.unrotate(x, position, frequencies), value)
    held = held if selection.rotated else held._replace(key=held.unrotate(key))
    return selection.build(selection.init(position.shape, key.shape[-1], key.dtype), sums or {}, held)


STATIC = ("selection", "window", "apart")


@functools.partial(jax.jit, static_argnames=STATIC)
def _steps(layer: Slots, query, key, value, guess, at, prompt, budget, *, selection, window, apart, skew):
    """Single tokens; leading axis: steps."""

    def body(layer, inputs):
        layer, out = _step(layer, *inputs, prompt, budget, selection, window, apart, skew)
        return layer, (layer.position, *out)

    return jax.lax.scan(body, layer, (query, key, value, guess, at))[1]


@functools.partial(jax.jit, static_argnames=STATIC)
def _block(layer: Slots, query, key, value, guess, at, prompt, budget, *, selection, window, apart, skew):
    return _step(layer, query, key, value, guess, at, prompt, budget, selection, window, apart, skew)


def _step(layer: Slots, query, key, value, guess, at, prompt, budget, selection, window, apart, skew):
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
        scale=SCALE, layer=0, window=window, first=None if n == 1 else at[:, 0], skew=skew,
    )  # fmt: skip
    index, entries = layer.index, {}
    if n == 1:
        own = key if selection.rotated else ROPE.unrotate(key, at[:, None], ROPE.frequencies(newest + 1))
        index = selection.write_value(selection.write(index, own, target[:, :, 0], newest >= 0), value, newest >= 0)
        entries = {} if selection.in_prompt else selection.entries(index, key, skew)
    settled = index | {name: write(index[name], target, own) for name, own in entries.items()}
    by = (guess if selection.ahead else query)[:, :, :, 0]
    if apart:
        behind = index | {name: jnp.concatenate([index[name], own], axis=2) for name, own in entries.items()}
        seen = _apart(view, at, key)
        chosen, behind = selection.choose(behind, by, seen)
        read = chosen | selection.always(behind, seen)
        chosen, read = (x[:, :, :size] | (view.new & x[:, :, size:]) for x in (chosen, read))
        moved = {name: write(behind[name][:, :, :size], target, behind[name][:, :, size:]) for name in entries}
        index = behind | moved
    else:
        chosen, index = selection.choose(settled, by, view)
        read = chosen | selection.always(index, view)
    # [B, K, n, S]
    mask = read[:, :, None] & (position[:, :, None] <= at[:, None, :, None])
    if window is not None:
        mask &= position[:, :, None] > at[:, None, :, None] - window
    keys = layer.key
    restored = None if selection.in_prompt else selection.restore(index, jnp.where(read, position, -1))
    if restored is not None:
        turned = ROPE.rotate(restored, position, ROPE.frequencies(newest + 1))
        keys = jnp.where(chosen[..., None], turned, keys)
    logits = SCALE * jnp.einsum("bkgnd,bksd->bkgns", query, keys)
    weights = jnp.where(mask[:, :, None], jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1e-30)
    output = jnp.einsum("bkgns,bksd->bkgnd", weights, layer.value)
    if n == 1 and not selection.in_prompt:
        output = selection.mix(index, output[:, :, :, 0], view)[:, :, :, None]
    paid = jnp.mean(weights, axis=2)
    age, left = (jnp.where(at >= 0, last[:, None] - at, -1) for last in (newest, prompt - 1))
    columns = {"mass": jnp.sum(paid, axis=2)}
    columns |= {each.name: each.reduce(paid, each.query_weights(age, left)) for each in selection.needs}
    index = selection.settle(index, columns, view)
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

    `reference(row, layer)` gives a row's heads.
    """
    for row, length in enumerate(texts.lengths):
        queries = slice((start or texts.prompts)[row], length)
        for head, expected in enumerate(reference(row, texts.layer(row))):
            about = f"row {row} head {head}"
            assert expected.gap > NEAR, f"{about}: a choice is too near ({expected.gap:.1e}); another seed"
            np.testing.assert_array_equal(found.read[row, head, queries, :length], expected.read[queries], about)
            np.testing.assert_array_equal(found.chosen[row, head, queries, :length], expected.chosen[queries], about)
            output = found.output[row, head, :, queries].swapaxes(0, 1)
            np.testing.assert_allclose(output, expected.output[queries], atol=2e-5, err_msg=about)
