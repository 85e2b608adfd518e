"""Arrays grow when more tokens follow than there is room for, and are then those of a prefill with the larger room."""

import dataclasses

import jax
import numpy as np
import pytest

import kvjax
from kvjax import CacheSpec, contexts, policies, selection, storage
from kvjax.contexts.description import state_shapes
from kvjax.contexts.room import lowered_layout, with_room
from kvjax.errors import InputError
from tests.tiny import kept, random_tokens, tiny

PROMPT, TURN, TOTAL = 24, 12, 256
TOKENS, TURNS = random_tokens(2, PROMPT, seed=3), random_tokens(2, TURN, seed=4)
LENGTHS = np.array([PROMPT, 17])
FED = {
    "codes on the host": CacheSpec(policies.snapkv(8, window=4), storage.int8(residual=4, memory="host")),
    "segments": CacheSpec(policies.full(), storage.zipcache(window=8)),
    "pages": CacheSpec(policies.full(), selection=selection.quest(4, 16, first_layer=0)),
    # Shorter texts are held whole, and exactly.
    "a low tier": CacheSpec(policies.h2o(30), storage.mikv(2, group=8, balance=False)),
    "blocks": CacheSpec(policies.full(), storage.kivi(2, group=32, residual=32)),
}
OTHERS = {
    "pairs": CacheSpec(policies.full(), storage.minicache(start=0)),
    "tiers": CacheSpec(policies.h2o(8), storage.mikv(2, group=8)),
    "full blocks": CacheSpec(policies.full(), storage.kivi(2, group=8, residual=8)),
    "landmarks": CacheSpec(policies.full(), selection=selection.shadowkv(28, 4, 8, local=1, outliers=1)),
    "a budget": policies.h2o(40),
    "a residual": CacheSpec(policies.full(), storage.int8(residual=32)),
}


def begun(spec, new_tokens):
    model = tiny(layers=2 if spec == OTHERS["pairs"] else 1).model
    limits = kvjax.Limits(prompt=PROMPT, new_tokens=new_tokens)
    return contexts.prefill(model, TOKENS, spec, lengths=LENGTHS, limits=limits)


def grown(context):
    """With room for as many tokens as a prefill with `TOTAL`."""
    larger = with_room(context, np.full(2, TURN))
    made = context.made
    sizes = dataclasses.replace(made.sizes, following=TOTAL - PROMPT)
    assert larger.layout == lowered_layout(made.model, made.spec, sizes, made.options) != context.layout
    shapes = state_shapes(made.model, larger.layout, 2)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), larger.state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), shapes
    )
    # There is room for all of these.
    assert with_room(larger, np.full(2, TOTAL - PROMPT)) is larger
    return larger


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FED)
def test_a_grown_context_goes_on_as_one_with_more_room(name):
    larger, whole = grown(begun(FED[name], 4)), begun(FED[name], TOTAL - PROMPT)
    made, expected = (contexts.extend(whole.made.model, each, TURNS, block=1) for each in (larger, whole))
    np.testing.assert_array_equal(made.logits, expected.logits)
    for row in range(2):
        assert kept(made.state, row) == kept(expected.state, row)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", OTHERS)
def test_arrays_of_every_kind_grow(name):
    context = begun(OTHERS[name], 4)
    larger = grown(context)
    for row in range(2):
        assert kept(larger.state, row) == kept(context.state, row)


def test_what_is_made_at_the_end_of_a_prompt_does_not_grow():
    spec = CacheSpec(policies.h2o(30), storage.mikv(2, group=8))
    with pytest.raises(InputError, match=r"36 tokens do not fit .* makes its scales when the prompt ends; give"):
        contexts.extend(tiny(layers=1).model, begun(spec, 4), TURNS)
