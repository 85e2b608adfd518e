"""How far a context of reused keys and values is from a whole prefill, and the attention of some tokens."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.planning.limits import prompt_bucket
from kvjax.contexts.turns import own_model
from kvjax.errors import InputError
from kvjax.generation.context import Context
from kvjax.generation.program import program
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.model import Model
from kvjax.numerics.soft_cap import soft_capped
from kvjax.reuse.blending import Blended
from kvjax.reuse.cache import ChunkCache, Collected, Text, check_chunks
from kvjax.reuse.layerwise import LayerResult, check_movable, next_logits, rotated, run_tokens
from kvjax.reuse.repairing import by_position
from kvjax.summary import one_line

Array = jax.Array


class Distances(NamedTuple):
    """The distances of a context from a whole prefill of the same tokens.

    Attributes:
      key: [L] float64, the norm of the difference of keys relative to that of keys (Frobenius), over all tokens.
      value: [L] float64, the same of values.
      attention: [L] float64, the same of the attention probabilities of the question; empty for contexts that were not
        blended.
      rank_correlation: [L - 2] float64, Spearman's correlation, from one layer to the next and from layer 1 on, of how
        far the values of chunks are from those of the prefill, without the first chunk: what CacheBlend rests on. Empty
        if there is one chunk or the context was not blended, NaN where the caches are those of the prefill.
      agrees: whether both predict the same next token.
    """

    key: np.ndarray
    value: np.ndarray
    attention: np.ndarray
    rank_correlation: np.ndarray
    agrees: bool

    def __repr__(self) -> str:
        return one_line(self)


def distances(model: Model, made: Blended | Context, *, chunks: Sequence[ChunkCache] | None = None) -> Distances:
    """Compares a context of reused keys and values with a whole prefill, which it computes.

    Args:
      model: that of the context.
      made: from `kvjax.reuse.blend`, or the field `blended` of what `kvjax.reuse.craft` returns; or the context that
        `kvjax.reuse.edit` or `kvjax.reuse.parallel` returns, of which keys and values are compared, but not attention.
      chunks: those that `kvjax.reuse.parallel` was given, whose keys and values are compared, before rotation.

    Raises:
      InputError: it is something else, or of another model; or a context that is not of one row, under
        `kvjax.policies.full` with exact storage.
    """
    if isinstance(made, Blended):
        if chunks is not None:
            raise InputError("chunks= is for a context of kvjax.reuse.parallel; a blended context has its own.")
        return _of_blended(model, made)
    if not isinstance(made, Context):
        raise InputError(
            "distances takes what kvjax.reuse.blend returns, the field blended of what craft returns, or a context; "
            f"got {type(made).__name__}."
        )
    return _of_context(model, made, chunks)


def _of_context(model: Model, context: Context, chunks: Sequence[ChunkCache] | None) -> Distances:
    """Compares the keys and values of a context, or of chunks, with a whole prefill."""
    check_movable(model.config)
    own_model(model, context)
    groups = context.layout.groups
    shared = any(group.parallel is not None for group in groups)
    plain = all(own.policy.budget is None and own.storage.exact and own.selection.reads_all for own in groups)
    if context.text is None or len(context.text) != 1 or not plain:
        caches = ", ".join(dict.fromkeys(f"{own.policy.name}, {own.storage.label}" for own in groups))
        raise InputError(
            f"distances compares contexts of one row, under policies.full with exact storage; got {context.num_rows} "
            f"of {caches}."
        )
    if shared != (chunks is not None):
        raise InputError("give chunks= for a context of kvjax.reuse.parallel, and for no other.")
    (tokens,) = context.text
    size = prompt_bucket(len(tokens))
    if chunks is None:
        key, value = by_position(context.state, config=model.config, phase=context.layout.decode, size=size)
        compared = slice(0, len(tokens))
    else:
        text = Text.of(model, chunks, check_chunks(model, chunks), tokens=tokens[_held(chunks) :])
        if not np.array_equal(text.tokens, tokens):
            raise InputError("chunks= are not those of the context, in their order there.")
        key, value, compared = text.key, text.value, slice(text.starts[0], _held(chunks))
    position = np.arange(len(tokens), dtype=np.int32)
    full = Collected()
    run = run_tokens(
        model, tokens, position, key, value, np.zeros(size, bool), total=int(np.asarray(context.state.total)[0]),
        record=full.add,
    )  # fmt: skip
    # [L] each
    keys, values = (
        np.array([_relative(one[:, :, compared], two[:, :, compared]) for one, two in zip(own, other, strict=True)])
        for own, other in ((key, full.key), (value, full.value))
    )
    agrees = int(np.argmax(np.asarray(context.logits)[0])) == int(np.argmax(np.asarray(next_logits(model, run))))
    return Distances(keys, values, np.zeros(0), np.zeros(0), agrees)


def _held(chunks: Sequence[ChunkCache]) -> int:
    """Returns the number of tokens of chunks and of their prefix."""
    prefix = chunks[0].prefix
    return sum(map(len, (*([] if prefix is None else [prefix]), *chunks)))


def _of_blended(model: Model, blended: Blended) -> Distances:
    import scipy.stats

    check_chunks(model, blended.chunks)
    assert blended.context.text is not None
    (tokens,) = blended.context.text
    prefix = blended.chunks[0].prefix
    chunked = _held(blended.chunks)
    text = Text.of(model, blended.chunks, prefix, tokens=tokens[chunked:])
    total = int(np.asarray(blended.context.state.total)[0])
    # [n] each: every token but those of the prefix
    everything = np.arange(0 if prefix is None else len(prefix), len(tokens), dtype=np.int32)
    entering = np.flatnonzero(blended.active[0]).astype(np.int32)

    def go_on(layer: int, result: LayerResult, position: np.ndarray) -> np.ndarray:
        return np.flatnonzero(blended.active[layer, position])

    made, full = (_Observed(model.config, len(tokens) - chunked, len(tokens), total) for _ in range(2))
    run_tokens(
        model, tokens[entering], entering, text.key, text.value, text.known, total=total, choose=go_on,
        record=made.add,
    )  # fmt: skip
    run = run_tokens(
        model, tokens[everything], everything, text.key, text.value, text.known, total=total, record=full.add
    )
    # [L] each
    key, value, attention = (
        np.array([_relative(*pair) for pair in zip(getattr(made, name), getattr(full, name), strict=True)])
        for name in ("key", "value", "attention")
    )
    correlations: list[float] = []
    if len(blended.chunks) > 1:
        later = slice(text.starts[1], chunked)
        # [tokens of later chunks] for each layer
        far = [
            np.square(np.asarray(new, np.float64) - np.asarray(old, np.float64)).sum(axis=(0, 1, 3))[later]
            for new, old in zip(full.value[1:], text.value[1:], strict=True)
        ]
        correlations = [
            float(scipy.stats.spearmanr(*pair).statistic) if all(np.ptp(each) > 0 for each in pair) else np.nan
            for pair in itertools.pairwise(far)
        ]
    predicted = int(np.argmax(np.asarray(next_logits(model, run))))
    agrees = int(np.argmax(np.asarray(blended.context.logits)[0])) == predicted
    return Distances(key, value, attention, np.array(correlations, np.float64), agrees)


class _Observed:
    """The keys and values of a text, and the attention of its question, in each layer of a run."""

    def __init__(self, config: DecoderConfig, question: int, length: int, total: int) -> None:
        self._config, self._total, self._question = config, jnp.full((1,), total, jnp.int32), question
        # [1, T]
        self._position = jnp.arange(length, dtype=jnp.int32)[None]
        self.key: list[Array] = []
        self.value: list[Array] = []
        self.attention: list[Array] = []

    def add(self, index: int, result: LayerResult, count: int) -> None:
        """Adds a layer of whose tokens, `count` in all, the question's are the last ones."""
        length, start = self._position.shape[1], count - self._question
        self.key.append(result.key)
        self.value.append(result.value)
        self.attention.append(probabilities(
            result.query[:, :, start:count], result.key[:, :, :length], self._position[:, length - self._question :],
            self._position, self._total, config=self._config, kind=self._config.kind(index),
        ))  # fmt: skip


