"""Routed experts against every expert for every token, in float64; as codes; and what plans count of them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.cache import Limits
from kvjax.cache.planning.limits import sizes_for
from kvjax.cache.planning.lowering import lower
from kvjax.cache.spec import as_spec
from kvjax.devices import Device
from kvjax.errors import ConfigError
from kvjax.models import experts
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.parameters import parameter_count
from kvjax.models.quantize import parameter_bytes
from kvjax.numerics.rope import Rope
from kvjax.planning.roofline import Roofline, average_slots, decode_shapes, roofline
from kvjax.products.quantized import dequantize, is_quantized
from tests.checkpoint.folders import assert_same
from tests.tiny import random_tokens, random_weights

HIDDEN, MLP, EXPERTS, K = 8, 6, 5, 2
CONFIG = DecoderConfig(
    family="mixtral", vocab_size=64, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=48,
    num_experts=EXPERTS, experts_per_token=K, max_positions=64, rope=Rope(dim=8), tie_embeddings=False,
)  # fmt: skip


@functools.cache
def coded() -> kvjax.Model:
    return kvjax.quantize_weights(model(), 4, group=16)


@functools.cache
def model() -> kvjax.Model:
    return kvjax.Model(CONFIG, random_weights(CONFIG))


def given(tokens: int, choose: str):
    """Inputs, choices and weights of one row, and the matrices."""
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((1, tokens, HIDDEN)).astype(np.float32)
    chosen = np.stack([rng.permutation(EXPERTS)[:K] for _ in range(tokens)])[None]
    # "same": all tokens crowd into two experts, which no capacity may cut.
    chosen = np.broadcast_to([3, 1], chosen.shape) if choose == "same" else chosen
    shapes = {"gate": (HIDDEN, MLP), "up": (HIDDEN, MLP), "down": (MLP, HIDDEN)}
    kernels = {name: rng.standard_normal((EXPERTS, *shape)).astype(np.float32) for name, shape in shapes.items()}
    return x, chosen.astype(np.int32), rng.random((1, tokens, K)).astype(np.float32), kernels


def reference(x, chosen, weight, kernels):
    """[B, n, hidden]: each token through each of its experts, one after the other."""
    xp = jnp if isinstance(x, jax.core.Tracer) else np
    x, weight, kernels = (
        (x, weight, kernels) if xp is jnp else jax.tree.map(lambda a: np.float64(a), (x, weight, kernels))
    )
    total = xp.zeros_like(x)
    for j in range(K):
        own = {name: each[chosen[..., j]] for name, each in kernels.items()}
        gate = xp.einsum("bnh,bnhm->bnm", x, own["gate"])
        inner = gate / (1 + xp.exp(-gate)) * xp.einsum("bnh,bnhm->bnm", x, own["up"])
        total = total + weight[..., j, None] * xp.einsum("bnm,bnmh->bnh", inner, own["down"])
    return total


run = jax.jit(functools.partial(experts.routed, activation=jax.nn.silu))


@pytest.mark.parametrize(("tokens", "choose"), [(1, "any"), (7, "same"), (300, "any"), (300, "same")])
def test_no_token_is_dropped(tokens, choose):
    arguments = given(tokens, choose)
    np.testing.assert_allclose(run(*arguments), reference(*arguments), atol=2e-5)


def test_blocks_suffice_for_any_choice(monkeypatch):
    monkeypatch.setattr(experts, "BLOCK", 4)
    for tokens in (1, 3, 4, 9):
        # Any numbers of tokens of each expert that are at most all and that add up, each in blocks of up to four.
        counts = np.array(
            [own for own in itertools.product(range(tokens + 1), repeat=EXPERTS) if sum(own) == tokens * K]
        )
        needed = np.max(np.sum(-(-counts // min(tokens, 4)), axis=1))
        assert needed <= experts.max_blocks(tokens * K, tokens, EXPERTS) <= needed + 1


@pytest.mark.parametrize("tokens", [1, 300])
def test_one_expert_at_a_time_is_held_besides_the_weights(tokens):
    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    kernels = {"gate": array((16, 256, 512)), "up": array((16, 256, 512)), "down": array((16, 512, 256))}
    chosen = jax.ShapeDtypeStruct((1, tokens, K), jnp.int32)
    program = run.lower(array((1, tokens, 256)), chosen, array((1, tokens, K)), kernels).compile()
    one_expert, row = 3 * 256 * 512 * 4, 4 * (256 + 512) * 4
    assert program.memory_analysis().temp_size_in_bytes < 1.1 * one_expert + tokens * row


def test_gradients():
    arguments = given(9, "any")

    def loss(function, x, weight, kernels):
        return jnp.sum(jnp.sin(function(x, arguments[1], weight, kernels)))

    got, expected = (
        jax.jit(jax.grad(functools.partial(loss, function), argnums=(0, 1, 2)))(arguments[0], *arguments[2:])
        for function in (run, reference)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), got, expected)


def test_codes():
    """Experts are quantised matrix by matrix, the router never; the model is one with the decoded weights."""
    mlp = coded().params["layer_1"]["mlp"]
    assert [is_quantized(mlp[name]["kernel"]) for name in ("router", "gate", "up", "down")] == [False, True, True, True]
    assert mlp["down"]["kernel"].shape == (EXPERTS, 48, 32)
    one = kvjax.products.quantized.quantize(model().params["layer_1"]["mlp"]["up"]["kernel"][3], 4, 16, jnp.float32)
    np.testing.assert_array_equal(mlp["up"]["kernel"].codes[3], one.codes)
    assert parameter_bytes(CONFIG, jnp.float32, kvjax.WeightCodes(4, 16)) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(coded().params)
    )
    plain = jax.tree.map(lambda x: dequantize(x) if is_quantized(x) else x, coded().params, is_leaf=is_quantized)
    tokens = random_tokens(2, 9)
    logits = [jax.jit(lambda p: Decoder(CONFIG).apply({"params": p}, tokens)[0])(p) for p in (coded().params, plain)]
    np.testing.assert_allclose(*logits, atol=1e-5)


def test_folders(tmp_path):
    """Each expert is a tensor of its own, exact or as codes; codes can be made while a folder is read."""
    for name, saved in (("exact", model()), ("codes", coded())):
        kvjax.save(saved, tmp_path / name)
        assert_same(kvjax.load(tmp_path / name).params, saved.params, None)
    assert_same(kvjax.load(tmp_path / "exact", weights=kvjax.WeightCodes(4, 16)).params, coded().params, None)


def test_plans_count_the_experts_that_rows_choose():
    def step(config: DecoderConfig, batch: int) -> Roofline:
        prompts = np.full((batch,), 8, np.int32)
        sizes = sizes_for(prompts, 1, width=8, block=None, limits=Limits(8, 2), last_fed=False)
        lowered = lower(as_spec(kvjax.policies.full()), config, sizes, prompts)
        shapes = decode_shapes(config, lowered.layout, jnp.float32, batch, None)
        return roofline(config, shapes, average_slots(config, lowered, 8, 2), Device("", None, None, None, ""))

    found = [step(CONFIG, batch) for batch in (1, 4)]
    layer, embedding = CONFIG.num_layers * EXPERTS * 3 * 32 * 48, 64 * 32
    # One row reads 2 of 5 experts, four rows 1 - (3 / 5)^4 of them.
    for own, share in zip(found, (0.4, 1 - 0.6**4), strict=True):
        expected = 4 * (parameter_count(CONFIG) - embedding - (1 - share) * layer)
        assert own.weights_moved == pytest.approx(expected, abs=2)
    dense = dataclasses.replace(CONFIG, num_experts=0, mlp_size=K * 48)
    router = 2 * 4 * CONFIG.num_layers * 32 * EXPERTS
    assert found[1].flops == step(dense, 4).flops + router


def test_numbers_of_experts_are_checked():
    with pytest.raises(ConfigError, match="experts_per_token is 6 of 5 experts"):
        dataclasses.replace(CONFIG, experts_per_token=6)
    with pytest.raises(ConfigError, match="gated MLPs without biases"):
        dataclasses.replace(CONFIG, mlp_bias=True)
