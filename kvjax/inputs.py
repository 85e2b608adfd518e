"""Checks of the arguments of public functions, on the host, before anything is traced."""

import inspect
import numbers
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvjax.errors import InputError, shown
from kvjax.models.config import DecoderConfig

#: The largest number of tokens, rows or slots: positions and sizes are int32, and sizes become the next power of two.
LARGEST_COUNT = 1 << 30


class Batch(NamedTuple):
    """A checked batch of tokens.

    Attributes:
      tokens: [B, T] int32, where T is the length of the longest row. Padding is replaced by 0.
      lengths: [B] int32, the number of real tokens of each row.
      width: the number of columns of the caller's array; larger than T if every row was padded.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    width: int


def check_batch(config: DecoderConfig, tokens: ArrayLike, lengths: ArrayLike | None, *, new_tokens: int) -> Batch:
    """Checks tokens and lengths, and that the model has positions for `new_tokens` more tokens.

    Args:
      config: the decoder.
      tokens: [B, T] or [T] int, rows padded at the end.
      lengths: [B] int, the number of real tokens of each row; None for T.
      new_tokens: the number of tokens to be generated.

    Raises:
      InputError: if a row is empty, a token is outside the vocabulary, a length is not between 1 and T, or a row
        exceeds a learned position table.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:
        raise InputError(
            "tokens must be [batch, length]; rows differ in length; pad them at the end and pass lengths."
        ) from None
    # [B, T]
    ids = ids[None] if ids.ndim == 1 else ids
    if ids.ndim != 2 or ids.size == 0:
        raise InputError(
            f"tokens must be [batch, length] with at least one token per row; got shape {np.shape(tokens)}."
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"tokens must be whole numbers; got an array of {ids.dtype}.")
    rows, width = ids.shape
    # [B]
    sizes = np.full((rows,), width) if lengths is None else np.asarray(lengths)
    if sizes.shape != (rows,) or not np.issubdtype(sizes.dtype, np.integer):
        raise InputError(
            f"lengths must be {rows} whole numbers, one per row; got shape {sizes.shape} of {sizes.dtype}."
        )
    if sizes.min() < 1 or sizes.max() > width:
        raise InputError(
            f"every row needs between 1 and {width} real tokens; got lengths from {sizes.min()} to {sizes.max()}."
        )
    # [B, T]
    ids = np.where(np.arange(width) < sizes[:, None], ids, 0)
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        bad = ids.max() if ids.max() >= config.vocab_size else ids.min()
        raise InputError(
            f"token {bad} is outside the model's vocabulary; valid ids are 0 to {config.vocab_size - 1}. "
            "Was the text encoded with another model's tokenizer?"
        )
    # The last new token is not fed back to the model, so it needs no position.
    longest = int(sizes.max()) + max(new_tokens - 1, 0)
    if config.learned_positions and longest > config.max_positions:
        raise InputError(
            f"this model's learned position table ends at {config.max_positions} tokens, but {sizes.max()} tokens"
            + (f" and {new_tokens} new ones need {longest} positions" if new_tokens else " were given")
            + "; shorten the text or generate fewer tokens."
        )
    return Batch(ids[:, : sizes.max()].astype(np.int32), sizes.astype(np.int32), width)


def check_prompt(prompt_length: ArrayLike, lengths: np.ndarray) -> np.ndarray:
    """Checks the prompt lengths of a batch.

    Args:
      prompt_length: the number of prompt tokens, for all rows or [B] for each.
      lengths: [B] int32, the number of real tokens of each row.

    Returns:
      [B] int32. A row that is shorter than its prompt length is all prompt.

    Raises:
      InputError: if a length is not a whole number of at least 1.
    """
    # [] or [B]
    prompt = np.asarray(prompt_length)
    whole = np.issubdtype(prompt.dtype, np.integer)
    if prompt.shape not in ((), lengths.shape) or not whole or prompt.min() < 1 or prompt.max() > LARGEST_COUNT:
        raise InputError(
            f"prompt_length must be a whole number from 1 to {LARGEST_COUNT}, or one for each of the {len(lengths)} "
            f"rows; got {shown(prompt_length)}."
        )
    return np.minimum(prompt, lengths).astype(np.int32)


def check_stop(stop: int | Sequence[int]) -> np.ndarray:
    """Checks stop tokens.

    Args:
      stop: the ids that end a row; a single id need not be in a sequence.

    Returns:
      [n] int32, distinct and ascending.

    Raises:
      InputError: if an id is not a whole number of 32 bits.
    """
    # [n]
    ids = np.atleast_1d(np.asarray(stop))
    if ids.size and (ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer)):
        raise InputError(f"stop must be token ids; got {shown(stop)}.")
    if ids.size and (ids.max() > np.iinfo(np.int32).max or ids.min() < np.iinfo(np.int32).min):
        raise InputError(f"stop must be token ids, which are numbers of 32 bits; got {shown(stop)}.")
    return np.unique(ids).astype(np.int32)


def check_positions(config: DecoderConfig, positions: str) -> None:
    """Checks that the kind of positions is available for a model.

    Args:
      config: the decoder.
      positions: ``original`` or ``cache``.

    Raises:
      InputError: if positions are by rank in the cache but the model has no rotary embedding.
    """
    if positions == "cache" and not config.rotates:
        raise InputError(
            f"positions='cache' rotates keys to their rank in the cache, but {config.family} has learned positions, "
            "which are added to the embedding; use positions='original'."
        )


def warn_beyond_context(config: DecoderConfig, positions: int) -> None:
    """Warns if a model with RoPE has more positions to tell apart than it was trained with.

    Frequencies that follow the length of a row (dynamic NTK) are for such texts. A learned position table ends, which
    `check_batch` refuses.

    Args:
      config: the decoder.
      positions: the number of positions.
    """
    if config.rope is None or config.rope.scaling == "dynamic" or positions <= config.max_positions:
        return
    # At the first caller outside of kvjax; the same text each time, so that it is shown once.
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        level, frame = level + 1, frame.f_back
    warnings.warn(
        f"the texts and what follows them are longer than the {config.max_positions:,} tokens of context that this "
        "model was trained with, beyond which its predictions mean little: shorten them, or use a policy with a budget "
        "and positions='cache'.",
        stacklevel=level,
    )


def check_count(name: str, value: object) -> None:
    """Checks that a value is a whole number from 1 to `LARGEST_COUNT`.

    Args:
      name: the name of the argument, for the message.
      value: its value.

    Raises:
      InputError: if it is not.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < 1:
        raise InputError(f"{name} must be a whole number of at least 1; got {shown(value)}.")
    if int(value) > LARGEST_COUNT:
        raise InputError(f"{name} must be at most {LARGEST_COUNT}; got {shown(value)}.")
