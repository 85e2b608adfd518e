"""A tiny random decoder, the same for every test that can use it, so that compiled shapes are shared."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import Block, KVState, LayerKV, layers_of
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.parameters import parameter_shapes
from kvjax.models.stacked_params import stacked
from kvjax.numerics.rope import Rope
from tests.parameters import with_parameters
from tests.reference import ReferenceConfig, random_model

VOCAB = 64
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}


class Tiny(NamedTuple):
    model: kvjax.Model  # with the parameters of every policy
    params: Any  # the reference's
    config: ReferenceConfig  # the reference's


@functools.cache
def tiny(heads: str = "gqa", seed: int = 0, head_dim: int = 8, layers: int = 2) -> Tiny:
    """Four query heads, 64 tokens; the library's model and the reference's of the same weights."""
    query_heads, kv_heads = HEADS[heads]
    params, reference = random_model(layers, query_heads, kv_heads, head_dim, vocab=VOCAB, seed=seed)
    config = DecoderConfig(
        family="llama",
        vocab_size=VOCAB,
        hidden_size=reference.hidden_size,
        num_layers=reference.num_layers,
        num_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=reference.head_dim,
        mlp_size=reference.intermediate_size,
        max_positions=512,
        norm_eps=reference.norm_eps,
        rope=Rope(dim=reference.head_dim, theta=reference.rope_theta),
    )
    model = with_parameters(kvjax.Model(config, jax.tree.map(jnp.asarray, params)))
    return Tiny(model, params, reference)


def in_stacks(model: kvjax.Model) -> kvjax.Model:
    """The model with the weights of its layers in stacks, so that layers run as loops on any platform."""
    return dataclasses.replace(model, params=stacked(model.params))


def random_weights(config: DecoderConfig, seed: int = 0) -> Any:
    """The parameters of any decoder, as large as they are initialised, float32; biases are 0, scales of norms 1.

    They are NumPy's: jax compiles a program for the random numbers of each shape, which takes seconds for a decoder.
    """
    rng = np.random.default_rng(seed)

    def drawn(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if leaf.ndim == 1:
            return jnp.full(leaf.shape, float(name == "scale"), leaf.dtype)
        # Kernels are [in, out], of experts [experts, in, out]; tables of embeddings [V, E].
        fan = leaf.shape[-2 if name == "kernel" else -1]
        return jnp.asarray(rng.normal(size=leaf.shape) / math.sqrt(fan), leaf.dtype)

    return jax.tree_util.tree_map_with_path(drawn, parameter_shapes(config))


def untied(model: kvjax.Model) -> kvjax.Model:
    """The same model, whose output head is a parameter of its own."""
    if not model.config.tie_embeddings:
        return model
    config = dataclasses.replace(model.config, tie_embeddings=False)
    head = {"kernel": model.params["embed"]["tokens"].T}
    return dataclasses.replace(model, config=config, params=model.params | {"head": head})


def spoiled(model: kvjax.Model, token: int) -> kvjax.Model:
    """The same model, whose logits are NaN once a row has a token: the token's embedding is infinite."""
    model = untied(model)  # a tied head would spoil all rows
    embed = {"tokens": model.params["embed"]["tokens"].at[token].set(jnp.inf)}
    return dataclasses.replace(model, params=model.params | {"embed": embed})


def random_tokens(rows: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, width), dtype=np.int32)


def kept(state: KVState, row: int) -> list[list[list[int]]]:
    """[layer][head] ascending live positions of a row; a layer whose heads are split appears once for each group."""
    layers = [np.asarray(layer.position)[row] for _, layer in layers_of(state)]
    return [[sorted(int(p) for p in head if p >= 0) for head in layer] for layer in layers]


def assert_same_state(
    state: KVState, other: KVState, row: int, other_row: int | None = None, atol: float = 0.0
) -> None:
    """Equal kept positions of a row and, slot by slot in order of position, equal keys, values and statistics.

    Dead slots and the order of slots are no part of what a state means.
    """
    other_row = row if other_row is None else other_row
    assert int(state.length[row]) == int(other.length[other_row])
    assert kept(state, row) == kept(other, other_row)
    for (_, a), (_, b) in zip(layers_of(state), layers_of(other), strict=True):
        for head in range(a.position.shape[1]):
            for one, two in zip(_live(a, row, head), _live(b, other_row, head), strict=True):
                np.testing.assert_allclose(one, two, rtol=atol, atol=atol)


def _live(layer: LayerKV, row: int, head: int) -> list[np.ndarray]:
    """Every leaf of a head's live slots of a dense layer, in ascending order of position."""
    position = np.asarray(layer.position)[row, head]
    order = np.argsort(position)[np.sum(position < 0) :]
    leaves = jax.tree.leaves((layer.position, layer.stores, layer.stats))
    return [np.asarray(leaf)[row, head][order] for leaf in leaves]


class Trace(NamedTuple):
    """Every step of an `evolve`: positions [steps, B, K, S] of each layer, logits [steps, B, V]."""

    positions: tuple[np.ndarray, ...]
    logits: np.ndarray


@functools.partial(jax.jit, static_argnames=("config", "phase"))
def _evolve(params, kv, tokens, lengths, *, config, phase):
    rows = jnp.arange(tokens.shape[0])

    def body(kv, _):
        at = kv.length
        position = jnp.where(at < lengths, at, -1)[:, None]
        token = tokens[rows, jnp.minimum(at, tokens.shape[1] - 1)]
        block = Block(position=position, prompt=kv.prompt, total=kv.total, budget=kv.budget)
        logits, kv = Decoder(config).apply({"params": params}, token[:, None], kv, block, phase)
        return kv, (tuple(layer.position for layer in kv.layers), logits[:, 0])

    return jax.lax.scan(body, kv, length=tokens.shape[1])[1]


def evolve(model: kvjax.Model, prefilled: Any, tokens: np.ndarray, lengths: np.ndarray) -> Trace:
    """Feeds tokens [B, T] one by one from a prefilled prompt on, with the state visible after every step."""
    out = _evolve(model.params, prefilled.state, tokens, lengths, config=model.config, phase=prefilled.layout.decode)
    return Trace(*jax.tree.map(np.asarray, out))
