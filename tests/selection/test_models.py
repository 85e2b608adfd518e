"""Selections in whole models: everything read is the full cache, guesses and skews, and one trace however long."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import policies, presets, selection
from kvjax.cache.step import attend
from kvjax.errors import InputError, PolicyError, SelectionError
from kvjax.generation import generate as loop
from kvjax.models import skew
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder_layer import SKEW
from kvjax.numerics.rope import Rope
from tests import reference
from tests.reference import decoder as reference_decoder
from tests.reference.eviction import full as reference_full
from tests.reference.step import rotate
from tests.tiny import HEADS, random_tokens, random_weights, tiny

PROMPTS, ENDS = np.array([20, 9, 15]), np.array([31, 26, 24])
TOKENS = random_tokens(3, 31, seed=4)


def score(model, policy, look=None, *, tokens=TOKENS, prompts=PROMPTS, ends=ENDS, **more):
    return kvjax.log_likelihood(model, tokens, policy, prompt_length=prompts, lengths=ends, selection=look, **more)


# --- everything read is the full cache ---

ALL = {
    "infinigen": selection.infinigen(math.inf, cap=1.0, first_layer=1),
    "infinigen of few columns": selection.infinigen(math.inf, ratio=0.1, cap=31, first_layer=1, columns="union"),
    "lserve": selection.lserve(8, 4, 3, 32, first_layer=0),
    "shadowkv of outliers": selection.shadowkv(1, 4, 4, local=0, outliers=9),
    "sparf": selection.sparf(1, 31),
    "rekv": selection.rekv(4, 4, sinks=13, recent=16, question=2),
}


def layers_for(look) -> int:
    """A guess needs a layer before; of all else one layer shows as much as two, in half the time."""
    return 2 if look.ahead else 1


@functools.cache
def full(heads: str, layers: int = 2):
    return score(tiny(heads, layers=layers).model, policies.full())


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize(  # `test_choices` has every selection in each layout, in one layer
    ("name", "heads"), list(zip(ALL, ("gqa", "mqa", "mha", "gqa", "mqa", "gqa"), strict=True))
)
def test_everything_read_is_the_full_cache(name, heads):
    layers = layers_for(ALL[name])
    got = score(tiny(heads, layers=layers).model, policies.full(), ALL[name])
    np.testing.assert_allclose(got.logprobs, full(heads, layers).logprobs, atol=3e-5)


@pytest.mark.sampled(1)
@pytest.mark.thorough
@pytest.mark.parametrize(("pool", "limit"), [("fifo", 31), ("lru", 1.0), ("counter", 31)])
def test_a_pool_that_holds_everything_is_the_full_cache(pool, limit):
    spec = presets.infinigen(math.inf, cap=1.0, first_layer=1, pool_limit=limit, pool=pool)
    got = score(tiny("gqa").model, spec)
    np.testing.assert_allclose(got.logprobs, full("gqa").logprobs, atol=3e-5)


def test_first_layers_beyond_the_last_are_a_dense_model():
    got = score(tiny("gqa").model, policies.full(), selection.infinigen(0, first_layer=2), record=True)
    np.testing.assert_array_equal(got.logprobs, full("gqa").logprobs)
    assert got.record is None or (got.record.number == -1).all()


@pytest.mark.sampled(0)
def test_heads_that_stream_read_all_that_they_hold():
    """The look is over the other heads."""
    policy = policies.duo_attention([[1, 0], [0, 1]], sinks=1, recent=6)
    model = tiny("gqa").model
    dense = score(model, policy)
    got = score(model, policy, ALL["infinigen"], record=True)
    np.testing.assert_allclose(got.logprobs, dense.logprobs, atol=3e-5)
    assert (got.record.number[:11, 1, 0, 0] == -1).all() and (got.record.number[:11, 1, 0, 1] >= 0).all()
    assert (got.record.number[:, 0] == -1).all()
    few = score(model, policy, selection.infinigen(0, first_layer=1), record=True)
    assert (few.record.number[:11, 1, 0, 1] == 1).all()


# --- rows, blocks, traces ---

#: A threshold, pages whose choice lasts, and chunks of keys that are restored.
FEW = {
    "infinigen": selection.infinigen(0.5, ratio=0.5, cap=0.5, first_layer=1),
    "lserve": selection.lserve(4, 2, 3, 12, first_layer=0),
    "shadowkv": selection.shadowkv(5, 2, 4, local=1, outliers=1),
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", FEW)
def test_the_room_of_the_arrays_changes_nothing(name):
    """Slots are masked where as many could be read as there are, and gathered in larger arrays."""
    look = FEW[name] if name != "shadowkv" else selection.shadowkv(5, 2, 12, local=1, outliers=2)
    model = tiny("gqa", layers=layers_for(look)).model
    room = int((ENDS - PROMPTS).max())
    tight, wide = (
        score(model, policies.full(), look, limits=kvjax.Limits(int(PROMPTS.max()) + more, room)) for more in (0, 60)
    )
    np.testing.assert_allclose(tight.logprobs, wide.logprobs, atol=3e-5)


class BySlot(selection.Pages):
    """Has room for a slot more than whole pages, so that a step looks at a mark of each slot."""

    def width(self, capacity):
        slots = super().width(capacity)
        return None if slots is None else slots + 1


class QuestBySlot(BySlot, selection.Quest):
    pass


class LServeBySlot(BySlot, selection.LServe):
    pass


PAGED = {
    "quest": (selection.Quest, QuestBySlot, {}),
    "lserve": (selection.LServe, LServeBySlot, {"sub": 2, "every": 3}),
}
LATER_PAGES = policies.after_prefill(
    policies.snapkv(18, window=3), then=policies.by_page(policies.roco(16), page=4)
)  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("look", "policy", "block", "window"),
    [
        ("quest", policies.full(), None, 13),
        ("lserve", policies.snapkv(14, window=3), None, 13),
        ("quest", policies.by_page(policies.h2o(20), page=4), 6, 13),
        ("quest", LATER_PAGES, None, None),
    ],
    ids=["full-window", "compressor", "pages in blocks", "pages afterwards"],
)
def test_marks_of_pages_gather_the_slots_that_marks_of_slots_do(look, policy, block, window, monkeypatch):
    """In a layer with a sliding window, and in one without."""
    whole, by_slot, more = PAGED[look]
    calls = []
    gather = attend._compact_units
    monkeypatch.setattr(attend, "_compact_units", lambda *a: calls.append(1) or gather(*a))
    model = tiny("gqa", layers=1).model
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, windows=(window,)))
    arguments = {"page": 4, "pages": 2, "first_layer": 0, **more}
    got = score(model, policy, whole(**arguments), record=True, prefill_block=block)
    assert len(calls) > 0, "units were gathered"
    expected = score(model, policy, by_slot(**arguments), record=True, prefill_block=block)
    most = got.record.positions.shape[-1]
    assert (got.record.positions >= 0).any() and (expected.record.positions[..., most:] < 0).all()
    np.testing.assert_array_equal(got.record.positions, expected.record.positions[..., :most])
    np.testing.assert_array_equal(got.record.read, expected.record.read)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=3e-5)


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.parametrize("name", FEW)
def test_a_row_alone_and_a_prompt_in_blocks_choose_the_same(name):
    look = FEW[name]
    model = tiny("gqa", layers=layers_for(look)).model
    together = score(model, policies.full(), look, record=True)
    blocks = score(model, policies.full(), look, record=True, prefill_block=6)
    np.testing.assert_array_equal(together.record.positions, blocks.record.positions)
    np.testing.assert_array_equal(together.record.number, (together.record.positions >= 0).sum(axis=-1) - (
        together.record.number < 0
    ))  # fmt: skip
    np.testing.assert_allclose(together.logprobs, blocks.logprobs, atol=3e-5)
    if name not in ("infinigen", "shadowkv"):
        return  # `test_pools` has the others' rows alone
    alone = score(
        model, policies.full(), look, record=True, tokens=TOKENS[1:2, :26], prompts=PROMPTS[1:2], ends=ENDS[1:2]
    )
    np.testing.assert_array_equal(alone.record.number[:, :, 0], together.record.number[:17, :, 1])
    width = min(alone.record.positions.shape[-1], together.record.positions.shape[-1])
    np.testing.assert_array_equal(
        alone.record.positions[:, :, 0, :, :width], together.record.positions[:17, :, 1, :, :width]
    )
    np.testing.assert_allclose(alone.logprobs[0], together.logprobs[1, :25], atol=3e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["infinigen", "lserve"])  # with a guess, and with choices that last
def test_one_trace_however_many_tokens(name, monkeypatch):
    chex.clear_trace_counter()
    counted = chex.assert_max_traces(loop.decode_steps.__wrapped__, n=1)
    static = ("config", "phase", "sampler", "record")
    monkeypatch.setattr(loop, "decode_steps", jax.jit(counted, static_argnames=static))
    limits = kvjax.Limits(prompt=20, new_tokens=loop.CHUNK)
    model = tiny(layers=layers_for(FEW[name])).model
    for new_tokens, lengths in ((12, PROMPTS), (2, PROMPTS - 3), (loop.CHUNK, PROMPTS)):
        kvjax.generate(
            model, TOKENS[:, :20], policies.full(), max_new_tokens=new_tokens, lengths=lengths, limits=limits,
            selection=FEW[name],
        )  # fmt: skip


# --- guesses and skews ---

# Two layers: the second guesses. In a model of three, the third guesses from a layer that guesses too.
BASE = {"vocab_size": 64, "num_layers": 2, "num_heads": 4, "head_dim": 8, "hidden_size": 32, "mlp_size": 48}
DEEPER = BASE | {"num_layers": 3}
LEARNED = {
    "max_positions": 64, "learned_positions": True, "norm": "layer", "norm_bias": True, "gated_mlp": False,
    "qkv_bias": True, "out_bias": True, "mlp_bias": True,
}  # fmt: skip
ROTATED = {"max_positions": 512, "rope": Rope(dim=8)}
CONFIGS = {
    "opt": DecoderConfig(family="opt", num_kv_heads=4, activation="relu", position_offset=2, **BASE, **LEARNED),
    "gpt2": DecoderConfig(family="gpt2", num_kv_heads=4, activation="gelu_new", **BASE, **LEARNED),
    "learned, gqa": DecoderConfig(family="opt", num_kv_heads=2, activation="relu", **BASE, **LEARNED),
    "llama": DecoderConfig(family="llama", num_kv_heads=4, **DEEPER, **ROTATED),
    "qwen3": DecoderConfig(family="qwen3", num_kv_heads=2, qk_norm=True, **BASE, **ROTATED),
    "qwen3, mha": DecoderConfig(family="qwen3", num_kv_heads=4, qk_norm=True, qkv_bias=True, **BASE, **ROTATED),
    "norms without rope": DecoderConfig(family="qwen3", num_kv_heads=2, qk_norm=True, **BASE, **LEARNED),
}


@functools.cache
def random_model(name: str) -> kvjax.Model:
    """No bias is 0 and no scale 1; attention is far from uniform."""
    config = CONFIGS[name]
    params = random_weights(config)
    leaves, tree = jax.tree.flatten_with_path(params)
    rng = np.random.default_rng(1)
    made = []
    for path, leaf in leaves:
        names = jax.tree_util.keystr(path)
        noise = 0.3 * rng.normal(size=leaf.shape).astype(np.float32)
        sharp = 3.0 if "query" in names or "['key']" in names else 1.0
        made.append(jnp.asarray(sharp * (np.asarray(leaf) + noise)))
    return kvjax.Model(config, jax.tree.unflatten(tree, made))


@functools.cache
def matrices(name: str) -> np.ndarray:
    return skew.find_skew(random_model(name), random_tokens(2, 30, seed=7))


def choices(model, **arguments):
    look = selection.infinigen(first_layer=1, **arguments)
    return score(model, policies.full(), look, record=True)


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["opt", "learned, gqa"])  # each query head with its own matrix, and groups
def test_a_folded_skew_is_the_one_at_run_time(name):
    """Log-probabilities, and choices; folding changes nothing that the model computes."""
    model, found = random_model(name), matrices(name)
    folded, held = (skew.skewed(model, found, fold=fold) for fold in (True, False))
    assert skew.can_fold(model.config) and SKEW not in folded.params["layer_1"]["attention"]
    dense = score(model, policies.full()).logprobs
    # Attention is sharp: keys that differ by 1e-4 of their size change these by 0.01, and rounding with AVX2 by 1.7e-4.
    np.testing.assert_allclose(score(folded, policies.full()).logprobs, dense, atol=5e-4)
    one, two = (choices(each, alpha=1.0, ratio=0.3, cap=0.5) for each in (folded, held))
    np.testing.assert_array_equal(one.record.positions, two.record.positions)
    np.testing.assert_allclose(one.logprobs, two.logprobs, atol=5e-4)
    plain = choices(model, alpha=1.0, ratio=0.3, cap=0.5)
    assert (plain.record.positions != one.record.positions).any(), "this skew changes which columns are large"
    default = skew.skewed(model, found)
    chex.assert_trees_all_equal(default.params, folded.params)


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["llama", "norms without rope"])
def test_a_skew_at_run_time_changes_only_choices(name):
    model, found = random_model(name), matrices(name)
    held = skew.skewed(model, found)
    assert not skew.can_fold(model.config) and held.params["layer_1"]["attention"][SKEW].shape == found.shape[1:]
    plain, turned = (choices(each, alpha=1.0, ratio=0.3, cap=0.5).record for each in (model, held))
    assert (plain.positions != turned.positions).any()
    # With every column, a rotation of the columns changes no product.
    if name == "llama":
        plain, turned = (choices(each, alpha=1.0, ratio=1.0, cap=0.5).record for each in (model, held))
        np.testing.assert_array_equal(plain.positions, turned.positions)
        dense = score(model, policies.full()).logprobs
        np.testing.assert_allclose(score(held, policies.full()).logprobs, dense, atol=1e-6)
    with pytest.raises(InputError, match="skew cannot be folded: this model rotates or normalises"):
        skew.skewed(model, found, fold=True)


def calm(model: kvjax.Model) -> kvjax.Model:
    """A model whose second layer's logits are small: no probability is 0 in float32."""
    layer = model.params["layer_1"]
    query = jax.tree.map(lambda x: 0.1 * x, layer["attention"]["query"])
    changed = {**layer, "attention": {**layer["attention"], "query": query}}
    return dataclasses.replace(model, params={**model.params, "layer_1": changed})


