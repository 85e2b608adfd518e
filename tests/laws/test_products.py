"""Every (policy, storage, selection) lowers and its steps trace, or it is refused with a reason: no third outcome."""

import functools
import itertools
import random

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax import policies, storage
from kvjax.cache import Block, CacheSpec, Layer, shared_layers
from kvjax.cache.empty import empty_layers
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.step.interface import LayerArgs
from kvjax.cache.step.prompt_end import Prompt, convert
from kvjax.cache.step.prompt_replay import evict_prompt
from kvjax.cache.step.step import step_layer
from kvjax.errors import PolicyError, StorageError
from kvjax.models.config import DecoderConfig
from kvjax.numerics.rope import Rope
from kvjax.policies import MERGES, POLICIES
from kvjax.selection import SELECTIONS, quest
from kvjax.storage import STORAGES
from kvjax.storage.calibration import side_shapes
from kvjax.storage.side import PROMPT as OF_PROMPT
from tests import examples
from tests.layers import policy_args

HEADS, KV_HEADS, DIM, PROMPT, NEW, BLOCK = 4, 2, 8, 48, 8, 16
CONFIG = DecoderConfig(
    family="llama", vocab_size=64, hidden_size=32, num_layers=2, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM,
    mlp_size=64, max_positions=512, rope=Rope(dim=DIM),
)  # fmt: skip
TABLE = ((True, False), (False, True))
LAYER = 1  # the one whose steps are traced: in the first, a selection that looks ahead reads everything


def all_policies() -> dict[str, policies.Policy]:
    found = {name: examples.policy(name) for name in POLICIES}
    found |= {f"h2o[{variant}]": policies.h2o(0.5, variant=variant) for variant in ("masked", "global", "local")}
    found |= {f"h2o+{name}": policies.h2o(0.5, merge=merge()) for name, merge in MERGES.items()}
    found |= {f"{name}@cache": policies.by_name(name, budget=0.5, positions="cache") for name in ("h2o", "knorm")}
    found["h2o@max"] = policies.h2o(0.5, group_reduce="max")
    return found | examples.combined() | examples.planned()


POLICY = all_policies()
STORAGE = {name: examples.held(name) for name in STORAGES} | {
    "int4+8": storage.int4(residual=8),
    # Exact keys beside coded values.
    "mixed": storage.Storage(key=storage.Exact(), value=storage.Integer(4), residual=3, name="mixed"),
    "host": storage.dense(memory="host"),
}
IN_PROMPT = {"in_prompt": True, "sinks": 4, "recent": 4, "query_block": 8}
SELECTION = {name: examples.chosen(name) for name in SELECTIONS} | {
    "quest in a prompt": quest(4, 16, first_layer=0, **IN_PROMPT)
}


def lowered_for(spec: CacheSpec, block: int | None):
    lengths, following = np.array([PROMPT, 37]), 0 if spec.selection.whole_text else NEW
    block = None if spec.selection.whole_text else block
    sizes = sizes_for(lengths, following, width=PROMPT, block=block, limits=None, last_fed=True)
    return lower(spec, CONFIG, sizes, lengths)


def compressed(take, layout, budgets, row):
    """Evicts from a prompt that has been replayed, and moves what is left of the last layer."""
    prompt, made = Prompt(row, CONFIG.rope, CONFIG.rope.frequencies(row)), []
    for own, before, after, budget in zip(
        take(row), layout.prompt[LAYER], layout.decode[LAYER], budgets.prompt[LAYER], strict=True
    ):
        left = evict_prompt(own, before, budget, prompt, row, jnp.int32(LAYER), LayerArgs(scale=DIM**-0.5))
        made.append(convert(left, before, after, prompt))
    return Layer(made)


