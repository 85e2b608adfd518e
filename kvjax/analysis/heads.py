"""Which heads look far back: RazorAttention's test on random tokens (arXiv:2407.15891).

In random tokens that repeat with a period, a token can only be predicted by looking one period back. An echo head
attends to the token's own earlier occurrences, an induction head to the tokens that followed these.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.analysis.rows import Rows
from kvjax.analysis.scan import over_tiles
from kvjax.errors import InputError
from kvjax.models.model import Model
from kvjax.summary import one_line
from kvjax.typing import PyTree

Array = jax.Array
LONGEST = 4096  # tokens of the test, unless the model has fewer positions


class RetrievalScores(NamedTuple):
    """The result of `retrieval_scores`: shares of attention in [0, 1], averaged over all repetitions but the first.

    Attributes:
      induction: [L, H] float32 share on the tokens that followed earlier occurrences of the query's token.
      echo: [L, H] float32 share on these occurrences themselves.
    """

    induction: np.ndarray
    echo: np.ndarray

    def __repr__(self) -> str:
        return one_line(self)


def retrieval_scores(
    model: Model,
    *,
    draw_from: object = None,
    repeats: int = 4,
    period: int | None = None,
    rows: int = 2,
    seed: int = 0,
) -> RetrievalScores:
    """Measures how much each query head attends to earlier occurrences of its token, and to the tokens after these.

    Args:
      model: from `kvjax.load`.
      draw_from: [N] token ids to draw from; None = the whole vocabulary except BOS and EOS, as in the paper. Give the
        ids of a text if the vocabulary has entries that were never trained: these attract attention wherever they are
        (kvjax-tiny's induction head then scores 0.00, and 0.37 on tokens of a book).
      repeats: the number of times that the random tokens occur; 4 in the paper.
      period: the number of random tokens; None = the most that fit into the model's positions and 4,096 (2,500 in the
        paper).
      rows: the number of sequences to average over.
      seed: of the random tokens.

    Raises:
      InputError: fewer than two repeats or tokens, ids that the model does not have, or a text too long for it.
    """
    config = model.config
    bos = [] if config.bos_token_id is None else [config.bos_token_id]
    if period is None:
        period = (min(config.max_positions or LONGEST, LONGEST) - len(bos)) // max(repeats, 1)
    for name, value, minimum in (("repeats", repeats, 2), ("period", period, 2), ("rows", rows, 1)):
        if value < minimum:
            raise InputError(f"{name}={value!r} is too small; give at least {minimum}.")
    special = {*bos, *config.eos_token_ids}
    pool = np.asarray([i for i in range(config.vocab_size) if i not in special] if draw_from is None else draw_from)
    if (
        pool.ndim != 1
        or not pool.size
        or pool.dtype.kind not in "iu"
        or not 0 <= pool.min() <= pool.max() < config.vocab_size
    ):
        raise InputError(f"draw_from must be token ids from 0 to {config.vocab_size - 1}; got {draw_from!r}.")
    random = pool[np.random.default_rng(seed).integers(pool.size, size=(rows, period))]
    tokens = np.concatenate([np.tile(bos, (rows, 1)), np.tile(random, (1, repeats))], axis=1).astype(np.int32)
    looked = over_tiles(model, tokens, None, _look_back, lambda *shape: (), jnp.int32(period), jnp.int32(len(bos)))
    # [L, B, H, T] -> [L, H]; the first period has no earlier occurrences
    means = [each[..., len(bos) + period :].mean(axis=(1, 3)) for each in looked.queries]
    return RetrievalScores(*means)


def _look_back(
    carry: PyTree, attention: tuple[Rows], period: Array, first: Array
) -> tuple[PyTree, tuple[Array, Array]]:
    (rows,) = attention
    query = rows.query[:, None, None, :, None]
    key = jnp.arange(rows.probability.shape[-1])

    def share(behind: Array) -> Array:
        return jnp.sum(
            jnp.where((behind % period == 0) & (behind > 0) & (key >= first), rows.probability, 0.0), axis=-1
        )

    return carry, (share(query + 1 - key), share(query - key))


def retrieval_heads(
    model: Model, *, induction_share: float = 0.14, echo_share: float = 0.01, draw_from: object = None, **options: Any
) -> np.ndarray:
    """Finds the KV heads that must keep every token: a table for `kvjax.policies.razor_attention` and `duo_attention`.

    A KV head is one of them if any of its query heads is among the model's best, as in RazorAttention.

    Args:
      model: from `kvjax.load`.
      induction_share: the share of all query heads, rounded up, that is chosen by induction score; 14 % in the paper.
      echo_share: the share that is chosen by echo score; 1 % in the paper.
      draw_from: see `retrieval_scores`.
      options: of `retrieval_scores`.

    Returns:
      [L, K] bool.

    Raises:
      InputError: a share outside [0, 1]; what `retrieval_scores` raises.
    """
    for name, value in (("induction_share", induction_share), ("echo_share", echo_share)):
        if not 0 <= value <= 1:
            raise InputError(f"{name}={value!r} is a share of the heads; give a number from 0 to 1.")
    scores = retrieval_scores(model, draw_from=draw_from, **options)
    chosen = np.zeros(scores.induction.size, bool)
    for score, share in ((scores.induction, induction_share), (scores.echo, echo_share)):
        count = int(np.ceil(share * score.size - 1e-9))
        chosen[np.argsort(-score, axis=None, kind="stable")[:count]] = True
    config = model.config
    return np.any(chosen.reshape(config.num_layers, config.num_kv_heads, -1), axis=2)