def same_input(model: kvjax.Model) -> kvjax.Model:
    """A model whose second layer's attention has the input of the first's: the first layer adds nothing."""
    params = dict(model.params)
    first, second = dict(params["layer_0"]), dict(params["layer_1"])
    second["attention_norm"] = first["attention_norm"]
    for part, last in (("attention", "out"), ("mlp", "down")):
        first[part] = {**first[part], last: jax.tree.map(jnp.zeros_like, first[part][last])}
    params |= {"layer_0": first, "layer_1": second}
    return dataclasses.replace(model, params=params)


@pytest.mark.sampled(0)
@pytest.mark.thorough
@pytest.mark.parametrize("name", ["opt", "qwen3, mha"])
def test_the_guess_is_all_that_a_layer_does_to_make_a_query(name):
    """Biases, norms of queries, rotation: where the layer before adds nothing, the guess is the query."""
    model = calm(random_model(name))
    found = {}
    for kind, each in (("equal", same_input(model)), ("other", model)):
        guessed = choices(each, alpha=math.inf, ratio=1.0, cap=5).record
        true = score(each, policies.full(), selection.optimal(5, first_layer=1), record=True).record
        found[kind] = (guessed.positions[:, 1] == true.positions[:, 1]).all()
    assert found == {"equal": True, "other": False}


