"""The error of the outputs of attention over the slots that a policy keeps of a prompt."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.cache import shared_prefix
from kvjax.cache.layer_stack import arranged_state
from kvjax.cache.planning.layout import Group
from kvjax.cache.spec import CacheSpec, as_spec
from kvjax.cache.state import Block, LayerKV
from kvjax.errors import InputError
from kvjax.generation.prefill import prefill
from kvjax.generation.program import program
from kvjax.inputs import check_batch, check_count
from kvjax.models.bound import bind
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.model import Model
from kvjax.numerics.soft_cap import soft_capped
from kvjax.parallel import distributed
from kvjax.parallel.sharding import Params
from kvjax.policies.base import Policy
from kvjax.policies.matched import LOG_WEIGHT
from kvjax.summary import one_line

Array = jax.Array
HIGHEST = jax.lax.Precision.HIGHEST


class OutputError(NamedTuple):
    """The result of `output_error`; both [L, B, H] float64, relative to the norm of the outputs of the full cache.

    Attributes:
      prompt: of the queries of the prompt, each of which sees all slots of the prompt, as queries after it do.
      following: of the queries of the tokens after the prompt, which see the prompt and each other's keys and values.
    """

    prompt: np.ndarray
    following: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def output_error(model: Model, tokens: ArrayLike, policy: Policy | CacheSpec, *, prompt_length: int) -> OutputError:
    """Measures how far attention over the slots that are left of a prompt is from attention over all of it.

    The output of a query is Σ_j a_j v_j, before the projection W_o. Queries, and the keys and values that follow the
    prompt, are those of the full cache, so that each layer is measured by itself. The error is the square root of
    Σ ‖o' - o‖² / Σ ‖o‖², with sums over queries.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, all rows of T tokens.
      policy: what the cache keeps of a prompt that is read in one block, or a `CacheSpec`.
      prompt_length: the number of tokens of each prompt, from 1 to T - 1.

    Raises:
      InputError: tokens or a prompt_length that do not fit, a storage that is not exact, keys at positions in the
        cache, or a model whose layers have sliding windows shorter than the text.
      ConfigError: a model that is spread over several processes.
      PolicyError: a policy or budget that cannot work.
    """
    distributed.check_alone(model.params, "kvjax.analysis")
    shared_prefix.refuse(model.params, "kvjax.analysis")
    config, spec = model.config, as_spec(policy)
    batch = check_batch(config, tokens, None, new_tokens=0)
    rows, width = batch.tokens.shape
    check_count("prompt_length", prompt_length)
    if prompt_length >= width:
        raise InputError(f"prompt_length={prompt_length} leaves no query to measure: the rows have {width} tokens.")
    if any(window is not None and window < width for window in config.windows):
        raise InputError(f"a layer of this model sees fewer than {width} positions; give a shorter text.")
    made = prefill(model, batch.tokens[:, :prompt_length], spec, max_new_tokens=1)
    state = arranged_state(made.state, ())
    groups = made.layout.decode
    for layer, own in zip(state.layers, groups, strict=True):
        if any(
            group.policy.positions != "original" or not held.is_exact for group, held in zip(own, layer, strict=True)
        ):
            raise InputError(f"{spec.name} does not hold exact keys at the positions of the text.")
    with model.on_mesh():
        ids, lengths = model.place((batch.tokens, np.full((rows,), width, np.int32)))
        projected = project_steps(model.params, ids, lengths, config=config)
        errors = [
            jax.device_get(
                _errors(
                    *each, tuple(layer), kind=config.kind(i), config=config, heads=_heads(own), prompt=prompt_length
                )
            )
            for i, (each, layer, own) in enumerate(zip(projected, state.layers, groups, strict=True))
        ]
    # [2, L, B, H] each
    missed, whole = (np.stack([each[part] for each in errors], axis=1).astype(np.float64) for part in range(2))
    return OutputError(*np.sqrt(missed / whole))


def _heads(groups: Sequence[Group]) -> tuple[int, ...]:
    """Returns the KV heads of a layer in the order of its groups; empty for one group of all."""
    return tuple(head for group in groups for head in group.heads or ())


@program(static_argnames=("config",))
def project_steps(params: Params, tokens: Array, lengths: Array, *, config: DecoderConfig) -> list[tuple[Array, ...]]:
    """Returns rotated queries [B, H, T, D] and keys and values [B, K, T, D] of each layer under the full cache."""
    place = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    block = Block(position=place, prompt=lengths, total=lengths, budget=((None,),) * config.num_layers)
    found = bind(config, params).projected(tokens, block, ((Group(),),) * config.num_layers)[1]
    made: list[tuple[Array, ...]] = []
    for layer in range(config.num_layers):
        query, key, value = found[layer]
        if (rope := config.kind(layer).rope) is not None:
            frequencies = rope.frequencies(lengths)
            query, key = (rope.rotate(x, place, frequencies) for x in (query, key))
        made.append((query, key, value))
    return made


@program(static_argnames=("kind", "config", "heads", "prompt"))
def _errors(
    query: Array,
    key: Array,
    value: Array,
    held: tuple[LayerKV, ...],
    *,
    kind: LayerKind,
    config: DecoderConfig,
    heads: tuple[int, ...],
    prompt: int,
) -> tuple[Array, Array]:
    """Returns sums of ‖o' - o‖² and of ‖o‖² over queries, [2, B, H] each: those of the prompt, then the others.

    Args:
      query: [B, H, T, D].
      key: [B, K, T, D].
      value: [B, K, T, D].
      held: the slots of each group of heads.
      kind: of the layer.
      config: the decoder.
      heads: see `_heads`.
      prompt: the number of tokens of the prompt.
    """
    batch, count, width, dim = query.shape
    scale = dim**-0.5 if config.attention_scale is None else config.attention_scale
    # [B, K, G, T, D]
    query = query.reshape(batch, key.shape[1], -1, width, dim).astype(jnp.float32)
    slots = max(group.position.shape[2] for group in held)

    def joined(leaves: list[Array], fill: float) -> Array:
        padded = [
            jnp.pad(x, ((0, 0), (0, 0), (0, slots - x.shape[2]), *((0, 0),) * (x.ndim - 3)), constant_values=fill)
            for x in leaves
        ]
        whole = jnp.concatenate(padded, axis=1)
        return whole[:, np.argsort(heads)] if heads else whole

    # [B, K, S], [B, K, S, D] and [B, K, S]
    position = joined([group.position for group in held], -1)
    old = [joined([getattr(group, name) for group in held], 0) for name in ("key", "value")]
    weight = joined([group.stats.get(LOG_WEIGHT, jnp.zeros(group.position.shape)) for group in held], 0)
    at = jnp.arange(width)
    # [T, T]: queries of the prompt see all of it, and none of what follows
    causal = (at < prompt) | (at[:, None] >= prompt) & (at <= at[:, None])

    def logits(keys: Array) -> Array:
        keys = keys.astype(jnp.float32)
        return soft_capped(
            scale * jnp.einsum("bkgtd,bksd->bkgts", query, keys, precision=HIGHEST), config.attention_soft_cap
        )

    def output(scores: Array, values: Array) -> Array:
        shares = jax.nn.softmax(scores, axis=-1)
        return jnp.einsum("bkgts,bksd->bkgtd", shares, values.astype(jnp.float32), precision=HIGHEST)

    own = jnp.where(causal, logits(key), -jnp.inf)
    whole = output(own, value)
    kept = jnp.where((position >= 0)[:, :, None, None], logits(old[0]) + weight[:, :, None, None], -jnp.inf)
    scores = jnp.concatenate([kept, own[..., prompt:]], axis=-1)
    left = output(scores, jnp.concatenate([old[1], value[:, :, prompt:].astype(old[1].dtype)], axis=2))
    # [B, K, G, T]
    squares = [jnp.sum(jnp.square(x), axis=-1) for x in (left - whole, whole)]
    parts = [jnp.stack([x[..., :prompt].sum(-1), x[..., prompt:].sum(-1)]) for x in squares]
    return parts[0].reshape(2, batch, count), parts[1].reshape(2, batch, count)
