"""Checks of the arguments of public functions, on the host, before anything is traced."""

import numbers
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from kvjax.arguments import outer_level
from kvjax.errors import InputError, shown
from kvjax.models.config import DecoderConfig
from kvjax.summary import one_line

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

    def __repr__(self) -> str:
        return one_line(self)


def check_batch(config: DecoderConfig, tokens: ArrayLike, lengths: ArrayLike | None, *, new_tokens: int) -> Batch:
    """Checks tokens and lengths, and that the model has positions for `new_tokens` more tokens.

    Args:
      config: the decoder.
      tokens: [B, T] or [T] int, rows padded at the end; or a sequence of rows of any lengths.
      lengths: [B] int, the number of real tokens of each row; None for T, or for the whole of each row.
      new_tokens: the number of tokens to be generated.

    Raises:
      InputError: if it is text, a row is empty, a token is outside the vocabulary, a length is not between 1 and T, or
        a row exceeds a learned position table.
    """
    check_no_text("tokens", tokens)
    ids, lengths = _one_array(tokens, lengths)
    check_no_text("tokens", ids)  # a text in a later row
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


def check_no_text(name: str, value: object) -> None:
    """Checks that what should be token ids is no text, and no conversation.

    Args:
      name: the name of the argument, for the message.
      value: its value.

    Raises:
      InputError: a text or a message, or a sequence or an array of these.
    """
    kinds = (str, bytes, Mapping)
    first = value
    while isinstance(first, list | tuple) and first and not isinstance(first[0], int):
        first = next((each for each in first if isinstance(each, kinds)), first[0])
    if isinstance(first, kinds) or (isinstance(first, np.ndarray) and first.dtype.kind in "SUT"):
        raise InputError(
            f"{name} must be token ids, but are text: kvjax.generate_text takes texts and conversations; elsewhere, "
            "encode them with model.tokenizer.encode_batch, which gives tokens and lengths."
        )


def check_one_row(name: str, tokens: object) -> None:
    """Checks that tokens are one row, [n], possibly without any.

    Args:
      name: what has the tokens, for the message.
      tokens: token ids, which are not checked.

    Raises:
      InputError: a text, or anything that is not of one dimension.
    """
    check_no_text(f"{name}'s tokens", tokens)
    try:
        shape: tuple[int, ...] | None = np.asarray(tokens).shape
    except ValueError:  # NumPy's, of rows that differ in length
        shape = None
    if shape is None or len(shape) != 1:
        got = "rows that differ in length" if shape is None else f"shape {shape}"
        raise InputError(f"{name} must be one row of tokens, [n]; got {got}.")


def _row(row: object) -> np.ndarray | None:
    """Returns a row of token ids as an array [n] int, possibly without any; None if it is no row."""
    try:
        ids = np.asarray(row)
    except ValueError:  # NumPy's, of items that differ in length
        return None
    return ids if ids.ndim == 1 and (not ids.size or np.issubdtype(ids.dtype, np.integer)) else None


def _one_array(tokens: ArrayLike, lengths: ArrayLike | None) -> tuple[np.ndarray, ArrayLike | None]:
    """Returns tokens as an array, and lengths. Rows that differ in length are padded at the end.

    Raises:
      InputError: rows that are not sequences of token ids, have no token, or have fewer tokens than `lengths` says.
    """
    try:
        ids = np.asarray(tokens)
    except ValueError:  # NumPy's, of rows that differ in length
        ids = np.empty(0, object)
    if ids.dtype != object or ids.ndim != 1:
        return ids, lengths
    given: Any = tokens
    # [n] each
    rows = [row for row in map(_row, given) if row is not None]
    if len(rows) < len(given):
        raise InputError(
            "tokens must be [batch, length], or a list of rows of token ids; for an encoded batch, give "
            "batch.tokens and lengths=batch.lengths."
        )
    # [B]
    own = np.array([row.size for row in rows])
    if not own.all():
        raise InputError(f"every row needs at least one token; row {int(np.argmin(own))} has none.")
    if lengths is not None and np.shape(lengths) == own.shape and np.any(np.asarray(lengths) > own):
        wrong = int(np.argmax(np.asarray(lengths) > own))
        said = np.asarray(lengths)[wrong]
        raise InputError(f"row {wrong} has {own[wrong]} tokens, but lengths says {said}.")
    # [B, T]
    padded = np.zeros((len(rows), own.max()), np.int64)
    for into, row in zip(padded, rows, strict=True):
        into[: row.size] = row
    return padded, own if lengths is None else lengths


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
        raise InputError(f"stop must be token ids, which are 32-bit integers; got {shown(stop)}.")
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
    # The same text each time, so that it is shown once at each caller.
    warnings.warn(
        f"the texts and what follows them are longer than the {config.max_positions:,} tokens of context that this "
        "model was trained with, beyond which its predictions mean little: shorten them, or use a policy with a budget "
        "and positions='cache'.",
        stacklevel=outer_level(),
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