def stacked(queries: np.ndarray) -> np.ndarray:
    """[D, D] right singular vectors of queries [n, D], by falling singular value."""
    return np.linalg.svd(queries.astype(np.float64))[2].T


def assert_same_columns(found: np.ndarray, expected: np.ndarray) -> None:
    """Up to signs."""
    signs = np.sign((found * expected).sum(axis=0))
    np.testing.assert_allclose(found * signs, expected, atol=2e-4)


@pytest.mark.parametrize("heads", HEADS)
def test_a_skew_is_the_svd_of_the_queries_of_the_sample(heads, monkeypatch):
    """Stacked over the group and the tokens of ragged rows, rotated, in every layer: of the float64 decoder's."""
    own = tiny(heads)
    seen = []

    def spy(heads, query, key, value, position, **options):
        seen.append(rotate(query, position, options["theta"]))
        return step(heads, query, key, value, position, **options)

    step = reference_decoder.step
    monkeypatch.setattr(reference_decoder, "step", spy)
    tokens, lengths = TOKENS[:2], np.array([31, 12])
    reference.reference_run(own.params, own.config, tokens, reference_full(), lengths, lengths)
    found = skew.find_skew(own.model, tokens, lengths=lengths)
    _, kv_heads = HEADS[heads]
    assert found.shape == (2, kv_heads, 8, 8) and found.dtype == np.float32
    for layer in range(2):
        for head in range(kv_heads):
            group = 4 // kv_heads
            rows = [seen[2 * row + layer][:, head * group : (head + 1) * group].reshape(-1, 8) for row in range(2)]
            assert_same_columns(found[layer, head], stacked(np.concatenate(rows)))