def trace(spec: CacheSpec, block: int | None) -> None:
    """Traces the steps of the last layer on shapes alone: the prompt's, and one of decoding."""
    lowered = lowered_for(spec, block)
    layout, budgets = lowered.layout, jax.tree.map(jnp.asarray, lowered.budgets)
    row = jax.ShapeDtypeStruct((2,), jnp.int32)
    shapes = side_shapes(spec.storage, KV_HEADS, DIM, jnp.float32)
    sides = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def take(layers, row, *, tokens, groups, budget):
        heads = [jnp.zeros((2, count, tokens, DIM)) for count in (HEADS, KV_HEADS, KV_HEADS)]
        position = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32), (2, tokens))
        given = Block(position=position, prompt=row, total=row, budget=budget).of_layer(LAYER)
        layer = None if layers is None else shared_layers.borrow(layers, LAYER, groups[LAYER])
        own = policy_args(heads[0], layout, CONFIG.rope)
        args = LayerArgs(rope=CONFIG.rope, guess=heads[0] if tokens == 1 else None, sides=sides, **own)
        output, layer, _ = step_layer(layer, *heads, block=given, groups=groups[LAYER], args=args)
        assert output.shape == (2, HEADS, tokens, DIM)
        if layers is None:
            # The other layer of a pair is alike.
            return shared_layers.join_prompts((layer,) * CONFIG.num_layers, layout.decode)[LAYER]
        return shared_layers.release(layer, layers[LAYER], groups[LAYER])

    def unchanged(phase, budget, tokens):
        layers = jax.eval_shape(lambda: empty_layers(phase, 2, KV_HEADS, DIM, jnp.float32))
        after = jax.eval_shape(functools.partial(take, tokens=tokens, groups=phase, budget=budget), layers, row)
        chex.assert_trees_all_equal_shapes_and_dtypes(layers[LAYER], after)
        return layers[LAYER]

    if layout.block is not None:
        unchanged(layout.prompt, budgets.prompt, block)
        return
    first = functools.partial(take, None, tokens=PROMPT, groups=layout.prompt, budget=budgets.prompt)
    if layout.replay is not None:
        # What the replay adds to the statistics has their shape.
        first = functools.partial(compressed, first, layout, budgets)
    made = jax.eval_shape(first, row)
    chex.assert_trees_all_equal_shapes_and_dtypes(made, unchanged(layout.decode, budgets.decode, 1))


#: Policies under which a row keeps every token that it has decoded.
APPENDING = {
    "full", "snapkv", "pyramidkv", "knorm", "keydiff", "expected_attention", "lagkv", "leverage", "cur", "adakv",
    "matched", "compactor", "value_aware", "chunkkv", "knorm@cache", "h2o[masked]", "h2o[global]", "h2o[local]",
    "kvzip", "kvgrad", "qfilters",
}  # fmt: skip
HIDING = {"h2o[masked]", "h2o[global]", "h2o[local]"}


#: Under which all heads of a layer hold the same positions.
ALIKE = {
    "full", "window", "fifo", "local_only", "streaming_llm", "strided", "fixed", "tova", "chunkkv", "h2o[masked]",
    "h2o[global]", "h2o[local]", "longgen",
}  # fmt: skip


def does_not_compose(name: str, held: str, block: int | None) -> bool:
    """Whether STORAGE.md's table refuses a policy with a storage."""
    merges, own = "+" in name or name in ("razor_attention", "matched", "ems"), STORAGE[held]
    block = None if name in ("h2o[global]", "h2o[local]") else block  # of whole texts
    return any((
        # A residual is no part of a page, and merges are on the device.
        name == "by_page" and own.new_tokens_separate and own.kept_exact,
        held == "host" and merges and not (name == "matched" and block is None),  # which changes values of a prompt
        # Channels and bases are of rotated keys, of which nothing is whole; prompts in blocks have no end to look from.
        own.shortened and (merges or POLICY[name].positions == "cache"),
        held == "think" and block is not None,
        # Tokens that were encoded together stay together.
        held in ("kivi", "gear", "kvarn", "zipcache") and (merges or name not in APPENDING),
        held in ("gear", "zipcache") and block is not None,
        # A low tier holds what is evicted, if anything is; its balancer is made from a whole prompt.
        held == "mikv" and (merges or block is not None or name in HIDING or name == "full"),
        # Heads that are held together hold the same positions.
        held in ("cskv", "kv_heads") and name not in ALIKE,
        # A prompt that is replayed is held as it is until then.
        name in examples.REPLAYED and bool(own.sides_of(OF_PROMPT) or held == "minicache"),
        name in examples.REPLAYED and block is not None and (own.new_tokens_separate or own.on_host),
        # Two layers that are held together hold the same positions, from whole prompts.
        held == "minicache" and (name not in ("full", *HIDING) or block is not None),
    ))  # fmt: skip


