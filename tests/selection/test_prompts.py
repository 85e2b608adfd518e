"""Prompts whose blocks of queries read chosen pages, against a float64 reference."""

import dataclasses
import functools
import math

import chex
import jax
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

import kvjax
from kvjax import CacheSpec, policies, selection, storage
from kvjax.cache.planning.limits import Sizes
from kvjax.cache.planning.lowering import lower
from kvjax.cache.step import query_blocks
from kvjax.errors import PolicyError, SelectionError
from kvjax.generation.prefill import prefill_steps
from kvjax.numerics.rope import Rope
from kvjax.planning.prompt_attention import prompt_attention_flops
from kvjax.selection import LServe, MeanKeys, QueryBlocks, Quest
from tests import layers
from tests.reference import selection as reference
from tests.reference.step import rotate
from tests.tiny import random_tokens, tiny

PROMPTS, STEPS, DIM, THETA = np.array([53, 40, 21]), 5, 8, 50.0
SCALE = DIM**-0.5
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (4, 1)}
BLOCKS = QueryBlocks(size=4, sinks=1, recent=2, pages=3)
NEAR = 1e-5


def mean_key(query, keys):
    return SCALE * query @ keys.mean(axis=0)


#: ours, the reference's score of a page, heads, block of the prompt, sliding window
CASES = {
    "quest": (Quest(page=2, pages=2, prompt=BLOCKS, first_layer=0), reference.bound(SCALE), "gqa", None, None),
    "largest": (
        Quest(page=2, pages=2, prompt=dataclasses.replace(BLOCKS, over="max"), first_layer=0), reference.bound(SCALE),
        "gqa", 8, None,
    ),
    "in blocks, with a window": (
        Quest(page=4, pages=2, prompt=dataclasses.replace(BLOCKS, size=8, recent=0), first_layer=0),
        reference.bound(SCALE), "mqa", 16, 23,
    ),
    "sub-pages": (
        LServe(page=4, sub=2, pages=2, every=2, prompt=dataclasses.replace(BLOCKS, size=8, sinks=0), first_layer=0),
        reference.bound(SCALE, 2), "mha", None, 30,
    ),
    "mean keys": (
        MeanKeys(page=2, pages=2, prompt=dataclasses.replace(BLOCKS, size=6)), mean_key, "gqa", 24, None,
    ),
    "a shape": (
        Quest(page=2, pages=2, prompt=QueryBlocks(size=4, sinks=2, recent=3, pages=0), first_layer=0), None, "gqa",
        None, None,
    ),
}  # fmt: skip


@functools.cache
def case(heads: str, block: int | None, window: int | None, seed: int = 0) -> layers.Case:
    streams = layers.random_streams(
        [10 * seed + row for row in range(3)], int(PROMPTS.max()) + STEPS, heads=HEADS[heads], dim=DIM
    )
    streams = streams._replace(query=2 * streams.query)
    return layers.Case(streams, PROMPTS, PROMPTS + STEPS, block, Rope(dim=DIM, theta=THETA), window)


