"""Checks of what a caller passes, at the edge: one paragraph each, before anything is traced."""

import numbers
from typing import Any, NamedTuple

import numpy as np

from kvjax.errors import InputError
from kvjax.models.config import DecoderConfig


class Batch(NamedTuple):
    """Tokens that a model can take.

    Attributes:
      tokens: [B, T] int32 up to the longest row, padding replaced by 0.
      lengths: [B] int32.
      width: of the caller's array; more than T where every row of it was padded.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    width: int


def check_batch(config: DecoderConfig, tokens: Any, lengths: Any, *, new_tokens: int) -> Batch:
    """Tokens and lengths that the model can take, with room for `new_tokens` more.

    Raises:
      InputError: empty prompts, tokens outside the vocabulary, lengths that do not fit, or a text past the end of a
        learned position table.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise InputError(
            "tokens must be [batch, length]; rows differ in length; pad them at the end and pass lengths."
        ) from None
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.size == 0:
        raise InputError(f"tokens must be [batch, length] with at least one token a row; got shape {np.shape(tokens)}.")
    if not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"tokens must be whole numbers; got an array of {ids.dtype}.")
    rows, width = ids.shape
    sizes = np.full((rows,), width) if lengths is None else np.asarray(lengths)
    if sizes.shape != (rows,) or not np.issubdtype(sizes.dtype, np.integer):
        raise InputError(f"lengths must be {rows} whole numbers, one a row; got shape {sizes.shape} of {sizes.dtype}.")
    if sizes.min() < 1 or sizes.max() > width:
        raise InputError(
            f"every row needs between 1 and {width} real tokens; got lengths from {sizes.min()} to {sizes.max()}."
        )
    ids = np.where(np.arange(width) < sizes[:, None], ids, 0)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        bad = ids.max() if ids.max() >= config.vocab_size else ids.min()
        raise InputError(
            f"token {bad} is outside the model's vocabulary; valid ids are 0 to {config.vocab_size - 1}. "
            "Was the text encoded with another model's tokenizer?"
        )
    # Of the new tokens the last is never fed back.
    longest = int(sizes.max()) + max(new_tokens - 1, 0)
    if config.learned_positions and longest > config.max_positions:
        raise InputError(
            f"this model's learned position table ends at {config.max_positions} tokens, but {sizes.max()} tokens"
            + (f" and {new_tokens} new ones need {longest} positions" if new_tokens else " were given")
            + "; shorten the text or generate fewer tokens."
        )
    return Batch(ids[:, : sizes.max()].astype(np.int32), sizes.astype(np.int32), width)


def check_prompt(prompt_length: Any, lengths: np.ndarray) -> np.ndarray:
    """[B] int32 prompt length of each row; a row that is shorter is all prompt."""
    prompt = np.asarray(prompt_length)
    if prompt.shape not in ((), lengths.shape) or not np.issubdtype(prompt.dtype, np.integer) or prompt.min() < 1:
        raise InputError(
            f"prompt_length must be a whole number of at least 1, or one for each of the {len(lengths)} rows; "
            f"got {prompt_length!r}."
        )
    return np.minimum(prompt, lengths).astype(np.int32)


def check_stop(stop: Any) -> np.ndarray:
    """[n] int32 ids that end a row; one id may come alone."""
    ids = np.atleast_1d(np.asarray(stop if len(np.shape(stop)) == 0 else list(stop)))
    if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
        raise InputError(f"stop must be token ids; got {stop!r}.")
    return np.unique(ids).astype(np.int32)


def check_positions(config: DecoderConfig, positions: str) -> None:
    """Refuses positions by rank for a model whose positions are not rotary."""
    if positions == "cache" and config.rope is None:
        raise InputError(
            f"positions='cache' rotates keys to their rank in the cache, but {config.family} has learned positions, "
            "which are added to the embedding; use positions='original'."
        )


def check_count(name: str, value: Any) -> None:
    """Refuses anything but a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1; got {value!r}.")
