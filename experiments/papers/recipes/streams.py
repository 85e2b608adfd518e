"""Queries, keys and what flows between layers: where they are large, and how alike those of neighbours are."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from experiments.papers.parts import Lab, Part, Result
from experiments.papers.recipes.speculation import SAMPLE, SkewedLab
from experiments.papers.settings import Settings
from kvjax import analysis
from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.cache.state import Block
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.decoder_layer import SKEW
from kvjax.models.stacked_params import unstacked
from kvjax.selection.speculate import skewed
from kvjax.typing import JsonObject, PyTree

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class Streams(Part):
    """A measure of rows of a text under the full cache.

    Attributes:
      text: a key of `TEXTS`.
      rows: of the text.
      length: tokens of each.
    """

    text: str
    rows: int
    length: int

    def files(self, settings: Settings) -> Sequence[Path]:
        return (settings.file(self.text), settings.file(SAMPLE))

    def tokens(self, lab: Lab) -> np.ndarray:
        """[rows, length] int32."""
        return lab.rows(self, self.text, self.rows, self.length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns(Streams):
    """How much of the queries is in few of their columns.

    The result has, for L layers and D columns, the largest first: ``plain`` and ``skewed`` [L, D], the share of the sum
    of |q| over tokens and query heads that is in a column, mean over KV heads; and ``outlier`` [L], the mean |x| of the
    largest channel of the layer's input, divided by the median channel's.
    """

    def measure(self, lab: Lab) -> Result:
        model, found = lab.model(self.model), {}
        turned = SkewedLab(lab, self, self.length).model(self.model)
        for name, each in (("plain", model), ("skewed", turned)):
            # [L, K, D], [L, hidden]
            sums, channels = (
                np.asarray(x, np.float64) for x in _sums(each.params, self.tokens(lab), config=each.config)
            )
            shares = -np.sort(-sums, axis=-1) / sums.sum(axis=-1, keepdims=True)
            found[name] = shares.mean(axis=1)
        return found | {"outlier": channels.max(axis=1) / np.median(channels, axis=1)}


@functools.partial(jax.jit, static_argnames="config")
def _sums(params: PyTree, tokens: Array, *, config: DecoderConfig) -> tuple[Array, Array]:
    """Sums of |q| by column [L, K, D], in the skew's columns if there is one, and of |x| by channel [L, hidden]."""
    decoder = Decoder(config, params["embed"]["tokens"].dtype)
    lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
    # [B, T]
    position = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    block = Block(position=position, prompt=lengths, total=lengths, budget=((None,),) * config.num_layers)
    _, sown = decoder.apply(
        {"params": unstacked(params)}, tokens, None, block, method="hidden", mutable="intermediates"
    )
    sums, channels = [], []
    for index in range(config.num_layers):
        ((seen,),) = sown["intermediates"][f"attention_{index}"]
        (streams,) = sown["intermediates"][f"streams_{index}"]
        # [B, K, G, T, D]
        query = seen.query.reshape(tokens.shape[0], config.num_kv_heads, -1, *seen.query.shape[2:])
        query = skewed(query, params[f"layer_{index}"]["attention"].get(SKEW))
        sums.append(jnp.sum(jnp.abs(query), axis=(0, 2, 3)))
        channels.append(jnp.sum(jnp.abs(streams.block_input.astype(jnp.float32)), axis=(0, 1)))
    return jnp.stack(sums), jnp.stack(channels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs(Streams):
    """Cosines of each layer's input with the layer before.

    The result has the fields of `kvjax.analysis.InputCosine`, [L] each, the mean over rows; NaN for layer 0.
    """

    def measure(self, lab: Lab) -> Result:
        found = analysis.input_cosine(lab.model(self.model), self.tokens(lab))
        return {name: value.mean(axis=1) for name, value in found._asdict().items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Important(Streams):
    """The number of keys whose score is within alpha of the largest, which InfiniGen calls important.

    The result has ``count`` [alphas, L, T], the mean over rows and heads for each query; and ``first`` [L], the mean
    attention on the first token.

    Attributes:
      alphas: distances from the largest score.
    """

    alphas: tuple[float, ...]

    def measure(self, lab: Lab) -> Result:
        run = over_tiles(lab.model(self.model), self.tokens(lab), None, _near, lambda *_: (), jnp.array(self.alphas))
        counts, first = run.queries
        # [L, B, H, alphas, T]
        return {"count": np.moveaxis(counts.mean(axis=(1, 2)), 1, 0), "first": first.mean(axis=(1, 2, 3))}


def _near(carry: PyTree, attention: tuple[Rows], alphas: Array) -> tuple[PyTree, tuple[Array, Array]]:
    (rows,) = attention
    logits = jnp.where(rows.seen, rows.logits, -jnp.inf)
    # [B, K, G, n, T]
    gap = logits - jnp.max(logits, axis=-1, keepdims=True)
    counts = [jnp.sum(gap > -alphas[i], axis=-1, dtype=jnp.float32) for i in range(alphas.shape[0])]
    # [B, K, G, alphas, n] and [B, K, G, n]
    return carry, (jnp.stack(counts, axis=3), rows.probability[..., 0])


def _sized(settings: Settings, text: str) -> JsonObject:
    return {"text": text, "rows": settings.scale.look_rows, "length": settings.scale.length}


def columns(settings: Settings, *, text: str = "book") -> Columns:
    """A part of the scale's sizes."""
    return Columns(**_sized(settings, text))


def inputs(settings: Settings, *, text: str = "book") -> Inputs:
    """A part of the scale's sizes."""
    return Inputs(**_sized(settings, text))


def important(settings: Settings, *, text: str = "book") -> Important:
    """A part of the scale's sizes."""
    return Important(**_sized(settings, text), alphas=(4.0, 5.0))