def expected(name: str) -> list[list[tuple]]:
    """The output [T, G, D], the probabilities [T, G, T] and the reads [T, T] of each row's prompt and head."""
    made, score, heads, block, window = CASES[name]
    blocks, streams = made.prompt, case(heads, block, window).streams
    rows = []
    for row, n in enumerate(PROMPTS):
        query, key, value = (np.moveaxis(x[row, :, :n].astype(np.float64), 1, 0) for x in streams)
        query, key = (rotate(x, np.arange(n), THETA) for x in (query, key))
        query = query.reshape(n, key.shape[1], -1, DIM)
        found = []
        for head in range(key.shape[1]):
            read, gap = reference.read_in_prompt(
                query[:, head], key[:, head], made.page, blocks.size, blocks.sinks, blocks.recent, blocks.pages, score,
                blocks.over, window,
            )  # fmt: skip
            assert gap > NEAR, f"{row=} {head=}: a choice is too near; another seed"
            logits = SCALE * np.einsum("tgd,sd->tgs", query[:, head], key[:, head])
            logits = np.where(read[:, None], logits, -np.inf)
            weight = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weight /= weight.sum(axis=-1, keepdims=True)
            found.append((weight @ value[:, head], weight, read))
        rows.append(found)
    return rows


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_a_prompt_is_the_reference(name, monkeypatch):
    """Returns the outputs of the prompt; what follows is as after a prompt that is read whole."""
    made, _, heads, block, window = CASES[name]
    if name == "quest":
        # The prompt has 10 blocks, and 4 of them are ranked at once.
        monkeypatch.setattr(query_blocks, "SCORES", 4 * len(PROMPTS) * HEADS[heads][0] * 29)
    given, group = case(heads, block, window), HEADS[heads][0] // HEADS[heads][1]
    run = layers.run(CacheSpec(policies.full(), selection=made), given)
    for row, (n, own) in enumerate(zip(PROMPTS, expected(name), strict=True)):
        for head, (output, _, _) in enumerate(own):
            found = run.output[row, head * group : (head + 1) * group, :n].swapaxes(0, 1)
            np.testing.assert_allclose(found, output, atol=2e-5, err_msg=f"{row=} {head=}")
    if name not in ("largest", "sub-pages"):
        return
    whole = layers.run(CacheSpec(policies.full(), selection=dataclasses.replace(made, prompt=None)), given)
    for row, n in enumerate(PROMPTS):
        np.testing.assert_array_equal(run.output[row, :, n:], whole.output[row, :, n:])
    chex.assert_trees_all_equal(run.layers, whole.layers)


def test_statistics_are_of_what_a_prompt_read():
    """With a budget of everything, a policy keeps statistics and evicts nothing."""
    made, _, heads, block, window = CASES["quest"]
    policy = policies.by_page(policies.roco(60, guard=2), page=made.page)
    run = layers.run(CacheSpec(policy, selection=made), case(heads, block, window))
    for row, (n, own) in enumerate(zip(PROMPTS, expected("quest"), strict=True)):
        for head, (_, weight, read) in enumerate(own):
            stats = {key: x[0, row, head, :n] for key, x in run.layers[0].stats.items()}
            paid = weight.mean(axis=1)
            np.testing.assert_allclose(stats["mass"], paid.sum(axis=0), atol=1e-4)
            np.testing.assert_allclose(stats["mass_sq"], (paid**2).sum(axis=0), atol=1e-4)
            np.testing.assert_array_equal(stats["count"], read.sum(axis=0))


@pytest.mark.sampled(0)
def test_a_budget_of_all_pages_is_a_prompt_that_is_read_whole():
    """The last block of 53 tokens has 48 before it: 12 pages of 4."""
    model, tokens = tiny("gqa", layers=1).model, random_tokens(2, 56)

    def score(budget, in_prompt=True):
        look = selection.quest(4, 12, first_layer=0, **PROMPT | {"prompt_budget": budget} if in_prompt else {})
        return kvjax.log_likelihood(
            model, tokens, policies.full(), selection=look, prompt_length=53, limits=kvjax.Limits(53, 4)
        )  # fmt: skip

    whole = score(None, in_prompt=False).logprobs
    np.testing.assert_array_equal(score(48).logprobs, whole)
    assert np.abs(score(44).logprobs - whole).max() > 1e-5


PROMPT = {"in_prompt": True, "sinks": 4, "recent": 8, "query_block": 8}


def test_numbers_of_tokens_are_whole_pages():
    made = selection.quest(16, 512, in_prompt=True)
    assert made.prompt == QueryBlocks(size=64, sinks=1, recent=4, pages=27) and made.prompt.dense(16) == 576
    assert selection.lserve(64, budget=512, in_prompt=True).prompt == QueryBlocks(size=64, sinks=1, recent=1, pages=6)
    a_shape = selection.retrieval(8, 64, in_prompt=True, prompt_budget=136, sinks=1, recent=128)
    assert a_shape.prompt == QueryBlocks(size=64, sinks=1, recent=16, pages=0) and a_shape.pages == 7


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"in_prompt": True, "query_block": 40},
            "^selection quest: query_block=40 is not a multiple of the page of 16",
        ),
        (
            {"in_prompt": True, "prompt_budget": 79},
            r"prompt_budget=79 is less than the 80 tokens that are always read \(sinks: 16, recent: 64\)",
        ),
        ({"prompt_budget": 512}, "prompt_budget=512 needs in_prompt=True"),
        ({"sinks": -5}, "sinks=-5 needs in_prompt=True"),
        ({"in_prompt": 512}, "in_prompt=512 is not valid; use True or False"),
        ({"in_prompt": True, "recent": -1}, "recent must be a whole number of at least 0; got -1"),
    ],
)
def test_numbers_that_are_not_valid_are_refused(arguments, message):
    with pytest.raises(SelectionError, match=message):
        selection.quest(16, 512, **arguments)


