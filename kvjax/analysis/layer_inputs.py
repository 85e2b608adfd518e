"""How alike the inputs of consecutive layers are: why the input of one layer foretells the query of the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.models.model import Model
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array


class InputCosine(NamedTuple):
    """The result of `input_cosine`: cosine similarities, [L, B] float32 in [-1, 1] each.

    Entry i is the mean over the real tokens of each row; NaN for layer 0. A vector of zeros has similarity 0.

    Attributes:
      attention_input: of the attention inputs of layers i - 1 and i: what projections of queries multiply. InfiniGen's
        guess of a query takes the first for the second.
      block_input: of the residual streams that enter layers i - 1 and i.
      attention_output: of the attention output of layer i - 1 and the residual stream that enters layer i.
      mlp_output: of the MLP output of layer i - 1 and the residual stream that enters layer i.
    """

    attention_input: np.ndarray
    block_input: np.ndarray
    attention_output: np.ndarray
    mlp_output: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def input_cosine(model: Model, tokens: ArrayLike, *, lengths: ArrayLike | None = None) -> InputCosine:
    """Compares each layer's input with the layer before: its input, and what it added (InfiniGen, Table 1).

    The last three are the rows of the table (arXiv:2406.19707), which has their means over the layers. They are
    measured under the full cache.

    Args:
      model: from `kvjax.load`.
      tokens: [B, T] or [T] int, rows padded at the end.
      lengths: [B] real tokens of each row; None = all T.

    Raises:
      InputError: tokens or lengths that do not fit the model.
    """
    run = over_tiles(model, tokens, lengths, _compare_streams, lambda *shape: ())
    means = []
    for cosine in run.queries:
        # [L, B, T]
        real = np.where(np.arange(cosine.shape[-1]) < run.lengths[:, None], cosine[:, :, 0], 0).astype(np.float64)
        means.append((real.sum(axis=2) / run.lengths).astype(np.float32))
    return InputCosine(*means)


def _compare_streams(carry: PyTree, attention: tuple[Rows]) -> tuple[PyTree, tuple[Array, ...]]:
    """Returns the fields of `InputCosine` for each query of one layer, [B, 1, 1, n] float32 each."""
    (rows,) = attention
    own, before = rows.streams, rows.before
    if before is None:
        nothing = jnp.full((rows.query.shape[0], 1, 1, rows.query.shape[1]), jnp.nan, jnp.float32)
        return carry, (nothing,) * len(InputCosine._fields)
    pairs = (
        (before.attention_input, own.attention_input),
        (before.block_input, own.block_input),
        (before.attention_output, own.block_input),
        (before.mlp_output, own.block_input),
    )
    # [B, 1, 1, n]
    return carry, tuple(_cosine(*pair)[:, None, None] for pair in pairs)


def _cosine(one: Array, two: Array) -> Array:
    """Cosine similarity of vectors [B, n, hidden] in float32, [B, n]."""
    # [B, n, hidden]
    one, two = one.astype(jnp.float32), two.astype(jnp.float32)
    # [B, n]
    dot = jnp.sum(one * two, axis=-1)
    length = jnp.sqrt(jnp.sum(jnp.square(one), axis=-1)) * jnp.sqrt(jnp.sum(jnp.square(two), axis=-1))
    return dot / jnp.where(length > 0, length, 1.0)
