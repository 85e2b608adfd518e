"""How far a blended context is from a whole prefill, and the attention of some tokens."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.errors import InputError
from kvjax.generation.program import program
from kvjax.models.config import DecoderConfig, LayerKind
from kvjax.models.model import Model
from kvjax.numerics.soft_cap import soft_capped
from kvjax.reuse.blending import Blended
from kvjax.reuse.cache import Text, check_chunks
from kvjax.reuse.layerwise import LayerResult, next_logits, rotated, run_tokens
from kvjax.summary import one_line

Array = jax.Array


class Distances(NamedTuple):
    """The distances of a blended context from a whole prefill of the same tokens.

    Attributes:
      key: [L] float64, the norm of the difference of keys relative to that of keys (Frobenius), over all tokens.
      value: [L] float64, the same of values.
      attention: [L] float64, the same of the attention probabilities of the question.
      rank_correlation: [L - 2] float64, Spearman's correlation, from one layer to the next and from layer 1 on, of how
        far the values of chunks are from those of the prefill, without the first chunk: what CacheBlend rests on. Empty
        if there is one chunk, NaN where the caches are those of the prefill.
      agrees: whether both predict the same next token.
    """

    key: np.ndarray
    value: np.ndarray
    attention: np.ndarray
    rank_correlation: np.ndarray
    agrees: bool

    def __repr__(self) -> str:
        return one_line(self)


def distances(model: Model, blended: Blended) -> Distances:
    """Compares a blended context with a whole prefill, which it computes.

    Args:
      model: that of the context.
      blended: from `kvjax.reuse.blend`, or the field `blended` of what `kvjax.reuse.craft` returns.

    Raises:
      InputError: it is something else, or of another model.
    """
    import scipy.stats

    if not isinstance(blended, Blended):
        raise InputError(
            f"distances takes what kvjax.reuse.blend returns, or the field blended of what craft returns; got "
            f"{type(blended).__name__}."
        )
    check_chunks(model, blended.chunks)
    assert blended.context.text is not None
    (tokens,) = blended.context.text
    prefix = blended.chunks[0].prefix
    chunked = sum(map(len, (*([] if prefix is None else [prefix]), *blended.chunks)))
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