@pytest.mark.parametrize(
    ("spec", "block", "message"),
    [
        (CacheSpec(policies.full()), 12, "prefill_block=12 divides blocks .* use a multiple of query_block=8"),
        (CacheSpec(policies.by_page(policies.h2o(16), page=4)), 16, "evicts between the blocks of a prompt; leave out"),
        (CacheSpec(policies.full(), storage.dense(memory="host")), 16, "holds the blocks of a prompt in another form"),
        (CacheSpec(policies.kvzip(16)), None, "this policy replays the prompt, which reads all; leave out in_prompt"),
    ],
)
def test_what_does_not_combine_is_refused(spec, block, message):
    look = selection.quest(4, 16, first_layer=0, **PROMPT)
    with pytest.raises(PolicyError, match=message):
        layers.lowered(dataclasses.replace(spec, selection=look), case("gqa", block, None))


def products_of_heads(jaxpr, times: int = 1) -> int:
    """The FLOPs of the products of a program that have batch dimensions: those of attention and of scores of pages."""
    found = 0

    def is_program(x):
        return isinstance(x, Jaxpr | ClosedJaxpr)

    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            depth = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            found += 2 * times * depth * math.prod(equation.outvars[0].aval.shape) if batch else 0
        inside = times * equation.params["length"] if equation.primitive.name == "scan" else times
        # A program has a branch for each platform; the one by XLA has the products.
        programs = jax.tree.leaves(tuple(equation.params.values()), is_leaf=is_program)
        found += max((products_of_heads(each, inside) for each in filter(is_program, programs)), default=0)
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block", [None, 256])
@pytest.mark.parametrize(("over", "sub"), [("mean", None), ("max", None), ("mean", 8)])
def test_flops_are_those_of_the_program(over, sub, block):
    """In several segments of the whole prompt, and in several tiles; every product of the traced program is counted."""
    model, rows, width = tiny("gqa", layers=1).model, 2, 1100
    look = selection.quest(16, 256, first_layer=0, in_prompt=True, sinks=16, recent=32, query_block=64)
    look = LServe(**vars(look) | {"sub": sub, "prompt": dataclasses.replace(look.prompt, over=over)})
    lengths, sizes = np.full(rows, width, np.int32), Sizes(rows, width, width, width, 4, block, rounded=False)
    share = []
    for chosen in (look, selection.everything()):
        made = lower(CacheSpec(policies.full(), selection=chosen), model.config, sizes, lengths)
        program = functools.partial(prefill_steps.__wrapped__, config=model.config, layout=made.layout, score=False)
        tokens = jax.ShapeDtypeStruct((rows, width), np.int32)
        jaxpr = jax.make_jaxpr(program)(model.params, tokens, lengths, lengths + 4, *made.budgets)
        share.append(prompt_attention_flops(model.config, made.layout, rows, width))
        assert products_of_heads(jaxpr) == share[-1]
    assert share[0] < 0.65 * share[1]


def test_a_plan_says_what_is_left():
    look = selection.quest(16, 128, first_layer=0, in_prompt=True)
    config = tiny("gqa", layers=1).model.config
    arguments = {"prompt_length": 400, "new_tokens": 4, "compiles": False}
    planned, whole = (
        kvjax.planning.plan(config, policies.full(), selection=each, **arguments) for each in (look, None)
    )
    assert planned.full_prompt_flops == whole.prompt_flops == whole.full_prompt_flops
    # The first 192 of 400 queries are one segment of tiles, and the others are four blocks that read 192 slots.
    scores, scored = 192 * 192 + 4 * 64 * 192, 4 * 25 * 4
    assert planned.prompt_flops == 4 * 8 * (4 * scores + scored) and whole.prompt_flops == 4 * 8 * 4 * 400 * 400
    assert "Attention over the prompts computes 11 MFLOP, 54 % of the 20.5 MFLOP of prompts" in planned.table()
    assert "Attention over the prompts" not in whole.table()