@pytest.mark.parametrize("name", ["opt", "gpt2", "qwen3"])
def test_a_skew_has_biases_and_norms(name):
    """The first layer's queries by hand."""
    model = random_model(name)
    config, params = model.config, jax.tree.map(lambda x: np.asarray(x, np.float64), model.params)
    tokens = random_tokens(1, 30, seed=7)[0]
    x, layer = params["embed"]["tokens"][tokens], params["layer_0"]
    if config.learned_positions:
        (table,) = params["position_embed"].values()
        x = x + table[np.arange(30) + config.position_offset]
    if config.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + config.norm_eps) * layer["attention_norm"]["scale"]
    x = x + layer["attention_norm"].get("bias", 0.0)
    linear = layer["attention"]["query"]
    query = (x @ linear["kernel"] + linear.get("bias", 0.0)).reshape(30, 4, 8)
    if config.qk_norm:
        query = query / np.sqrt((query**2).mean(axis=-1, keepdims=True) + config.norm_eps)
        query = query * layer["attention"]["query_norm"]["scale"]
    if config.rope is not None:
        query = rotate(query, np.arange(30), config.rope.theta)
    found = skew.find_skew(model, tokens)
    group = 4 // config.num_kv_heads
    for head in range(config.num_kv_heads):
        assert_same_columns(found[0, head], stacked(query[:, head * group : (head + 1) * group].reshape(-1, 8)))