def _relative(one: Array, two: Array) -> float:
    """Returns the norm of the difference, divided by that of the second array."""
    first, second = (np.asarray(each, np.float64) for each in (one, two))
    return float(np.linalg.norm(first - second) / np.linalg.norm(second))


@program(static_argnames=("config", "kind"))
def probabilities(
    query: Array,
    key: Array,
    query_position: Array,
    key_position: Array,
    total: Array,
    *,
    config: DecoderConfig,
    kind: LayerKind,
) -> Array:
    """Computes the attention probabilities of a layer.

    Args:
      query: [1, H, n, D], not rotated.
      key: [1, K, S, D], not rotated.
      query_position: [1, n] int32.
      key_position: [1, S] int32, -1 = not seen.
      total: [1] int32, the number of tokens that RoPE is for.
      config: the decoder.
      kind: of the layer.

    Returns:
      [1, H, n, S] float32.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    # [1, H, n, D] and [1, K, S, D]
    query = rotated(kind.rope, query, query_position, total).astype(jnp.float32)
    key = rotated(kind.rope, key, key_position, total).astype(jnp.float32)
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    # [1, K, G, n, D]
    grouped = query.reshape(1, kv_heads, heads // kv_heads, *query.shape[2:])
    # [1, K, G, n, S]
    logits = soft_capped(jnp.einsum("bkgnd,bksd->bkgns", grouped, key) * scale, config.attention_soft_cap)
    # [1, n, S]
    age = query_position[:, :, None] - key_position[:, None]
    seen = (age >= 0) & (key_position[:, None] >= 0)
    if kind.window is not None:
        seen &= age < kind.window
    # Nothing is seen by padding alone.
    found = jax.nn.softmax(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=-1)
    return jnp.where(seen[:, None, None], found, 0.0).reshape(1, heads, *found.shape[3:])
