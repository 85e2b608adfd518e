"""ReKV's further turns: a block chooses by its own queries, reads what it has chosen, and the choice stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import contexts, policies, selection, storage
from kvjax.cache import CacheSpec
from kvjax.cache.planning.limits import Limits, sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.state import Block
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.step import step_layer
from kvjax.contexts.room import block_phase
from kvjax.models.config import DecoderConfig
from tests.reference import selection as reference
from tests.reference.step import rotate
from tests.selection.driver import DIM, HEADS, NEAR, ROPE, THETA
from tests.tiny import random_tokens, tiny

PROMPTS, TURNS, ANSWER = np.array([22, 13, 17]), np.array([5, 8, 0]), 3  # the last row has no token in the turn
MADE = selection.rekv(2, 4, sinks=2, recent=6, question=4)
SCALE = DIM**-0.5


def streams(heads):
    kv_heads, group = HEADS[heads]
    rng, width = np.random.default_rng(0), int(PROMPTS.max() + TURNS.max() + ANSWER)
    shapes = ((len(PROMPTS), count, width, DIM) for count in (kv_heads * group, kv_heads, kv_heads))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


@functools.cache
def layout(heads, made):
    kv_heads, group = HEADS[heads]
    config = DecoderConfig(
        family="llama", vocab_size=1, hidden_size=8, num_layers=1, num_heads=kv_heads * group, num_kv_heads=kv_heads,
        head_dim=DIM, mlp_size=1, max_positions=64, rope=ROPE,
    )  # fmt: skip
    room = int(TURNS.max()) + ANSWER + 40
    sizes = sizes_for(PROMPTS, room, width=int(PROMPTS.max()), block=None, limits=Limits(22, room), last_fed=True)
    return lower(CacheSpec(policies.full(), storage.dense(), made), config, sizes, PROMPTS).layout


@functools.partial(jax.jit, static_argnames=("groups",))
def fed(layer, tokens, position, prompt, total, groups):
    block = Block(position=position, prompt=prompt, total=total, budget=((None,),)).of_layer(0)
    output, layer, (seen,) = step_layer(layer, *tokens, block=block, groups=groups, args=LayerArgs(rope=ROPE))
    return output, layer, seen.position


def run(heads, made=MADE):
    """The outputs [B, H, n, D] of the turn and of each step, with the positions [B, K, S] that a step has read."""
    made_layout, every = layout(heads, made), streams(heads)
    total = jnp.asarray(PROMPTS + TURNS + ANSWER, jnp.int32)

    def part(start, count, width):
        """Tokens of each row from number `start` on, and their positions."""
        at = start[:, None] + np.arange(width)
        at = np.where(np.arange(width) < count[:, None], at, -1).astype(np.int32)
        return [np.take_along_axis(x, np.maximum(at, 0)[:, None, :, None], axis=2) for x in every], at

    prompt, zero = jnp.asarray(PROMPTS, jnp.int32), np.zeros(len(PROMPTS), int)
    _, layer, _ = fed(None, *part(zero, PROMPTS, int(PROMPTS.max())), prompt, total, made_layout.prompt[0])
    width = int(TURNS.max()) + 2  # padding
    turn = part(PROMPTS, TURNS, width)
    found = [fed(layer, *turn, prompt + jnp.asarray(TURNS), total, block_phase(made_layout.decode, width)[0])]
    for number in range(ANSWER):
        one = part(PROMPTS + TURNS + number, np.ones(len(PROMPTS), int), 1)
        found.append(fed(found[-1][1], *one, prompt, total, made_layout.decode[0]))
    return [(np.asarray(output), np.asarray(read)) for output, _, read in found]


def expected(heads, row, *, sinks=1, recent=3, asks=True):
    """The same of a row in float64: outputs [n, H, D] and the positions that are read, of the turn and of each step.

    If the turn does not ask, the choice of the prompt stands.
    """
    query, key, value = (np.moveaxis(x[row], 1, 0).astype(np.float64) for x in streams(heads))
    (kv_heads, group), prompt, turn = HEADS[heads], int(PROMPTS[row]), int(TURNS[row])
    at = np.arange(len(key))
    query, key = (rotate(x, at, THETA) for x in (query, key))
    query = query.reshape(len(at), kv_heads, group, DIM)
    look = reference.ReKV(lambda x, at: rotate(x, -at, THETA), 2, 2, sinks, recent, 4)
    look.begin(query[:prompt], key[:prompt], key[:prompt])

    def attended(position, read):
        heads = [
            reference.attend(query[position, head], key[read, head], SCALE) @ value[read, head]
            for head in range(kv_heads)
        ]
        return np.concatenate(heads)

    def keys(count):
        return [key[:count, head] for head in range(kv_heads)], [at[:count]] * kv_heads

    found, gaps, end = [], [], prompt + turn
    if not asks:
        look.decide(*keys(prompt), (prompt - 1) // 2, (prompt - 1) // 2)
    elif turn:
        look.asked = look.plain(query[prompt:end], at[prompt:end]).mean(axis=0)
        look.decide(*keys(end), prompt // 2, (end - 1) // 2)
        gaps.append(look.gap)
        page = at[:end] // 2
        marks = np.isin(page, [*look.stands]) | (page < sinks) | (page > (end - 1) // 2 - recent) | (at[:end] >= prompt)
        outputs = [attended(t, at[:end][marks & (at[:end] <= t)]) for t in range(prompt, end)]
        found.append((np.array(outputs), at[:end][marks]))
    for number in range(ANSWER):
        choice = look.choose(query[end + number], *keys(end + number + 1))[0]
        gaps.append(choice.gap)
        read = np.sort(np.concatenate([choice.chosen, choice.always]))
        found.append((attended(end + number, read)[None], read))
    assert min(gaps) > NEAR, "another seed"
    return found


@pytest.mark.parametrize("heads", HEADS)
def test_a_turn_is_the_reference(heads):
    found = run(heads)
    for row, turn in enumerate(TURNS):
        wanted = expected(heads, row)
        got = found if turn else found[1:]
        for (output, read), (own, positions) in zip(got, wanted, strict=True):
            count = len(own)
            np.testing.assert_allclose(np.moveaxis(output[row, :, :count], 0, 1), own, atol=2e-5)
            for held in read[row]:
                np.testing.assert_array_equal(np.sort(held[held >= 0]), positions)
    # The turn has chosen other pages than the prompt.
    before, after = ([expected(heads, row, asks=asks)[-1][1].tolist() for row in range(2)] for asks in (False, True))
    assert before != after


def test_a_turn_with_a_window_in_the_prompt_chooses_too():
    """Blocks of the prompt's queries read some pages; a turn is not such a block."""
    sparse = selection.rekv(2, 4, sinks=2, recent=6, question=4, in_prompt=True, query_block=4)
    assert layout("gqa", sparse).prompt[0][0].sparse_prompt is not None
    for (output, read), (other, same) in zip(run("gqa"), run("gqa", sparse), strict=True):
        np.testing.assert_allclose(output, other, atol=2e-6)  # of one layer, keys and values do not depend on it
        np.testing.assert_array_equal(read, same)


def test_a_turn_of_a_context_chooses():
    model, text = tiny().model, random_tokens(1, 60, seed=2)
    made = selection.rekv(2, 6, sinks=1, recent=4, question=4, first_layer=0)
    context = contexts.prefill(model, text[:, :48], policies.full(), selection=made)
    turned, fed_singly = (contexts.extend(model, context, text[0, 48:56], block=block) for block in (None, 1))
    assert [context.boundaries[0][-1].block for context in (turned, fed_singly)] == [8, 1]
    assert np.abs(turned.logits - fed_singly.logits).max() > 1e-3, "it reads the pages that the prompt has chosen"
    # A choice of all pages is the full cache.
    every, full = (
        contexts.extend(model, contexts.prefill(model, text[:, :48], policies.full(), selection=each), text[0, 48:56])
        for each in (selection.rekv(2, 60, recent=30, question=4, first_layer=0), selection.everything())
    )
    np.testing.assert_allclose(every.logits, full.logits, atol=1e-5)
