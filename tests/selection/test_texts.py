"""Selections of whole texts, which attend by way of `kvjax.attention`, against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import attention
from kvjax.selection import Hindsight, Local, SelectView
from tests.reference import selection as reference
from tests.selection.driver import NEAR, SCALE, Texts, texts

REFERENCES = {Hindsight: reference.in_hindsight, Local: reference.local}


def run(selection, batch: Texts, budget, *, window=None) -> np.ndarray:
    """Output [B, K, G, T, D] of texts that go in as one prompt."""
    at = np.arange(batch.key.shape[2], dtype=np.int32)
    at = np.where(at < np.array(batch.lengths)[:, None], at, -1)
    return np.asarray(attend(*batch[:3], at, np.array(budget, np.int32), selection=selection, window=window))


@functools.partial(jax.jit, static_argnames=("selection", "window"))
def attend(query, key, value, at, budget, *, selection, window):
    rows, kv_heads, group, width, dim = query.shape
    position = jnp.broadcast_to(at[:, None], (rows, kv_heads, width))
    problem = attention.problem(
        query.reshape(rows, kv_heads * group, width, dim), key, value, query_position=at, key_position=position,
        scale=SCALE, window=window, needs=selection.needs, causal=True,
    )  # fmt: skip
    newest = jnp.max(at, axis=1)
    view = SelectView(position, key, newest, budget, newest + 1, jnp.zeros((rows, kv_heads), jnp.int32), SCALE, 0)
    return selection.attend_text(lambda each: attention.attend_and_reduce(each, "xla"), problem, view)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("heads", "recent"), [("mha", None), ("gqa", 3), ("mqa", 0)])
@pytest.mark.parametrize("kind", [Hindsight, Local])
def test_every_row_and_head(kind, heads, recent):
    batch, budgets = texts(heads, seed=11, whole=True), (9, 10, 50)
    found = run(kind(9, recent), batch, budgets)
    for row, length in enumerate(batch.lengths):
        b = budgets[row]
        for head in range(batch.key.shape[1]):
            r = b // 2 if recent is None else recent
            expected = REFERENCES[kind](*batch.head(row, head), b, r, SCALE)
            assert expected.gap > NEAR, "a choice is too near; another seed"
            output = found[row, head, :, :length].swapaxes(0, 1)
            np.testing.assert_allclose(output, expected.output, atol=2e-5, err_msg=f"row {row} head {head}")


def test_local_in_a_sliding_window():
    """Slots outside of the model's window are neither paid nor seen."""
    batch = texts("gqa", seed=13, whole=True)
    found = run(Local(20, 0), batch, (40, 40, 40), window=6)
    # Heavy sets of all tokens: dense attention inside the window.
    query, key, value = batch.head(0, 0)
    for at in range(37):
        near = slice(max(0, at - 5), at + 1)
        expected = reference.attend(query[at], key[near], SCALE) @ value[near]
        np.testing.assert_allclose(found[0, 0, :, at], expected, atol=2e-5)


@pytest.mark.parametrize("kind", [Hindsight, Local])
def test_a_budget_of_the_whole_text_is_dense(kind):
    batch = texts("gqa", seed=14, whole=True)
    found = run(kind(9, 3), batch, (200, 200, 200))
    query, key, value = batch.head(1, 1)
    for at in range(30):
        expected = reference.attend(query[at], key[: at + 1], SCALE) @ value[: at + 1]
        np.testing.assert_allclose(found[1, 1, :, at], expected, atol=2e-5)