def test_it_lowers_or_says_why_not():
    """All pairs of values of two axes and a fortieth of the triples, in one shot and in blocks; the site lowers all."""
    refused = {}
    pairs, triples = [], []
    for each in itertools.product(POLICY, STORAGE, SELECTION, (None, BLOCK)):
        (pairs if {"full", "dense", "everything"} & set(each) else triples).append(each)
    products = [*pairs, *random.Random(0).sample(triples, len(triples) // 40)]
    for name, held, read, block in products:
        try:
            lowered_for(CacheSpec(POLICY[name], STORAGE[held], SELECTION[read]), block)
        except (PolicyError, StorageError) as error:
            refused[name, held, read, block] = str(error)
    assert all(len(reason) > 40 and "\n" not in reason for reason in refused.values())
    found = {(name, held, block) for name, held, read, block in refused if read == "everything"}
    assert found == {each for each in itertools.product(POLICY, STORAGE, (None, BLOCK)) if does_not_compose(*each)}
    assert ("full", "int8", "optimal", BLOCK) not in refused and ("full", "dense", "quest", None) not in refused
    print(f"{len(refused)} of {len(products)} products are refused")


def pairs() -> list[tuple[str, str, str, int | None]]:
    """Every policy with some storage, and every storage and selection with some policies.

    Policies, and storages under some of them, are in one shot and in blocks; storages and selections are in either, in
    turns.
    """
    found = [(name, list(STORAGE)[i % len(STORAGE)], "everything") for i, name in enumerate(POLICY)]
    found += [
        (name, held, "everything") for held in STORAGE for name in ("full", "value_norm", "after_prefill", "h2o+d2o")
    ]
    made = [(*each, block) for each in found for block in (None, BLOCK)]
    others = itertools.cycle(("full", "snapkv", "duo_attention", "by_page", "from_layer"))
    for row, read in enumerate(SELECTIONS):
        made += [(next(others), held, read, (None, BLOCK)[(row + i) % 2]) for i, held in enumerate(STORAGE)]
    for row, read in enumerate(SELECTION):
        names = ("full", "snapkv", "duo_attention", "from_layer")
        made += [(name, "dense", read, (None, BLOCK)[(row + i) % 2]) for i, name in enumerate(names)]
    return list(dict.fromkeys(made))


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("name", "held", "read", "block"), pairs())
def test_what_lowers_traces(name, held, read, block):
    spec = CacheSpec(POLICY[name], STORAGE[held], SELECTION[read])
    try:
        lowered_for(spec, block)
    except (PolicyError, StorageError):
        return
    trace(spec, block)


def test_what_is_refused_is_written_down():
    """Selections refuse what moves or rewrites the slots that they ranked."""
    specs = {
        ("h2o", "quest"): "evicts single ones while decoding",
        ("knorm@cache", "quest"): "positions",
        ("h2o+d2o", "optimal"): "merges",
        ("h2o[masked]", "optimal"): "has a selection of its own",
        ("split_heads", "optimal"): "none of its heads keeps every token",
        ("knorm@cache", "infinigen"): "rotates keys again at every step",
        ("h2o+d2o", "infinigen"): "merges",
        ("h2o", "tokenselect"): "each head holds its own",
        ("h2o", "shadowkv"): "it needs every token",
        ("h2o[masked]", "lserve"): "has a selection of its own",
        ("counter", "retrieval"): "evicts single ones",
        ("kvzip", "quest in a prompt"): "replays the prompt, which reads all",
    }
    for (name, read), reason in specs.items():
        with pytest.raises(PolicyError, match=reason):
            lowered_for(CacheSpec(POLICY[name], selection=SELECTION[read]), None)