@pytest.mark.parametrize("name", ["opt", "qwen3"])
def test_a_skew_is_orthogonal_and_its_columns_fall(name):
    found = matrices(name)
    np.testing.assert_allclose(found.swapaxes(2, 3) @ found, np.broadcast_to(np.eye(8), found.shape), atol=1e-5)


def test_a_sample_or_a_skew_that_does_not_fit_is_refused():
    model = tiny("mha").model
    good = skew.find_skew(model, TOKENS[:1])
    with pytest.raises(InputError, match=r"the sample has 7 tokens and 1 query heads .* fewer than the 8 features"):
        skew.find_skew(model, TOKENS[:1, :7])
    skew.find_skew(tiny("gqa").model, TOKENS[:1, :4])  # 2 query heads for each KV head: 8 rows
    for wrong in (good[:1], good[:, :2], good[..., :4], good[0], tiny):
        with pytest.raises((InputError, TypeError, ValueError)):
            skew.skewed(model, wrong)
    with pytest.raises(
        InputError, match=r"skew has shape \[2, 2, 8, 8\]; this model needs \[2, 4, 8, 8\], \[L, K, D, D\]"
    ):
        skew.skewed(model, good[:, :2])
    for wrong in (2 * good, np.where(np.arange(8) == 3, np.nan, good), good * 0):
        with pytest.raises(InputError, match="not orthogonal"):
            skew.skewed(model, wrong)


# --- the preset ---


def test_a_preset_is_a_product():
    spec = presets.infinigen(5, cap=64, first_layer=1, sinks=2, pool_limit=80)
    assert spec == kvjax.CacheSpec(
        policies.from_layer(policies.counter(80), first=1),
        selection=selection.infinigen(5, cap=64, first_layer=1, sinks=2),
    )
    assert presets.infinigen(pool_limit=0.8, pool="lru").policy == policies.lru(
        policies.FromLayer(policies.TextFraction(0.8), 2)
    )
    assert presets.infinigen().policy == policies.full()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"alpha": -1}, SelectionError, "alpha must be"),
        ({"ratio": 0}, SelectionError, "ratio must be"),
        ({"cap": 0}, SelectionError, "cap must be"),
        ({"first_layer": 0}, SelectionError, "first_layer must be"),
        ({"pool": "random", "pool_limit": 9}, SelectionError, "pool='random' is not valid; use 'fifo', 'lru' or"),
        ({"pool_limit": 0}, PolicyError, "budget 0 is out of range|budget"),
        ({"pool_limit": -4}, PolicyError, "budget"),
        ({"pool_limit": 1.5}, PolicyError, "budget"),
        ({"pool_limit": 0.0}, PolicyError, "budget"),
        ({"pool_limit": True}, PolicyError, "budget"),
        ({"pool_limit": 9, "saturate": 0}, PolicyError, "saturate must be"),
    ],
    ids=str,
)
def test_a_preset_that_cannot_work_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        presets.infinigen(**arguments)


def test_a_pool_below_what_is_protected_is_refused():
    model = tiny("gqa").model
    for arguments in ({"pool_limit": 5, "sinks": 3, "recent": 2}, {"pool_limit": 6, "recent": 6, "pool": "fifo"}):
        with pytest.raises(PolicyError, match=r"always reads . slots, and the budget has|protects"):
            score(model, presets.infinigen(first_layer=1, **arguments))
