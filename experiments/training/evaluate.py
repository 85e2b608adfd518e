"""Evaluates a decoder with its full cache: bits per byte of held-out text, exact matches on recall tasks."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from experiments.tasks.prompts import Prompt
from experiments.training.corpus import Text
from kvjax.models.config import DecoderConfig
from kvjax.models.decoder import Decoder
from kvjax.models.stacked_params import unstacked
from kvjax.numerics.finite import check_finite
from kvjax.parallel import distributed
from kvjax.typing import PyTree

Array = jax.Array
ROWS = 8  # of one forward pass


@functools.partial(jax.jit, static_argnames="config")
def _score(params: PyTree, tokens: Array, config: DecoderConfig) -> tuple[Array, Array]:
    """Scores all but the first of tokens [B, T + 1]: log-probability and whether it is the likeliest, [B, T] each."""
    logits, _ = Decoder(config).apply({"params": unstacked(params)}, tokens[:, :-1])
    target = tokens[:, 1:]
    chosen = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1) == target


def log_probabilities(params: PyTree, rows: np.ndarray, config: DecoderConfig) -> tuple[np.ndarray, np.ndarray]:
    """Scores all but the first token of rows [N, T + 1]: log-probability, whether it is the likeliest; [N, T] each.

    Raises:
      NonFiniteError: a log-probability is not finite.
    """
    parts = [_score(params, rows[start : start + ROWS], config) for start in range(0, len(rows), ROWS)]
    parts = distributed.to_host(parts)
    logprobs = np.concatenate([logprob for logprob, _ in parts])
    check_finite(logprobs, logprobs)
    return logprobs, np.concatenate([best for _, best in parts])


def bits_per_byte(params: PyTree, config: DecoderConfig, text: Text, *, bos: int, context: int, windows: int) -> float:
    """Bits per byte of `windows` windows, spread evenly over a text, each after BOS."""
    starts = np.linspace(0, text.tokens.size - context, windows).astype(int)
    rows = np.stack([text.tokens[start : start + context] for start in starts])
    size = sum(int(text.bytes[start : start + context].sum()) for start in starts)
    logprobs, _ = log_probabilities(
        params, np.concatenate([np.full((windows, 1), bos, np.int32), rows], axis=1), config
    )
    return float(-logprobs.sum(dtype=np.float64) / (np.log(2) * size))


def exact_match(params: PyTree, config: DecoderConfig, asked: Sequence[Prompt]) -> float:
    """Share of prompts, all of one length, that greedy decoding with the full cache answers exactly.

    Greedy decoding is right throughout if and only if every token of the answer is the likeliest after the true ones,
    so that one forward pass tells; `tasks.score` generates, under any policy.
    """
    count, length = len(asked), asked[0].tokens.size
    width = length + max(prompt.answer.size for prompt in asked)
    rows = np.zeros((count, width + 1), np.int32)
    answer = np.zeros((count, width), bool)
    for row, of_answer, prompt in zip(rows, answer, asked, strict=True):
        end = length + prompt.answer.size
        row[:end] = np.concatenate([prompt.tokens, prompt.answer])
        of_answer[length - 1 : end - 1] = True
    _, best = log_probabilities(params, rows, config)
    return float((best | ~answer).all(axis=1).mean())
